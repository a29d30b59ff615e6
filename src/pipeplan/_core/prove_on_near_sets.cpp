// A lower bound on every plan, from small sets that are known and larger ones of which only the size
// is (near_topology.hpp); then single plans are looked at (plan_proof.hpp).
//
// Limits start at what is proved already, and rise until a plan below the limit stays open. A low
// limit leaves little, so the first runs are quick and merge few suffixes.
#include <algorithm>
#include <utility>
#include <vector>

#include "kernels.hpp"
#include "near_topology.hpp"
#include "plan_proof.hpp"

namespace pipeplan {
namespace {

constexpr int kLargestKnown = 3, kPrices = 64, kFairPrices = 97, kMostClasses = 8, kMaxLevels = 1024;
constexpr double kFirstRise = 1.01, kFasterRise = 1.01;

// How many sets of devices there are with at most so many.
double num_sets(int num_devices, int largest) {
    double sum = 0.0, of_size = 1.0;
    for (int size = 1; size <= largest; ++size) {
        of_size = of_size * (num_devices - size + 1) / size;
        sum += of_size;
    }
    return sum;
}

}  // namespace

ProvedPlans prove_on_near_sets(const Instance& in, const DpLimits& limits, double proved_ms,
                               double dp_steps, double proof_steps, Pool& pool, Control& control) {
    in.require_proportional();
    ProvedPlans result{{std::min(proved_ms, limits.limit_ms), {}}, {limits.limit_ms, {}, {}}};
    if (in.num_devices < 2 || in.num_devices > NearTopology::kMostDevices) return result;
    if (!(proved_ms > 0) || !(limits.limit_ms < kInfinity)) return result;
    if (in.limits.has_constraints()) return result;
    const bool equal = std::equal(in.speed.begin() + 1, in.speed.end(), in.speed.begin());
    const DeviceBudget prices =
        in.limits.any_shares
            ? DeviceBudget::by_fair_price(in.speed, kFairPrices)
            : DeviceBudget::by_price(in.speed, equal ? in.num_devices : kPrices, kMostClasses);
    int largest = std::min(kLargestKnown, in.num_devices);
    const auto steps = [&] {
        const double sets = num_sets(in.num_devices, largest);
        return prices.num_nodes() * sets * in.num_layers * (sets + in.num_layers / 2.0);
    };
    while (largest > 0 && steps() > dp_steps) --largest;
    if (largest == 0) return result;
    const BestLinks best(in, kMaxLevels, control);
    const SharedBest shared(in, control);
    NearTopology topology(in, best, shared, prices, largest);
    double& least_ms = result.candidates.least_ms;
    std::vector<ChannelCosts> channels;
    for (double rise = kFirstRise; least_ms < limits.limit_ms; rise *= kFasterRise) {
        const double limit_ms = std::min(limits.limit_ms, least_ms * rise);
        const DpLimits limited{limits.capacity, limit_ms, 0};
        SuffixDp<NearTopology> dp(in, topology, limited, Overflow::kMerge, pool, control);
        dp.use_channels(std::move(channels));
        const double dp_ms = dp.run().least_ms;
        channels = dp.take_channels();
        least_ms = std::max(least_ms, dp_ms);
        if (dp_ms >= limit_ms) continue;
        PlanProof<NearTopology> proof(in, topology, dp, limit_ms, pool, control);
        const double shown_ms = proof.run(proof_steps);
        least_ms = std::max(least_ms, shown_ms);
        if (!proof.best().codes.empty()) result.found = proof.best();
        // A proof ends a few instants below its limit, so after the highest limit nothing is left to do.
        if (shown_ms < limit_ms * (1 - 1e-6) || limit_ms >= limits.limit_ms) break;
    }
    least_ms = std::min(least_ms, result.found.iteration_ms);
    return result;
}

}  // namespace pipeplan
