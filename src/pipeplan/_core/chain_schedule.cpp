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
// Keys. Every microbatch repeats the way of the one before it a round later, as in the building blocks
// of Qi et al. 2024 (arXiv:2405.15362): one way as if it were alone, and one on which no two blocks of
// a group meet in any round. Then latest starts: those of a schedule are the keys of the next one,
// with noise.
//
// A run takes O(blocks * (stages of a group + groups)).
#include "chain_schedule.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <stdexcept>

namespace pipeplan {
namespace {

constexpr double kRoomRounding = 1e-9;  // relative

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

ChainSettings random_settings(Random& random) {
    static const double delays[] = {0.0, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 1e6};
    ChainSettings result;
    result.ratio = 0.5 * std::pow(16.0, random.unit());
    result.delay = delays[random.below(8)];
    if (random.below(2)) {
        result.window = 0.6 * std::pow(3.0, random.unit());
        result.extra = random.below(2) ? 3 * random.unit() : 0.0;
    }
    const int way = random.below(4);
    result.patience = way == 0 ? 0.0 : way == 1 ? 1.0 : random.unit();
    return result;
}

ChainSettings near_settings(const ChainSettings& settings, Random& random) {
    const ChainSettings other = random_settings(random);
    ChainSettings result = settings;
    switch (random.below(8)) {
        case 0: result.ratio = other.ratio; break;
        case 1: result.ratio *= std::pow(2.0, random.unit() - 0.5); break;
        case 2: result.delay = other.delay; break;
        case 3: result.window = other.window, result.extra = other.extra; break;
        case 4: result.window *= std::pow(1.5, random.unit() - 0.5); break;
        case 5: result.extra = std::max(0.0, result.extra + random.unit() - 0.5); break;
        case 6: result.patience = other.patience; break;
        default: result = other;
    }
    if (result.ratio < 0) result.ratio = std::min(result.ratio, -1.0);
    return result;
}

void Chain::check() const {
    const std::size_t P = num_stages;
    const auto require = [](bool condition, const char* message) {
        if (!condition) throw std::invalid_argument(message);
    };
    require(num_stages >= 1 && num_groups >= 1 && num_microbatches >= 1, "chain: is empty");
    for (const auto* values : {&forward_ms, &backward_ms, &weight_ms, &there_ms, &back_ms,
                               &reduce_ms, &held_bytes, &kept_bytes}) {
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
    best_ms_ = kInfinity;
}

bool ChainScheduler::admits(int p) const {
    const Chain& chain = *chain_;
    const int g = chain.group[p];
    if (!most_->empty()) {
        const int done = chain.is_split[p] ? num_weight_[p] : num_backward_[p];
        if (num_forward_[p] - done >= (*most_)[p]) return false;
    }
    const double room = chain.room_bytes[g];
    if (room == kInfinity) return true;
    const double limit = room * (1 + kRoomRounding);
    if (used_bytes_[g] + reserved_[p] > limit) return false;
    const int last = stages_[stage_begin_[g + 1] - 1];
    if (p == last) return true;
    const int oldest = num_forward_[last] + 1;
    double bytes = group_bytes_[g];
    for (int k = stage_begin_[g]; k + 1 < stage_begin_[g + 1]; ++k) {
        const int q = stages_[k];
        const int younger = num_forward_[q] + (q == p) - oldest;
        if (younger > 0) bytes += younger * reserved_[q];
    }
    return bytes <= limit;
}

double ChainScheduler::earliest_end(int g) const {
    const Chain& chain = *chain_;
    const int M = chain.num_microbatches;
    const double free = free_ms_[g];
    double least = kInfinity;
    for (int k = stage_begin_[g]; k < stage_begin_[g + 1]; ++k) {
        const int p = stages_[k];
        const int i = num_backward_[p], j = num_forward_[p];
        if (i < M) least = std::min(least, std::max(free, backward_there_ms_[p * M + i]) + chain.backward_ms[p]);
        if (num_weight_[p] < i && chain.is_split[p]) least = std::min(least, free + chain.weight_ms[p]);
        if (j < M) {
            const double end = std::max(free, forward_there_ms_[p * M + j]) + chain.forward_ms[p];
            if (end < least && admits(p)) least = end;
        }
    }
    return least;
}

ChainScheduler::Choice ChainScheduler::choose(int g, const std::vector<double>& keys,
                                              double patience) const {
    const Chain& chain = *chain_;
    const int M = chain.num_microbatches;
    const double free = free_ms_[g];
    Choice choices[kNumChainKinds * kMostPositions];
    int count = 0;
    double first_end = kInfinity, first_start = kInfinity;
    const auto consider = [&](double there, double length, int p, int kind, int m) {
        const double start = std::max(free, there);
        first_end = std::min(first_end, start + length);
        first_start = std::min(first_start, start);
        choices[count++] = {start, keys[(p * kNumChainKinds + kind) * M + m], p, kind};
    };
    for (int k = stage_begin_[g]; k < stage_begin_[g + 1]; ++k) {
        const int p = stages_[k];
        const int i = num_backward_[p], j = num_forward_[p], w = num_weight_[p];
        if (i < M && backward_there_ms_[p * M + i] < kInfinity)
            consider(backward_there_ms_[p * M + i], chain.backward_ms[p], p, kChainBackward, i);
        if (chain.is_split[p] && w < i) consider(free, chain.weight_ms[p], p, kChainWeight, w);
        if (j < M && forward_there_ms_[p * M + j] < kInfinity && admits(p))
            consider(forward_there_ms_[p * M + j], chain.forward_ms[p], p, kChainForward, j);
    }
    const double before = first_start + patience * (first_end - first_start);
    const Choice* best = nullptr;
    for (int k = 0; k < count; ++k) {
        const Choice& each = choices[k];
        if (each.start_ms > first_start && each.start_ms >= before) continue;
        if (!best || each.key < best->key || (each.key == best->key && each.start_ms < best->start_ms))
            best = &each;
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
        m = num_weight_[p]++;
        used_bytes_[g] -= chain.kept_bytes[p];
        last_end_ms_[p] = end;
    }
    const int block = (p * kNumChainKinds + choice.kind) * M + m;
    start_ms_[block] = choice.start_ms;
    order_.push_back(block);
    return touched;
}

// The all-reduces: a group's one after the other, in the order in which they become ready.
double ChainScheduler::finish() {
    const Chain& chain = *chain_;
    double last = 0.0;
    for (int g = 0; g < chain.num_groups; ++g) {
        double ring = 0.0;
        last = std::max(last, free_ms_[g]);
        const int begin = stage_begin_[g], count = stage_begin_[g + 1] - begin;
        int sorted[kMostPositions];
        std::copy_n(stages_.begin() + begin, count, sorted);
        std::sort(sorted, sorted + count,
                  [&](int a, int b) { return last_end_ms_[a] < last_end_ms_[b]; });
        for (int k = 0; k < count; ++k) {
            const int p = sorted[k];
            if (chain.reduce_ms[p] == 0.0) continue;
            ring = std::max(ring, last_end_ms_[p]) + chain.reduce_ms[p];
        }
        last = std::max(last, ring);
    }
    return last;
}

double ChainScheduler::run(const std::vector<double>& keys, double patience,
                           const std::vector<int>& most) {
    const Chain& chain = *chain_;
    const int P = chain.num_stages, G = chain.num_groups, M = chain.num_microbatches;
    ++num_runs_;
    most_ = &most;
    for (int g = 0; g < G; ++g)
        if (group_bytes_[g] > chain.room_bytes[g] * (1 + kRoomRounding)) return last_ms_ = kInfinity;
    free_ms_.assign(G, 0.0), used_bytes_.assign(G, 0.0), channel_ms_.assign(num_channels_, 0.0);
    forward_there_ms_.assign(static_cast<std::size_t>(P) * M, kInfinity);
    backward_there_ms_.assign(static_cast<std::size_t>(P) * M, kInfinity);
    std::fill(forward_there_ms_.begin(), forward_there_ms_.begin() + M, 0.0);
    num_forward_.assign(P, 0), num_backward_.assign(P, 0), num_weight_.assign(P, 0);
    last_end_ms_.assign(P, 0.0);
    order_.clear();
    end_ms_.assign(G, kInfinity);
    end_ms_[chain.group[0]] = earliest_end(chain.group[0]);
    for (;;) {
        int g = 0;
        for (int h = 1; h < G; ++h)
            if (end_ms_[h] < end_ms_[g]) g = h;
        if (end_ms_[g] == kInfinity) break;
        const int touched = commit(g, choose(g, keys, patience));
        end_ms_[g] = earliest_end(g);
        if (touched >= 0) end_ms_[touched] = earliest_end(touched);
    }
    int num_blocks = 0;
    for (int p = 0; p < P; ++p) num_blocks += M * (chain.is_split[p] ? 3 : 2);
    if (static_cast<int>(order_.size()) < num_blocks)
        throw std::logic_error("chain_schedule: deadlock");
    return last_ms_ = finish();
}

void ChainScheduler::path_keys(double ratio, double delay, std::vector<double>& keys) const {
    const Chain& chain = *chain_;
    const int P = chain.num_stages, M = chain.num_microbatches;
    keys.resize(static_cast<std::size_t>(P) * kNumChainKinds * M);
    for (int p = 0; p < P; ++p) {
        const double back = ratio * way_backward_[p];
        const double first[] = {ratio * way_forward_[p], back,
                                back + chain.backward_ms[p] + delay * round_ms_};
        for (int kind = 0; kind < kNumChainKinds; ++kind)
            for (int m = 0; m < M; ++m)
                keys[(p * kNumChainKinds + kind) * M + m] = first[kind] + m * round_ms_;
    }
}

void ChainScheduler::round_keys(double slack, std::vector<double>& keys) const {
    const Chain& chain = *chain_;
    const int P = chain.num_stages, M = chain.num_microbatches, G = chain.num_groups;
    const double round = round_ms_ * (1 + slack), tiny = 1e-9 * round;
    keys.resize(static_cast<std::size_t>(P) * kNumChainKinds * M);
    std::vector<std::vector<std::pair<double, double>>> taken(G);  // [start, end) within a round
    // The first time from `there` on at which the group has room for the block in every round.
    const auto place = [&](int g, double there, double length) {
        auto& busy = taken[g];
        double start = there;
        for (int tries = 0; tries <= static_cast<int>(2 * busy.size()) + 1; ++tries) {
            const double phase = std::fmod(start, round);
            double wait = 0.0;
            for (const auto& [from, to] : busy) {
                // Both within a round; the block may reach into the next one.
                for (const double shift : {0.0, round}) {
                    if (phase + tiny < to + shift && from + shift + tiny < phase + length)
                        wait = std::max(wait, to + shift - phase);
                }
            }
            if (wait <= tiny) {
                const double end = phase + length;
                busy.emplace_back(phase, std::min(end, round));
                if (end > round + tiny) busy.emplace_back(0.0, end - round);
                return start;
            }
            start += wait;
        }
        return there;  // no room: the list scheduler will find some
    };
    const auto put = [&](int p, int kind, double first) {
        for (int m = 0; m < M; ++m) keys[(p * kNumChainKinds + kind) * M + m] = first + m * round;
    };
    double way = 0.0;
    for (int p = 0; p < P; ++p) {
        const double start = place(chain.group[p], way, chain.forward_ms[p]);
        put(p, kChainForward, start);
        way = start + chain.forward_ms[p] + (p + 1 < P ? chain.there_ms[p] : 0.0);
    }
    std::vector<double> ready(P);
    for (int p = P - 1; p >= 0; --p) {
        if (p + 1 < P) way += chain.back_ms[p];
        const double start = place(chain.group[p], way, chain.backward_ms[p]);
        put(p, kChainBackward, start);
        way = ready[p] = start + chain.backward_ms[p];
    }
    for (int p = P - 1; p >= 0; --p)
        put(p, kChainWeight, chain.is_split[p] ? place(chain.group[p], ready[p], chain.weight_ms[p]) : ready[p]);
}

void ChainScheduler::latest_starts(std::vector<double>& keys) {
    const Chain& chain = *chain_;
    const int P = chain.num_stages, M = chain.num_microbatches, G = chain.num_groups;
    keys.resize(start_ms_.size());
    // The latest start of what follows: of a group's next block, of a channel's next transfer.
    std::vector<double>& next = latest_;
    next.assign(G + num_channels_, last_ms_);
    double* channel_next = next.data() + G;
    std::vector<double> ring_next(G, last_ms_);
    std::vector<char> is_last(P, 1);
    for (std::size_t k = order_.size(); k-- > 0;) {
        const int block = order_[k];
        const int m = block % M, kind = block / M % kNumChainKinds, p = block / M / kNumChainKinds;
        const int g = chain.group[p];
        double end = next[g];
        double length = chain.weight_ms[p];
        const auto send = [&](int channel, double ms, double needed) {
            if (channel < 0) {
                end = std::min(end, needed);
                return;
            }
            channel_next[channel] = std::min(channel_next[channel], needed) - ms;
            end = std::min(end, channel_next[channel]);
        };
        if (kind == kChainForward) {
            length = chain.forward_ms[p];
            if (p + 1 == P) end = std::min(end, keys[chain_block(chain, p, kChainBackward, m)]);
            else send(channel_there_[p], chain.there_ms[p], keys[chain_block(chain, p + 1, kChainForward, m)]);
        } else {
            if (kind == kChainBackward) {
                length = chain.backward_ms[p];
                if (chain.is_split[p]) end = std::min(end, keys[chain_block(chain, p, kChainWeight, m)]);
                if (p > 0) send(channel_back_[p - 1], chain.back_ms[p - 1], keys[chain_block(chain, p - 1, kChainBackward, m)]);
            }
            if (is_last[p] && chain.reduce_ms[p] > 0) {
                ring_next[g] -= chain.reduce_ms[p];
                end = std::min(end, ring_next[g]);
            }
            is_last[p] = 0;
        }
        next[g] = keys[block] = end - length;
    }
}

void ChainScheduler::windows(const ChainSettings& settings, std::vector<int>& most) const {
    const Chain& chain = *chain_;
    const int P = chain.num_stages, M = chain.num_microbatches;
    most.clear();
    if (settings.window <= 0) return;
    for (int p = 0; p < P; ++p) {
        const double way = settings.ratio < 0
                               ? keys_[chain_block(chain, p, kChainWeight, 0)] - keys_[chain_block(chain, p, kChainForward, 0)]
                               : way_backward_[p] + chain.backward_ms[p] - way_forward_[p];
        const double rounds = settings.window * (way + chain.weight_ms[p]) / round_ms_ + settings.extra;
        most.push_back(rounds < M ? std::max(1, static_cast<int>(std::ceil(rounds - 1e-6))) : M);
    }
}

double ChainScheduler::run(const ChainSettings& settings) {
    if (settings.ratio < 0) round_keys(-settings.ratio - 1, keys_);
    else path_keys(settings.ratio, settings.delay, keys_);
    windows(settings, own_most_);
    return run(keys_, settings.patience, own_most_);
}

void ChainScheduler::shift_keys(const Walk& walk, Random& random, std::vector<double>& keys) const {
    const Chain& chain = *chain_;
    const int P = chain.num_stages, M = chain.num_microbatches;
    const double noise = round_ms_ * std::pow(10.0, -2.0 * random.unit()) * (random.below(4) ? 0.5 : 2.0);
    const auto shift_some = [&](int first, int end) {
        for (int p = 0; p < P; ++p)
            for (int kind = 0; kind < kNumChainKinds; ++kind) {
                if (random.below(3)) continue;
                const double shift = noise * (2 * random.unit() - 1);
                for (int m = first; m < end; ++m) keys[chain_block(chain, p, kind, m)] += shift;
            }
    };
    const int way = random.below(8);
    if (way == 0) {
        shift_some(0, M);
    } else if (way == 1) {
        for (double& key : keys) key += noise * (2 * random.unit() - 1);
    } else if (way == 2) {  // a few microbatches
        const int first = random.below(M);
        shift_some(first, std::min(M, first + 1 + random.below(M)));
    } else {  // some blocks that the time depends on run earlier
        if (random.below(4)) keys = walk.starts;
        for (int count = 1 + random.below(4); count > 0 && !walk.critical.empty(); --count)
            keys[walk.critical[random.below(static_cast<int>(walk.critical.size()))]] -= noise;
    }
}

void ChainScheduler::take_step(Walk& walk, double patience, const std::vector<int>& most) {
    if (last_ms_ < best_ms_) best_ms_ = last_ms_, best_order_ = order_;
    if (last_ms_ > walk.ms * (1 + 1e-12)) return;
    walk.ms = last_ms_, walk.patience = patience, walk.most = most;
    latest_starts(walk.keys);
    walk.starts = start_ms_;
    walk.critical.clear();
    for (int block : order_)
        if (walk.keys[block] - start_ms_[block] < 1e-9 * last_ms_) walk.critical.push_back(block);
}

double ChainScheduler::search(int num_runs, double enough_ms, Random& random, Control& control) {
    best_ms_ = kInfinity;
    Walk walk;
    ChainSettings winner;
    const auto is_done = [&](int k) {
        if (k % 16 == 0) control.check_without_deadline();
        return best_ms_ <= enough_ms * (1 + 1e-12) || (best_ms_ < kInfinity && control.is_late());
    };
    const auto try_settings = [&](const ChainSettings& settings) {
        run(settings);
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
        run(trial_, patience, trial_most_);
        take_step(walk, patience, trial_most_);
    }
    return best_ms_;
}

}  // namespace pipeplan
