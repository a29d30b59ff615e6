// How many microbatches a stage may hold at once, so that its devices have the memory for it.
//
// A device of share x needs state + in_flight * activations * x, or, if the stage recomputes, state
// + (in_flight * bytes into the stage + activations) * x. State is parameters, gradients and
// optimizer.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "bound.hpp"
#include "instance.hpp"

namespace pipeplan {

constexpr double kMemoryRounding = 1e-9;  // relative

// Some devices of a set, which together take a share of each microbatch and have this memory.
struct Holding {
    double share, bytes;
    int num_devices = 1;
};

// What the devices of a set can hold. Empty if memory does not count.
using Room = std::vector<Holding>;

// What layers need that are to become a stage.
struct StageNeeds {
    double state_bytes, activation_bytes, bytes_into;
};

inline StageNeeds needs_of(const Instance& in, int first_layer, int end_layer) {
    return {in.limits.state_bytes_per_parameter_byte * in.parameter_bytes(first_layer, end_layer),
            in.activation_bytes(first_layer, end_layer), in.bytes_into(first_layer)};
}

// Adds a holding, unless another one holds no more anyway.
inline void add_holding(Room& room, const Holding& one) {
    for (const Holding& other : room)
        if (other.num_devices == one.num_devices && other.share >= one.share && other.bytes <= one.bytes)
            return;
    room.erase(std::remove_if(room.begin(), room.end(),
                              [&](const Holding& other) {
                                  return other.num_devices == one.num_devices &&
                                         other.share <= one.share && other.bytes >= one.bytes;
                              }),
               room.end());
    room.push_back(one);
}

// Sums over several devices are rounded more often. A bound may hold a little too much.
inline int most_in_flight(const Holding& holding, const StageNeeds& needs, int mode,
                          int num_microbatches) {
    const double rounding = holding.num_devices > 1 ? 3 * kMemoryRounding : kMemoryRounding;
    double room = holding.bytes * (1 + rounding) - holding.num_devices * needs.state_bytes;
    double each = holding.share * needs.activation_bytes;
    if (mode & kRecomputes) room -= each, each = holding.share * needs.bytes_into;
    if (!(room >= each)) return 0;
    if (room >= each * num_microbatches) return num_microbatches;
    return static_cast<int>(room / each);
}

// The most microbatches that a stage may hold; 0 if it does not fit.
inline int most_in_flight(const Instance& in, const Room& room, const StageNeeds& needs, int mode) {
    int most = in.num_microbatches;
    for (const Holding& holding : room)
        most = std::min(most, most_in_flight(holding, needs, mode, most));
    return most;
}

// Writes the cap into the costs.
inline void set_cap(StageCosts& costs, int cap, double M) {
    if (cap >= M) return;
    costs.cap = cap;
    costs.rounds = std::ceil(M / cap);
    costs.spare = M - 1 - (costs.rounds - 1) * cap;
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
