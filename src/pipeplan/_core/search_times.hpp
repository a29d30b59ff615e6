// How long a plan of local search takes: by simulation, and how crowded it is near its slowest part.
#pragma once
#include <algorithm>
#include <vector>

#include "bound.hpp"
#include "card_load.hpp"
#include "kernels.hpp"
#include "pipeline.hpp"
#include "search_plan.hpp"

namespace pipeplan {

class SimulatedTimes {
  public:
    SimulatedTimes(const Instance& in, Control& control)
        : in_(in), control_(control), card_load_(in) {}

    // With many microbatches an estimate. Where links are shared, no less than the busiest of them
    // takes. Adds what it costs to `units`.
    double ms(const SearchPlan& plan, int rule, double& units) {
        const double load_ms = in_.shared ? card_load_(plan) : 0.0;
        return std::max(load_ms, alone_ms(plan, rule, units));
    }
    // Whether any of the times was an estimate.
    bool has_estimates() const { return has_estimates_; }

  private:
    static constexpr double kUnitsPerBlock = 70.0;

    double alone_ms(const SearchPlan& plan, int rule, double& units) {
        const int S = static_cast<int>(plan.size());
        forward_S_.resize(S), backward_S_.resize(S), reduce_S_.resize(S);
        there_C_.resize(S), back_C_.resize(S);
        for (int n = 0; n < S; ++n) {
            forward_S_[n] = plan[n].costs.forward;
            backward_S_[n] = plan[n].costs.backward;
            reduce_S_[n] = plan[n].costs.all_reduce;
            there_C_[n] = plan[n].channel.there;
            back_C_[n] = plan[n].channel.back;
        }
        caps_S_.resize(in_.has_memory() ? S : 0);
        for (int n = 0; n < static_cast<int>(caps_S_.size()); ++n) caps_S_[n] = plan[n].costs.cap;
        const CostsView costs{S,
                              in_.num_microbatches,
                              forward_S_.data(),
                              backward_S_.data(),
                              there_C_.data(),
                              back_C_.data(),
                              reduce_S_.data(),
                              in_.half_duplex,
                              caps_S_.empty() ? nullptr : caps_S_.data()};
        const RuleEstimate estimate = estimate_of(costs);
        has_estimates_ = has_estimates_ || !estimate.is_exact;
        units += kUnitsPerBlock * estimate.num_microbatches * (4 * S - 2);
        return estimate_rule_ms(costs, rule, control_);
    }

    const Instance& in_;
    Control& control_;
    CardLoad card_load_;
    bool has_estimates_ = false;
    std::vector<double> forward_S_, backward_S_, reduce_S_, there_C_, back_C_;
    std::vector<int> caps_S_;
};

// How much of the plan is nearly as slow as its slowest part, as a part of its time.
//
// Only the slowest stage decides the bound. Of two plans with the same bound, one in which a single
// stage is slow is nearer to a better plan than one in which all are. Without this the walk drifts
// among plans that look alike: on irregular clusters of 64 devices they were 0.5 % slower.
inline double crowding_of(const SearchPlan& plan, double num_microbatches, double bound) {
    constexpr double kCrowding = 0.05;
    if (!(bound > 0)) return 0.0;
    const int S = static_cast<int>(plan.size());
    double sum = 0.0, forward_head = 0.0, head = 0.0;
    for (int n = 0; n < S; ++n) {
        const StageCosts& costs = plan[n].costs;
        const double work = costs.forward + costs.backward;
        const double ms = num_microbatches * work + std::max(head, forward_head + costs.all_reduce);
        const double part = ms / bound, fourth = part * part * part * part;
        sum += fourth * fourth;
        const ChannelCosts& channel = plan[n].channel;  // of the last stage it does not matter
        forward_head += costs.forward + channel.there;
        head += work + channel.there + channel.back;
    }
    return kCrowding * sum / S;
}

}  // namespace pipeplan
