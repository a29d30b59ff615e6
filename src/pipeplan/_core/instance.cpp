// Validation of instances and placed plans; classes of exchangeable devices.
#include "instance.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>

#include "sizes.hpp"

namespace pipeplan {
namespace {

// Far above the limits of files, and far below the overflow of sums and products.
constexpr double kMost = 1e60;
constexpr int kMaxLayers = 1'000'000, kMaxDevices = 32'766;

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

void require_values(const std::vector<double>& values, std::size_t size, const char* name) {
    if (values.size() != size)
        refuse(std::string(name) + ": has " + std::to_string(values.size()) + " values, not " +
               std::to_string(size));
    for (double value : values)
        if (!(value >= 0 && value <= kMost))
            refuse(std::string(name) + ": " + std::to_string(value) + " is no finite number >= 0");
}

std::vector<double> checked(std::vector<double> values, std::size_t size, const char* name) {
    require_values(values, size, name);
    return values;
}

int checked_count(std::size_t count, int most, const char* name) {
    if (count < 1 || count > static_cast<std::size_t>(most))
        refuse(std::string(name) + ": " + std::to_string(count) + " is not within 1.." +
               std::to_string(most));
    return static_cast<int>(count);
}

std::vector<double> or_zeros(std::vector<double> values, std::size_t size) {
    return values.empty() ? std::vector<double>(size, 0.0) : values;
}

// Rising sizes, and a time of each layer at each of them.
std::vector<double> checked_sizes(const LayerCosts& layers, std::size_t num_layers) {
    require_values(layers.sizes, layers.sizes.size(), "sizes");
    for (std::size_t k = 0; k < layers.sizes.size(); ++k)
        if (!(layers.sizes[k] > (k ? layers.sizes[k - 1] : 0.0))) refuse("sizes: do not rise");
    for (const std::vector<double>* times : {&layers.forward_at, &layers.backward_at})
        require_values(*times, layers.sizes.size() * num_layers, "times at sizes");
    return layers.sizes;
}

// Times of a whole microbatch, in proportion to which no number of samples takes less: on a line
// between two points the time by samples is no less than at one of its ends. No device takes more than
// a microbatch, whose own time is known.
std::vector<double> least_times(const std::vector<double>& own, const std::vector<double>& sizes,
                                const std::vector<double>& at, double samples) {
    std::vector<double> least = own;
    for (std::size_t k = 0; k < sizes.size() && sizes[k] <= samples; ++k)
        for (std::size_t l = 0; l < own.size(); ++l)
            least[l] = std::min(least[l], at[k * own.size() + l] / sizes[k] * samples);
    return least;
}

std::vector<RangeSums> sums_at_sizes(const std::vector<double>& at, std::size_t num_sizes) {
    std::vector<RangeSums> sums;
    const std::size_t row = num_sizes ? at.size() / num_sizes : 0;
    for (std::size_t k = 0; k < num_sizes; ++k)
        sums.emplace_back(std::vector<double>(at.begin() + k * row, at.begin() + (k + 1) * row));
    return sums;
}

PlanLimits checked_limits(PlanLimits limits, int num_devices) {
    const std::size_t size = limits.memory_bytes.size();
    if (size != 0 && size != static_cast<std::size_t>(num_devices))
        refuse("memory_bytes: has " + std::to_string(size) + " values, not one for each device");
    for (double bytes : limits.memory_bytes)
        if (!(bytes >= 0)) refuse("memory_bytes: " + std::to_string(bytes) + " is no number >= 0");
    require_values({limits.state_bytes_per_parameter_byte, limits.input_bytes}, 2, "memory");
    if (limits.min_stages < 1 || limits.max_stages < limits.min_stages)
        refuse("max_stages: " + std::to_string(limits.max_stages) + " is not at least " +
               std::to_string(std::max(limits.min_stages, 1)));
    for (int u : {limits.first_device, limits.last_device})
        if (u < -1 || u >= num_devices) refuse("device: " + std::to_string(u) + " is unknown");
    return limits;
}

}  // namespace

std::vector<double> prefix_sums(const std::vector<double>& values) {
    std::vector<double> sums(values.size() + 1, 0.0);
    for (std::size_t k = 0; k < values.size(); ++k) sums[k + 1] = sums[k] + values[k];
    return sums;
}

RangeSums::RangeSums(const std::vector<double>& values)
    : size_(values.size()), tree_(2 * values.size(), 0.0) {
    std::copy(values.begin(), values.end(), tree_.begin() + size_);
    for (std::size_t k = size_; k-- > 1;) tree_[k] = tree_[2 * k] + tree_[2 * k + 1];
}

double RangeSums::operator()(int first, int end) const {
    double sum = 0.0;
    for_nodes(size_, first, end, [&](std::size_t k) { sum += tree_[k]; });
    return sum;
}

Pairs::Pairs(std::vector<double> table, int num_devices, const char* name)
    : size_(num_devices), is_full_(true) {
    if (table.size() == size_ * size_)  // a device has no link to itself
        for (std::size_t u = 0; u < size_; ++u) table[u * size_ + u] = 0.0;
    require_values(table, size_ * size_, name);
    table_ = std::make_shared<const std::vector<double>>(std::move(table));
    data_ = table_->data();
    find_one_number();
}

Pairs::Pairs(std::vector<int> host_of, std::vector<double> inside, double between, const char* name)
    : size_(inside.size()), host_of_(std::move(host_of)), between_(between), is_full_(false) {
    for (int host : host_of_)
        if (host < 0 || static_cast<std::size_t>(host) >= size_)
            refuse("host_of: " + std::to_string(host) + " is no host");
    require_values(inside, size_, name);
    require_values({between}, 1, name);
    table_ = std::make_shared<const std::vector<double>>(std::move(inside));
    data_ = table_->data();
    find_one_number();
}

void Pairs::find_one_number() {
    const std::size_t num_values = table_->size();
    one_number_ = !is_full_ ? data_[0] : size_ > 1 ? data_[1] : 0.0;
    for (std::size_t k = 0; k < num_values; ++k)
        if (!(is_full_ && k % (size_ + 1) == 0) && data_[k] != one_number_) return;
    is_one_number_ = is_full_ || size_ == 1 || between_ == one_number_;
}

std::vector<int> Pairs::sorted_hosts(const std::vector<int>& devices) const {
    std::vector<int> hosts;
    hosts.reserve(devices.size());
    for (int u : devices) hosts.push_back(host_of_[u]);
    std::sort(hosts.begin(), hosts.end());
    return hosts;
}

double Pairs::least_inside(const std::vector<int>& devices) const {
    const std::vector<int> hosts = sorted_hosts(devices);
    double least = hosts.front() == hosts.back() ? std::numeric_limits<double>::infinity() : between_;
    for (std::size_t k = 1; k < hosts.size(); ++k)
        if (hosts[k] == hosts[k - 1]) least = std::min(least, data_[hosts[k]]);
    return least;
}

double Pairs::least_between(const std::vector<int>& senders,
                            const std::vector<int>& receivers) const {
    const std::vector<int> from = sorted_hosts(senders), to = sorted_hosts(receivers);
    const bool is_one_host =
        from.front() == from.back() && to.front() == to.back() && from.front() == to.front();
    double least = is_one_host ? std::numeric_limits<double>::infinity() : between_;
    for (std::size_t a = 0, b = 0; a < from.size() && b < to.size();) {
        if (from[a] == to[b]) least = std::min(least, data_[from[a]]);
        if (from[a] <= to[b]) ++a;
        else ++b;
    }
    return least;
}

// The largest share on each host that has any, largest first.
std::vector<std::pair<double, int>> Pairs::largest_by_host(const std::vector<int>& devices,
                                                           const std::vector<double>& shares) const {
    std::vector<std::pair<int, double>> by_host;
    for (std::size_t i = 0; i < devices.size(); ++i)
        by_host.push_back({host_of_[devices[i]], -shares[i]});
    std::sort(by_host.begin(), by_host.end());
    std::vector<std::pair<double, int>> result;
    for (std::size_t i = 0; i < by_host.size(); ++i)
        if (i == 0 || by_host[i].first != by_host[i - 1].first)
            result.push_back({-by_host[i].second, by_host[i].first});
    std::sort(result.begin(), result.end(), std::greater<std::pair<double, int>>());
    return result;
}

double Pairs::longest_between(const std::vector<int>& senders, const std::vector<double>& shares,
                              const std::vector<int>& receivers,
                              const std::vector<double>& next_shares) const {
    const auto from = largest_by_host(senders, shares), to = largest_by_host(receivers, next_shares);
    const auto ms = [](double part, double rate) {
        return rate > 0 ? part / rate : std::numeric_limits<double>::infinity();
    };
    double longest = 0.0;
    // The largest two of each side have among them the largest pair of different hosts.
    for (std::size_t a = 0; a < std::min<std::size_t>(2, from.size()); ++a)
        for (std::size_t b = 0; b < std::min<std::size_t>(2, to.size()); ++b)
            if (from[a].second != to[b].second)
                longest = std::max(longest, ms(from[a].first * to[b].first, between_));
    std::vector<double> to_of(size_, 0.0);
    for (const auto& [share, host] : to) to_of[host] = share;
    for (const auto& [share, host] : from)
        if (to_of[host] > 0) longest = std::max(longest, ms(share * to_of[host], data_[host]));
    return longest;
}

Pairs Pairs::on_devices(const std::vector<int>& order) const {
    if (!is_full_) {
        Pairs result = *this;
        result.host_of_.clear();
        for (int u : order) result.host_of_.push_back(host_of_[u]);
        return result;
    }
    const std::size_t size = order.size();
    std::vector<double> table(size * size);
    for (std::size_t a = 0; a < size; ++a)
        for (std::size_t b = 0; b < size; ++b)
            table[a * size + b] = data_[static_cast<std::size_t>(order[a]) * size_ + order[b]];
    return Pairs(std::move(table), static_cast<int>(size), "links");
}

Instance::Instance(LayerCosts layers, DeviceLinks links, bool half_duplex_, int num_microbatches_,
                   int microbatch_size_, int max_replicas_, PlanLimits limits_)
    : num_layers(checked_count(layers.forward_ms.size(), kMaxLayers, "layers")),
      num_devices(checked_count(links.speed.size(), kMaxDevices, "devices")),
      num_microbatches(checked_count(std::max(num_microbatches_, 0), kMaxMicrobatches,
                                     "num_microbatches")),
      microbatch_size(checked_count(std::max(microbatch_size_, 0), std::numeric_limits<int>::max(),
                                    "microbatch_size")),
      half_duplex(half_duplex_),
      max_replicas(checked_count(std::max(max_replicas_, 0), std::numeric_limits<int>::max(),
                                 "max_replicas")),
      output_bytes(checked(layers.output_bytes, num_layers, "output_bytes")),
      gradient_bytes(checked(layers.gradient_bytes, num_layers, "gradient_bytes")),
      forward_sum(prefix_sums(least_times(checked(layers.forward_ms, num_layers, "forward_ms"),
                                          checked_sizes(layers, num_layers), layers.forward_at,
                                          microbatch_size))),
      backward_sum(prefix_sums(least_times(checked(layers.backward_ms, num_layers, "backward_ms"),
                                           layers.sizes, layers.backward_at, microbatch_size))),
      forward_ms(layers.forward_ms), backward_ms(layers.backward_ms),
      parameter_bytes(checked(layers.parameter_bytes, num_layers, "parameter_bytes")),
      activation_bytes(checked(or_zeros(layers.activation_bytes, num_layers), num_layers,
                               "activation_bytes")),
      speed(checked(std::move(links.speed), num_devices, "speed")),
      bytes_per_ms(std::move(links.bytes_per_ms)), latency_ms(std::move(links.latency_ms)),
      shared(std::move(links.shared)), limits(checked_limits(std::move(limits_), num_devices)),
      sizes(layers.sizes), forward_at_(sums_at_sizes(layers.forward_at, sizes.size())),
      backward_at_(sums_at_sizes(layers.backward_at, sizes.size())), layers_(std::move(layers)) {
    for (double s : speed)
        if (!(s > 1e-60)) refuse("speed: " + std::to_string(s) + " is not above zero");
    for (double rate : bytes_per_ms.table())
        if (rate > 0 && rate < 1e-60) refuse("bytes_per_ms: has a rate of almost zero");
    if (shared && shared->num_devices() != num_devices)
        refuse("shared: has another number of devices");
}

Instance Instance::on_devices(const std::vector<int>& order) const {
    std::vector<int> place(num_devices, -1);
    std::vector<double> speeds;
    PlanLimits mine = limits;
    mine.memory_bytes.clear();
    for (int u : order) {
        if (u < 0 || u >= num_devices || place[u] >= 0)
            refuse("order: device " + std::to_string(u) + " is unknown or stands twice");
        place[u] = static_cast<int>(speeds.size());
        speeds.push_back(speed[u]);
        if (has_memory()) mine.memory_bytes.push_back(limits.memory_bytes[u]);
    }
    for (int* device : {&mine.first_device, &mine.last_device}) {
        if (*device < 0) continue;
        *device = place[*device];
        if (*device < 0) refuse("order: lacks a device that has to serve a stage");
    }
    const auto shared_by =
        shared ? std::make_shared<const SharedLinks>(shared->on_devices(order)) : nullptr;
    return Instance(layers_,
                    {std::move(speeds), bytes_per_ms.on_devices(order), latency_ms.on_devices(order),
                     shared_by},
                    half_duplex, num_microbatches, microbatch_size, max_replicas, std::move(mine));
}

void Instance::require_proportional() const {
    if (has_measured()) refuse("instance: a bound needs times in proportion to the samples");
}

SizeMix Instance::size_mix(double share) const {
    const double samples = share * microbatch_size;
    const int last = static_cast<int>(sizes.size()) - 1;
    if (samples <= sizes[0]) return {0, samples / sizes[0], 0.0};
    if (samples >= sizes[last]) return {last, samples / sizes[last], 0.0};
    const int low =
        static_cast<int>(std::upper_bound(sizes.begin(), sizes.end(), samples) - sizes.begin()) - 1;
    const double high = (samples - sizes[low]) / (sizes[low + 1] - sizes[low]);
    return {low, 1 - high, high};
}

bool Instance::has_equal_devices() const {
    const std::vector<double>& memory = limits.memory_bytes;
    const bool has_ends = limits.first_device >= 0 || limits.last_device >= 0;
    return !shared && bytes_per_ms.is_one_number() && latency_ms.is_one_number() && !has_ends &&
           std::all_of(memory.begin(), memory.end(), [&](double m) { return m == memory[0]; }) &&
           std::all_of(speed.begin(), speed.end(), [&](double s) { return s == speed[0]; });
}

Instance Instance::with_layers(LayerCosts layers) const {
    return Instance(std::move(layers), {speed, bytes_per_ms, latency_ms, shared}, half_duplex,
                    num_microbatches, microbatch_size, max_replicas, limits);
}

PlacedPlan::PlacedPlan(const Instance& instance, std::vector<int> end_layer,
                       std::vector<std::vector<int>> devices, std::vector<int> modes)
    : end_layer_(std::move(end_layer)), devices_(std::move(devices)), modes_(std::move(modes)),
      num_layers_(instance.num_layers), num_devices_(instance.num_devices) {
    if (end_layer_.empty() || end_layer_.size() != devices_.size())
        refuse("stages: one end and one set of devices for each, at least one stage");
    if (modes_.empty()) modes_.assign(end_layer_.size(), kKeeps);
    if (modes_.size() != end_layer_.size()) refuse("modes: one for each stage");
    for (int mode : modes_)
        if (mode < 0 || mode >= kNumStageModes) refuse("modes: " + std::to_string(mode) + " is none");
    if (end_layer_.back() != num_layers_) refuse("end_layer: the last stage ends at the last layer");
    std::vector<std::uint8_t> taken(num_devices_, 0);
    for (std::size_t n = 0; n < end_layer_.size(); ++n) {
        if (end_layer_[n] <= (n ? end_layer_[n - 1] : 0)) refuse("end_layer: does not rise");
        if (devices_[n].empty()) refuse("devices: a stage has at least one");
        for (int u : devices_[n]) {
            if (u < 0 || u >= num_devices_ || taken[u])
                refuse("devices: " + std::to_string(u) + " is unknown or serves two stages");
            taken[u] = 1;
        }
    }
}

std::vector<int> device_classes(const Instance& in) {
    const PlanLimits& limits = in.limits;
    const auto exchangeable = [&](int u, int v) {
        if (in.speed[u] != in.speed[v]) return false;
        if (in.shared && !in.shared->are_alike(u, v)) return false;
        if (in.has_memory() && limits.memory_bytes[u] != limits.memory_bytes[v]) return false;
        for (int special : {limits.first_device, limits.last_device})
            if (u == special || v == special) return false;
        for (const Pairs* pairs : {&in.bytes_per_ms, &in.latency_ms}) {
            const Pairs& p = *pairs;
            if (p(u, v) != p(v, u)) return false;
            for (int w = 0; w < in.num_devices; ++w)
                if (w != u && w != v && (p(u, w) != p(v, w) || p(w, u) != p(w, v))) return false;
        }
        return true;
    };
    std::vector<int> representatives, class_of;
    for (int u = 0; u < in.num_devices; ++u) {
        const auto found = std::find_if(representatives.begin(), representatives.end(),
                                        [&](int other) { return exchangeable(u, other); });
        class_of.push_back(static_cast<int>(found - representatives.begin()));
        if (found == representatives.end()) representatives.push_back(u);
    }
    return class_of;
}

}  // namespace pipeplan
