// Simulated annealing over complete plans: any cuts, any sets of devices.
//
// Moves: shift a cut by 1 to 3 layers; move, swap, add, drop or replace a device; swap the sets of
// two stages; split a stage; merge two; reverse the sets of a run of stages; move a device to the
// next stage and the cut with it; divide two stages' devices and layers anew. Every fourth time two
// moves are made at once: some improvements need both. The last three are for up to 64 devices. The
// temperature falls from 2 % to 0.05 % of the current time.
//
// A simulation takes as long as a hundred moves. So the walk goes by an estimate: the fixed-plan
// bound, times how far above its bound a plan nearby was. Only what may beat the best time is
// simulated.
#include <algorithm>
#include <cmath>
#include <vector>

#include "bound.hpp"
#include "kernels.hpp"
#include "pipeline.hpp"
#include "plan_costs.hpp"
#include "random.hpp"
#include "search_plan.hpp"

namespace pipeplan {
namespace {

constexpr double kHottest = 0.02, kColdest = 0.0005;
// Other schedules are rarely more than 1 % faster where the first one is far from the best time.
constexpr double kWorthTryingAllRules = 1.01;
// Accepted moves after which the looseness of a bound is measured again.
constexpr int kOldest = 8;
constexpr long kMovesBetweenChecks = 16;
// On 256 devices the budget is too small for them: plans were 4 % slower with than without.
constexpr int kMostDevicesForLargeMoves = 64;
constexpr double kUnitsPerBlock = 60.0, kUnitsPerPair = 1.0;
constexpr double kUnitsPerMove = 150.0, kUnitsPerStage = 25.0;

class Search {
  public:
    Search(const Instance& in, std::uint64_t seed, double budget, double target_ms, double known_ms,
           Control& control)
        : in_(in), control_(control), random_(seed), budget_(budget),
          target_ms_(target_ms * (1 + 1e-12)), known_ms_(known_ms),
          makes_large_moves_(in.num_devices <= kMostDevicesForLargeMoves) {}

    SearchResult run(const PlacedPlan& start) {
        best_ = {kInfinity, 0, start};
        try {
            anneal(start);
        } catch (const DeadlinePassed&) {  // inside a simulation
        }
        if (has_estimates_) simulate_best();
        return best_;
    }

  private:
    void anneal(const PlacedPlan& start) {
        SearchPlan current = from_placed(start), next;
        if (!complete(current)) return;
        Judgement judged = judge(current, bound_ms(current), {kInfinity, 1.0, 0});
        SearchPlan champion = current;
        Judgement champions = judged;
        for (long step = 0; spent_ < budget_ && best_.iteration_ms > target_ms_; ++step) {
            if (step % kMovesBetweenChecks == 0) {
                control_.check_without_deadline();
                if (control_.is_late()) break;
            }
            const double heat = kHottest * std::pow(kColdest / kHottest, spent_ / budget_);
            next = current;  // reuses its memory
            spent_ += kUnitsPerMove + kUnitsPerStage * static_cast<double>(next.size());
            if (!move(next)) continue;
            // No harm where the second one is impossible.
            if (makes_large_moves_ && random_.below(4) == 0) move(next);
            const double accept_ms = judged.ms * (1.0 - heat * std::log(random_.unit()));
            const double most_ms = accept_ms / judged.looseness;
            if (!complete(next, most_ms)) continue;
            const double bound = bound_ms(next);
            if (bound > most_ms) continue;
            const Judgement found = judge(next, bound, judged);
            if (found.ms > accept_ms) continue;
            std::swap(current, next);
            judged = found;
            if (judged.ms < champions.ms) champion = current, champions = judged;
        }
        if (champions.age > 0 && !control_.is_late()) try_all_rules(champion, simulate(champion, 0));
    }

    // With many microbatches the best time is an estimate. The true time takes its place, or none if
    // the deadline passes first.
    void simulate_best() {
        if (best_.iteration_ms == kInfinity) return;
        SearchPlan found = from_placed(best_.plan);
        complete(found);
        try {
            best_.iteration_ms = simulate(found, best_.rule, true);
        } catch (const DeadlinePassed&) {
            best_.iteration_ms = kInfinity;
        }
    }

    struct Judgement {
        double ms;         // simulated, or the bound times the looseness
        double looseness;  // time by bound, where it was simulated last
        int age;           // accepted moves since then
    };

    // The time of a plan. What cannot beat the best time is only estimated: by its bound, and by
    // how much longer than its bound the plan that it came from takes.
    Judgement judge(const SearchPlan& plan, double bound, const Judgement& last) {
        const double beat_ms = std::min(known_ms_, best_.iteration_ms);
        const double estimate_ms = bound * last.looseness;
        const bool is_close = estimate_ms < beat_ms || last.age >= kOldest;
        if (bound >= beat_ms || !is_close) return {estimate_ms, last.looseness, last.age + 1};
        const double ms = simulate(plan, 0);
        if (ms < beat_ms * kWorthTryingAllRules) try_all_rules(plan, ms);
        return {ms, bound > 0 ? ms / bound : 1.0, 0};
    }

    // Fills in the costs that a move left open; false where a path is missing, or where one stage
    // or channel alone takes more than `most_ms`.
    bool complete(SearchPlan& plan, double most_ms = kInfinity) {
        const double M = in_.num_microbatches;
        for (std::size_t n = 0; n < plan.size(); ++n) {
            SearchStage& stage = plan[n];
            const double k = static_cast<double>(stage.devices.size());
            if (!stage.costs_known) {
                spent_ += kUnitsPerPair * k * k;
                stage.costs_known =
                    cost_stage(in_, stage.first_layer, stage.end_layer,
                               links_of_set(in_, stage.devices), stage.devices, 0, stage.costs);
                if (!stage.costs_known) return false;
                const StageCosts& costs = stage.costs;
                if (M * (costs.forward + costs.backward) + costs.all_reduce > most_ms) return false;
            }
            if (n + 1 < plan.size() && !stage.channel_known) {
                const std::vector<int>& next = plan[n + 1].devices;
                spent_ += kUnitsPerPair * k * static_cast<double>(next.size());
                stage.channel_known =
                    cost_channel(in_, stage.end_layer, stage.devices, next, stage.channel);
                if (!stage.channel_known) return false;
                if (M * channel_busy_ms(stage.channel, in_.half_duplex) > most_ms) return false;
            }
        }
        return true;
    }

    double bound_ms(const SearchPlan& plan) const {
        const double M = in_.num_microbatches;
        Suffix suffix = last_stage(plan.back().costs, M);
        for (std::size_t n = plan.size() - 1; n-- > 0;)
            suffix = before(plan[n].costs,
                            behind_channel(suffix, plan[n].channel, M, in_.half_duplex), M);
        return suffix.last_reduce;
    }

    // With many microbatches an estimate, unless `is_final`.
    double simulate(const SearchPlan& plan, int rule, bool is_final = false) {
        const int S = static_cast<int>(plan.size());
        forward_S_.resize(S), backward_S_.resize(S), reduce_S_.resize(S);
        there_C_.resize(S), back_C_.resize(S);
        for (int n = 0; n < S; ++n) {
            forward_S_[n] = plan[n].costs.forward;
            backward_S_[n] = plan[n].costs.backward;
            reduce_S_[n] = plan[n].costs.all_reduce;
            there_C_[n] = plan[n].channel.there;
            back_C_[n] = plan[n].channel.back;
        }
        const CostsView costs{S,
                              in_.num_microbatches,
                              forward_S_.data(),
                              backward_S_.data(),
                              there_C_.data(),
                              back_C_.data(),
                              reduce_S_.data(),
                              in_.half_duplex};
        const RuleEstimate estimate = estimate_of(costs);
        has_estimates_ = has_estimates_ || !estimate.is_exact;
        spent_ += kUnitsPerBlock * estimate.num_microbatches * (4 * S - 2);
        return is_final ? iteration_ms(run_rule(costs, rule, control_), costs)
                        : estimate_rule_ms(costs, rule, control_);
    }

    void try_all_rules(const SearchPlan& plan, double first_rule_ms) {
        for (int rule = 0; rule < kNumRules; ++rule) {
            const double ms = rule == 0 ? first_rule_ms : simulate(plan, rule);
            if (ms < best_.iteration_ms) best_ = {ms, rule, to_placed(in_, plan)};
        }
    }

    // ------------------------------------------------------------------ moves

    static void forget_stage(SearchPlan& plan, int n) {
        plan[n].costs_known = plan[n].channel_known = false;
        if (n > 0) plan[n - 1].channel_known = false;
    }

    bool move(SearchPlan& plan) {
        switch (random_.below(makes_large_moves_ ? 15 : 12)) {
            case 0: case 1: case 2: return shift_cut(plan);
            case 3: case 4: return move_device(plan);
            case 5: return swap_devices(plan);
            case 6: return swap_sets(plan);
            case 7: return split(plan);
            case 8: return merge(plan);
            case 9: return reverse_sets(plan);
            case 10: return use_unused(plan);
            case 11: return drop_device(plan);
            case 12: case 13: return move_device_and_cut(plan);
            default: return divide_anew(plan);
        }
    }

    bool shift_cut(SearchPlan& plan) {
        if (plan.size() < 2) return false;
        const int n = random_.below(static_cast<int>(plan.size()) - 1);
        const int by = (1 + random_.below(3)) * (random_.below(2) ? 1 : -1);
        const int cut = plan[n].end_layer + by;
        if (cut <= plan[n].first_layer || cut >= plan[n + 1].end_layer) return false;
        plan[n].end_layer = plan[n + 1].first_layer = cut;
        forget_stage(plan, n);
        plan[n + 1].costs_known = false;
        return true;
    }

    bool move_device(SearchPlan& plan) {
        const int S = static_cast<int>(plan.size());
        if (S < 2) return false;
        const int from = random_.below(S), to = random_.below(S);
        if (from == to || plan[from].devices.size() < 2) return false;
        plan[to].devices.push_back(take(plan[from].devices));
        forget_stage(plan, from);
        forget_stage(plan, to);
        return true;
    }

    bool swap_devices(SearchPlan& plan) {
        const int S = static_cast<int>(plan.size());
        if (S < 2) return false;
        const int a = random_.below(S), b = random_.below(S);
        if (a == b) return false;
        std::swap(pick(plan[a].devices), pick(plan[b].devices));
        forget_stage(plan, a);
        forget_stage(plan, b);
        return true;
    }

    bool swap_sets(SearchPlan& plan) {
        const int S = static_cast<int>(plan.size());
        if (S < 2) return false;
        const int a = random_.below(S), b = random_.below(S);
        if (a == b) return false;
        std::swap(plan[a].devices, plan[b].devices);
        forget_stage(plan, a);
        forget_stage(plan, b);
        return true;
    }

    bool split(SearchPlan& plan) {
        const int n = random_.below(static_cast<int>(plan.size()));
        const int layers = plan[n].end_layer - plan[n].first_layer;
        const int devices = static_cast<int>(plan[n].devices.size());
        if (layers < 2 || devices < 2) return false;
        SearchStage behind;
        const int cut = plan[n].first_layer + 1 + random_.below(layers - 1);
        const int moved = 1 + random_.below(devices - 1);
        behind.first_layer = cut;
        behind.end_layer = plan[n].end_layer;
        plan[n].end_layer = cut;
        for (int k = 0; k < moved; ++k) behind.devices.push_back(take(plan[n].devices));
        plan.insert(plan.begin() + n + 1, std::move(behind));
        forget_stage(plan, n);
        return true;
    }

    bool merge(SearchPlan& plan) {
        if (plan.size() < 2) return false;
        const int n = random_.below(static_cast<int>(plan.size()) - 1);
        plan[n].end_layer = plan[n + 1].end_layer;
        plan[n].devices.insert(plan[n].devices.end(), plan[n + 1].devices.begin(),
                               plan[n + 1].devices.end());
        plan.erase(plan.begin() + n + 1);
        forget_stage(plan, n);
        return true;
    }

    bool reverse_sets(SearchPlan& plan) {
        const int S = static_cast<int>(plan.size());
        if (S < 3) return false;
        const int a = random_.below(S), b = random_.below(S);
        for (int low = std::min(a, b), high = std::max(a, b); low < high; ++low, --high)
            std::swap(plan[low].devices, plan[high].devices);
        for (int n = std::min(a, b); n <= std::max(a, b); ++n) forget_stage(plan, n);
        return a != b;
    }

    // A device goes to a neighbouring stage, and with it the layers that keep the two in balance.
    bool move_device_and_cut(SearchPlan& plan) {
        if (plan.size() < 2) return false;
        const int n = random_.below(static_cast<int>(plan.size()) - 1);
        const bool forth = random_.below(2);
        std::vector<int>&from = plan[forth ? n : n + 1].devices, &to = plan[forth ? n + 1 : n].devices;
        if (from.size() < 2) return false;
        to.push_back(take(from));
        return balance(plan, n);
    }

    // The devices of two neighbouring stages, mixed and divided in another ratio.
    bool divide_anew(SearchPlan& plan) {
        if (plan.size() < 2) return false;
        const int n = random_.below(static_cast<int>(plan.size()) - 1);
        std::vector<int>&first = plan[n].devices, &second = plan[n + 1].devices;
        const int all = static_cast<int>(first.size() + second.size());
        const int wanted = 1 + random_.below(all - 1);
        while (static_cast<int>(first.size()) > wanted) second.push_back(take(first));
        while (static_cast<int>(first.size()) < wanted) first.push_back(take(second));
        return balance(plan, n);
    }

    // Puts the cut behind stage n where the work of both stages fits their devices' speed.
    bool balance(SearchPlan& plan, int n) {
        const auto speed = [&](const SearchStage& stage) {
            double slowest = kInfinity;
            for (int u : stage.devices) slowest = std::min(slowest, in_.speed[u]);
            return slowest * static_cast<double>(stage.devices.size());
        };
        const auto work = [&](int layer) { return in_.forward_sum[layer] + in_.backward_sum[layer]; };
        const int first = plan[n].first_layer, end = plan[n + 1].end_layer;
        const double before = speed(plan[n]), behind = speed(plan[n + 1]);
        const double target = work(first) + (work(end) - work(first)) * before / (before + behind);
        int cut = first + 1;
        while (cut < end - 1 && work(cut) < target) ++cut;
        if (cut > first + 1 && random_.below(2)) --cut;
        plan[n].end_layer = plan[n + 1].first_layer = cut;
        forget_stage(plan, n);
        forget_stage(plan, n + 1);
        return true;
    }

    // Gives a device that no stage has to a stage: as one more, or in place of one of its own.
    bool use_unused(SearchPlan& plan) {
        std::vector<std::uint8_t> used(in_.num_devices, 0);
        int num_used = 0;
        for (const SearchStage& stage : plan)
            for (int u : stage.devices) used[u] = 1, ++num_used;
        if (num_used == in_.num_devices) return false;
        int skip = random_.below(in_.num_devices - num_used), device = 0;
        while (used[device] || skip-- > 0) ++device;
        const int n = random_.below(static_cast<int>(plan.size()));
        if (random_.below(2)) pick(plan[n].devices) = device;
        else plan[n].devices.push_back(device);
        forget_stage(plan, n);
        return true;
    }

    bool drop_device(SearchPlan& plan) {
        const int n = random_.below(static_cast<int>(plan.size()));
        if (plan[n].devices.size() < 2) return false;
        take(plan[n].devices);
        forget_stage(plan, n);
        return true;
    }

    int& pick(std::vector<int>& devices) {
        return devices[random_.below(static_cast<int>(devices.size()))];
    }
    int take(std::vector<int>& devices) {
        std::swap(pick(devices), devices.back());
        const int device = devices.back();
        devices.pop_back();
        return device;
    }

    const Instance& in_;
    Control& control_;
    Random random_;
    const double budget_, target_ms_, known_ms_;
    const bool makes_large_moves_;
    double spent_ = 0.0;
    bool has_estimates_ = false;
    std::vector<double> forward_S_, backward_S_, reduce_S_, there_C_, back_C_;
    SearchResult best_;
};

}  // namespace

std::vector<SearchResult> local_search(const Instance& instance,
                                       const std::vector<PlacedPlan>& starts, std::uint64_t seed,
                                       double budget, double target_ms, double known_ms,
                                       Pool& pool, Control& control) {
    std::vector<SearchResult> results(starts.size());
    pool.run(static_cast<int>(starts.size()), [&](int k, int) {
        Search search(instance, seed * 1000003ULL + k, budget, target_ms, known_ms, control);
        results[k] = search.run(starts[k]);
    });
    return results;
}

}  // namespace pipeplan
