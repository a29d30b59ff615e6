// All plans of a finished recursion (suffix_dp.hpp), in the order of their fixed-plan bounds.
//
// A state is the first stages of a plan, and the device set of the next one. The recursion knows the
// front of all suffixes from there on. So the least bound of the plans that begin with these
// stages is known exactly (or, where fronts were merged, from below). The state with the least bound is
// taken first, and its next stage is chosen in all ways. Hence no plan that is still to come has a
// lower bound than the states that wait.
#pragma once
#include <algorithm>
#include <cstdint>
#include <queue>
#include <utility>
#include <vector>

#include "suffix_dp.hpp"

namespace pipeplan {

// A stage of a listed plan, and the channel behind it (none behind the last one).
struct ListedStage {
    int option, end_layer;
    int mode;  // bits of StageMode
};

template <class Topology>
class PlanListing {
  public:
    PlanListing(const Instance& in, const Topology& topology, const SuffixDp<Topology>& dp)
        : in_(in), topology_(topology), dp_(dp), M_(in.num_microbatches) {
        for (int node = 0; node < topology.num_nodes(); ++node) {
            for (int option = 0; option < topology.num_options(); ++option) {
                double least_ms = kInfinity;
                for (int k = 0; k < dp.num_points(node, option, 0); ++k)
                    least_ms = std::min(least_ms, dp.point(node, option, 0, k).last_reduce);
                if (least_ms < kInfinity) add({least_ms, -1, node, option, 0, kKeeps, {}, {}});
            }
        }
        alive_.resize(topology.num_nodes());
        for (int node = 0; node < topology.num_nodes(); ++node)
            for (int option = 0; option < topology.num_options(); ++option)
                if (dp.is_alive(node, option)) alive_[node].push_back(option);
    }

    // The first stages of a plan, the last of which has no end yet; or a whole plan.
    struct State {
        double bound_ms;
        int before;                // the state that this one extends
        int node, option, layer;   // as in the recursion; a whole plan has option -1
        int mode;                  // of the stage that ends at `layer`
        StageCosts stage_before;   // of the same
        ChannelCosts channel;      // behind it
    };

    // No plan that is not listed yet has a lower bound.
    double least_ms() const { return waiting_.empty() ? kInfinity : waiting_.top().bound_ms; }

    // Takes the state with the least bound; of equal ones the newest, which is the most complete.
    int take() {
        const int state = waiting_.top().state;
        waiting_.pop();
        return state;
    }
    double bound_ms(int state) const { return states_[state].bound_ms; }
    bool is_whole(int state) const { return states_[state].option < 0; }
    void add(const State& state) {
        waiting_.push({state.bound_ms, static_cast<int>(states_.size())});
        states_.push_back(state);
    }

    // The stages of a whole plan.
    std::vector<ListedStage> stages(int state) const {
        std::vector<ListedStage> result;
        for (int end = states_[state].layer; states_[state].before >= 0;) {
            const int mode = states_[state].mode;
            state = states_[state].before;
            result.push_back({states_[state].option, end, mode});
            end = states_[state].layer;
        }
        std::reverse(result.begin(), result.end());
        return result;
    }

    // All ways to end the open stage and to choose the next set, with bounds below the limit. Adds the
    // suffixes that it looks at to `steps`. Changes nothing, so threads may call it.
    std::vector<State> extend(int index, double limit_ms, double& steps) const {
        const State& state = states_[index];
        const Ahead ahead(states_, index);
        const std::uint64_t used = devices_used(index);
        const DeviceSet& set = topology_.set(state.node, state.option);
        const int rest = topology_.detach(state.node, state.option);
        std::vector<State> result;
        double forward_ms = 0.0, backward_ms = 0.0, parameter_bytes = 0.0;
        StageNeeds needs{0.0, 0.0, in_.bytes_into(state.layer)};
        for (int cut = state.layer + 1; cut <= in_.num_layers; ++cut) {
            forward_ms += in_.forward_ms.value(cut - 1);
            backward_ms += in_.backward_ms.value(cut - 1);
            parameter_bytes += in_.parameter_bytes.value(cut - 1);
            const double rate = set.shares.compute_rate;
            const StageCosts stage{rate * forward_ms, rate * backward_ms,
                                   set.ring.fixed_ms + set.ring.ms_per_byte * parameter_bytes};
            if (M_ * (stage.forward + stage.backward) + stage.all_reduce + ahead.forward > limit_ms)
                break;  // it only grows with the cut
            const auto end = [&](const StageCosts& costs, int mode) {
                end_stage({index, rest, cut, mode, costs, limit_ms, used}, ahead, set, steps, result);
            };
            if (!in_.has_memory()) {
                end(stage, kKeeps);
                continue;
            }
            needs.state_bytes = in_.limits.state_bytes_per_parameter_byte * parameter_bytes;
            needs.activation_bytes += in_.activation_bytes.value(cut - 1);
            if (!for_modes(in_, set.room, needs, stage, cut == in_.num_layers, end)) break;
        }
        return result;
    }

  private:
    struct Waiting {
        double bound_ms;
        int state;
        bool operator<(const Waiting& other) const {  // the largest one is taken first
            return bound_ms != other.bound_ms ? bound_ms > other.bound_ms : state < other.state;
        }
    };

    // The stages in front of the open one, nearest first.
    struct Ahead {
        Ahead(const std::vector<State>& states, int index) {
            for (; states[index].before >= 0; index = states[index].before) {
                const State& state = states[index];
                stages.push_back({state.stage_before, state.channel});
                forward += state.stage_before.forward + state.channel.there;
                work += state.stage_before.forward + state.stage_before.backward +
                        state.channel.there + state.channel.back;
            }
        }
        std::vector<std::pair<StageCosts, ChannelCosts>> stages;
        double forward = 0.0, work = 0.0;  // sums with the channels
    };

    // A way to end the open stage of a state.
    struct Ending {
        int index, rest, cut, mode;
        StageCosts stage;
        double limit_ms;
        std::uint64_t used;  // devices
    };

    // All ways to choose the next set behind an ended stage.
    void end_stage(const Ending& one, const Ahead& ahead, const DeviceSet& set, double& steps,
                   std::vector<State>& result) const {
        const int rest = one.rest, cut = one.cut;
        if (cut == in_.num_layers) {
            const double bound_ms =
                topology_.may_end(rest) ? with_stages(ahead, last_stage(one.stage, M_)) : kInfinity;
            if (bound_ms < one.limit_ms)
                result.push_back({bound_ms, one.index, 0, -1, cut, one.mode, one.stage, {}});
            return;
        }
        for (int next : alive_[rest]) {
            const int num = dp_.num_points(rest, next, cut);
            if (num == 0 || (one.used & topology_.bits(next))) continue;
            const LinkPair links = topology_.links(rest, states_[one.index].option, next);
            if (!links.forward->connected()) continue;
            const ChannelCosts channel =
                dp_.channel_costs(links, set.shares, topology_.set(rest, next).shares, cut);
            if (M_ * channel_busy_ms(channel, in_.half_duplex) > one.limit_ms) continue;
            double least_ms = kInfinity;
            for (int k = 0; k < num; ++k) {
                const Suffix value = before(
                    one.stage, behind_channel(dp_.point(rest, next, cut, k), channel, M_, in_.half_duplex),
                    M_);
                if (value.last_backward + ahead.work < one.limit_ms &&
                    value.last_reduce + ahead.forward < one.limit_ms)
                    least_ms = std::min(least_ms, with_stages(ahead, value));
            }
            steps += num;
            if (least_ms < one.limit_ms)
                result.push_back({least_ms, one.index, rest, next, cut, one.mode, one.stage, channel});
        }
    }

    // Those of the first stages and of the open one, as far as the topology knows them.
    std::uint64_t devices_used(int index) const {
        std::uint64_t used = 0;
        for (; index >= 0; index = states_[index].before) used |= topology_.bits(states_[index].option);
        return used;
    }

    // The bound of a plan whose open stage begins this suffix.
    double with_stages(const Ahead& ahead, Suffix suffix) const {
        for (const auto& [stage, channel] : ahead.stages)
            suffix = before(stage, behind_channel(suffix, channel, M_, in_.half_duplex), M_);
        return suffix.last_reduce;
    }

    const Instance& in_;
    const Topology& topology_;
    const SuffixDp<Topology>& dp_;
    const double M_;
    std::vector<State> states_;
    std::priority_queue<Waiting> waiting_;
    std::vector<std::vector<int>> alive_;  // [node], options with any suffix
};

}  // namespace pipeplan
