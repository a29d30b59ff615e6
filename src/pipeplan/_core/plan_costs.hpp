// The times of a placed plan's stages and channels, and how many microbatches its stages may hold.
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
#include "memory.hpp"
#include "pipeline.hpp"
#include "stage_work.hpp"

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
    if (in.shared) links.slowest_bytes_per_ms = in.shared->ring_rate(devices);
    if (has_host_links(in)) {
        links.slowest_bytes_per_ms =
            std::min(links.slowest_bytes_per_ms, in.bytes_per_ms.least_inside(devices));
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

// How the devices of a stage share a microbatch: the longest time of one of them, where a device of
// speed 1 takes 1 for all of it, and the memory that they have.
struct SetShares {
    double rate;
    Room room;
    std::vector<Pace> paces;  // where layers were measured at several sizes
};

inline SetShares shares_of_set(const Instance& in, const std::vector<int>& devices,
                               double slowest_speed, Split split = Split::kEven) {
    const int k = static_cast<int>(devices.size());
    const auto memory = [&](int i) { return in.limits.memory_bytes[devices[i]]; };
    SetShares result{1.0 / (k * slowest_speed), {}, {}};
    if (split != Split::kBySpeed && in.shares_evenly(k)) {
        double least_bytes = kInfinity;
        for (int i = 0; in.has_memory() && i < k; ++i) least_bytes = std::min(least_bytes, memory(i));
        if (in.has_memory()) result.room.push_back({1.0 / k, least_bytes});
        if (in.has_measured()) result.paces.push_back({1.0 / k, slowest_speed});
        return result;
    }
    const std::vector<double> shares = in.shares(devices, split);
    result.rate = 0.0;
    for (int i = 0; i < k; ++i) {
        result.rate = std::max(result.rate, shares[i] / in.speed[devices[i]]);
        if (in.has_memory()) add_holding(result.room, {shares[i], memory(i)});
    }
    result.paces = paces_of(in, devices, shares);
    return result;
}

// Whether the fastest devices of a set may not be those with the most memory, and it matters.
inline bool can_share_by_memory(const Instance& in, int num_devices) {
    return in.has_memory() && !in.shares_evenly(num_devices);
}

// Whether shares in proportion to speed are other shares than even ones.
inline bool can_share_by_speed(const Instance& in, const std::vector<int>& devices) {
    return in.limits.any_shares && in.has_many_speeds(devices);
}

// The costs of a stage in a mode; false if a path is missing, if a stage may not have so many devices
// or if it does not fit their memory. If it fits only so, the devices with the most memory take more
// samples; `may_share_by_memory` allows that.
inline bool cost_stage(const Instance& in, int first_layer, int end_layer, const SetLinks& links,
                       const std::vector<int>& devices, int mode, StageCosts& costs,
                       bool may_share_by_memory = false) {
    const Ring ring =
        make_ring(in, links.num_devices, links.slowest_bytes_per_ms, links.latency_ms);
    if (!ring.connected) return false;
    const auto fits = [&](Split split) {
        const SetShares shares = shares_of_set(in, devices, links.slowest_speed, split);
        const bool recomputes = mode & kRecomputes;
        ForwardBackward work = measured_work(in, shares.paces, first_layer, end_layer, recomputes);
        if (!in.has_measured()) {
            work.forward = shares.rate * in.forward_ms(first_layer, end_layer);
            work.backward = shares.rate * in.backward_ms(first_layer, end_layer);
            if (recomputes) work.backward += work.forward;
        }
        costs = {work.forward, work.backward,
                 ring.fixed_ms + ring.ms_per_byte * in.parameter_bytes(first_layer, end_layer)};
        costs.split = split;
        if (!in.has_memory()) return true;
        const int cap = most_in_flight(in, shares.room, needs_of(in, first_layer, end_layer), mode);
        set_cap(costs, cap, in.num_microbatches);
        return cap > 0;
    };
    if (mode & kBySpeed && can_share_by_speed(in, devices)) return fits(Split::kBySpeed);
    return fits(Split::kEven) || (may_share_by_memory && can_share_by_memory(in, links.num_devices) &&
                                  fits(Split::kByMemory));
}

// The devices at one end of a channel, and how they share a microbatch.
struct ChannelEnd {
    const std::vector<int>& devices;
    Split split = Split::kEven;

    bool is_even(const Instance& in) const {
        return split != Split::kBySpeed && in.shares_evenly(static_cast<int>(devices.size()));
    }
};

// The costs of a channel whose stages have devices with different shares; without shared links.
inline bool cost_uneven_channel(const Instance& in, int end_layer, const ChannelEnd& here,
                                const ChannelEnd& next, ChannelCosts& costs) {
    const std::vector<double> shares = in.shares(here.devices, here.split);
    const std::vector<double> next_shares = in.shares(next.devices, next.split);
    const double output = in.output_bytes[end_layer - 1], gradient = in.gradient_bytes[end_layer - 1];
    if (has_host_links(in)) {
        const double ms_per_byte =
            in.bytes_per_ms.longest_between(here.devices, shares, next.devices, next_shares);
        const double latency_ms = in.latency_ms.one_number();
        costs = {latency_ms + output * ms_per_byte, latency_ms + gradient * ms_per_byte};
        return ms_per_byte < kInfinity;
    }
    costs = {0.0, 0.0};
    for (std::size_t a = 0; a < here.devices.size(); ++a) {
        for (std::size_t b = 0; b < next.devices.size(); ++b) {
            const int u = here.devices[a], v = next.devices[b];
            const double part = shares[a] * next_shares[b];
            const double forth = in.bytes_per_ms(u, v), back = in.bytes_per_ms(v, u);
            if (!(forth > 0 && back > 0)) return false;
            costs.there = std::max(costs.there, in.latency_ms(u, v) + part * output / forth);
            costs.back = std::max(costs.back, in.latency_ms(v, u) + part * gradient / back);
        }
    }
    return true;
}

// The same as below, without shared links.
inline bool cost_own_channel(const Instance& in, int end_layer, const ChannelEnd& here,
                             const ChannelEnd& next, ChannelCosts& costs) {
    if (!here.is_even(in) || !next.is_even(in))
        return cost_uneven_channel(in, end_layer, here, next, costs);
    const double part = 1.0 / (static_cast<double>(here.devices.size()) * next.devices.size());
    const double there_bytes = part * in.output_bytes[end_layer - 1];
    const double back_bytes = part * in.gradient_bytes[end_layer - 1];
    if (has_host_links(in)) {
        const double rate = in.bytes_per_ms.least_between(here.devices, next.devices);
        const double latency_ms = in.latency_ms.one_number();
        costs = {latency_ms + there_bytes / rate, latency_ms + back_bytes / rate};
        return rate > 0;
    }
    costs = {0.0, 0.0};
    for (int u : here.devices) {
        for (int v : next.devices) {
            const double forth = in.bytes_per_ms(u, v), back = in.bytes_per_ms(v, u);
            if (!(forth > 0 && back > 0)) return false;
            costs.there = std::max(costs.there, in.latency_ms(u, v) + there_bytes / forth);
            costs.back = std::max(costs.back, in.latency_ms(v, u) + back_bytes / back);
        }
    }
    return true;
}

// Transfers take at least as long as their part of each shared link takes.
inline void raise_by_shared(const Instance& in, int end_layer, const ChannelEnd& here,
                            const ChannelEnd& next, ChannelCosts& costs) {
    const double output = in.output_bytes[end_layer - 1], gradient = in.gradient_bytes[end_layer - 1];
    const SharedLinks::LeastTimes least =
        here.is_even(in) && next.is_even(in)
            ? in.shared->least_times(here.devices, next.devices, output, gradient)
            : in.shared->least_times(here.devices, in.shares(here.devices, here.split), next.devices,
                                     in.shares(next.devices, next.split), output, gradient);
    costs.there = std::max(costs.there, least.there_ms);
    costs.back = std::max(costs.back, least.back_ms);
}

// The costs of the channel behind a stage that ends at `end_layer`; false if a path is missing. Where
// links are shared, the least that they can be.
inline bool cost_channel(const Instance& in, int end_layer, const ChannelEnd& here,
                         const ChannelEnd& next, ChannelCosts& costs) {
    if (!cost_own_channel(in, end_layer, here, next, costs)) return false;
    if (in.shared) raise_by_shared(in, end_layer, here, next, costs);
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
            StageCosts stage;
            is_possible_ = is_possible_ && cost_stage(in, n ? plan.end_layer()[n - 1] : 0,
                                                      plan.end_layer()[n], links_of_set(in, devices),
                                                      devices, plan.modes()[n], stage, true);
            if (!is_possible_) return;
            forward_.push_back(stage.forward), backward_.push_back(stage.backward);
            all_reduce_.push_back(stage.all_reduce);
            splits_.push_back(stage.split);
            if (in.has_memory()) caps_.push_back(stage.cap);
        }
        there_.assign(S, 0.0), back_.assign(S, 0.0);
        for (int n = 0; n + 1 < S; ++n) {
            ChannelCosts channel;
            is_possible_ =
                is_possible_ && cost_channel(in, plan.end_layer()[n], {plan.devices()[n], splits_[n]},
                                             {plan.devices()[n + 1], splits_[n + 1]}, channel);
            if (!is_possible_) return;
            there_[n] = channel.there, back_[n] = channel.back;
        }
        if (in.shared) flows_ = std::make_unique<PlanFlows>(in, plan.end_layer(), shares_of(in, plan));
    }
    // False if a path is missing, or if a stage has too many devices or too little memory.
    bool is_possible() const { return is_possible_; }
    CostsView view() const {
        return {static_cast<int>(forward_.size()), num_microbatches_, forward_.data(),
                backward_.data(), there_.data(), back_.data(), all_reduce_.data(), half_duplex_,
                caps_.empty() ? nullptr : caps_.data(), flows_.get()};
    }

  private:
    StageShares shares_of(const Instance& in, const PlacedPlan& plan) const {
        StageShares stages{plan.devices(), {}};
        for (int n = 0; n < plan.num_stages(); ++n)
            stages.shares.push_back(in.shares(plan.devices()[n], splits_[n]));
        return stages;
    }

    std::unique_ptr<const PlanFlows> flows_;  // where links are shared
    std::vector<double> forward_, backward_, there_, back_, all_reduce_;
    std::vector<int> caps_;         // only where memory counts
    std::vector<Split> splits_;     // [stages]
    int num_microbatches_;
    bool half_duplex_, is_possible_ = true;
};

}  // namespace pipeplan
