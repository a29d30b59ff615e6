// Simulated annealing over complete plans: any cuts, any sets of devices.
//
// Moves (search_moves.hpp): shift a cut by 1 to 3 layers; move, swap, add, drop or replace a
// device; let a device join a stage that it fits, or trade places; swap the sets of two stages;
// split a stage; merge two; reverse the sets of a run of stages; move a device to the next stage
// and the cut with it; divide two stages' devices and layers anew. Every fourth time two moves are
// made at once: some improvements need both. The last three are for up to 64 devices. Devices
// that are alike also move together (search_groups.hpp). The temperature falls from what the caller
// says to 0.03 % of the current time. What is nearly as slow as the slowest part counts a little, too.
//
// Now and then a large move is followed by small ones that mend the plan: a trip (search_trips.hpp).
//
// A move touches few stages. What is known of the others stays: their costs, the bound of the
// stages behind, and how long a microbatch takes in front. Most moves are rejected by these alone.
//
// A simulation takes as long as a hundred moves. So the walk goes by an estimate: the fixed-plan
// bound, times how far above its bound a plan nearby was. Only what may beat the best time is
// simulated, and only as long as simulations take a part of the time. On 64 devices they took up to
// 99 % of it without this limit.
#include <algorithm>
#include <cmath>
#include <vector>

#include "bound.hpp"
#include "kernels.hpp"
#include "pipeline.hpp"
#include "plan_costs.hpp"
#include "random.hpp"
#include "search_balance.hpp"
#include "search_moves.hpp"
#include "search_plan.hpp"
#include "search_times.hpp"
#include "search_trips.hpp"

namespace pipeplan {
namespace {

constexpr double kColdest = 0.0003;
// Other schedules are rarely more than 1 % faster where the first one is far from the best time.
constexpr double kWorthTryingAllRules = 1.01;
// Accepted moves after which the looseness of a bound is measured again.
constexpr int kOldest = 300;
// The part of the budget for simulations, and what may be spent on them in advance.
constexpr double kSimulated = 0.2, kInAdvance = 0.05;
constexpr long kMovesBetweenChecks = 16;
// On 256 devices the budget is too small for them: plans were 4 % slower with than without.
constexpr int kMostDevicesForLargeMoves = 64;
constexpr double kUnitsPerMove = 180.0, kUnitsPerStage = 30.0, kUnitsPerBalance = 150.0;
constexpr double kUnitsPerPair = 1.5;
// By how much the price of too little memory rises, in all and at a time; its unit without a plan.
constexpr double kDearest = 64.0, kDearer = 1.5, kUnknownMs = 1e3;
constexpr double kRounding = 1 + 1e-9;  // sums in another order differ by less

class Search {
  public:
    Search(const Instance& in, std::uint64_t seed, double budget, double target_ms, double known_ms,
           double hottest, double overflow_price, Control& control)
        : in_(in), control_(control), random_(seed), budget_(budget), hottest_(hottest),
          overflow_price_(overflow_price),
          target_ms_(target_ms * (1 + 1e-12)), known_ms_(known_ms),
          makes_large_moves_(in.num_devices <= kMostDevicesForLargeMoves),
          costs_(in), times_(in, control), moves_(in, random_, makes_large_moves_), cuts_(in) {}

    SearchResult run(const PlacedPlan& start) {
        best_ = {kInfinity, 0, start};
        try {
            anneal(start);
        } catch (const DeadlinePassed&) {  // inside a simulation
        }
        if (times_.has_estimates()) simulate_best();
        return best_;
    }

  private:
    void anneal(const PlacedPlan& start) {
        current_ = from_placed(start);
        next_ = current_;
        set_price(overflow_price_);
        const double bound = evaluate_anew();
        if (bound == kInfinity) return;
        judged_ = judge(next_, bound, {kInfinity, 1.0, 0});
        accept();
        champion_ = current_;
        crowding_ = crowding_of(current_, in_.num_microbatches, bound);
        if (fits_memory(current_)) champions_ = judged_;
        double heat = hottest_;
        for (long step = 0; spent_ < budget_ && best_.iteration_ms > target_ms_; ++step) {
            if (step % kMovesBetweenChecks == 0) {
                if (control_.check_for_deadline()) break;
                if (champions_.age > 0 && champions_.ms < beat_ms() && may_simulate())
                    champions_ = simulated(champion_, champions_.ms / champions_.looseness);
                heat = hottest_ * std::pow(kColdest / hottest_, spent_ / budget_);
                if (overflow_price_ > 0 && !trip_.is_under_way()) raise_price();
            }
            const bool leaves =
                makes_trips() && !trip_.is_under_way() && random_.below(Trip::kOneIn) == 0;
            if (leaves) trip_.start(current_, judged_, accepted_ms(heat));
            try_move(leaves ? judged_.ms * (1 + crowding_) * Trip::kSlower : accepted_ms(heat), leaves);
            if (trip_.is_under_way() && !leaves && trip_.has_failed(judged_.ms * (1 + crowding_)))
                go_back();
        }
        if (champions_.age > 0 && !control_.is_late())
            try_all_rules(champion_, simulate(champion_, 0));
    }

    // How slow a plan may be to take the place of the current one.
    double accepted_ms(double heat) {
        return judged_.ms * (1 + crowding_) * (1.0 - heat * std::log(random_.unit()));
    }

    // Makes a move, and keeps the plan if its time is below `accept_ms`.
    void try_move(double accept_ms, bool leaves) {
        spent_ += kUnitsPerMove;
        changes_.reset(next_);
        bool is_possible = false;
        if (leaves) is_possible = moves_.make_large(next_, changes_);
        else if (trip_.is_under_way()) is_possible = moves_.make_small(next_, changes_);
        else is_possible = moves_.make(next_, changes_);
        // No harm where the second one is impossible.
        if (is_possible && !trip_.is_under_way() && makes_large_moves_ && random_.below(4) == 0)
            moves_.make(next_, changes_);
        spent_ += kUnitsPerPair * changes_.num_pairs;
        if (leaves && is_possible) is_possible = balance(accept_ms);
        if (!is_possible || !is_taken(accept_ms)) {
            restore(next_, current_);
            if (leaves) trip_.cancel();
        }
    }
    bool is_taken(double accept_ms) {
        const double most_ms = accept_ms / judged_.looseness, bound = evaluate(most_ms);
        if (bound > most_ms) return false;
        const double crowding = crowding_of(next_, in_.num_microbatches, bound);
        const double estimate_ms = bound * judged_.looseness;
        if (estimate_ms * (1 + crowding) > accept_ms && estimate_ms >= beat_ms()) return false;
        const PlanTime found = judge(next_, bound, judged_);
        const bool is_best = found.ms < champions_.ms && fits_memory(next_);
        if (found.ms * (1 + crowding) > accept_ms && !is_best) return false;
        accept();
        crowding_ = crowding;
        judged_ = found;
        if (is_best) champion_ = current_, champions_ = judged_;
        return true;
    }

    // ------------------------------------------------------------ plans that do not fit

    // They are taken at a price, because plans that fit may have no others beside them. It rises, so
    // that the search ends among plans that fit.
    void set_price(double price) {
        price_ = price;
        costs_.set_price(price * (known_ms_ < kInfinity ? known_ms_ : kUnknownMs));
    }
    void raise_price() {
        const double price = overflow_price_ * std::pow(kDearest, spent_ / budget_);
        if (price < price_ * kDearer) return;
        set_price(price);
        if (fits_memory(current_)) return;
        for (SearchStage& stage : current_) stage.costs_known = false;
        next_ = current_;
        judged_.ms = evaluate_anew() * judged_.looseness;
        accept();
        crowding_ = crowding_of(current_, in_.num_microbatches, judged_.ms / judged_.looseness);
    }

    // ------------------------------------------------------------ trips

    // Not where devices are alike: groups of them move together, and single ones do not help there.
    bool makes_trips() const { return makes_large_moves_ && !moves_.moves_groups(); }
    // Puts the cuts of the next plan where they suit its devices.
    bool balance(double most_ms) {
        if (evaluate(kInfinity) == kInfinity) return false;
        const std::vector<int>& cuts = cuts_.find(next_, most_ms / judged_.looseness);
        spent_ += kUnitsPerBalance * static_cast<double>(next_.size());
        if (cuts.empty()) return next_.size() == 1;
        moves_.cut_all_at(next_, changes_, cuts);
        return true;
    }
    // From a trip that led nowhere.
    void go_back() {
        next_ = trip_.plan();
        const double bound = evaluate_anew();
        accept();
        crowding_ = crowding_of(current_, in_.num_microbatches, bound);
        judged_ = trip_.judged();
    }

    // The bound of the next plan, which need not be like the current one.
    double evaluate_anew() {
        changes_.reset(next_);
        changes_.is_resized = true;
        changes_.num_front = changes_.num_back = 0;
        way_.assign(1, {0.0, 0.0});
        return evaluate(kInfinity);
    }

    // What a microbatch takes before a stage: its way there, and there and back.
    struct Way {
        double there, both;
    };

    // Makes one of two plans that differ by the last move equal to the other.
    void restore(SearchPlan& plan, const SearchPlan& from) const {
        if (changes_.is_resized) plan = from;
        else for (int n : changes_.stages) plan[n] = from[n];
    }

    void accept() {
        restore(current_, next_);
        const int S = static_cast<int>(current_.size());
        suffix_.resize(S), way_.resize(S + 1);
        for (int k = changes_.num_back; k < S; ++k) suffix_[k] = new_suffix_[k];
        for (int n = changes_.num_front; n < S; ++n) {
            const StageCosts& costs = current_[n].costs;
            const ChannelCosts channel = n + 1 < S ? current_[n].channel : ChannelCosts{0.0, 0.0};
            way_[n + 1] = {way_[n].there + costs.forward + channel.there,
                           way_[n].both + costs.forward + costs.backward + channel.there + channel.back};
        }
        find_critical();
    }

    // The stages that decide the bound: the one whose all-reduce ends last, and the one behind it
    // that keeps its last backward waiting.
    void find_critical() {
        const int S = static_cast<int>(current_.size());
        const auto suffix = [&](int k) { return suffix_[S - 1 - k]; };
        int n = 0;
        const auto own_ms = [&](int k) {
            return suffix(k).last_backward + current_[k].costs.all_reduce;
        };
        while (n + 1 < S && own_ms(n) < suffix(n).last_reduce) ++n;
        const int reduced_last = n;
        for (; n + 1 < S; ++n) {
            const double waits_ms = way_[n + 1].both - way_[n].both + suffix(n + 1).last_backward;
            if (waits_ms * kRounding < suffix(n).last_backward) break;
        }
        allowed_ms_.resize(S);
        for (int k = 0; k < S; ++k)
            allowed_ms_[k] = suffix(0).last_reduce - way_[k].there - suffix(k).last_backward;
        moves_.start_from(current_, reduced_last, n, allowed_ms_);
    }

    // The number of stages, and the devices that have to serve the first and the last one.
    bool keeps_constraints(const SearchPlan& plan) const {
        const PlanLimits& limits = in_.limits;
        const int S = static_cast<int>(plan.size());
        const auto serves = [&](const SearchStage& stage, int device) {
            return device < 0 || std::find(stage.devices.begin(), stage.devices.end(), device) !=
                                     stage.devices.end();
        };
        return S >= limits.min_stages && S <= limits.max_stages &&
               serves(plan.front(), limits.first_device) && serves(plan.back(), limits.last_device);
    }

    // The fixed-plan bound of the next plan; infinite where a path is missing, where a limit is
    // broken, or where the bound is above `most_ms`. What the last move did not touch is known already.
    double evaluate(double most_ms) {
        const double M = in_.num_microbatches;
        const int S = static_cast<int>(next_.size());
        const int front = changes_.num_front, back = changes_.num_back;
        if (!keeps_constraints(next_)) return kInfinity;
        most_ms *= kRounding;
        double num_pairs = 0.0;
        if (!stages_may_do(front, S - back, most_ms, num_pairs)) {
            spent_ += kUnitsPerPair * num_pairs;
            return kInfinity;
        }
        if (static_cast<int>(new_suffix_.size()) < S) new_suffix_.resize(S);
        const Suffix* behind = back ? &suffix_[back - 1] : nullptr;
        for (int n = S - 1 - back; n >= 0; --n) {
            SearchStage& stage = next_[n];
            if (behind && !stage.channel_known &&
                !costs_.fill_channel(stage, next_[n + 1], num_pairs))
                break;
            Suffix& suffix = new_suffix_[S - 1 - n];
            if (!behind) suffix = last_stage(stage.costs, M);
            else suffix = before(stage.costs,
                                 behind_channel(*behind, stage.channel, M, in_.half_duplex), M);
            behind = &suffix;
            const Way& ahead = n < front ? way_[n] : new_way_[n - front];
            if (std::max(suffix.last_reduce + ahead.there, suffix.last_backward + ahead.both) > most_ms) {
                spent_ += kUnitsPerStage * (S - back - n) + kUnitsPerPair * num_pairs;
                return kInfinity;
            }
        }
        spent_ += kUnitsPerStage * (S - back) + kUnitsPerPair * num_pairs;
        return behind == &new_suffix_[S - 1] ? behind->last_reduce : kInfinity;
    }

    // Whether each of these stages alone lets the plan stay below `most_ms`: first without a look at
    // links, then with its own. Most moves end here, before channels are looked at.
    bool stages_may_do(int front, int end, double most_ms, double& num_pairs) {
        const double M = in_.num_microbatches;
        const double there = way_[front].there;
        for (int n = front; n < end; ++n)
            if (!next_[n].costs_known && there + M * costs_.work_ms(next_[n]) > most_ms) return false;
        new_way_.clear();
        Way ahead = way_[front];
        for (int n = front; n < end; ++n) {
            SearchStage& stage = next_[n];
            if (!stage.costs_known && !costs_.fill_stage(stage, num_pairs)) return false;
            const StageCosts& costs = stage.costs;
            const double work = costs.forward + costs.backward;
            if (M * work + std::max(ahead.both, ahead.there + costs.all_reduce) > most_ms) return false;
            new_way_.push_back(ahead);
            ahead.there += costs.forward, ahead.both += work;
            if (!stage.channel_known) continue;
            ahead.there += stage.channel.there, ahead.both += stage.channel.there + stage.channel.back;
        }
        return true;
    }

    // With many microbatches the best time is an estimate. The true time takes its place, or none
    // if the deadline passes first.
    void simulate_best() {
        if (best_.iteration_ms == kInfinity) return;
        const PlacedCosts costs(in_, best_.plan);
        try {
            const CostsView view = costs.view();
            best_.iteration_ms = iteration_ms(run_rule(view, best_.rule, control_), view);
        } catch (const DeadlinePassed&) {
            best_.iteration_ms = kInfinity;
        }
    }

    // The time of a plan. What cannot beat the best time is only estimated: by its bound, and by
    // how much longer than its bound the plan that it came from takes.
    PlanTime judge(const SearchPlan& plan, double bound, const PlanTime& last) {
        const double estimate_ms = bound * last.looseness;
        const bool is_close = estimate_ms < beat_ms() || last.age >= kOldest;
        if (bound >= beat_ms() || !is_close || !may_simulate() || !fits_memory(plan))
            return {estimate_ms, last.looseness, last.age + 1};
        return simulated(plan, bound);
    }
    PlanTime simulated(const SearchPlan& plan, double bound) {
        const double ms = simulate(plan, 0);
        if (ms < beat_ms() * kWorthTryingAllRules) try_all_rules(plan, ms);
        return {ms, bound > 0 ? ms / bound : 1.0, 0};
    }
    double beat_ms() const { return std::min(known_ms_, best_.iteration_ms); }
    bool may_simulate() const {
        return simulating_ <= kSimulated * (spent_ + kInAdvance * budget_);
    }

    double simulate(const SearchPlan& plan, int rule) {
        double units = 0.0;
        const double ms = times_.ms(plan, rule, units);
        spent_ += units, simulating_ += units;
        return ms;
    }

    void try_all_rules(const SearchPlan& plan, double first_rule_ms) {
        for (int rule = 0; rule < kNumRules; ++rule) {
            const double ms = rule == 0 ? first_rule_ms : simulate(plan, rule);
            if (ms < best_.iteration_ms) best_ = {ms, rule, to_placed(in_, plan)};
        }
    }

    const Instance& in_;
    Control& control_;
    Random random_;
    const double budget_, hottest_, overflow_price_, target_ms_, known_ms_;
    const bool makes_large_moves_;
    SearchCosts costs_;
    SimulatedTimes times_;
    Moves moves_;
    SearchPlan current_, next_, champion_;
    PlanTime judged_{}, champions_{kInfinity, 1.0, 0};  // of the current plan, and of the best one
    Trip trip_;
    BalancedCuts cuts_;
    Changes changes_;
    // [stages], the last one first; of the current and of the next plan
    std::vector<Suffix> suffix_, new_suffix_;
    // [stages + 1], of the current plan; of the next one [touched stages], without unknown channels
    std::vector<Way> way_, new_way_;
    std::vector<double> allowed_ms_;  // [stages]
    double spent_ = 0.0, simulating_ = 0.0, crowding_ = 0.0, price_ = 0.0;
    SearchResult best_;
};

}  // namespace

std::vector<SearchResult> local_search(const Instance& instance,
                                       const std::vector<PlacedPlan>& starts, std::uint64_t seed,
                                       double budget, double target_ms, double known_ms,
                                       double hottest, Pool& pool, Control& control,
                                       double overflow_price) {
    std::vector<SearchResult> results(starts.size());
    pool.run(static_cast<int>(starts.size()), [&](int k, int) {
        Search search(instance, seed * 1000003ULL + k, budget, target_ms, known_ms, hottest,
                      overflow_price, control);
        results[k] = search.run(starts[k]);
    });
    return results;
}

}  // namespace pipeplan
