// The input of planning kernels. Both classes validate themselves when they are made, so kernels do
// not check them again.
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

// The sums of the first l values, for l from 0 to their number.
std::vector<double> prefix_sums(const std::vector<double>& values);

// A chain of layers, and devices in the order that the caller chose.
class Instance {
  public:
    // Throws std::invalid_argument if sizes differ or a number is out of range.
    Instance(LayerCosts layers, DeviceLinks links, bool half_duplex, int num_microbatches,
             int max_replicas);

    // The same instance with only these devices, in this order.
    Instance on_devices(const std::vector<int>& order) const;

    std::size_t at(int sender, int receiver) const {
        return static_cast<std::size_t>(sender) * num_devices + receiver;
    }

    const int num_layers;
    const int num_devices;
    const int num_microbatches;
    const bool half_duplex;
    const int max_replicas;  // no stage may have more devices
    const std::vector<double> output_bytes, gradient_bytes;            // [layers]
    const std::vector<double> forward_sum, backward_sum, parameter_sum;  // [layers + 1], prefix sums
    const std::vector<double> speed;                                   // [devices]
    const std::vector<double> bytes_per_ms, latency_ms;                // [devices][devices]

  private:
    const LayerCosts layers_;
};

// The stages of a plan: stage n has layers [end_layer[n-1], end_layer[n]) on devices[n].
class PlacedPlan {
  public:
    PlacedPlan() = default;
    // Throws std::invalid_argument unless the stages cover all layers in order, and each device is
    // known and serves at most one stage.
    PlacedPlan(const Instance& instance, std::vector<int> end_layer,
               std::vector<std::vector<int>> devices);

    const std::vector<int>& end_layer() const { return end_layer_; }
    const std::vector<std::vector<int>>& devices() const { return devices_; }
    int num_stages() const { return static_cast<int>(end_layer_.size()); }
    // Whether the plan was made for an instance with as many layers and devices.
    bool fits(const Instance& instance) const {
        return num_layers_ == instance.num_layers && num_devices_ == instance.num_devices;
    }

  private:
    std::vector<int> end_layer_;
    std::vector<std::vector<int>> devices_;
    int num_layers_ = 0, num_devices_ = 0;
};

// For each device the number of its class, from 0. If two devices of a class are exchanged, no
// speed, no link and no latency changes. This relation is transitive, so each device is compared
// with only one device of each class: O(devices^2) for each class.
std::vector<int> device_classes(const Instance& instance);

}  // namespace pipeplan
