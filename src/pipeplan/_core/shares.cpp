// Whole samples nearly in proportion to speeds.
#include "shares.hpp"

#include <algorithm>
#include <cstddef>

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

}  // namespace pipeplan
