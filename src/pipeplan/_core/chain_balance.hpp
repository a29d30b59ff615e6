// A quick bound on plans on groups of devices, and cuts that lower it.
#pragma once
#include <algorithm>
#include <vector>

#include "chain_plan.hpp"
#include "random.hpp"

namespace pipeplan {

// Lower bounds in O(stages): each group's first head, its work, and the least that is left after it. And
// what it holds, summed over time, has to fit into its room (docs/theory.md, section 11).
class QuickBound {
  public:
    double operator()(const Chain& chain) {
        const int P = chain.num_stages, G = chain.num_groups;
        const double M = chain.num_microbatches;
        groups_.assign(G, {});
        double way = 0.0, back = 0.0;
        for (int p = 0; p < P; ++p) {
            OfGroup& group = groups_[chain.group[p]];
            const double left = chain.left_ms(p);
            if (group.head == kInfinity) group.head = way, group.tail = std::max(back, chain.weight_ms[p] + left);
            group.weight_tail = std::min(group.weight_tail, chain.is_split[p] ? left : group.tail);
            group.gradient_work += chain.forward_ms[p] + chain.backward_ms[p];
            group.weight_work += chain.weight_ms[p];
            way += chain.forward_ms[p] + chain.there_ms[p];
            back += chain.backward_ms[p] + chain.back_ms[p];
        }
        double least = way + back;
        add_holding(chain, least);
        critical_ = -1;
        for (int g = 0; g < G; ++g) {
            const OfGroup& group = groups_[g];
            double ms = std::max(M * (group.gradient_work + group.weight_work) + group.weight_tail,
                                 M * group.gradient_work + group.tail);
            const double room = chain.room_bytes[g] * (1 + kRoomRounding);
            if (room > 0 && room < kInfinity) ms = std::max(ms, M * group.held / room + group.weight_tail);
            if (group.head + ms > least) least = group.head + ms, critical_ = g;
        }
        return least;
    }
    // The group that the last bound comes from; -1 if it is the way of one microbatch.
    int critical() const { return critical_; }

  private:
    struct OfGroup {
        double head = kInfinity, tail = kInfinity, weight_tail = kInfinity;
        double gradient_work = 0.0, weight_work = 0.0;
        double held = 0.0;  // by one microbatch, bytes times milliseconds
    };

    // A stage holds a microbatch for as long as the rest of its way takes, at least.
    void add_holding(const Chain& chain, double whole_way) {
        double outside = 0.0;  // of the stage: what passes before its forward and after its backward
        for (int p = 0; p < chain.num_stages; ++p) {
            double& held = groups_[chain.group[p]].held;
            held += chain.held_bytes[p] * (whole_way - outside);
            if (chain.is_split[p]) held += chain.kept_bytes[p] * chain.weight_ms[p];
            outside += chain.forward_ms[p] + chain.there_ms[p] + chain.backward_ms[p] + chain.back_ms[p];
        }
    }

    std::vector<OfGroup> groups_;
    int critical_ = -1;
};

// Shifts layers away from the group that lacks room, or that the bound comes from, at random, as long as
// it helps. A plan whose groups have just changed is rarely any good before.
class ChainBalance {
  public:
    ChainBalance(ChainCosts& costs, QuickBound& bound, Random& random)
        : costs_(costs), bound_(bound), random_(random) {}

    // The plan is the one whose costs were taken last. Counts what it tries, and returns the bound.
    double improve(ChainPlan& plan, int most_tries, int& num_tries) {
        State state = look();
        int failed = 0;
        for (num_tries = 0; num_tries < most_tries && failed < kPatience && state.group >= 0; ++num_tries) {
            ++failed;
            const Shift shift = draw(plan, state.group);
            if (!shift.by) continue;
            apply(plan, shift, shift.by);
            const State next = look();
            if (next.missing < state.missing || (next.missing == state.missing && next.ms < state.ms)) {
                state = next, failed = 0;
            } else {
                apply(plan, shift, -shift.by);
            }
        }
        return state.ms;
    }

  private:
    static constexpr int kPatience = 6;  // tries in a row without success
    static constexpr int kFarthest = 3;  // stages that a layer passes

    struct State {
        double missing, ms;
        int group;  // which should have less; -1: none
    };
    // All cuts between two stages move by so many layers; none: nothing can be shifted.
    struct Shift {
        int first = 0, last = 0, by = 0;
    };

    State look() {
        State state{costs_.missing_bytes(), bound_(costs_.chain()), bound_.critical()};
        if (state.missing > 0) state.group = costs_.fullest();
        return state;
    }

    Shift draw(const ChainPlan& plan, int g) {
        const int P = plan.num_stages();
        int count = 0, p = 0;
        for (int q = 0; q < P; ++q)
            if (plan.group[q] == g && random_.below(++count) == 0) p = q;
        const int by = random_.below(4) ? 1 : 2, way = random_.below(2) ? 1 : -1;
        const int q = p + way * (1 + (random_.below(2) ? 0 : random_.below(kFarthest)));
        if (q < 0 || q >= P || plan.group[q] == g || plan.end_layer[p] - plan.first_layer(p) <= by) return {};
        return {std::min(p, q), std::max(p, q), -way * by};
    }

    void apply(ChainPlan& plan, const Shift& shift, int by) {
        for (int p = shift.first; p < shift.last; ++p) plan.end_layer[p] += by;
        costs_.shift_cuts(plan, shift.first, shift.last);
    }

    ChainCosts& costs_;
    QuickBound& bound_;
    Random& random_;
};

}  // namespace pipeplan
