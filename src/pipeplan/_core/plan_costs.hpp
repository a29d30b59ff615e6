// The times of a placed plan's stages and channels, under even shares.
//
// The same formulas as in pipeplan.cost, but fast enough for millions of plans. Tests compare the
// two.
#pragma once
#include <algorithm>
#include <vector>

#include "bound.hpp"
#include "instance.hpp"
#include "links.hpp"
#include "pipeline.hpp"

namespace pipeplan {

// Whether links can be told from the hosts, without a look at each pair of devices.
inline bool has_host_links(const Instance& in) {
    return !in.bytes_per_ms.is_full() && in.latency_ms.is_one_number();
}

// What the costs of a stage depend on, of its devices.
struct SetLinks {
    int num_devices;
    double slowest_speed, slowest_bytes_per_ms, latency_ms;
};

inline SetLinks links_of_set(const Instance& in, const std::vector<int>& devices) {
    SetLinks links{static_cast<int>(devices.size()), kInfinity, kInfinity, 0.0};
    for (int u : devices) links.slowest_speed = std::min(links.slowest_speed, in.speed[u]);
    if (has_host_links(in)) {
        links.slowest_bytes_per_ms = in.bytes_per_ms.least_inside(devices);
        links.latency_ms = in.latency_ms.one_number();
        return links;
    }
    for (int u : devices) {
        for (int v : devices) {
            if (u == v) continue;
            links.slowest_bytes_per_ms = std::min(links.slowest_bytes_per_ms, in.bytes_per_ms(u, v));
            links.latency_ms = std::max(links.latency_ms, in.latency_ms(u, v));
        }
    }
    return links;
}

// The costs of a stage; false if a path is missing or if a stage may not have so many devices.
inline bool cost_stage(const Instance& in, int first_layer, int end_layer, const SetLinks& links,
                       StageCosts& costs) {
    const Ring ring =
        make_ring(in, links.num_devices, links.slowest_bytes_per_ms, links.latency_ms);
    if (!ring.connected) return false;
    const double rate = 1.0 / (links.num_devices * links.slowest_speed);
    costs = {rate * in.forward_ms(first_layer, end_layer),
             rate * in.backward_ms(first_layer, end_layer),
             ring.fixed_ms + ring.ms_per_byte * in.parameter_bytes(first_layer, end_layer)};
    return true;
}

inline bool cost_stage(const Instance& in, int first_layer, int end_layer,
                       const std::vector<int>& devices, StageCosts& costs) {
    return cost_stage(in, first_layer, end_layer, links_of_set(in, devices), costs);
}

// The costs of the channel behind a stage that ends at `end_layer`; false if a path is missing.
inline bool cost_channel(const Instance& in, int end_layer, const std::vector<int>& devices,
                         const std::vector<int>& next_devices, ChannelCosts& costs) {
    const double part = 1.0 / (static_cast<double>(devices.size()) * next_devices.size());
    const double there_bytes = part * in.output_bytes[end_layer - 1];
    const double back_bytes = part * in.gradient_bytes[end_layer - 1];
    if (has_host_links(in)) {
        const double rate = in.bytes_per_ms.least_between(devices, next_devices);
        const double latency_ms = in.latency_ms.one_number();
        costs = {latency_ms + there_bytes / rate, latency_ms + back_bytes / rate};
        return rate > 0;
    }
    costs = {0.0, 0.0};
    for (int u : devices) {
        for (int v : next_devices) {
            const double forth = in.bytes_per_ms(u, v), back = in.bytes_per_ms(v, u);
            if (!(forth > 0 && back > 0)) return false;
            costs.there = std::max(costs.there, in.latency_ms(u, v) + there_bytes / forth);
            costs.back = std::max(costs.back, in.latency_ms(v, u) + back_bytes / back);
        }
    }
    return true;
}

// The costs of all stages and channels of a placed plan.
class PlacedCosts {
  public:
    PlacedCosts(const Instance& in, const PlacedPlan& plan)
        : num_microbatches_(in.num_microbatches), half_duplex_(in.half_duplex) {
        const int S = plan.num_stages();
        for (int n = 0; n < S; ++n) {
            const std::vector<int>& devices = plan.devices()[n];
            const int end = plan.end_layer()[n];
            StageCosts stage;
            ChannelCosts channel{0.0, 0.0};
            is_possible_ =
                is_possible_ &&
                cost_stage(in, n ? plan.end_layer()[n - 1] : 0, end, devices, stage) &&
                (n + 1 == S || cost_channel(in, end, devices, plan.devices()[n + 1], channel));
            if (!is_possible_) return;
            forward_.push_back(stage.forward), backward_.push_back(stage.backward);
            all_reduce_.push_back(stage.all_reduce);
            there_.push_back(channel.there), back_.push_back(channel.back);
        }
    }
    // False if a path is missing or if a stage has too many devices.
    bool is_possible() const { return is_possible_; }
    CostsView view() const {
        return {static_cast<int>(forward_.size()), num_microbatches_, forward_.data(),
                backward_.data(), there_.data(), back_.data(), all_reduce_.data(), half_duplex_};
    }

  private:
    std::vector<double> forward_, backward_, there_, back_, all_reduce_;
    int num_microbatches_;
    bool half_duplex_, is_possible_ = true;
};

}  // namespace pipeplan
