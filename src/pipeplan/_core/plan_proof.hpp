// Looks at the plans below a known time one by one: is there really a schedule that fast?
//
// The fixed-plan bound is not always reached. So plans are listed in the order of their bounds
// (plan_listing.hpp). For each one the windows of its blocks (schedule_windows.hpp) either show that no
// schedule beats the best time so far, or a schedule is searched for (schedule_search.cpp). What
// stays open lowers the result. The list ends when its bounds reach the best time, or after a number
// of steps; then the next bound on the list is the result.
#pragma once
#include <algorithm>
#include <vector>

#include "kernels.hpp"
#include "pipeline.hpp"
#include "plan_costs.hpp"
#include "plan_listing.hpp"
#include "schedule_windows.hpp"

namespace pipeplan {

template <class Topology>
class PlanProof {
  public:
    PlanProof(const Instance& in, const Topology& topology, const SuffixDp<Topology>& dp,
              double known_ms, Pool& pool, Control& control)
        : in_(in), topology_(topology), dp_(dp), listing_(in, topology, dp), pool_(pool),
          control_(control), best_{known_ms, {}, {}} {}

    // No plan takes less than the result.
    double run(double max_steps) {
        const double first_ms = listing_.least_ms();
        for (double steps = 0.0; listing_.least_ms() < std::min(target_ms(), open_ms_);) {
            if (steps > max_steps || is_hopeless(first_ms, steps / max_steps))
                return std::min(listing_.least_ms(), open_ms_);
            std::vector<int> states;
            while (static_cast<int>(states.size()) < kAtOnce &&
                   listing_.least_ms() < std::min(target_ms(), open_ms_))
                states.push_back(listing_.take());
            std::vector<Step> taken(states.size());
            const auto look_at = [&](int k, int) {
                control_.check();
                Step& step = taken[k];
                if (listing_.is_whole(states[k])) judge(states[k], step);
                else step.next = listing_.extend(states[k], target_ms(), step.steps);
            };
            pool_.run(static_cast<int>(states.size()), look_at, Tasks::kShort);
            for (Step& step : taken) {
                steps += step.steps;
                open_ms_ = std::min(open_ms_, step.open_ms);
                if (step.is_searched) ++num_vain_;
                if (step.found.iteration_ms < best_.iteration_ms) {
                    best_ = std::move(step.found);
                    num_vain_ = 0;
                }
                for (const auto& state : step.next) listing_.add(state);
            }
        }
        return std::min(target_ms(), open_ms_);
    }

    // The fastest plan, if it is faster than the one known before; else without stages.
    const FoundPlan& best() const { return best_; }

  private:
    using State = typename PlanListing<Topology>::State;

    // What one state leads to.
    struct Step {
        double steps = 1.0;
        std::vector<State> next;
        double open_ms = kInfinity;  // a plan that could take so little
        FoundPlan found{kInfinity, {}, {}};
        bool is_searched = false;
    };

    static constexpr int kAtOnce = 16;  // fixed, so that threads change nothing
    static constexpr int kRounds = 3, kDeadlines = 6, kMostUneven = 6;
    // Where links are shared, bounds of single plans are loose: few schedules are tried for them, and
    // the bounds are rough. With as many rounds as else none of 48 bounds was higher.
    static constexpr int kSharedRounds = 1, kSharedDeadlines = 2;
    static constexpr double kWithin = 1e-5, kSharedWithin = 5e-4;  // of bounds of single plans
    static constexpr double kStepsPerPoint = 0.25;  // of a grid of blocks
    // Where bounds of plans are loose, few searches find a faster plan, and these are among the first.
    static constexpr int kMostVain = 8;
    bool is_loose() const { return in_.shared || in_.limits.any_shares; }

    // Where memory caps what stages hold, or devices have any shares, the bounds of plans are loose, and
    // lists of plans are long.
    // The first hundredth of the steps, or the first tenth, shows whether the list can end: on one
    // instance of eight devices it took 1.3 s of 1.4 and raised the bound by a third of the gap. But
    // where it goes on well, it finds plans that local search misses.
    bool is_hopeless(double first_ms, double part_of_steps) const {
        if (!in_.has_memory() && !in_.limits.any_shares) return false;
        const double raised = (listing_.least_ms() - first_ms) / (target_ms() - first_ms);
        return (part_of_steps > 0.01 && raised < 0.1) || (part_of_steps > 0.1 && raised < 0.4);
    }

    // What takes no less than this is not faster than `ms`: the difference is a few instants.
    double just_below(double ms) const {
        return ms * (1 - 5e-8) -
               4 * kSameInstantMs * (2 * in_.num_microbatches + 4 * in_.num_devices + 8);
    }
    double target_ms() const { return just_below(best_.iteration_ms); }

    // The costs of a listed plan. `whole` says which stages take whole samples, where that differs.
    struct Costs {
        std::vector<double> forward, backward, all_reduce, there, back;
        std::vector<int> caps;  // only where memory counts
        CostsView view(const Instance& in) const {
            return {static_cast<int>(forward.size()), in.num_microbatches, forward.data(),
                    backward.data(), there.data(), back.data(), all_reduce.data(), in.half_duplex,
                    caps.empty() ? nullptr : caps.data()};
        }
    };

    Costs costs(const std::vector<ListedStage>& stages, unsigned whole) const {
        Costs result;
        const auto is_whole = [&](std::size_t n) { return (whole >> n & 1) != 0; };
        const bool any = in_.limits.any_shares;
        const auto shares = [&](std::size_t n) {
            const DeviceSet& set = topology_.set(0, stages[n].option);
            if (any) return set.shares;
            const double least =
                is_whole(n) ? least_whole_share(in_, set.num_devices) : set.shares.even;
            return Shares{set.shares.even, least, 0.0};
        };
        for (std::size_t n = 0; n < stages.size(); ++n) {
            const DeviceSet& set = topology_.set(0, stages[n].option);
            const int first = n ? stages[n - 1].end_layer : 0, end = stages[n].end_layer;
            const double rate = any           ? set.shares.compute_rate
                                : is_whole(n) ? set.whole_rate
                                              : set.even_rate;
            result.forward.push_back(rate * in_.forward_ms(first, end));
            result.backward.push_back(rate * in_.backward_ms(first, end));
            const int mode = stages[n].mode;
            if (mode & kRecomputes) result.backward.back() += result.forward.back();
            if (in_.has_memory())
                result.caps.push_back(most_in_flight(in_, set.room, needs_of(in_, first, end), mode));
            result.all_reduce.push_back(set.ring.fixed_ms +
                                        set.ring.ms_per_byte * in_.parameter_bytes(first, end));
            if (n + 1 == stages.size()) break;
            const LinkPair links = topology_.links(0, stages[n].option, stages[n + 1].option);
            const ChannelCosts channel = dp_.channel_costs(links, shares(n), shares(n + 1), end);
            result.there.push_back(channel.there);
            result.back.push_back(channel.back);
        }
        return result;
    }

    // Every combination of even shares and whole samples.
    void judge(int state, Step& step) const {
        const std::vector<ListedStage> stages = listing_.stages(state);
        unsigned uneven = 0;
        int num_uneven = 0;
        for (std::size_t n = 0; n < stages.size(); ++n)
            if (topology_.set(0, stages[n].option).whole_rate > 0)
                uneven |= 1u << n, ++num_uneven;
        if (in_.limits.whole_samples || in_.limits.any_shares) {
            judge(stages, uneven, step);
            return;
        }
        if (num_uneven > kMostUneven) {
            step.open_ms = listing_.bound_ms(state);
            return;
        }
        for (unsigned whole = uneven;; whole = (whole - 1) & uneven) {
            judge(stages, whole, step);
            if (whole == 0) break;
        }
    }

    void judge(const std::vector<ListedStage>& stages, unsigned whole, Step& step) const {
        const Costs known = costs(stages, whole);
        const CostsView view = known.view(in_);
        double proved_ms = plan_bound(view, view.caps);
        const double M = in_.num_microbatches;
        step.steps += kStepsPerPoint * M * M * static_cast<double>(stages.size());
        // Where links are shared, many plans stay open: their real times are above all bounds. Then
        // only the least of them counts, and no other is bounded further than that.
        const double worth_ms = in_.shared ? open_ms_ : kInfinity;
        const auto is_beaten = [&](double limit_ms) {
            if (proved_ms < limit_ms)
                proved_ms =
                    schedule_bound(view, proved_ms, limit_ms, in_.shared ? kSharedRounds : kRounds,
                                   control_, worth_ms, in_.shared ? kSharedWithin : kWithin);
            return proved_ms >= limit_ms;
        };
        if (is_beaten(target_ms())) return;
        const bool is_planned = whole == 0 || in_.limits.whole_samples || in_.limits.any_shares;
        if (is_planned && is_known(stages) && !(is_loose() && num_vain_ >= kMostVain)) {
            step.is_searched = true;
            search(stages, proved_ms, step);
            if (step.found.iteration_ms < kInfinity && is_beaten(just_below(step.found.iteration_ms)))
                return;
        }
        step.open_ms = std::min(step.open_ms, proved_ms);
    }

    bool is_known(const std::vector<ListedStage>& stages) const {
        return std::all_of(stages.begin(), stages.end(), [&](const ListedStage& stage) {
            return topology_.is_known(stage.option);
        });
    }

    void search(const std::vector<ListedStage>& stages, double proved_ms, Step& step) const {
        std::vector<int> end_layer, options, modes;
        for (const ListedStage& stage : stages) {
            end_layer.push_back(stage.end_layer);
            options.push_back(stage.option);
            modes.push_back(stage.mode);
        }
        search(PlacedPlan(in_, end_layer, topology_.devices(options), modes), proved_ms, step);
        if (!in_.limits.any_shares) return;
        for (int& mode : modes) mode |= kBySpeed;
        search(PlacedPlan(in_, end_layer, topology_.devices(options), modes), proved_ms, step);
    }

    void search(const PlacedPlan& plan, double proved_ms, Step& step) const {
        const PlacedCosts placed(in_, plan);
        if (!placed.is_possible()) return;  // the wrong devices have more samples
        const double known_ms = std::min(best_.iteration_ms, step.found.iteration_ms);
        const int num_deadlines = in_.shared ? kSharedDeadlines : kDeadlines;
        Schedule found = urgent_schedule(placed.view(), proved_ms, known_ms, num_deadlines, control_);
        if (!found.codes.empty()) step.found = {found.iteration_ms, plan, std::move(found.codes)};
    }

    const Instance& in_;
    const Topology& topology_;
    const SuffixDp<Topology>& dp_;
    PlanListing<Topology> listing_;
    Pool& pool_;
    Control& control_;
    FoundPlan best_;
    double open_ms_ = kInfinity;  // the least that a plan on the list could take
    int num_vain_ = 0;            // searches since the last that found a faster plan
};

}  // namespace pipeplan
