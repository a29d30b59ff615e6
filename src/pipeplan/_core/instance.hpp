// What planning kernels read. Both classes check themselves when they are made, so kernels need not.
#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "shared_links.hpp"
#include "shares.hpp"

namespace pipeplan {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct LayerCosts {
    std::vector<double> forward_ms, backward_ms;            // [layers]
    std::vector<double> output_bytes, gradient_bytes;       // [layers]
    std::vector<double> parameter_bytes, activation_bytes;  // [layers]; no activations: empty
    // Where layers were measured at several microbatch sizes: these, rising, and the times at each.
    std::vector<double> sizes, forward_at, backward_at;  // [sizes], [sizes][layers]
};

// Two neighbouring sizes at which layers were measured, and how much each counts.
struct SizeMix {
    int low;
    double of_low, of_high;
};

// What a plan has to keep beside the most replicas of a stage.
struct PlanLimits {
    bool whole_samples = false;  // a device takes whole samples, not fractions of them
    bool may_recompute = false;  // a stage may compute its activations again
    // Devices of different speed may have different shares: planning also splits in proportion to
    // speed, and bounds hold for all shares.
    bool any_shares = false;
    std::vector<double> memory_bytes;            // [devices]; empty: memory does not count
    double state_bytes_per_parameter_byte = 1.0; // the parameters themselves included
    double input_bytes = 0.0;                    // into the first layer
    int min_stages = 1, max_stages = std::numeric_limits<int>::max();
    int first_device = -1, last_device = -1;     // serve the first and the last stage; -1: any

    // Whether the number of stages or the devices at the ends matter. Single plans are then not listed.
    bool has_constraints() const {
        return min_stages > 1 || max_stages < std::numeric_limits<int>::max() || first_device >= 0 ||
               last_device >= 0;
    }
};

// How a stage runs, as bits of one number.
enum StageMode : int {
    kKeeps = 0,       // activations are kept, shares are even
    kRecomputes = 1,  // activations are computed again
    kBySpeed = 2      // shares are in proportion to the speeds of the devices
};
constexpr int kNumStageModes = 4;

// One number for each ordered pair of different devices: as a full matrix, or as one number for each
// host and one for all pairs of hosts.
class Pairs {
  public:
    // A full matrix. All constructors throw std::invalid_argument unless all numbers are finite and
    // >= 0 and the sizes fit.
    Pairs(std::vector<double> table, int num_devices, const char* name);
    // `host_of` has the host of each device, `inside` a number for each host.
    Pairs(std::vector<int> host_of, std::vector<double> inside, double between, const char* name);

    double operator()(int u, int v) const {
        if (is_full_) return data_[static_cast<std::size_t>(u) * size_ + v];
        return host_of_[u] == host_of_[v] ? data_[host_of_[u]] : between_;
    }
    // By the index that Instance::at gives; only for full matrices.
    double operator[](std::size_t index) const { return data_[index]; }
    bool is_full() const { return is_full_; }
    // Whether all pairs have the same number, and which one.
    bool is_one_number() const { return is_one_number_; }
    double one_number() const { return one_number_; }
    const std::vector<double>& table() const { return *table_; }
    // The least number between any two devices of a set, or from one set to another that has none of
    // its devices; infinite if there is no pair. From the hosts alone; not for full matrices.
    double least_inside(const std::vector<int>& devices) const;
    double least_between(const std::vector<int>& senders, const std::vector<int>& receivers) const;
    // The largest product of two shares by the number of their pair, likewise; infinite where a number
    // is 0.
    double longest_between(const std::vector<int>& senders, const std::vector<double>& shares,
                           const std::vector<int>& receivers,
                           const std::vector<double>& next_shares) const;

    Pairs on_devices(const std::vector<int>& order) const;

  private:
    void find_one_number();
    std::vector<int> sorted_hosts(const std::vector<int>& devices) const;
    std::vector<std::pair<double, int>> largest_by_host(const std::vector<int>& devices,
                                                        const std::vector<double>& shares) const;

    std::shared_ptr<const std::vector<double>> table_;
    const double* data_;
    std::size_t size_;          // devices or hosts
    std::vector<int> host_of_;  // [devices]; empty where full
    double between_ = 0.0;
    bool is_full_, is_one_number_ = false;
    double one_number_ = 0.0;
};

struct DeviceLinks {
    std::vector<double> speed;  // [devices]
    Pairs bytes_per_ms;         // 0 = no path
    Pairs latency_ms;
    std::shared_ptr<const SharedLinks> shared = nullptr;  // none: no two transfers share a link
};

// Sums over the first l values, for l from 0 to their number. The difference of two of them is no
// sum of the values between: small ones vanish beside large ones. Use RangeSums for that.
std::vector<double> prefix_sums(const std::vector<double>& values);

// Sums of neighbouring values, by adding only: each is right to a few units in its last place.
// A binary tree over the values; O(log n) for each sum.
class RangeSums {
  public:
    explicit RangeSums(const std::vector<double>& values);
    double operator()(int first, int end) const;
    double value(int index) const { return tree_[size_ + index]; }
    // Calls `add(k)` for each node k whose values add up to a range's sum, in the order of the sum.
    template <class Add>
    static void for_nodes(std::size_t size, int first, int end, const Add& add) {
        for (std::size_t a = size + first, b = size + end; a < b; a /= 2, b /= 2) {
            if (a % 2) add(a++);
            if (b % 2) add(--b);
        }
    }
    const std::vector<double>& nodes() const { return tree_; }

  private:
    std::size_t size_;
    std::vector<double> tree_;  // node k holds the sum of nodes 2k and 2k + 1; leaves from size_ on
};

// A chain of layers, and devices in the order that the caller chose.
class Instance {
  public:
    // Throws std::invalid_argument where sizes differ or a number cannot be.
    Instance(LayerCosts layers, DeviceLinks links, bool half_duplex, int num_microbatches,
             int microbatch_size, int max_replicas, PlanLimits limits = {});

    // Whether some devices are faster than others.
    bool has_many_speeds() const;
    bool has_many_speeds(const std::vector<int>& devices) const;

    // The same with these devices only, in this order.
    Instance on_devices(const std::vector<int>& order) const;
    // Another model on the same devices.
    Instance with_layers(LayerCosts layers) const;

    // Whether all devices have one speed and one memory, all links one rate and one latency, and no
    // device has to serve a certain stage.
    bool has_equal_devices() const;
    // Whether links can be read by index.
    bool has_full_links() const { return bytes_per_ms.is_full() && latency_ms.is_full(); }
    // Whether memory limits plans at all.
    bool has_memory() const { return !limits.memory_bytes.empty(); }
    // Whether all of so many devices have the same share of a microbatch.
    bool shares_evenly(int num_devices) const {
        return !limits.whole_samples || microbatch_size % num_devices == 0;
    }
    double largest_share(int num_devices) const {
        if (shares_evenly(num_devices)) return 1.0 / num_devices;
        return static_cast<double>(microbatch_size / num_devices + 1) / microbatch_size;
    }
    // The share of each of these devices. Whole samples are divided as evenly as can be; the fastest
    // devices take one more, among equally fast ones those with the most memory. With `kByMemory` it
    // is the other way round, for stages that do not fit else. With `kBySpeed` shares are in
    // proportion to speed; even if a share would be too small for files.
    std::vector<double> shares(const std::vector<int>& devices, Split split = Split::kEven) const;
    // Whether layers were measured at several microbatch sizes. Then `forward_ms` and `backward_ms` are
    // the times of a whole microbatch, and the prefix sums are of times in proportion to the samples that
    // are nowhere above.
    bool has_measured() const { return !sizes.empty(); }
    // Throws std::invalid_argument if so: bounds need times in proportion to the samples.
    void require_proportional() const;
    SizeMix size_mix(double share) const;
    double forward_at(const SizeMix& mix, int first, int end) const {
        return mixed(forward_at_, mix, first, end);
    }
    double backward_at(const SizeMix& mix, int first, int end) const {
        return mixed(backward_at_, mix, first, end);
    }
    // What enters a layer from those before it.
    double bytes_into(int layer) const {
        return layer ? output_bytes[layer - 1] : limits.input_bytes;
    }
    std::size_t at(int sender, int receiver) const {
        return static_cast<std::size_t>(sender) * num_devices + receiver;
    }

    const int num_layers;
    const int num_devices;
    const int num_microbatches;
    const int microbatch_size;  // samples
    const bool half_duplex;
    const int max_replicas;  // no stage may have more devices
    const std::vector<double> output_bytes, gradient_bytes;            // [layers]
    const std::vector<double> forward_sum, backward_sum;               // [layers + 1], prefix sums
    const RangeSums forward_ms, backward_ms, parameter_bytes;          // of layers [first, end)
    const RangeSums activation_bytes;                                  // the same
    const std::vector<double> speed;                                   // [devices]
    const Pairs bytes_per_ms, latency_ms;                              // [devices][devices]
    const std::shared_ptr<const SharedLinks> shared;                   // may be none
    const PlanLimits limits;
    const std::vector<double> sizes;  // of microbatches, rising; empty unless has_measured()

  private:
    static double mixed(const std::vector<RangeSums>& sums, const SizeMix& mix, int first, int end) {
        const double low = mix.of_low * sums[mix.low](first, end);
        return mix.of_high > 0 ? low + mix.of_high * sums[mix.low + 1](first, end) : low;
    }
    std::vector<int> ranked(const std::vector<int>& devices, bool by_memory) const;
    std::vector<double> shares_by_speed(const std::vector<int>& devices) const;

    std::vector<RangeSums> forward_at_, backward_at_;  // by size
    const LayerCosts layers_;
};

// A plan's stages: layers [end_layer[n-1], end_layer[n]) on the devices[n].
class PlacedPlan {
  public:
    PlacedPlan() = default;
    // Throws std::invalid_argument unless the stages cover all layers in order, on devices that the
    // instance has, each of which serves one stage. Without modes all stages keep activations.
    PlacedPlan(const Instance& instance, std::vector<int> end_layer,
               std::vector<std::vector<int>> devices, std::vector<int> modes = {});

    const std::vector<int>& end_layer() const { return end_layer_; }
    const std::vector<std::vector<int>>& devices() const { return devices_; }
    const std::vector<int>& modes() const { return modes_; }  // [stages], bits of StageMode
    int num_stages() const { return static_cast<int>(end_layer_.size()); }
    // Whether it was made for an instance of this many layers and devices.
    bool fits(const Instance& instance) const {
        return num_layers_ == instance.num_layers && num_devices_ == instance.num_devices;
    }

  private:
    std::vector<int> end_layer_;
    std::vector<std::vector<int>> devices_;
    std::vector<int> modes_;
    int num_layers_ = 0, num_devices_ = 0;
};

// For each device the number of its class, from 0. Exchanging two devices of a class changes no
// speed, no link and no latency. Being exchangeable is transitive, so each device is compared with
// one of each class: O(devices^2) for each class.
std::vector<int> device_classes(const Instance& instance);

}  // namespace pipeplan
