// How many of the first layers fit in front of what the stages placed so far use (suffix_dp.hpp).
//
// A stage that keeps its activations and holds one microbatch needs the least memory. A longer front
// leaves less to the stage behind it. So of each node only the longest front counts, whatever its time:
// each of its stages takes as many layers as fit.
//
// Complexity: O(log^2 L) for each (node, option); where sets are known, O(L log^2 L) for each option.
#pragma once
#include <algorithm>
#include <vector>

#include "control.hpp"
#include "memory.hpp"

namespace pipeplan {

template <class Topology>
class FrontRoom {
  public:
    // `topology` as in suffix_dp.hpp. Where memory does not count, everything fits.
    FrontRoom(const Instance& in, const Topology& topology, Control& control)
        : in_(in), topology_(topology), L_(in.num_layers) {
        if (!in.has_memory()) return;
        if constexpr (Topology::kKnowsFreeSets) tabulate_stages(control);
        tabulate_fronts(control);
    }

    // How many layers fit on devices that the node does not use.
    int most_layers(int node) const { return in_.has_memory() ? most_layers_[node] : L_; }
    // The end of the longest stage from a layer on; only where sets are known.
    int stage_end(int option, int first) const {
        return in_.has_memory() ? stage_end_[at(option, first)] : L_;
    }

  private:
    static constexpr double kSumRounding = 1e-12;  // relative, of sums of bytes

    std::size_t at(int option, int first) const {
        return static_cast<std::size_t>(option) * L_ + first;
    }

    void tabulate_stages(Control& control) {
        stage_end_.resize(at(topology_.num_options(), 0), 0);
        for (int option = 1; option < topology_.num_options(); ++option) {
            control.check();
            for (int first = 0; first < L_; ++first)
                stage_end_[at(option, first)] = longest_end(topology_.set(0, option), first);
        }
    }

    void tabulate_fronts(Control& control) {
        most_layers_.assign(topology_.num_nodes(), 0);
        for (int node = topology_.num_nodes(); node-- > 0;) {
            control.check();
            int& most = most_layers_[node];
            for (int option = 0; option < topology_.num_options() && most < L_; ++option) {
                const int next = topology_.attach(node, option);
                if (next < 0 || !topology_.set(node, option).ring.connected) continue;
                most = std::max(most, front_end(node, option, most_layers_[next]));
            }
        }
    }

    // The end of a stage on the option, directly in front of the node and behind a front.
    int front_end(int node, int option, int front) const {
        if (front == L_) return L_;
        if constexpr (Topology::kKnowsFreeSets) return stage_end_[at(option, front)];
        else return longest_end(topology_.set(node, option), front);
    }

    template <class Set>
    int longest_end(const Set& set, int first) const {
        int end = first, too_far = L_ + 1;
        while (too_far - end > 1) {
            const int middle = (end + too_far) / 2;
            (fits(set, first, middle) ? end : too_far) = middle;
        }
        return end;
    }

    template <class Set>
    bool fits(const Set& set, int first, int end) const {
        StageNeeds needs = needs_of(in_, first, end);
        needs.state_bytes *= 1 - kSumRounding;
        needs.activation_bytes *= 1 - kSumRounding;
        return most_in_flight(in_, set.room, needs, kKeeps) > 0 ||
               (set.rate_by_memory > 0 && most_in_flight(in_, set.room_by_memory, needs, kKeeps) > 0);
    }

    const Instance& in_;
    const Topology& topology_;
    const int L_;
    std::vector<int> stage_end_;    // [option][first layer]
    std::vector<int> most_layers_;  // [node]
};

}  // namespace pipeplan
