// The times of a placed plan's stages and channels, under even shares.
//
// The same formulas as in pipeplan.cost, but fast enough for millions of plans. Tests compare the
// two.
#pragma once
#include <algorithm>
#include <memory>
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

// The costs of a stage; false if a path is missing or if a stage may not have so many devices.
inline bool cost_stage(const Instance& in, int first_layer, int end_layer,
                       const std::vector<int>& devices, StageCosts& costs) {
    double slowest = kInfinity, latency_ms = 0.0, speed = kInfinity;
    for (int u : devices) speed = std::min(speed, in.speed[u]);
    const bool by_hosts = has_host_links(in);
    if (by_hosts) {
        slowest = in.bytes_per_ms.least_inside(devices);
        latency_ms = in.latency_ms.one_number();
    }
    for (std::size_t a = 0; !by_hosts && a < devices.size(); ++a) {
        const int u = devices[a];
        for (int v : devices) {
            if (u == v) continue;
            slowest = std::min(slowest, in.bytes_per_ms(u, v));
            latency_ms = std::max(latency_ms, in.latency_ms(u, v));
        }
    }
    const int k = static_cast<int>(devices.size());
    const Ring ring = make_ring(in, k, slowest, latency_ms);
    if (!ring.connected) return false;
    const double rate = 1.0 / (k * speed);
    costs = {rate * in.forward_ms(first_layer, end_layer),
             rate * in.backward_ms(first_layer, end_layer),
             ring.fixed_ms + ring.ms_per_byte * in.parameter_bytes(first_layer, end_layer)};
    return true;
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
        if (in.shared) flows_ = std::make_unique<PlanFlows>(in, plan.end_layer(), even_stages(plan));
    }
    // False if a path is missing or if a stage has too many devices.
    bool is_possible() const { return is_possible_; }
    CostsView view() const {
        return {static_cast<int>(forward_.size()), num_microbatches_, forward_.data(),
                backward_.data(), there_.data(), back_.data(), all_reduce_.data(), half_duplex_,
                flows_.get()};
    }

  private:
    static StageShares even_stages(const PlacedPlan& plan) {
        StageShares stages{plan.devices(), {}};
        for (const std::vector<int>& devices : plan.devices())
            stages.shares.emplace_back(devices.size(), 1.0 / static_cast<double>(devices.size()));
        return stages;
    }

    std::unique_ptr<const PlanFlows> flows_;  // where links are shared
    std::vector<double> forward_, backward_, there_, back_, all_reduce_;
    int num_microbatches_;
    bool half_duplex_, is_possible_ = true;
};

}  // namespace pipeplan
