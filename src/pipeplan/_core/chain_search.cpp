// Simulated annealing over groups of devices, chains of stages on them, and cuts.
//
// The walk goes by list schedules, two for each candidate: one with the settings of the plan that it
// comes from, and one with other settings, drawn at random. With many microbatches it schedules fewer
// and adds the rounds that are left. A cheap bound, times how far above its bound a plan nearby was,
// rejects most candidates before they are scheduled. The best plans are scheduled in full, and their
// schedules improved (ChainScheduler::search).
#include "chain_search.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "chain_bound.hpp"
#include "chain_moves.hpp"

namespace pipeplan {
namespace {

constexpr double kHottest = 0.02, kColdest = 0.0005;
constexpr double kBlocksPerMove = 40.0;  // what a move and its bound cost, in scheduled blocks
constexpr double kBlocksPerLink = 0.1;   // and a look at one link
constexpr double kBlocksPerStage = 5.0;  // and the costs of one stage
// What a scheduled block costs, by the stages of its group and by the groups.
// Beside that, keys and arrays of all blocks, also where the schedule ends early.
constexpr double kSchedule = 0.25;
constexpr double kBlockBase = 0.25, kBlockPerPosition = 0.1, kBlockPerGroup = 0.13;
constexpr double kFirstPolish = 0.1;     // of what the best plans get, for all that may be among them
constexpr double kFarAbove = 1.02;       // times its bound: a schedule like this may gain much,
constexpr double kFarPolish = 3.0;       // and gets so many times the budget
constexpr double kNear = 1.05;           // times the best: a start like this is improved, too
constexpr int kFewMicrobatches = 10;     // beside one for each group

constexpr ChainSettings kUsualSettings[] = {{1.7, 3.0, 0.0, 0.0, 0.5}, {3.2, 8.0, 0.0, 0.0, 0.0},
                                            {4.5, 0.0, 0.0, 0.0, 0.0}, {4.5, 1.2, 0.0, 0.0, 0.0},
                                            {1.0, 3.0, 1.25, 1.0, 1.0}, {2.0, 1.0, 1.7, 2.0, 0.5}};

// A lower bound in O(stages): each group's first head, its work, and the least that is left after it.
double quick_bound(const Chain& chain, std::vector<double>& scratch) {
    const int P = chain.num_stages, G = chain.num_groups;
    const double M = chain.num_microbatches;
    scratch.assign(5 * G, 0.0);
    double* head = scratch.data();
    double* tail = head + G;
    double* work = tail + G;
    double* gradient_work = work + G;
    double* weight_tail = gradient_work + G;
    for (int g = 0; g < G; ++g) head[g] = tail[g] = weight_tail[g] = kInfinity;
    double way = 0.0, back = 0.0, least = 0.0;
    for (int p = 0; p < P; ++p) {
        const int g = chain.group[p];
        if (head[g] == kInfinity) head[g] = way, tail[g] = std::max(back, chain.weight_ms[p] + chain.left_ms(p));
        weight_tail[g] = std::min(weight_tail[g], chain.is_split[p] ? chain.left_ms(p) : tail[g]);
        gradient_work[g] += chain.forward_ms[p] + chain.backward_ms[p];
        work[g] += chain.forward_ms[p] + chain.backward_ms[p] + chain.weight_ms[p];
        way += chain.forward_ms[p] + chain.there_ms[p];
        back += chain.backward_ms[p] + chain.back_ms[p];
    }
    least = way + back;
    for (int g = 0; g < G; ++g) {
        least = std::max(least, head[g] + M * work[g] + weight_tail[g]);
        least = std::max(least, head[g] + M * gradient_work[g] + tail[g]);
    }
    return least;
}

class ChainSearch {
  public:
    ChainSearch(const ChainModel& model, std::uint64_t seed, double budget, Control& control)
        : model_(model), control_(control), random_(seed), budget_(budget), moves_(model, random_) {}

    // The best plans on the way, the fastest first.
    std::vector<ChainResult> run(const ChainPlan& start, int num_best) {
        try {
            anneal(start);
        } catch (const DeadlinePassed&) {
        }
        std::vector<ChainResult> results;
        for (auto& [ms, plan] : best_) {
            if (static_cast<int>(results.size()) == num_best) break;
            results.push_back({ms, 0.0, plan, {}, {}, false});
        }
        return results;
    }

    // The time of a plan under a few settings; infinite if it is not possible.
    double judge(const ChainPlan& plan) {
        if (!cost(plan)) return kInfinity;
        double least = kInfinity;
        for (const ChainSettings& settings : kUsualSettings) least = std::min(least, schedule(settings, bound_).ms);
        return least;
    }

  private:
    struct Judged {
        double ms, looseness;
        ChainSettings settings;
    };

    void anneal(const ChainPlan& start) {
        ChainPlan current = start, next;
        if (!cost(current)) return;
        Judged judged{kInfinity, 1.0, {}};
        for (const ChainSettings& settings : kUsualSettings) {
            const Judged found = schedule(settings, bound_);
            if (found.ms < judged.ms) judged = found;
        }
        keep(current, judged.ms);
        double heat = kHottest;
        for (long step = 0; spent_ < budget_; ++step) {
            if (step % 64 == 0) {
                control_.check_without_deadline();
                if (control_.is_late()) return;
            }
            heat = kHottest * std::pow(kColdest / kHottest, spent_ / budget_);
            spent_ += kBlocksPerMove;
            next = current;
            if (!moves_.make(next) || !cost(next)) continue;
            const double accept_ms = judged.ms * (1.0 - heat * std::log(random_.unit()));
            if (bound_ * std::max(1.0, 0.5 + 0.5 * judged.looseness) > accept_ms) continue;
            Judged found = schedule(judged.settings, bound_, accept_ms);
            if (found.ms > judged.ms) {
                const double limit_ms = std::min(found.ms, accept_ms);
                const Judged other = schedule(near_settings(judged.settings, random_), bound_, limit_ms);
                if (other.ms < found.ms) found = other;
            }
            if (found.ms > accept_ms) continue;
            std::swap(current, next);
            judged = found;
            keep(current, judged.ms);
        }
    }

    // Costs the plan with few microbatches; the bound is that of all of them.
    bool cost(const ChainPlan& plan) {
        const int M = model_.in.num_microbatches;
        const int few = std::min(M, kFewMicrobatches + plan.num_groups());
        double num_links = 0.0;
        for (const auto& devices : plan.devices) num_links += static_cast<double>(devices.size()) * devices.size();
        for (int p = 0; p + 1 < plan.num_stages(); ++p)
            num_links += static_cast<double>(plan.devices[plan.group[p]].size()) *
                         plan.devices[plan.group[p + 1]].size();
        spent_ += kBlocksPerLink * num_links + kBlocksPerStage * plan.num_stages();
        const double positions = static_cast<double>(plan.num_stages()) / plan.num_groups();
        block_cost_ = kBlockBase + kBlockPerPosition * positions + kBlockPerGroup * plan.num_groups();
        if (!cost_chain(model_, plan, few, chain_)) return false;
        rest_ = M - few;
        chain_.num_microbatches = M;
        bound_ = quick_bound(chain_, scratch_);
        chain_.num_microbatches = few;
        is_taken_ = false;
        return true;
    }

    Judged schedule(const ChainSettings& settings, double bound, double limit_ms = kInfinity) {
        if (!is_taken_) scheduler_.take(chain_), is_taken_ = true;
        const double rest_ms = rest_ * scheduler_.round_ms();
        const double ms = scheduler_.run(settings, limit_ms - rest_ms) + rest_ms;
        const double num_blocks = static_cast<double>(chain_.num_stages) * kNumChainKinds * chain_.num_microbatches;
        spent_ += kSchedule * num_blocks + block_cost_ * static_cast<double>(scheduler_.order().size());
        return {ms, bound > 0 ? ms / bound : 1.0, settings};
    }

    void keep(const ChainPlan& plan, double ms) {
        constexpr std::size_t kMost = 8;
        if (best_.size() == kMost && ms >= best_.rbegin()->first) return;
        best_.emplace(ms, plan);
        if (best_.size() > kMost) best_.erase(std::prev(best_.end()));
    }

    const ChainModel& model_;
    Control& control_;
    Random random_;
    const double budget_;
    ChainMoves moves_;
    Chain chain_;
    ChainScheduler scheduler_;
    bool is_taken_ = false;
    double rest_ = 0.0, bound_ = 0.0, spent_ = 0.0, block_cost_ = 1.0;
    std::vector<double> scratch_;
    std::map<double, ChainPlan> best_;
};

// Improves the plan's schedule with all microbatches.
void polish(const ChainModel& model, double budget, std::uint64_t seed, ChainResult& result,
            Control& control) {
    Chain chain;
    if (!cost_chain(model, result.plan, model.in.num_microbatches, chain)) return;
    ChainScheduler scheduler;
    scheduler.take(chain);
    Random random(seed);
    result.bound_ms = chain_bound(chain);
    const double num_blocks = static_cast<double>(chain.num_stages) * kNumChainKinds * chain.num_microbatches;
    const int num_runs = static_cast<int>(std::clamp(budget / num_blocks, 1.0, 1e6));
    const double ms = scheduler.search(num_runs, result.bound_ms, random, control);
    if (!result.order.empty() && ms >= result.iteration_ms) return;
    result.iteration_ms = ms, result.order = scheduler.best_order(), result.num_parts = chain.num_parts;
}

void sort_by_time(std::vector<ChainResult>& results) {
    std::stable_sort(results.begin(), results.end(), [](const ChainResult& a, const ChainResult& b) {
        return a.iteration_ms < b.iteration_ms;
    });
}

// The fastest, and the fastest start beside them if it is not far behind: its schedule may gain more.
void keep_best(std::vector<ChainResult>& results, int num_best) {
    sort_by_time(results);
    if (static_cast<int>(results.size()) <= num_best) return;
    const auto rest = results.begin() + num_best;
    const bool has_start = std::any_of(results.begin(), rest, [](const ChainResult& each) { return each.is_start; });
    const auto start = std::find_if(rest, results.end(), [](const ChainResult& each) { return each.is_start; });
    const bool is_near = start != results.end() && start->iteration_ms < kNear * results[0].iteration_ms;
    if (is_near && !has_start) std::iter_swap(rest, start), ++num_best;
    results.resize(num_best);
}

// The first starts, at most two on the same groups; where these are too few, the same again. Each
// search has its own random numbers.
std::vector<ChainPlan> different_starts(const std::vector<ChainPlan>& starts, int num_starts) {
    std::vector<ChainPlan> chosen;
    std::map<std::vector<std::vector<int>>, int> taken;
    for (const ChainPlan& start : starts) {
        if (static_cast<int>(chosen.size()) == num_starts) break;
        std::vector<std::vector<int>> groups = start.devices;
        std::sort(groups.begin(), groups.end());
        if (++taken[groups] <= 2) chosen.push_back(start);
    }
    const std::size_t num_different = chosen.size();
    for (std::size_t k = 0; num_different && static_cast<int>(chosen.size()) < num_starts; ++k)
        chosen.push_back(chosen[k % num_different]);
    return chosen;
}

}  // namespace

std::vector<ChainPlan> rank_chains(const ChainModel& model, std::vector<ChainPlan> starts, Pool& pool,
                                   Control& control) {
    std::vector<std::pair<double, int>> ranked(starts.size());
    pool.run(static_cast<int>(starts.size()), [&](int k, int) {
        const bool is_late = control.check_for_deadline() && k > 0;
        ranked[k] = {is_late ? kInfinity : ChainSearch(model, 0, 0.0, control).judge(starts[k]), k};
    });
    std::sort(ranked.begin(), ranked.end());
    std::vector<ChainPlan> result;
    for (const auto& [ms, k] : ranked)
        if (ms < kInfinity) result.push_back(std::move(starts[k]));
    return result;
}

std::vector<ChainResult> search_chains(const ChainModel& model, std::vector<ChainPlan> starts,
                                       std::uint64_t seed, const ChainBudget& budget, Pool& pool,
                                       Control& control) {
    starts = rank_chains(model, std::move(starts), pool, control);
    const std::vector<ChainPlan> different = different_starts(starts, budget.num_starts);
    std::vector<std::vector<ChainResult>> found(different.size());
    pool.run(static_cast<int>(different.size()), [&](int k, int) {
        ChainSearch search(model, seed * 1000003ULL + k, budget.anneal, control);
        found[k] = search.run(different[k], 2 * budget.num_best);
    });
    std::vector<ChainResult> all;
    for (auto& each : found)
        for (ChainResult& result : each) all.push_back(std::move(result));
    sort_by_time(all);
    // Regular chains gain most by a better schedule: the walks may have left them for a worse plan.
    const std::size_t num_found = 4 * budget.num_best;
    if (all.size() > num_found) all.resize(num_found);
    for (std::size_t k = 0; k < starts.size() && k < num_found; ++k) all.push_back({kInfinity, 0.0, starts[k], {}, {}, true});
    pool.run(static_cast<int>(all.size()), [&](int k, int) {
        polish(model, budget.polish * kFirstPolish, seed * 7919ULL + k, all[k], control);
    });
    keep_best(all, budget.num_best);
    pool.run(static_cast<int>(all.size()), [&](int k, int) {
        const bool is_far = all[k].iteration_ms > kFarAbove * all[k].bound_ms;
        polish(model, budget.polish * (is_far ? kFarPolish : 1.0), seed * 7919ULL + 1000 + k, all[k], control);
    });
    sort_by_time(all);
    return all;
}

}  // namespace pipeplan
