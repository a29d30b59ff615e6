// How many microbatches a stage may hold at once, so that its devices have the memory for it.
//
// A device of share x needs state + in_flight * activations * x, or, if the stage recomputes, state
// + (in_flight * bytes into the stage + activations) * x. State is parameters, gradients and
// optimizer.
#pragma once
#include <algorithm>
#include <cmath>

#include "bound.hpp"
#include "instance.hpp"

namespace pipeplan {

constexpr double kMemoryRounding = 1e-9;  // relative

// What the devices of a set can hold: the least memory among the devices with the larger share, and
// among those with the smaller one. Where shares are even, both are alike.
struct Room {
    double more_share = 1.0, more_bytes = kInfinity;
    double fewer_share = 1.0, fewer_bytes = kInfinity;
};

// What layers need that are to become a stage.
struct StageNeeds {
    double state_bytes, activation_bytes, bytes_into;
};

inline int most_in_flight(double share, double memory_bytes, const StageNeeds& needs, int mode,
                          int num_microbatches) {
    double room = memory_bytes * (1 + kMemoryRounding) - needs.state_bytes;
    double each = share * needs.activation_bytes;
    if (mode & kRecomputes) room -= each, each = share * needs.bytes_into;
    if (!(room >= each)) return 0;
    if (room >= each * num_microbatches) return num_microbatches;
    return static_cast<int>(room / each);
}

// The most microbatches that a stage may hold; 0 if it does not fit.
inline int most_in_flight(const Instance& in, const Room& room, const StageNeeds& needs, int mode) {
    const int M = in.num_microbatches;
    const int most = most_in_flight(room.more_share, room.more_bytes, needs, mode, M);
    if (most == 0 || room.fewer_share == room.more_share) return most;
    return std::min(most, most_in_flight(room.fewer_share, room.fewer_bytes, needs, mode, M));
}

// Writes the cap into the costs.
inline void set_cap(StageCosts& costs, int cap, double M) {
    if (cap >= M) return;
    costs.cap = cap;
    costs.rounds = std::ceil(M / cap);
}

// Calls `visit(costs, mode)` for each way in which a stage may run: it keeps its activations, or
// computes them again where that lets it hold more microbatches. A last stage needs to hold only one.
// False if the stage fits in no way.
template <class Visit>
bool for_modes(const Instance& in, const Room& room, const StageNeeds& needs,
               const StageCosts& stage, bool is_last, const Visit& visit) {
    const int M = in.num_microbatches;
    const int kept = most_in_flight(in, room, needs, kKeeps);
    if (kept > 0) {
        StageCosts costs = stage;
        set_cap(costs, kept, M);
        visit(costs, kKeeps);
        if (kept >= M || is_last) return true;
    }
    if (!in.limits.may_recompute) return kept > 0;
    const int recomputed = most_in_flight(in, room, needs, kRecomputes);
    if (recomputed <= kept) return kept > 0;
    StageCosts costs = stage;
    costs.backward += costs.forward;
    set_cap(costs, recomputed, M);
    visit(costs, kRecomputes);
    return true;
}

}  // namespace pipeplan
