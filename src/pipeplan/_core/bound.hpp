// The fixed-plan bound: no schedule runs a pipeline of given costs in less time.
//
// Suffix recurrences from the last stage to the first (docs/theory.md has the proofs). Times count
// from the start of the first stage's first forward.
#pragma once
#include <algorithm>
#include <cmath>

#include "shares.hpp"

namespace pipeplan {

// `cap` is the most microbatches that the stage may hold, kNoCap if all of them; `rounds` is
// ceil(M / cap), 0 without a cap. Of so many rounds of `cap` microbatches only the last is not full:
// `spare` more microbatches than one are in it.
constexpr int kNoCap = 1 << 30;
struct StageCosts {
    double forward, backward, all_reduce;
    int cap = kNoCap;
    double rounds = 0.0, spare = 0.0;
    Split split = Split::kEven;  // how the devices share a microbatch (Instance::shares)
};

struct ChannelCosts {
    double there, back;
};

// Bounds for a suffix: the stages from one stage on. `round_trip` is the time of one microbatch to
// the last stage and back. `last_backward` is the earliest end of the first stage's last backward,
// `last_reduce` the earliest end of all all-reduces. The other four are of its busiest stage:
// `forward` and `backward` are its costs, `behind` is the round trip behind it, and `lead` the way
// there and back from the first stage on. The first three matter most. `round_trip` is not computed
// from the others, because these may become lower when fronts are merged.
struct Suffix {
    double round_trip, last_backward, last_reduce;
    double forward, backward, behind, lead;
};

// The same, seen from the stage in front, across the channel. `busy` is the time from the departure
// of the first microbatch to the return of the last one. `lead` has the channel, there and back, too.
struct Beyond {
    double round_trip, busy, last_reduce;
    double forward, backward, behind, lead;
};

inline double channel_busy_ms(const ChannelCosts& c, bool half_duplex) {
    return half_duplex ? c.there + c.back : std::max(c.there, c.back);
}

// The last stage alone: it runs one block at a time.
inline Suffix last_stage(const StageCosts& s, double M) {
    const double work = s.forward + s.backward;
    return {work, M * work, M * work + s.all_reduce, s.forward, s.backward, 0.0, 0.0};
}

inline Beyond behind_channel(const Suffix& next, const ChannelCosts& c, double M, bool half_duplex) {
    const double both = c.there + c.back;
    double busy = both + next.last_backward;
    busy = std::max(busy, next.round_trip + std::max(M * c.there + c.back, c.there + M * c.back));
    if (half_duplex) busy = std::max(busy, M * both);
    return {both + next.round_trip, busy,        c.there + next.last_reduce, next.forward,
            next.backward,          next.behind, both + next.lead};
}

// The gain G of docs/theory.md, section 4: the bound on a stage may leave out its first (or last) i
// blocks of one kind, because the neighbour hands them over (or takes them) one in `pace` at most:
// max over whole i <= most of min(i * pace, longest) - i * own.
inline double staggered(double most, double pace, double own, double longest) {
    if (!(pace > own)) return 0.0;
    const double whole = std::min(most, std::floor(longest / pace));
    const double beyond = whole + 1 <= most ? longest - (whole + 1) * own : 0.0;
    return std::max({0.0, whole * (pace - own), beyond});
}

// What a stage takes that waits for `round_trip` behind it and may not hold all microbatches. Either
// microbatches go one after the other, one in `cap`; or the stage waits for its first backward, before
// which it runs `cap` forwards at most, or behind its last forward, where it runs `cap` backwards at
// most; or both.
inline double capped_ms(const StageCosts& s, double work, double round_trip, double M) {
    const double in_turn = s.rounds * (work + round_trip) + s.spare * std::max(s.forward, s.backward);
    const double once = round_trip + M * work - (s.cap - 1) * std::min(s.forward, s.backward);
    return std::max({in_turn, once, 2 * round_trip + (M - s.cap + 1) * work});
}

// The suffix with one more stage in front.
inline Suffix before(const StageCosts& s, const Beyond& b, double M) {
    const double work = s.forward + s.backward;
    double last = std::max(M * work, work + b.busy);
    last = std::max(last, b.round_trip + std::max(s.forward + M * s.backward,
                                                M * s.forward + s.backward));
    if (s.rounds > 0) last = std::max(last, capped_ms(s, work, b.round_trip, M));
    // The busiest stage's blocks, without those that this stage hands over late or needs early.
    const double path = work + b.lead + M * (b.forward + b.backward);
    last = std::max(last, path + staggered(M - 1, s.forward, b.forward, b.forward + b.behind) +
                              staggered(M, s.backward, b.backward, b.backward + b.behind));
    const double reduced = std::max(last + s.all_reduce, s.forward + b.last_reduce);
    if (path > M * work)
        return {work + b.round_trip, last,       reduced,  b.forward,
                b.backward,          b.behind, work + b.lead};
    return {work + b.round_trip, last, reduced, s.forward, s.backward, b.round_trip, 0.0};
}

}  // namespace pipeplan
