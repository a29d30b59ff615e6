// The iteration time of a placed plan under each schedule of the portfolio.
#include <vector>

#include "kernels.hpp"
#include "pipeline.hpp"
#include "plan_costs.hpp"

namespace pipeplan {

std::vector<double> rule_times(const Instance& instance, const PlacedPlan& plan, double worth_ms,
                               Control& control) {
    const int S = plan.num_stages();
    std::vector<double> forward(S), backward(S), there(S), back(S), all_reduce(S);
    for (int n = 0; n < S; ++n) {
        const std::vector<int>& devices = plan.devices()[n];
        const int end = plan.end_layer()[n];
        StageCosts stage;
        ChannelCosts channel{0.0, 0.0};
        if (!cost_stage(instance, n ? plan.end_layer()[n - 1] : 0, end, devices, stage)) return {};
        if (n + 1 < S && !cost_channel(instance, end, devices, plan.devices()[n + 1], channel))
            return {};
        forward[n] = stage.forward, backward[n] = stage.backward, all_reduce[n] = stage.all_reduce;
        there[n] = channel.there, back[n] = channel.back;
    }
    const CostsView costs{S,           instance.num_microbatches, forward.data(),
                          backward.data(), there.data(),          back.data(),
                          all_reduce.data(), instance.half_duplex};
    std::vector<double> times(kNumRules, kInfinity);
    for (int rule = 0; rule < kNumRules; ++rule) {
        if (rule > 0 && !(times[0] <= worth_ms)) break;
        times[rule] = iteration_ms(run_rule(costs, rule, control), costs);
    }
    return times;
}

}  // namespace pipeplan
