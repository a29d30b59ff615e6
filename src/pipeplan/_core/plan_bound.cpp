// The fixed-plan bound, from the last stage to the first (bound.hpp). O(S).
#include "bound.hpp"
#include "memory.hpp"
#include "pipeline.hpp"

namespace pipeplan {

double plan_bound(const CostsView& costs, const int* caps) {
    const double M = costs.num_microbatches;
    const auto stage = [&](int n) {
        StageCosts one{costs.forward_ms[n], costs.backward_ms[n], costs.all_reduce_ms[n]};
        if (caps) set_cap(one, caps[n], M);
        return one;
    };
    Suffix suffix = last_stage(stage(costs.num_stages - 1), M);
    for (int n = costs.num_stages - 2; n >= 0; --n) {
        const ChannelCosts channel{costs.send_forward_ms[n], costs.send_backward_ms[n]};
        suffix = before(stage(n), behind_channel(suffix, channel, M, costs.half_duplex), M);
    }
    return suffix.last_reduce;
}

}  // namespace pipeplan
