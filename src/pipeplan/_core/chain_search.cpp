// Simulated annealing over groups of devices, chains of stages on them, and cuts.
//
// A walk that starts on the wrong groups hardly leaves them. So many short walks start on different
// groups, also on some drawn at random, and a few long ones go on from the best of them. After a move of
// groups or stages, cuts are shifted until a quick bound falls no more (ChainBalance).
//
// The walk goes by list schedules: one with the settings of the plan that the candidate comes from, and at
// times one with other settings, drawn at random. With many microbatches it schedules fewer and adds the
// rounds that are left. The bound, times how far above its bound a plan nearby was, rejects most
// candidates before they are scheduled. The best plans are scheduled in full, and their schedules improved
// (ChainScheduler::search).
#include "chain_search.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <map>
#include <utility>

#include "chain_balance.hpp"
#include "chain_bound.hpp"
#include "chain_draws.hpp"
#include "chain_moves.hpp"

namespace pipeplan {
namespace {

constexpr double kHottest = 0.01, kMiddle = 0.004, kColdest = 0.0005;
constexpr int kShortWalks = 3;           // short walks for each start that is asked for,
constexpr double kShortPart = 0.4;       // and their part of the budget
constexpr double kLongWalks = 0.5;       // long ones, that go on from the best of them
constexpr int kDraws = 400, kDrawn = 24; // chains drawn at random, and how many of them are looked at
constexpr int kStartTries = 40, kMoveTries = 24;  // to balance a start, and a plan after a move
constexpr double kOtherSettings = 0.3;   // so often a plan that is not better is scheduled again
constexpr double kLikeNearby = 0.9, kUnlikeNearby = 0.5;  // how far the looseness of a plan nearby counts
constexpr int kUnlikeEvery = 3;
constexpr double kBlocksPerMove = 15.0;  // what a move and its bound cost, in scheduled blocks
constexpr double kBlocksPerLink = 0.1;   // and a look at one link
constexpr double kBlocksPerStage = 5.0;  // and the costs of one stage
constexpr double kBlocksPerTry = 4.0;    // and a shift of cuts
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

// Plans that were scheduled before, and how long they took at least; newer ones take the place of older.
class KnownTimes {
  public:
    void clear() { entries_.assign(kSize, {}); }
    double& of(const ChainPlan& plan) {
        std::uint64_t hash = plan.is_split;
        const auto add = [&](int value) { hash = (hash ^ static_cast<std::uint64_t>(value + 2)) * 0x9e3779b97f4a7c15ULL; };
        for (const auto& devices : plan.devices) {
            for (int device : devices) add(device);
            add(-1);
        }
        for (int g : plan.group) add(g);
        for (int end : plan.end_layer) add(end);
        Entry& entry = entries_[hash >> (64 - kBits)];
        if (entry.hash != hash) entry = {hash, 0.0};
        return entry.ms;
    }

  private:
    static constexpr int kBits = 12, kSize = 1 << kBits;
    struct Entry {
        std::uint64_t hash = 0;
        double ms = 0.0;
    };
    std::vector<Entry> entries_;
};

class ChainSearch {
  public:
    ChainSearch(const ChainModel& model, std::uint64_t seed, Control& control)
        : model_(model), control_(control), random_(seed), moves_(model, random_) {}

    // The best plans on the way, the fastest first.
    std::vector<ChainResult> run(const ChainPlan& start, double budget, double hottest, double coldest, int num_best) {
        try {
            anneal(start, budget, hottest, coldest);
        } catch (const DeadlinePassed&) {
        }
        std::vector<ChainResult> results;
        for (auto& [ms, plan] : best_) {
            if (static_cast<int>(results.size()) == num_best) break;
            results.push_back({ms, 0.0, plan, {}, {}, false});
        }
        return results;
    }

    // The time of a plan under a few settings, after so many tries to balance it; infinite if it is not
    // possible.
    double judge(ChainPlan& plan, int num_tries) {
        if (!cost(plan, num_tries)) return kInfinity;
        double least = kInfinity;
        for (const ChainSettings& settings : kUsualSettings) least = std::min(least, schedule(settings, bound_).ms);
        return least;
    }

    // The best by their bounds of many chains drawn at random along the devices of these plans.
    std::vector<ChainPlan> draw(const std::vector<ChainPlan>& like) {
        constexpr std::size_t kMost = 4 * kDrawn;
        ChainDraws draws(model_, random_);
        std::multimap<double, ChainPlan> drawn;
        for (int k = 0; k < kDraws && !control_.check_for_deadline(); ++k) {
            std::vector<int> order;
            for (const auto& devices : like[random_.below(std::min(8, static_cast<int>(like.size())))].devices)
                order.insert(order.end(), devices.begin(), devices.end());
            ChainPlan plan = draws.draw(order);
            if (!cost(plan, kStartTries) || (drawn.size() == kMost && bound_ >= drawn.rbegin()->first)) continue;
            drawn.emplace(bound_, std::move(plan));
            if (drawn.size() > kMost) drawn.erase(std::prev(drawn.end()));
        }
        std::vector<ChainPlan> plans;
        for (auto& [ms, plan] : drawn) plans.push_back(std::move(plan));
        return plans;
    }

  private:
    struct Judged {
        double ms, looseness;
        ChainSettings settings;
    };

    void anneal(const ChainPlan& start, double budget, double hottest, double coldest) {
        ChainPlan current = start, next;
        if (!cost(current, 0)) return;
        Judged judged{kInfinity, 1.0, {}};
        for (const ChainSettings& settings : kUsualSettings) {
            const Judged found = schedule(settings, bound_);
            if (found.ms < judged.ms) judged = found;
        }
        keep(current, judged.ms);
        known_.clear();
        for (long step = 0; spent_ < budget; ++step) {
            if (step % 64 == 0) {
                control_.check_without_deadline();
                if (control_.is_late()) return;
            }
            const double heat = hottest * std::pow(coldest / hottest, spent_ / budget);
            spent_ += kBlocksPerMove;
            next = current;
            if (!moves_.make(next) || !cost(next, moves_.is_far() ? kMoveTries : 0)) continue;
            const double accept_ms = judged.ms * (1.0 - heat * std::log(random_.unit()));
            const double like = random_.below(kUnlikeEvery) ? kLikeNearby : kUnlikeNearby;
            if (bound_ * std::max(1.0, 1.0 + like * (judged.looseness - 1.0)) > accept_ms) continue;
            double& known_ms = known_.of(next);
            if (known_ms > accept_ms) continue;
            const Judged found = schedule_near(judged, accept_ms);
            known_ms = std::max(known_ms, std::min(found.ms, accept_ms * (1 + 1e-12)));
            if (found.ms > accept_ms) continue;
            std::swap(current, next);
            judged = found;
            keep(current, judged.ms);
        }
    }

    // Costs the plan with few microbatches, after so many tries to balance it; the bound is that of all.
    bool cost(ChainPlan& plan, int num_tries) {
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
        if (!costs_.take(plan, M)) return false;
        bound_ = balance_.improve(plan, num_tries, num_tries);
        spent_ += kBlocksPerTry * num_tries;
        if (!costs_.fits()) return false;
        rest_ = M - few;
        chain_.num_microbatches = few;
        is_taken_ = false;
        return true;
    }

    // The candidate's schedule with the settings of the plan that it comes from, or with others.
    Judged schedule_near(const Judged& from, double accept_ms) {
        const Judged found = schedule(from.settings, bound_, accept_ms);
        if (found.ms <= from.ms || random_.unit() >= kOtherSettings) return found;
        const double limit_ms = std::min(found.ms, accept_ms);
        const Judged other = schedule(near_settings(from.settings, random_), bound_, limit_ms);
        return other.ms < found.ms ? other : found;
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
    ChainMoves moves_;
    ChainCosts costs_{model_};
    Chain& chain_ = costs_.chain();
    QuickBound quick_bound_;
    ChainBalance balance_{costs_, quick_bound_, random_};
    KnownTimes known_;
    ChainScheduler scheduler_;
    bool is_taken_ = false;
    double rest_ = 0.0, bound_ = 0.0, spent_ = 0.0, block_cost_ = 1.0;
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

// The first starts, at most two on the same groups.
std::vector<ChainPlan> different_starts(const std::vector<ChainPlan>& starts, int num_starts) {
    std::vector<ChainPlan> chosen;
    std::map<std::vector<std::vector<int>>, int> taken;
    for (const ChainPlan& start : starts) {
        if (static_cast<int>(chosen.size()) == num_starts) break;
        std::vector<std::vector<int>> groups = start.devices;
        std::sort(groups.begin(), groups.end());
        if (++taken[groups] <= 2) chosen.push_back(start);
    }
    return chosen;
}

// Judges plans after so many tries to balance them; those that are not possible are left out.
std::vector<ChainPlan> rank(const ChainModel& model, std::vector<ChainPlan> plans, int num_tries, Pool& pool,
                            Control& control) {
    std::vector<std::pair<double, int>> ranked(plans.size());
    pool.run(static_cast<int>(plans.size()), [&](int k, int) {
        const bool is_late = control.check_for_deadline() && k > 0;
        ranked[k] = {is_late ? kInfinity : ChainSearch(model, 0, control).judge(plans[k], num_tries), k};
    });
    std::sort(ranked.begin(), ranked.end());
    std::vector<ChainPlan> result;
    for (const auto& [ms, k] : ranked)
        if (ms < kInfinity) result.push_back(std::move(plans[k]));
    return result;
}

// Where walks start: chains drawn at random beside these, all balanced, the best first.
std::vector<ChainPlan> with_draws(const ChainModel& model, const std::vector<ChainPlan>& starts, std::uint64_t seed,
                                  Pool& pool, Control& control) {
    if (starts.empty()) return {};
    std::vector<ChainPlan> plans = different_starts(ChainSearch(model, seed, control).draw(starts), kDrawn);
    plans.insert(plans.begin(), starts.begin(), starts.end());
    return rank(model, std::move(plans), kStartTries, pool, control);
}

}  // namespace

std::vector<ChainPlan> rank_chains(const ChainModel& model, std::vector<ChainPlan> starts, Pool& pool,
                                   Control& control) {
    return rank(model, std::move(starts), 0, pool, control);
}

std::vector<ChainResult> search_chains(const ChainModel& model, std::vector<ChainPlan> starts,
                                       std::uint64_t seed, const ChainBudget& budget, Pool& pool,
                                       Control& control) {
    starts = rank(model, std::move(starts), 0, pool, control);
    const double whole = budget.anneal * budget.num_starts;
    // Walks from different starts, with this budget in all; what they found, the fastest first.
    const auto walk = [&](const std::vector<ChainPlan>& from, int most, std::uint64_t first, double part, double hottest,
                          double coldest) {
        // Where starts are too few, the same again: each walk has its own random numbers.
        const std::vector<ChainPlan> different = different_starts(from, most);
        std::vector<std::vector<ChainResult>> found(different.empty() ? 0 : most);
        pool.run(static_cast<int>(found.size()), [&](int k, int) {
            ChainSearch search(model, seed * 1000003ULL + first + k, control);
            found[k] = search.run(different[k % different.size()], part * whole / most, hottest, coldest,
                                  2 * budget.num_best);
        });
        std::vector<ChainResult> all;
        for (auto& each : found) std::move(each.begin(), each.end(), std::back_inserter(all));
        sort_by_time(all);
        return all;
    };
    std::vector<ChainPlan> halfway;
    const std::vector<ChainPlan> varied = with_draws(model, starts, seed * 31ULL + 7, pool, control);
    for (auto& each : walk(varied, kShortWalks * budget.num_starts, 0, kShortPart, kHottest, kMiddle))
        halfway.push_back(std::move(each.plan));
    const int num_long = std::max(1, static_cast<int>(kLongWalks * budget.num_starts));
    std::vector<ChainResult> all = walk(halfway, num_long, 500, 1 - kShortPart, kMiddle, kColdest);
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
