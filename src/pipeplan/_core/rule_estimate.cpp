// The time of a rule for many microbatches, from few.
//
// After its fill a pipeline repeats: each microbatch takes as long as the one before. So two short
// runs, of m and of 2m microbatches, tell the time of any number of them up to what the rhythm of a
// list scheduler hides. Estimates only rank plans: whatever is kept is simulated in full.
#include <algorithm>

#include "pipeline.hpp"

namespace pipeplan {
namespace {

constexpr int kFewestMicrobatches = 32, kMicrobatchesPerStage = 4;
constexpr int kWorthEstimating = 8;  // times as many microbatches as the shorter run has

int shorter_run(const CostsView& costs) {
    return std::max(kFewestMicrobatches, kMicrobatchesPerStage * costs.num_stages);
}

}  // namespace

RuleEstimate estimate_of(const CostsView& costs) {
    const int few = shorter_run(costs);
    const bool is_exact = costs.num_microbatches < kWorthEstimating * few;
    return {is_exact, is_exact ? costs.num_microbatches : 3 * few};
}

double estimate_rule_ms(const CostsView& costs, int rule, Control& control) {
    if (estimate_of(costs).is_exact) return iteration_ms(run_rule(costs, rule, control), costs);
    CostsView shorter = costs, longer = costs;
    shorter.num_microbatches = shorter_run(costs);
    longer.num_microbatches = 2 * shorter.num_microbatches;
    const double shorter_ms = iteration_ms(run_rule(shorter, rule, control), shorter);
    const double longer_ms = iteration_ms(run_rule(longer, rule, control), longer);
    const double each_ms = (longer_ms - shorter_ms) / shorter.num_microbatches;
    return longer_ms + each_ms * (costs.num_microbatches - longer.num_microbatches);
}

}  // namespace pipeplan
