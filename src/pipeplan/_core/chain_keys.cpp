// The keys of list schedules: which block goes first.
//
// Every microbatch repeats the way of the one before it a round later, as in the building blocks of Qi
// et al. 2024 (arXiv:2405.15362): one way as if it were alone, and one on which no two blocks of a
// group meet in any round. A schedule's own latest starts are keys as well, with noise.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "chain_schedule.hpp"

namespace pipeplan {

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
    switch (random.below(10)) {
        case 0: result.ratio = other.ratio; break;
        case 1: result.ratio *= std::pow(2.0, random.unit() - 0.5); break;
        case 2: result.delay = other.delay; break;
        case 3: result.window = other.window, result.extra = other.extra; break;
        case 4: result.window *= std::pow(1.5, random.unit() - 0.5); break;
        case 5: result.extra = std::max(0.0, result.extra + random.unit() - 0.5); break;
        case 6: result.patience = other.patience; break;
        case 7: result = other; break;
        default: result.bend[random.below(4)] *= std::pow(4.0, random.unit() - 0.5);
    }
    if (result.ratio < 0) result.ratio = std::min(result.ratio, -1.0);
    return result;
}

void ChainScheduler::path_keys(const ChainSettings& settings, std::vector<double>& keys) const {
    const Chain& chain = *chain_;
    const int P = chain.num_stages, M = chain.num_microbatches;
    keys.resize(static_cast<std::size_t>(P) * kNumChainKinds * M);
    double key = 0.0, way = 0.0;
    const auto advance = [&](double to, int quarter) {
        key += settings.ratio * settings.bend[quarter] * (to - way);
        way = to;
        return key;
    };
    const auto put = [&](int p, int kind, double first) {
        for (int m = 0; m < M; ++m) keys[(p * kNumChainKinds + kind) * M + m] = first + m * round_ms_;
    };
    for (int p = 0; p < P; ++p) put(p, kChainForward, advance(way_forward_[p], 2 * p >= P ? 1 : 0));
    for (int p = P - 1; p >= 0; --p) {
        const double back = advance(way_backward_[p], 2 * p >= P ? 2 : 3);
        put(p, kChainBackward, back);
        put(p, kChainWeight, back + chain.backward_ms[p] + settings.delay * round_ms_);
    }
}

void ChainScheduler::round_keys(const ChainRound& settings, std::vector<double>& keys, Random* random) const {
    const Chain& chain = *chain_;
    const int P = chain.num_stages, M = chain.num_microbatches, G = chain.num_groups;
    const double round = round_ms_ * (1 + settings.slack), tiny = 1e-9 * round;
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
            if (wait <= tiny && random && random->unit() < settings.waits) wait = length;
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
        const double stretch = settings.stretch[2 * p >= P ? 1 : 0];
        way = start + stretch * chain.forward_ms[p] + (p + 1 < P ? chain.there_ms[p] : 0.0);
    }
    std::vector<double> ready(P);
    for (int p = P - 1; p >= 0; --p) {
        if (p + 1 < P) way += chain.back_ms[p];
        const double start = place(chain.group[p], way, chain.backward_ms[p]);
        put(p, kChainBackward, start);
        ready[p] = start + chain.backward_ms[p];
        way = start + settings.stretch[2 * p >= P ? 1 : 0] * chain.backward_ms[p];
    }
    for (int p = 0; p < P; ++p)
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
                end = std::min(end, ring_next[g] + chain.early_ms[p]);
                end = std::min(end, last_ms_ - chain.last_part_ms[p]);
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

}  // namespace pipeplan
