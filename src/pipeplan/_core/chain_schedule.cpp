// List scheduling on chains, and a search over its keys.
//
// Giffler and Thompson 1960: take the group on which a block can end first. No block that is not
// known yet can start there before that end. So all blocks that could start before it compete, those
// included whose input is still computed or under way, and the one with the least key runs. Some
// choice of keys gives an optimal schedule.
//
// Memory. A forward is admitted if the group has room for it and if afterwards the oldest microbatch
// that has not passed the group's last stage still finds room for the rest of its stages, even if no
// younger one gives anything back (the banker's rule, Dijkstra 1965). Older microbatches need no more
// forwards here. So the oldest one can always go on, and nothing deadlocks.
//
// The keys are made in chain_keys.cpp.
//
// A run takes O(blocks * (stages of a group + groups)).
#include "chain_schedule.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <stdexcept>

#include "chain_swaps.hpp"

namespace pipeplan {
namespace {

constexpr int kRunsInAll = 2;           // one in so many schedules of a search is a list schedule
constexpr long kSwapsInRun = 5;         // exchanges that take as long as one list schedule

// They did best, one beside the others, on chains that the planner finds and on uniform ones.
constexpr ChainSettings kStarts[] = {
    {1.7, 3.0, 0.0, 0.0, 0.5},  {3.2, 8.0, 0.0, 0.0, 0.0},   {4.5, 0.0, 0.0, 0.0, 0.0},
    {4.5, 1.2, 0.0, 0.0, 0.0},  {1.4, 3.0, 0.0, 0.0, 0.0},   {0.7, 8.0, 0.0, 0.0, 0.0},
    {2.0, 1e6, 0.0, 0.0, 0.0},  {0.7, 3.0, 0.9, 2.0, 0.0},   {4.5, 3.0, 0.9, 2.0, 0.0},
    {2.0, 3.0, 0.9, 1.0, 0.0},  {-1.0, 0.0, 0.9, 0.0, 0.0},  {-1.1, 0.0, 0.9, 0.0, 0.0},
    {1.4, 3.0, 0.0, 0.0, 1.0},  {2.0, 3.0, 0.9, 2.0, 0.0},   {2.0, 1.0, 0.9, 1.0, 0.5},
    {1.0, 1.0, 0.9, 0.0, 0.5},  {3.0, 8.0, 1.7, 1.0, 0.0},   {1.4, 1.0, 0.9, 2.0, 0.5},
    {3.0, 3.0, 0.9, 2.0, 0.5},  {-1.03, 0.0, 0.0, 0.0, 1.0}, {2.0, 1.0, 1.7, 2.0, 1.0},
    {1.0, 0.0, 0.7, 0.0, 0.5}};

}  // namespace

void Chain::check() const {
    const std::size_t P = num_stages;
    const auto require = [](bool condition, const char* message) {
        if (!condition) throw std::invalid_argument(message);
    };
    require(num_stages >= 1 && num_groups >= 1 && num_microbatches >= 1, "chain: is empty");
    for (const auto* values : {&forward_ms, &backward_ms, &weight_ms, &there_ms, &back_ms,
                               &reduce_ms, &early_ms, &last_part_ms, &held_bytes, &kept_bytes}) {
        require(values->size() == P, "chain: one number for each stage");
        for (double value : *values)
            require(std::isfinite(value) && value >= 0, "chain: numbers are finite and not negative");
    }
    require(group.size() == P && is_split.size() == P, "chain: one group for each stage");
    require(room_bytes.size() == static_cast<std::size_t>(num_groups), "chain: one room a group");
    for (double value : room_bytes) require(value >= 0, "chain: rooms are not negative");
    std::vector<int> num_positions(num_groups, 0);
    for (int g : group) {
        require(g >= 0 && g < num_groups, "chain: unknown group");
        ++num_positions[g];
    }
    for (int count : num_positions) {
        require(count > 0, "chain: a group has no stage");
        require(count <= kMostPositions, "chain: a group has more than 64 stages");
    }
}

void ChainScheduler::take(const Chain& chain) {
    chain_ = &chain;
    const int P = chain.num_stages, G = chain.num_groups, M = chain.num_microbatches;
    stage_begin_.assign(G + 1, 0);
    for (int p = 0; p < P; ++p) ++stage_begin_[chain.group[p] + 1];
    for (int g = 0; g < G; ++g) stage_begin_[g + 1] += stage_begin_[g];
    stages_.resize(P);
    std::vector<int> next(stage_begin_.begin(), stage_begin_.end() - 1);
    for (int p = 0; p < P; ++p) stages_[next[chain.group[p]]++] = p;

    // Channels by their two groups; a linear search over few.
    channel_there_.assign(P, -1), channel_back_.assign(P, -1);
    std::vector<long> ends;
    std::vector<double> channel_load;
    const auto channel = [&](int from, int to, double load) {
        if (chain.half_duplex && from > to) std::swap(from, to);
        const long end = static_cast<long>(from) * G + to;
        const auto found = std::find(ends.begin(), ends.end(), end);
        const int index = static_cast<int>(found - ends.begin());
        if (found == ends.end()) ends.push_back(end), channel_load.push_back(0.0);
        channel_load[index] += load;
        return index;
    };
    std::vector<double> load(G, 0.0);
    group_bytes_.assign(G, 0.0);
    reserved_.resize(P);
    for (int p = 0; p < P; ++p) {
        const int g = chain.group[p];
        load[g] += chain.forward_ms[p] + chain.backward_ms[p] + chain.weight_ms[p];
        reserved_[p] = chain.reserved_bytes(p);
        group_bytes_[g] += reserved_[p];
        if (p + 1 == P || chain.group[p + 1] == g) continue;
        channel_there_[p] = channel(g, chain.group[p + 1], chain.there_ms[p]);
        channel_back_[p] = channel(chain.group[p + 1], g, chain.back_ms[p]);
    }
    num_channels_ = static_cast<int>(ends.size());
    round_ms_ = *std::max_element(load.begin(), load.end());
    load_ms_ = std::move(load);
    for (double ms : channel_load) round_ms_ = std::max(round_ms_, ms);

    way_forward_.resize(P), way_backward_.resize(P);
    double way = 0.0;
    for (int p = 0; p < P; ++p) {
        way_forward_[p] = way;
        way += chain.forward_ms[p] + (p + 1 < P ? chain.there_ms[p] : 0.0);
    }
    for (int p = P - 1; p >= 0; --p) {
        if (p + 1 < P) way += chain.back_ms[p];
        way_backward_[p] = way;
        way += chain.backward_ms[p];
    }
    start_ms_.resize(static_cast<std::size_t>(P) * kNumChainKinds * M);
    choices_.resize(static_cast<std::size_t>(P) * kNumChainKinds);
    num_choices_.assign(G, 0), first_start_ms_.assign(G, kInfinity);
    limit_bytes_.resize(G);
    for (int g = 0; g < G; ++g) limit_bytes_[g] = chain.room_bytes[g] * (1 + kRoomRounding);
    best_ms_ = kInfinity;
}

bool ChainScheduler::admits(int p) const {
    const Chain& chain = *chain_;
    const int g = chain.group[p];
    if (!most_->empty()) {
        const int done = chain.is_split[p] ? num_weight_[p] : num_backward_[p];
        if (num_forward_[p] - done >= (*most_)[p]) return false;
    }
    const double limit = limit_bytes_[g];
    if (limit == kInfinity) return true;
    if (used_bytes_[g] + reserved_[p] > limit) return false;
    const int last = stages_[stage_begin_[g + 1] - 1];
    if (p == last || num_forward_[p] <= num_forward_[last]) return true;
    return promised_bytes_[g] + reserved_[p] <= limit;
}

// What the oldest microbatch that has not passed the group's last stage needs in all its stages, and
// what younger ones hold already.
void ChainScheduler::promise(int g) {
    const int last = stages_[stage_begin_[g + 1] - 1], oldest = num_forward_[last] + 1;
    double bytes = group_bytes_[g];
    for (int k = stage_begin_[g]; k + 1 < stage_begin_[g + 1]; ++k) {
        const int younger = num_forward_[stages_[k]] - oldest;
        if (younger > 0) bytes += younger * reserved_[stages_[k]];
    }
    promised_bytes_[g] = bytes;
}

double ChainScheduler::look(int g) {
    const Chain& chain = *chain_;
    const int M = chain.num_microbatches;
    const double free = free_ms_[g];
    Choice* const first = choices_.data() + kNumChainKinds * stage_begin_[g];
    Choice* next = first;
    double first_end = kInfinity, first_start = kInfinity;
    const auto consider = [&](double there, double length, int p, int kind, int m) {
        const double start = std::max(free, there);
        first_end = std::min(first_end, start + length);
        first_start = std::min(first_start, start);
        *next++ = {start, p, kind, (p * kNumChainKinds + kind) * M + m};
    };
    for (int k = stage_begin_[g]; k < stage_begin_[g + 1]; ++k) {
        const int p = stages_[k];
        const int i = num_backward_[p], j = num_forward_[p], w = num_weight_[p];
        if (i < M && backward_there_ms_[p * M + i] < kInfinity)
            consider(backward_there_ms_[p * M + i], chain.backward_ms[p], p, kChainBackward, i);
        if (w < i && chain.is_split[p]) consider(free, chain.weight_ms[p], p, kChainWeight, w);
        if (j < M && forward_there_ms_[p * M + j] < kInfinity && admits(p))
            consider(forward_there_ms_[p * M + j], chain.forward_ms[p], p, kChainForward, j);
    }
    num_choices_[g] = static_cast<int>(next - first);
    first_start_ms_[g] = first_start;
    return first_end;
}

ChainScheduler::Choice ChainScheduler::choose(int g, const std::vector<double>& keys,
                                              double patience) const {
    const Choice* const first = choices_.data() + kNumChainKinds * stage_begin_[g];
    const double first_start = first_start_ms_[g];
    const double before = first_start + patience * (end_ms_[g] - first_start);
    const Choice* best = nullptr;
    double best_key = 0.0;
    for (const Choice* each = first; each < first + num_choices_[g]; ++each) {
        if (each->start_ms > first_start && each->start_ms >= before) continue;
        const double key = keys[each->block];
        if (!best || key < best_key || (key == best_key && each->start_ms < best->start_ms))
            best = each, best_key = key;
    }
    return *best;
}

// Starts the block, and returns the other group that may have something new to run; -1: none.
int ChainScheduler::commit(int g, const Choice& choice) {
    const Chain& chain = *chain_;
    const int P = chain.num_stages, M = chain.num_microbatches, p = choice.stage;
    const double length = choice.kind == kChainForward    ? chain.forward_ms[p]
                          : choice.kind == kChainBackward ? chain.backward_ms[p]
                                                     : chain.weight_ms[p];
    const double end = choice.start_ms + length;
    free_ms_[g] = end;
    int m = 0, touched = -1;
    if (choice.kind == kChainForward) {
        m = num_forward_[p]++;
        used_bytes_[g] += reserved_[p];
        if (limit_bytes_[g] < kInfinity) promise(g);
        if (p + 1 == P) {
            backward_there_ms_[p * M + m] = end;
        } else {
            double there = end;
            if (const int c = channel_there_[p]; c >= 0) {
                there = std::max(end, channel_ms_[c]) + chain.there_ms[p];
                channel_ms_[c] = there;
                touched = chain.group[p + 1];
            }
            forward_there_ms_[(p + 1) * M + m] = there;
        }
    } else if (choice.kind == kChainBackward) {
        m = num_backward_[p]++;
        used_bytes_[g] += (chain.is_split[p] ? chain.kept_bytes[p] : 0.0) - reserved_[p];
        last_end_ms_[p] = end;
        if (p > 0) {
            double there = end;
            if (const int c = channel_back_[p - 1]; c >= 0) {
                there = std::max(end, channel_ms_[c]) + chain.back_ms[p - 1];
                channel_ms_[c] = there;
                touched = chain.group[p - 1];
            }
            backward_there_ms_[(p - 1) * M + m] = there;
        }
    } else {
        ++num_weight_[p];
        used_bytes_[g] -= chain.kept_bytes[p];
        last_end_ms_[p] = end;
    }
    start_ms_[choice.block] = choice.start_ms;
    order_.push_back(choice.block);
    return touched;
}

double ChainScheduler::finish() {
    const Chain& chain = *chain_;
    double last = 0.0;
    for (int g = 0; g < chain.num_groups; ++g) {
        const int begin = stage_begin_[g], count = stage_begin_[g + 1] - begin;
        rings_.take(chain, stages_.data() + begin, count, last_end_ms_.data());
        last = std::max({last, free_ms_[g], rings_.end_ms()});
    }
    return last;
}

double ChainScheduler::run(const std::vector<double>& keys, double patience,
                           const std::vector<int>& most, double limit_ms) {
    const Chain& chain = *chain_;
    const int P = chain.num_stages, G = chain.num_groups, M = chain.num_microbatches;
    ++num_runs_;
    most_ = &most;
    for (int g = 0; g < G; ++g)
        if (group_bytes_[g] > limit_bytes_[g]) return last_ms_ = kInfinity;
    free_ms_.assign(G, 0.0), used_bytes_.assign(G, 0.0), channel_ms_.assign(num_channels_, 0.0);
    forward_there_ms_.assign(static_cast<std::size_t>(P) * M, kInfinity);
    backward_there_ms_.assign(static_cast<std::size_t>(P) * M, kInfinity);
    std::fill(forward_there_ms_.begin(), forward_there_ms_.begin() + M, 0.0);
    num_forward_.assign(P, 0), num_backward_.assign(P, 0), num_weight_.assign(P, 0);
    last_end_ms_.assign(P, 0.0);
    order_.clear();
    end_ms_.assign(G, kInfinity);
    promised_bytes_ = group_bytes_;
    idle_ms_.resize(G);  // what is left: a group that waits longer ends after the limit
    for (int g = 0; g < G; ++g) idle_ms_[g] = limit_ms * (1 + kLimitRounding) - M * load_ms_[g];
    end_ms_[chain.group[0]] = look(chain.group[0]);
    for (;;) {
        int g = 0;
        double first_end = end_ms_[0];
        for (int h = 1; h < G; ++h) {  // without branches: nobody can foretell which is the first
            g += (h - g) * (end_ms_[h] < first_end);
            first_end = std::min(first_end, end_ms_[h]);
        }
        if (first_end == kInfinity) break;
        const Choice choice = choose(g, keys, patience);
        idle_ms_[g] -= choice.start_ms - free_ms_[g];
        if (idle_ms_[g] < 0) return last_ms_ = kInfinity;
        const int touched = commit(g, choice);
        end_ms_[g] = look(g);
        if (touched >= 0) end_ms_[touched] = look(touched);
    }
    int num_blocks = 0;
    for (int p = 0; p < P; ++p) num_blocks += M * (chain.is_split[p] ? 3 : 2);
    // Cannot be (docs/theory.md, section 11); and if rounding should bring it about, it is no schedule.
    if (static_cast<int>(order_.size()) < num_blocks) return last_ms_ = kInfinity;
    return last_ms_ = finish();
}

double ChainScheduler::run(const ChainSettings& settings, double limit_ms) {
    if (settings.ratio < 0) round_keys({-settings.ratio - 1, 0.0, {1.0, 1.0}}, keys_);
    else path_keys(settings, keys_);
    windows(settings, own_most_);
    return run(keys_, settings.patience, own_most_, limit_ms);
}

void ChainScheduler::take_step(Walk& walk, double patience, const std::vector<int>& most) {
    if (last_ms_ < best_ms_) best_ms_ = last_ms_, best_order_ = order_;
    if (last_ms_ == kInfinity || last_ms_ > walk.ms * (1 + 1e-12)) return;
    walk.ms = last_ms_, walk.patience = patience, walk.most = most;
    latest_starts(walk.keys);
    walk.starts = start_ms_;
    walk.critical.clear();
    for (int block : order_)
        if (walk.keys[block] - start_ms_[block] < 1e-9 * last_ms_) walk.critical.push_back(block);
}

void ChainScheduler::try_rounds(int num_tries, Random& random, Control& control) {
    static const double slacks[] = {0.0, 0.02, 0.05, 0.1, 0.2, 0.4}, waits[] = {0.0, 0.0, 0.02, 0.05, 0.2};
    static const double stretches[] = {1.0, 1.5, 2.0, 2.5, 3.0, 4.0};
    ChainSwaps swaps(*chain_);
    std::vector<int> order;
    for (int block = 0; block < static_cast<int>(start_ms_.size()); ++block) {
        const int token = block / chain_->num_microbatches;
        if (token % kNumChainKinds != kChainWeight || chain_->is_split[token / kNumChainKinds]) order.push_back(block);
    }
    for (int k = 0; k < num_tries; ++k) {
        if (k % 16 == 0) control.check_without_deadline();
        if (control.is_late()) return;
        ChainRound round;
        if (k < 36) round.stretch[0] = stretches[k / 6], round.stretch[1] = stretches[k % 6];
        else round = {slacks[random.below(6)], waits[random.below(5)], {stretches[random.below(6)], stretches[random.below(6)]}};
        round_keys(round, keys_, &random);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return keys_[a] < keys_[b]; });
        const double ms = swaps.time_of(order, best_ms_);
        if (ms < best_ms_) best_ms_ = ms, best_order_ = order;
    }
}

double ChainScheduler::search(int num_runs, double enough_ms, Random& random, Control& control) {
    const int num_all = num_runs;
    if (!chain_->half_duplex) num_runs = std::min(num_all, std::max<int>(std::size(kStarts), num_all / kRunsInAll));
    const long num_swaps = kSwapsInRun * (num_all - num_runs);
    best_ms_ = kInfinity;
    Walk walk;
    ChainSettings winner;
    const auto is_done = [&](int k) {
        if (k % 16 == 0) control.check_without_deadline();
        return best_ms_ <= enough_ms * (1 + 1e-12) || (best_ms_ < kInfinity && control.is_late());
    };
    const auto try_settings = [&](const ChainSettings& settings) {
        run(settings, walk.ms);
        take_step(walk, settings.patience, own_most_);
        if (walk.ms == last_ms_) winner = settings;
    };
    const int num_starts = std::min<int>(std::size(kStarts), std::max(1, num_runs));
    for (int k = 0; k < num_starts && !is_done(k); ++k) try_settings(kStarts[k]);
    if (best_ms_ == kInfinity) return best_ms_;
    const int num_settings = (num_runs - num_starts) / 2;
    for (int k = 0; k < num_settings && !is_done(k); ++k) try_settings(near_settings(winner, random));
    for (int k = num_starts + num_settings; k < num_runs && !is_done(k); ++k) {
        trial_ = walk.keys;
        trial_most_ = walk.most;
        shift_keys(walk, random, trial_);
        if (!trial_most_.empty() && random.below(2)) {
            if (random.below(8) == 0) trial_most_.clear();
            for (int& each : trial_most_)
                if (random.below(4) == 0) each = std::max(1, each + (random.below(2) ? 1 : -1));
        }
        const int which = random.below(4);
        const double patience = which == 0 ? random.unit() : which == 1 ? walk.patience : which - 2.0;
        run(trial_, patience, trial_most_, walk.ms);
        take_step(walk, patience, trial_most_);
    }
    if (num_swaps > 0 && !is_done(0)) try_rounds(static_cast<int>(std::min(100L, num_swaps / 8)), random, control);
    if (num_swaps > 0 && !is_done(0))
        best_ms_ = ChainSwaps(*chain_).improve(best_order_, num_swaps, enough_ms, random, control);
    return best_ms_;
}

}  // namespace pipeplan
