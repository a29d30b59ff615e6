// How the devices of a stage share a microbatch; whole samples nearly in proportion to speeds.
#include "shares.hpp"

#include <algorithm>
#include <cstddef>
#include <numeric>

#include "instance.hpp"

namespace pipeplan {

std::vector<int> samples_by_speed(const std::vector<double>& speeds, int num_samples) {
    const std::size_t k = speeds.size();
    double sum = 0.0;
    for (double speed : speeds) sum += speed;
    std::vector<int> samples(k);
    long left = num_samples;
    for (std::size_t i = 0; i < k; ++i) {
        samples[i] = std::max(1, static_cast<int>(num_samples * (speeds[i] / sum)));
        left -= samples[i];
    }
    for (; left < 0; ++left) {  // at least one each may be too many
        std::size_t slowest = k;
        for (std::size_t i = 0; i < k; ++i)
            if (samples[i] > 1 && (slowest == k || samples[i] / speeds[i] >=
                                                       samples[slowest] / speeds[slowest]))
                slowest = i;
        --samples[slowest];
    }
    for (; left > 0; --left) {
        std::size_t first = 0;
        for (std::size_t i = 1; i < k; ++i)
            if ((samples[i] + 1) / speeds[i] < (samples[first] + 1) / speeds[first]) first = i;
        ++samples[first];
    }
    return samples;
}

double rate_of_samples(const std::vector<double>& speeds, const std::vector<int>& samples,
                       int num_samples) {
    double rate = 0.0;
    for (std::size_t i = 0; i < speeds.size(); ++i)
        rate = std::max(rate, samples[i] / static_cast<double>(num_samples) / speeds[i]);
    return rate;
}

bool Instance::has_many_speeds() const {
    return std::any_of(speed.begin(), speed.end(), [&](double s) { return s != speed[0]; });
}

bool Instance::has_many_speeds(const std::vector<int>& devices) const {
    return std::any_of(devices.begin(), devices.end(),
                       [&](int u) { return speed[u] != speed[devices[0]]; });
}

// The places of these devices, the fastest one first, among equally fast ones that with the most memory;
// with `by_memory` the other way round.
std::vector<int> Instance::ranked(const std::vector<int>& devices, bool by_memory) const {
    std::vector<int> order(devices.size());
    std::iota(order.begin(), order.end(), 0);
    const auto memory = [&](int i) { return has_memory() ? limits.memory_bytes[devices[i]] : 0.0; };
    std::sort(order.begin(), order.end(), [&](int a, int b) {
        const double faster = speed[devices[a]] - speed[devices[b]];
        const bool has_more = memory(a) > memory(b), has_less = memory(a) < memory(b);
        if (by_memory && (has_more || has_less)) return has_more;
        if (faster != 0) return faster > 0;
        if (has_more || has_less) return has_more;
        return devices[a] < devices[b];
    });
    return order;
}

// Empty if a share would be too small for files.
std::vector<double> Instance::shares_by_speed(const std::vector<int>& devices) const {
    const std::vector<int> order = ranked(devices, false);
    std::vector<double> speeds, result(devices.size());
    double sum = 0.0;
    for (int i : order) speeds.push_back(speed[devices[i]]), sum += speeds.back();
    if (limits.whole_samples) {
        const std::vector<int> samples = samples_by_speed(speeds, microbatch_size);
        for (std::size_t k = 0; k < order.size(); ++k)
            result[order[k]] = samples[k] / static_cast<double>(microbatch_size);
    } else {
        for (std::size_t k = 0; k < order.size(); ++k) result[order[k]] = speeds[k] / sum;
    }
    const double least = *std::min_element(result.begin(), result.end());
    return least < kLeastShare ? std::vector<double>() : result;
}

std::vector<double> Instance::shares(const std::vector<int>& devices, Split split) const {
    const int k = static_cast<int>(devices.size());
    const bool has_samples = !limits.whole_samples || k <= microbatch_size;
    if (split == Split::kBySpeed && has_samples) {
        std::vector<double> by_speed = shares_by_speed(devices);
        if (!by_speed.empty()) return by_speed;
    }
    if (shares_evenly(k)) return std::vector<double>(k, 1.0 / k);
    const double samples = microbatch_size;
    const std::vector<int> order = ranked(devices, split == Split::kByMemory);
    std::vector<double> result(k, (microbatch_size / k) / samples);
    for (int i = 0; i < microbatch_size % k; ++i) result[order[i]] = (microbatch_size / k + 1) / samples;
    return result;
}

}  // namespace pipeplan
