// The iteration time of a placed plan under the schedules of the portfolio.
#include <algorithm>
#include <numeric>
#include <vector>

#include "card_load.hpp"
#include "kernels.hpp"
#include "pipeline.hpp"
#include "plan_costs.hpp"

namespace pipeplan {
namespace {

constexpr double kSameTime = 1e-12;     // relative; no rule that is faster by less counts as faster
constexpr double kCouldBeBest = 5e-4;   // relative; estimates are that good
constexpr int kMostFullRuns = 2;

// Without estimates: every rule is simulated, unless the first one takes longer than `worth_ms` or
// the plan's own bound shows that no rule is faster.
std::vector<double> time_rules(const CostsView& costs, double worth_ms, double bound_ms,
                               Control& control) {
    std::vector<double> times(kNumRules, kInfinity);
    for (int rule = 0; rule < kNumRules; ++rule) {
        if (rule > 0 && !(times[0] <= worth_ms && times[0] > bound_ms * (1 + kSameTime))) break;
        times[rule] = iteration_ms(run_rule(costs, rule, control), costs);
    }
    return times;
}

}  // namespace

std::vector<double> shares_of_stage(const Instance& instance, int first_layer, int end_layer,
                                    const std::vector<int>& devices, int mode) {
    StageCosts costs;
    const bool fits = cost_stage(instance, first_layer, end_layer, links_of_set(instance, devices),
                                 devices, mode, costs, true);
    if (mode & kBySpeed && can_share_by_speed(instance, devices))
        return instance.shares(devices, Split::kBySpeed);
    return instance.shares(devices, fits ? costs.split : Split::kEven);
}

std::vector<int> caps_of(const Instance& instance, const PlacedPlan& plan) {
    const PlacedCosts costs(instance, plan);
    if (!costs.is_possible()) return {};
    std::vector<int> caps(plan.num_stages(), instance.num_microbatches);
    if (costs.view().caps)
        for (int n = 0; n < plan.num_stages(); ++n) caps[n] = std::min(caps[n], costs.view().caps[n]);
    return caps;
}

std::vector<double> rule_times(const Instance& instance, const PlacedPlan& plan, double worth_ms,
                               Control& control) {
    const PlacedCosts costs(instance, plan);
    if (!costs.is_possible()) return {};
    return time_rules(costs.view(), worth_ms, -kInfinity, control);
}

Judgement judge_plan(const Instance& instance, const PlacedPlan& plan, double best_ms,
                     double worth_ms, Control& control) {
    const PlacedCosts placed(instance, plan);
    if (!placed.is_possible()) return {kInfinity, {}};
    const CostsView costs = placed.view();
    double bound_ms = plan_bound(costs, costs.caps);
    if (costs.flows) {
        bound_ms = std::max(bound_ms, card_load_ms(costs.flows->table(), costs.num_stages,
                                                   costs.num_microbatches));
        // Where many transfers use the same cards a simulation takes long: not for plans that cannot win.
        if (bound_ms > best_ms) return {bound_ms, std::vector<double>(kNumRules, kInfinity)};
    }
    if (estimate_of(costs).is_exact) {
        std::vector<double> times = time_rules(costs, worth_ms, bound_ms, control);
        return {times[0], std::move(times)};
    }
    Judgement result{bound_ms, std::vector<double>(kNumRules, kInfinity)};
    if (bound_ms > worth_ms) return result;
    std::vector<double> estimate_ms(kNumRules, kInfinity);
    for (int rule = 0; rule < kNumRules; ++rule) {
        if (rule > 0 && estimate_ms[0] > worth_ms) break;
        estimate_ms[rule] = std::max(bound_ms, estimate_rule_ms(costs, rule, control));
    }
    result.rank_ms = estimate_ms[0];
    std::vector<int> order(kNumRules);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return estimate_ms[a] < estimate_ms[b]; });
    double least_ms = best_ms;
    for (int k = 0; k < kMostFullRuns; ++k) {
        const int rule = order[k];
        if (estimate_ms[rule] > least_ms * (1 + (k ? 0.0 : kCouldBeBest))) break;
        result.times_ms[rule] = iteration_ms(run_rule(costs, rule, control), costs);
        least_ms = std::min(least_ms, result.times_ms[rule]);
    }
    return result;
}

}  // namespace pipeplan
