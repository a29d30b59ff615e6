// The fixed-plan bound: no schedule runs a pipeline of given costs in less time.
//
// Suffix recurrences from the last stage to the first (docs/theory.md has the proofs). For the
// stages from n on: round_trip, from the first forward of stage n to the end of the backward of
// the same microbatch at the earliest; last_backward, from that forward to the end of stage n's last
// backward; last_reduce, to the end of the last all-reduce of the suffix.
#pragma once
#include <algorithm>
#include <cmath>

namespace pipeplan {

struct Suffix {
    double round_trip;
    double last_backward;
    double last_reduce;
};

struct StageCosts {
    double forward, backward, all_reduce;
};

struct ChannelCosts {
    double there, back;
};

inline double channel_busy_ms(const ChannelCosts& c, bool half_duplex) {
    return half_duplex ? c.there + c.back : std::max(c.there, c.back);
}

// The last stage alone: it runs one block at a time.
inline Suffix last_stage(const StageCosts& s, double M) {
    const double work = s.forward + s.backward;
    return {work, M * work, M * work + s.all_reduce};
}

// Seen from the sender's side of the channel in front of a suffix: the round trip behind the
// channel, the time from the first arrival's departure to the last return, and the last reduce.
inline Suffix behind_channel(const Suffix& next, const ChannelCosts& c, double M, bool half_duplex) {
    const double both = c.there + c.back;
    double busy = both + next.last_backward;
    busy = std::max(busy, next.round_trip + std::max(M * c.there + c.back, c.there + M * c.back));
    if (half_duplex) busy = std::max(busy, M * both);
    return {both + next.round_trip, busy, c.there + next.last_reduce};
}

// A stage in front of what lies behind its channel. `rounds` is ceil(M / most microbatches that
// the stage may hold), 0 without such a limit.
inline Suffix before(const StageCosts& s, const Suffix& behind, double M, double rounds = 0.0) {
    const double work = s.forward + s.backward;
    double last_backward = std::max(M * work, work + behind.last_backward);
    last_backward = std::max(last_backward, behind.round_trip + std::max(s.forward + M * s.backward,
                                                                         M * s.forward + s.backward));
    last_backward = std::max(last_backward, rounds * (work + behind.round_trip));
    return {work + behind.round_trip, last_backward,
            std::max(last_backward + s.all_reduce, s.forward + behind.last_reduce)};
}

}  // namespace pipeplan
