// What planning kernels read. Both classes check themselves when they are made, so kernels need not.
#pragma once
#include <cstddef>
#include <limits>
#include <vector>

namespace pipeplan {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct LayerCosts {
    std::vector<double> forward_ms, backward_ms;            // [layers]
    std::vector<double> output_bytes, gradient_bytes;       // [layers]
    std::vector<double> parameter_bytes;                    // [layers]
};

struct DeviceLinks {
    std::vector<double> speed;         // [devices]
    std::vector<double> bytes_per_ms;  // [devices][devices]; 0 = no path
    std::vector<double> latency_ms;    // [devices][devices]
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

  private:
    std::size_t size_;
    std::vector<double> tree_;  // node k holds the sum of nodes 2k and 2k + 1; leaves from size_ on
};

// A chain of layers, and devices in the order that the caller chose.
class Instance {
  public:
    // Throws std::invalid_argument where sizes differ or a number cannot be.
    Instance(LayerCosts layers, DeviceLinks links, bool half_duplex, int num_microbatches,
             int microbatch_size, int max_replicas);

    // The same with these devices only, in this order.
    Instance on_devices(const std::vector<int>& order) const;

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
    const std::vector<double> speed;                                   // [devices]
    const std::vector<double> bytes_per_ms, latency_ms;                // [devices][devices]

  private:
    const LayerCosts layers_;
};

// A plan's stages: layers [end_layer[n-1], end_layer[n]) on the devices[n].
class PlacedPlan {
  public:
    PlacedPlan() = default;
    // Throws std::invalid_argument unless the stages cover all layers in order, on devices that the
    // instance has, each of which serves one stage.
    PlacedPlan(const Instance& instance, std::vector<int> end_layer,
               std::vector<std::vector<int>> devices);

    const std::vector<int>& end_layer() const { return end_layer_; }
    const std::vector<std::vector<int>>& devices() const { return devices_; }
    int num_stages() const { return static_cast<int>(end_layer_.size()); }
    // Whether it was made for an instance of this many layers and devices.
    bool fits(const Instance& instance) const {
        return num_layers_ == instance.num_layers && num_devices_ == instance.num_devices;
    }

  private:
    std::vector<int> end_layer_;
    std::vector<std::vector<int>> devices_;
    int num_layers_ = 0, num_devices_ = 0;
};

// For each device the number of its class, from 0. Exchanging two devices of a class changes no
// speed, no link and no latency. Being exchangeable is transitive, so each device is compared with
// one of each class: O(devices^2) for each class.
std::vector<int> device_classes(const Instance& instance);

}  // namespace pipeplan
