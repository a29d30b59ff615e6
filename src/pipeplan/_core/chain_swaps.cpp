// Simulated annealing over the orders of a chain's groups (van Laarhoven, Aarts and Lenstra 1992).
//
// A schedule is as long as its longest path: blocks that wait for the block before them on their
// group, or for a result of another group. Only a change of that path can shorten it. So a step takes
// two blocks of the path that follow each other on a group, and exchanges them, or moves one of them
// further. Groups run their blocks in the given order, each as soon as it can.
//
// Where memory is tight, a microbatch that enters too early takes the room of one that is ahead of it,
// on all groups at once, and no exchange on one group mends that. So some steps shift a microbatch, or
// all from one on: a block starts so much later, and all behind it on its way are as late as that makes
// them; or a block starts earlier, and all before it. Groups then run their blocks by these starts.
//
// What a group holds depends on its own order alone, so a step that needs more than its room is seen
// before it is run. A step that deadlocks is seen by the run, and undone.
//
// A step takes O(blocks).
#include "chain_swaps.hpp"

#include <algorithm>
#include <cmath>

namespace pipeplan {
namespace {

constexpr double kHotSwaps = 0.2, kColdSwaps = 0.02;    // of a block's mean length
constexpr double kManySteps = 10.0, kMostHeat = 5.0;   // for each block; with more it may be hotter
constexpr int kFurthest = 8;                           // places that a block moves at once
constexpr int kShiftEvery = 3;                         // one in so many steps shifts a microbatch's way,
constexpr double kFarthestShift = 32.0;                // by so many blocks at most
constexpr int kMostRepairs = 3;                        // other blocks that make room for it

}  // namespace

ChainSwaps::ChainSwaps(const Chain& chain) : chain_(chain), stages_(chain.num_groups), sequence_(chain.num_groups) {
    const int P = chain.num_stages, G = chain.num_groups;
    channel_there_.assign(P, -1), channel_back_.assign(P, -1);
    std::vector<int> channels(static_cast<std::size_t>(G) * G, -1);
    const auto channel = [&](int from, int to) {
        int& index = channels[static_cast<std::size_t>(from) * G + to];
        if (index < 0) index = num_channels_++;
        return index;
    };
    load_ms_.assign(G, 0.0);
    for (int p = 0; p < P; ++p) {
        stages_[chain.group[p]].push_back(p);
        load_ms_[chain.group[p]] += chain.forward_ms[p] + chain.backward_ms[p] + chain.weight_ms[p];
    }
    for (int p = 0; p + 1 < P; ++p) {
        const int g = chain.group[p], h = chain.group[p + 1];
        if (g == h) continue;
        channel_there_[p] = channel(g, h), channel_back_[p] = channel(h, g);
    }
    const std::size_t num_blocks = static_cast<std::size_t>(P) * kNumChainKinds * chain.num_microbatches;
    there_ms_.resize(num_blocks), start_ms_.resize(num_blocks);
    sender_.resize(num_blocks), before_.resize(num_blocks);
    waited_for_.resize(num_blocks), index_.resize(num_blocks);
}

double ChainSwaps::length(Token token) const {
    const int p = token / kNumChainKinds, kind = token % kNumChainKinds;
    return kind == kChainForward    ? chain_.forward_ms[p]
           : kind == kChainBackward ? chain_.backward_ms[p]
                                    : chain_.weight_ms[p];
}

ChainSwaps::Result ChainSwaps::result_of(Token token, int m) const {
    const int p = token / kNumChainKinds, kind = token % kNumChainKinds;
    if (kind == kChainForward) {
        if (p + 1 == chain_.num_stages) return {chain_block(chain_, p, kChainBackward, m), -1, 0.0};
        return {chain_block(chain_, p + 1, kChainForward, m), channel_there_[p], chain_.there_ms[p]};
    }
    if (kind == kChainWeight || p == 0) return {-1, -1, 0.0};
    return {chain_block(chain_, p - 1, kChainBackward, m), channel_back_[p - 1], chain_.back_ms[p - 1]};
}

// The place of the first forward in the group's sequence that finds no room; -1 if all do.
int ChainSwaps::first_over(int g) const {
    const double room = chain_.room_bytes[g] * (1 + kRoomRounding);
    if (room == kInfinity) return -1;
    double used = 0.0;
    const std::vector<Token>& sequence = sequence_[g];
    for (int k = 0; k < static_cast<int>(sequence.size()); ++k) {
        const Token token = sequence[k];
        const int p = token / kNumChainKinds, kind = token % kNumChainKinds;
        if (kind == kChainForward) {
            used += chain_.reserved_bytes(p);
            if (used > room) return k;
        } else if (kind == kChainBackward) {
            used += (chain_.is_split[p] ? chain_.kept_bytes[p] : 0.0) - chain_.reserved_bytes(p);
        } else {
            used -= chain_.kept_bytes[p];
        }
    }
    return -1;
}

// Where a forward finds no room, the next block that gives some back goes before it.
bool ChainSwaps::make_room(int g) {
    std::vector<Token>& sequence = sequence_[g];
    for (int tries = 0; tries <= kMostRepairs; ++tries) {
        const int over = first_over(g);
        if (over < 0) return true;
        int k = over + 1;
        const auto gives_back = [&](Token token) {
            return token % kNumChainKinds == (chain_.is_split[token / kNumChainKinds] ? kChainWeight : kChainBackward);
        };
        while (k < static_cast<int>(sequence.size()) && !gives_back(sequence[k])) ++k;
        if (k == static_cast<int>(sequence.size())) return false;
        std::rotate(sequence.begin() + over, sequence.begin() + k, sequence.begin() + k + 1);
    }
    return false;
}

// Runs the sequences; infinite if they deadlock, or as soon as they take longer than the limit.
double ChainSwaps::run(double limit_ms) {
    const int P = chain_.num_stages, G = chain_.num_groups, M = chain_.num_microbatches;
    next_.assign(G, 0), free_ms_.assign(G, 0.0), group_block_.assign(G, -1);
    idle_ms_.resize(G);  // what is left: a group that waits longer ends after the limit
    for (int g = 0; g < G; ++g) idle_ms_[g] = limit_ms * (1 + kLimitRounding) - M * load_ms_[g];
    count_.assign(P * kNumChainKinds, 0);
    channel_ms_.assign(num_channels_, 0.0), channel_block_.assign(num_channels_, -1);
    std::fill(there_ms_.begin(), there_ms_.end(), kInfinity);
    std::fill(sender_.begin(), sender_.end(), -1);
    for (int m = 0; m < M; ++m) there_ms_[chain_block(chain_, 0, kChainForward, m)] = 0.0;
    end_ms_.assign(P, 0.0), last_of_stage_.assign(P, -1);
    order_.clear(), waiting_.clear();
    for (int g = G; g-- > 0;) waiting_.push_back(g);
    while (!waiting_.empty()) {
        const int g = waiting_.back();
        waiting_.pop_back();
        while (next_[g] < static_cast<int>(sequence_[g].size()) && run_group(g)) {}
        if (idle_ms_[g] < 0) return kInfinity;
    }
    for (int g = 0; g < G; ++g)
        if (next_[g] < static_cast<int>(sequence_[g].size())) return kInfinity;
    return finish();
}

// Runs the group's next block, if its input is there.
bool ChainSwaps::run_group(int g) {
    const Token token = sequence_[g][next_[g]];
    const int p = token / kNumChainKinds, kind = token % kNumChainKinds;
    const int m = count_[token], block = token * chain_.num_microbatches + m;
    if (there_ms_[block] == kInfinity) return false;
    ++count_[token];
    const double start = std::max(free_ms_[g], there_ms_[block]), end = start + length(token);
    idle_ms_[g] -= start - free_ms_[g];
    before_[block] = group_block_[g], group_block_[g] = block;
    index_[block] = next_[g]++;
    start_ms_[block] = start, free_ms_[g] = end;
    order_.push_back(block);
    if (kind != kChainForward) end_ms_[p] = end, last_of_stage_[p] = block;
    if (kind == kChainBackward && chain_.is_split[p])
        there_ms_[chain_block(chain_, p, kChainWeight, m)] = end;
    const Result result = result_of(token, m);
    if (result.receiver < 0) return true;
    if (result.channel < 0) {
        there_ms_[result.receiver] = end;
        return true;
    }
    double& channel_ms = channel_ms_[result.channel];
    int& channel_block = channel_block_[result.channel];
    waited_for_[block] = channel_ms > end ? channel_block : -1;
    channel_ms = there_ms_[result.receiver] = std::max(end, channel_ms) + result.ms;
    channel_block = block;
    sender_[result.receiver] = block;
    waiting_.push_back(chain_.group[result.receiver / chain_.num_microbatches / kNumChainKinds]);
    return true;
}

// The end of everything: of computation and of the all-reduces.
double ChainSwaps::finish() {
    double last = 0.0;
    last_block_ = group_block_[0];
    for (int g = 0; g < chain_.num_groups; ++g) {
        if (free_ms_[g] > last) last = free_ms_[g], last_block_ = group_block_[g];
        const std::vector<int>& stages = stages_[g];
        rings_.take(chain_, stages.data(), static_cast<int>(stages.size()), end_ms_.data());
        if (rings_.end_ms() > last) last = rings_.end_ms(), last_block_ = last_of_stage_[rings_.cause()];
    }
    return last;
}

// Finds a longest path from its end; where two lead there, one of them at random.
void ChainSwaps::follow_back(Random& random) {
    critical_.clear();
    for (int block = last_block_; block >= 0;) {
        const int M = chain_.num_microbatches, before = before_[block];
        const double start = start_ms_[block];
        const bool waits_here = before >= 0 && start_ms_[before] + length(before / M) >= start;
        const bool waits_there = sender_[block] >= 0 && there_ms_[block] >= start;
        if (waits_here && (!waits_there || random.below(2))) {
            critical_.push_back({chain_.group[block / M / kNumChainKinds], index_[block]});
            block = before;
        } else if (waits_there) {
            block = sender_[block];
            while (waited_for_[block] >= 0) block = waited_for_[block];
        } else {
            break;
        }
    }
}

// Exchanges two blocks of the path, or moves one of them further; false if nothing comes of it.
bool ChainSwaps::move_one(Random& random) {
    if (critical_.empty()) return false;
    const Place place = critical_[random.below(static_cast<int>(critical_.size()))];
    std::vector<Token>& sequence = sequence_[place.group];
    changed_.push_back(place.group);
    kept_[place.group] = sequence;
    const int way = random.below(4);
    if (way < 2) {
        if (sequence[place.index] == sequence[place.index - 1]) return false;
        std::swap(sequence[place.index], sequence[place.index - 1]);
    } else if (way == 2) {  // the later one goes before some others
        const int to = std::max(0, place.index - 2 - random.below(kFurthest));
        std::rotate(sequence.begin() + to, sequence.begin() + place.index, sequence.begin() + place.index + 1);
    } else {  // the earlier one goes behind some others
        const int from = place.index - 1;
        const int to = std::min(static_cast<int>(sequence.size()) - 1, from + 2 + random.below(kFurthest));
        std::rotate(sequence.begin() + from, sequence.begin() + from + 1, sequence.begin() + to + 1);
    }
    return make_room(place.group) && sequence != kept_[place.group];
}

// Wants the block to start then, and all that it makes late on the way of its microbatch later, too.
void ChainSwaps::push_later(int block, double start_ms) {
    const int M = chain_.num_microbatches;
    while (block >= 0 && wanted_ms_[block] < start_ms) {
        const Token token = block / M;
        const int p = token / kNumChainKinds, m = block % M;
        wanted_ms_[block] = start_ms;
        is_shifted_[chain_.group[p]] = 1;
        const double end_ms = start_ms + length(token);
        if (token % kNumChainKinds == kChainBackward && chain_.is_split[p]) {
            double& weight = wanted_ms_[chain_block(chain_, p, kChainWeight, m)];
            weight = std::max(weight, end_ms);
        }
        const Result result = result_of(token, m);
        start_ms = end_ms + (result.channel < 0 ? 0.0 : result.ms);
        block = result.receiver;
    }
}

// Wants the block to start then, and all that it waits for on the way of its microbatch early enough.
void ChainSwaps::pull_earlier(int block, double start_ms) {
    const int M = chain_.num_microbatches;
    while (block >= 0 && wanted_ms_[block] > start_ms) {
        const Token token = block / M;
        const int p = token / kNumChainKinds, m = block % M, kind = token % kNumChainKinds;
        wanted_ms_[block] = start_ms;
        is_shifted_[chain_.group[p]] = 1;
        if (kind == kChainForward) {
            if (p == 0) return;
            block = chain_block(chain_, p - 1, kChainForward, m);
            if (channel_there_[p - 1] >= 0) start_ms -= chain_.there_ms[p - 1];
        } else if (kind == kChainWeight) {
            block = chain_block(chain_, p, kChainBackward, m);
        } else if (p + 1 == chain_.num_stages) {
            block = chain_block(chain_, p, kChainForward, m);
        } else {
            block = chain_block(chain_, p + 1, kChainBackward, m);
            if (channel_back_[p] >= 0) start_ms -= chain_.back_ms[p];
        }
        start_ms -= length(block / M);
    }
}

// Sorts the groups that a shift touched by the starts that it wants; false if nothing comes of it.
bool ChainSwaps::sort_groups() {
    const int M = chain_.num_microbatches;
    std::fill(count_.begin(), count_.end(), 0);
    bool is_new = false;
    for (int g = 0; g < chain_.num_groups; ++g) {
        if (!is_shifted_[g]) continue;
        sorted_.clear();
        for (const Token token : sequence_[g]) sorted_.emplace_back(wanted_ms_[token * M + count_[token]++], token);
        std::stable_sort(sorted_.begin(), sorted_.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
        changed_.push_back(g);
        kept_[g].swap(sequence_[g]);
        sequence_[g].clear();
        for (const auto& [ms, token] : sorted_) sequence_[g].push_back(token);
        if (!make_room(g)) return false;
        is_new |= sequence_[g] != kept_[g];
    }
    return is_new;
}

// Shifts blocks of one microbatch, or of all from one on, through all groups.
bool ChainSwaps::shift_way(Random& random) {
    const int M = chain_.num_microbatches;
    const int block = order_now_[random.below(static_cast<int>(order_now_.size()))];
    const double by_ms = length_ms_ * std::pow(kFarthestShift, random.unit());
    wanted_ms_ = now_ms_;
    is_shifted_.assign(chain_.num_groups, 0);
    const int way = random.below(3);
    if (way == 0) {
        push_later(block, now_ms_[block] + by_ms);
    } else if (way == 1) {
        pull_earlier(block, now_ms_[block] - by_ms);
    } else {
        for (int m = block % M, b = block; m < M; ++m, ++b) push_later(b, now_ms_[b] + by_ms);
    }
    return sort_groups();
}

// Makes a step; false if nothing comes of it.
bool ChainSwaps::change(Random& random) {
    changed_.clear();
    if (random.below(kShiftEvery) == 0 ? shift_way(random) : move_one(random)) return true;
    undo();
    return false;
}

void ChainSwaps::undo() {
    for (const int g : changed_) sequence_[g].swap(kept_[g]);
}

double ChainSwaps::time_of(const std::vector<int>& order, double limit_ms) {
    const int M = chain_.num_microbatches;
    for (auto& sequence : sequence_) sequence.clear();
    for (const int block : order) sequence_[chain_.group[block / M / kNumChainKinds]].push_back(block / M);
    for (int g = 0; g < chain_.num_groups; ++g)
        if (first_over(g) >= 0) return kInfinity;
    return run(limit_ms);
}

double ChainSwaps::improve(std::vector<int>& order, long num_steps, double enough_ms, Random& random,
                           Control& control) {
    double current = time_of(order), best = current;
    length_ms_ = 0.0;
    for (const int block : order)
        length_ms_ += length(block / chain_.num_microbatches) / static_cast<double>(order.size());
    order = order_now_ = order_;
    now_ms_ = start_ms_;
    kept_.resize(chain_.num_groups);
    follow_back(random);
    const double steps_per_block = static_cast<double>(num_steps) / static_cast<double>(order.size());
    const double hottest_ms = length_ms_ * kHotSwaps * std::clamp(steps_per_block / kManySteps, 1.0, kMostHeat);
    for (long step = 0; step < num_steps && best > enough_ms * (1 + 1e-12); ++step) {
        if (step % 64 == 0) {
            control.check_without_deadline();
            if (control.is_late()) break;
        }
        if (!change(random)) continue;
        const double heat = hottest_ms * std::pow(kColdSwaps / kHotSwaps, static_cast<double>(step) / num_steps);
        const double accept_ms = current - heat * std::log(random.unit());
        const double ms = run(accept_ms);
        if (ms > accept_ms) {
            undo();
            continue;
        }
        current = ms;
        now_ms_ = start_ms_, order_now_ = order_;
        if (ms < best) best = ms, order = order_;
        follow_back(random);
    }
    return best;
}

}  // namespace pipeplan
