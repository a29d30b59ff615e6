// The orders that the event loop runs: a given one, a list scheduler's, or one of the portfolio.
#include <algorithm>
#include <vector>

#include "event_loop.hpp"
#include "pipeline.hpp"

namespace pipeplan {
namespace {

template <class Choose>
Trace run(const CostsView& costs, Control& control, Choose&& choose) {
    Trace trace;
    if (costs.flows) Run<SharedTimes>(costs, trace, control)(choose);
    else Run<GivenTimes>(costs, trace, control)(choose);
    return trace;
}

}  // namespace

Trace run_schedule(const CostsView& costs, const Code* codes, Control& control) {
    const int num_blocks = 2 * costs.num_microbatches;
    return run(costs, control, [=](int n, const Stage& stage, const auto& state, Code& code) {
        const int position = stage.forwards_begun + stage.backwards_begun;
        if (position == num_blocks) return false;
        code = codes[static_cast<std::size_t>(n) * num_blocks + position];
        return state.ready(n, code);
    });
}

Trace run_list(const CostsView& costs, Preference preference, const int* caps, Control& control) {
    const int S = costs.num_stages, M = costs.num_microbatches;
    return run(costs, control, [=](int n, const Stage& stage, const auto& state, Code& code) {
        const int i = stage.backwards_begun, j = stage.forwards_begun;
        const bool backward_ready = i < M && state.ready(n, -1 - i);
        const bool forward_ready = j < M && j - i < caps[n] && state.ready(n, j);
        if (!backward_ready && !forward_ready) return false;
        const bool backward_first =
            preference == Preference::kBackward ||
            (preference == Preference::kUnitPipeline && i + 4 * (S - 1) - 2 * n <= j + 2 * n);
        code = backward_ready && (backward_first || !forward_ready) ? -1 - i : j;
        return true;
    });
}

Trace run_rule(const CostsView& costs, int rule, Control& control) {
    const int S = costs.num_stages, M = costs.num_microbatches;
    std::vector<int> caps(S, M);
    if (costs.caps)
        for (int n = 0; n < S; ++n) caps[n] = std::min(M, costs.caps[n]);
    const auto leave_room = [&](int per_stage_behind) {
        for (int n = 0; n < S; ++n) {
            const int room = per_stage_behind * (S - 1 - n) + 1;
            caps[n] = costs.caps ? std::min(caps[n], room) : room;
        }
    };
    const auto run_warm_up = [&] {  // caps[n] forwards, then one backward and one forward in turn
        std::vector<Code> codes;
        for (int n = 0; n < S; ++n) {
            // With more forwards than the stage in front a stage would wait for ever.
            if (n > 0) caps[n] = std::min(caps[n], caps[n - 1]);
            for (int m = 0; m < std::min(caps[n], M); ++m) codes.push_back(m);
            for (int m = 0; m < M; ++m) {
                codes.push_back(-1 - m);
                if (caps[n] + m < M) codes.push_back(caps[n] + m);
            }
        }
        return run_schedule(costs, codes.data(), control);
    };
    switch (rule) {
        case 0: return run_list(costs, Preference::kUnitPipeline, caps.data(), control);
        case 1: leave_room(1); return run_warm_up();
        case 2: leave_room(2); return run_warm_up();
        case 3: return run_list(costs, Preference::kBackward, caps.data(), control);
        case 4: leave_room(4); return run_list(costs, Preference::kForward, caps.data(), control);
        default: leave_room(2); return run_list(costs, Preference::kForward, caps.data(), control);
    }
}

double iteration_ms(const Trace& trace, const CostsView& costs) {
    double latest = 0.0;
    if (costs.flows) {
        for (double end_ms : trace.all_reduce_end_ms) latest = std::max(latest, end_ms);
        return latest;
    }
    for (int n = 0; n < costs.num_stages; ++n)
        latest = std::max(latest, trace.stage_end_ms[n] + costs.all_reduce_ms[n]);
    return latest;
}

}  // namespace pipeplan
