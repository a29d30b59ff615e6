// The recursion of suffix_dp.hpp on arbitrary sets of devices: no loss by any order of devices.
#include <algorithm>
#include <stdexcept>
#include <vector>

#include "plan_proof.hpp"
#include "set_topology.hpp"

namespace pipeplan {
namespace {

// Devices of one class can really be exchanged, and classes are numbered without gaps.
void require_classes(const Instance& in, const std::vector<int>& class_of) {
    const std::vector<int> coarsest = device_classes(in);
    if (class_of.size() != coarsest.size())
        throw std::invalid_argument("class_of: one class for each device");
    std::vector<int> coarsest_of(class_of.size(), -1);  // by the given class
    for (std::size_t u = 0; u < class_of.size(); ++u) {
        const int c = class_of[u];
        if (c < 0 || c >= in.num_devices) throw std::invalid_argument("class_of: out of range");
        if (coarsest_of[c] < 0) coarsest_of[c] = coarsest[u];
        if (coarsest_of[c] != coarsest[u])
            throw std::invalid_argument("class_of: devices of a class cannot be exchanged");
    }
    const int num_classes = *std::max_element(class_of.begin(), class_of.end()) + 1;
    if (std::count(coarsest_of.begin(), coarsest_of.begin() + num_classes, -1) > 0)
        throw std::invalid_argument("class_of: a class has no device");
}

}  // namespace

ProvedPlans plan_on_sets(const Instance& instance, const std::vector<int>& class_of,
                         const DpLimits& limits, double proof_steps, Pool& pool, Control& control) {
    instance.require_proportional();
    require_classes(instance, class_of);
    SetTopology topology(instance, class_of);
    SuffixDp<SetTopology> dp(instance, topology, limits, Overflow::kMerge, pool, control);
    const DpResult found = dp.run();
    ProvedPlans result{{found.least_ms, {}}, {limits.limit_ms, {}, {}}};
    for (const std::vector<PlacedStage>& stages : found.best) {
        std::vector<int> options;
        for (const PlacedStage& stage : stages) options.push_back(stage.option);
        result.candidates.plans.emplace_back(instance, end_layers(stages), topology.devices(options),
                                             modes_of(stages));
    }
    if (proof_steps > 0 && limits.limit_ms < kInfinity && !instance.limits.has_constraints()) {
        PlanProof<SetTopology> proof(instance, topology, dp, limits.limit_ms, pool, control);
        double& least_ms = result.candidates.least_ms;
        least_ms = std::max(least_ms, proof.run(proof_steps));
        result.found = proof.best();
        least_ms = std::min(least_ms, result.found.iteration_ms);
    }
    return result;
}

}  // namespace pipeplan
