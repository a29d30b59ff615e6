// All sets of devices, as nodes and options of the recursion in suffix_dp.hpp.
//
// Devices of one class can be exchanged for one another without changing any speed or link, so
// a set is the number of its devices from each class: 81 sets instead of 65,536 for two hosts of
// eight equal devices.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

#include "crossings.hpp"
#include "suffix_dp.hpp"

namespace pipeplan {

class SetTopology {
  public:
    static constexpr bool kKnowsFreeSets = true;
    SetTopology(const Instance& in, const std::vector<int>& class_of) : in_(in) {
        members_.resize(*std::max_element(class_of.begin(), class_of.end()) + 1);
        for (int u = 0; u < in.num_devices; ++u) members_[class_of[u]].push_back(u);
        if (encode_limit() > kMaxSets)
            throw std::invalid_argument("instance: has too many different sets of devices");
        list_sets();
        tabulate();
    }
    int num_nodes() const { return static_cast<int>(sets_.size()); }
    int num_options() const { return static_cast<int>(sets_.size()); }
    bool may_end(int node) const { return node == 0; }
    int attach(int node, int option) const { return option == 0 ? -1 : sum_[pair(node, option)]; }
    int detach(int node, int option) const { return difference_[pair(node, option)]; }
    const DeviceSet& set(int, int option) const { return device_sets_[option]; }
    void enter(int) {}
    LinkPair links(int, int option, int next) const {
        return {&links_[pair(option, next)], &links_[pair(next, option)]};
    }
    double head_speed(int node) const { return speed_.back() - speed_[node]; }
    // Only for devices that are alone in their class.
    bool contains(int, int option, int device) const {
        for (std::size_t c = 0; c < members_.size(); ++c)
            if (members_[c][0] == device) return sets_[option][c] > 0;
        return false;
    }
    bool may_follow(int option, int next) const { return attach(next, option) >= 0; }
    // Nodes know which devices are used, so a listing need not count them.
    std::uint64_t bits(int) const { return 0; }
    bool is_known(int) const { return true; }

    // Gives every stage its own devices of each class, from the option of each stage.
    std::vector<std::vector<int>> devices(const std::vector<int>& options) const {
        std::vector<int> given(members_.size(), 0);
        std::vector<std::vector<int>> result;
        for (int option : options) {
            std::vector<int> mine;
            for (std::size_t c = 0; c < members_.size(); ++c)
                for (int k = 0; k < sets_[option][c]; ++k)
                    mine.push_back(members_[c][given[c]++]);
            result.push_back(std::move(mine));
        }
        return result;
    }

  private:
    static constexpr std::size_t kMaxSets = 2048;  // tables of pairs take 80 bytes a pair

    using Counts = std::vector<int>;

    std::size_t pair(int a, int b) const { return static_cast<std::size_t>(a) * sets_.size() + b; }

    void list_sets() {
        Counts counts(members_.size(), 0);
        for (;;) {
            sets_.push_back(counts);
            std::size_t c = 0;
            while (c < counts.size() && ++counts[c] > static_cast<int>(members_[c].size()))
                counts[c++] = 0;
            if (c == counts.size()) break;
        }
        // Later nodes hold more devices; the empty set comes first, the whole cluster last.
        std::stable_sort(sets_.begin(), sets_.end(), [](const Counts& a, const Counts& b) {
            return std::accumulate(a.begin(), a.end(), 0) < std::accumulate(b.begin(), b.end(), 0);
        });
    }

    void tabulate() {
        const int N = num_nodes();
        sum_.assign(static_cast<std::size_t>(N) * N, -1);
        difference_.assign(sum_.size(), -1);
        links_.resize(sum_.size());
        speed_.assign(N, 0.0);
        for (int a = 0; a < N; ++a) {
            for (std::size_t c = 0; c < members_.size(); ++c)
                speed_[a] += sets_[a][c] * in_.speed[members_[c][0]];
            if (in_.shared) shared_.push_back(members_of(sets_[a]));
            device_sets_.push_back(device_set(sets_[a]));
        }
        std::vector<int> index_of(encode_limit(), -1);
        for (int a = 0; a < N; ++a) index_of[encode(sets_[a])] = a;
        Counts total(members_.size());
        for (int a = 0; a < N; ++a) {
            for (int b = 0; b < N; ++b) {
                bool fits = true;
                for (std::size_t c = 0; c < members_.size(); ++c) {
                    total[c] = sets_[a][c] + sets_[b][c];
                    fits = fits && total[c] <= static_cast<int>(members_[c].size());
                }
                if (!fits) continue;
                const int whole = index_of[encode(total)];
                sum_[pair(a, b)] = whole;
                difference_[pair(whole, b)] = a;
                if (a == 0 || b == 0) continue;
                links_[pair(a, b)] = links_between(sets_[a], sets_[b]);
                if (in_.shared)
                    insert_crossings(*in_.shared, shared_[a], shared_[b], links_[pair(a, b)]);
            }
        }
    }

    std::size_t encode_limit() const {
        std::size_t limit = 1;
        for (const std::vector<int>& members : members_)
            if ((limit *= members.size() + 1) > kMaxSets) break;  // far from overflowing
        return limit;
    }
    std::size_t encode(const Counts& counts) const {
        std::size_t code = 0;
        for (std::size_t c = 0; c < counts.size(); ++c)
            code = code * (members_[c].size() + 1) + counts[c];
        return code;
    }

    // Two different devices, of these classes.
    std::pair<int, int> representatives(std::size_t c, std::size_t d) const {
        return {members_[c][0], c == d ? members_[c][1] : members_[d][0]};
    }

    LinkSet links_between(const Counts& senders, const Counts& receivers) const {
        LinkSet links;
        SummedLinks together;
        for (std::size_t c = 0; c < senders.size(); ++c) {
            for (std::size_t d = 0; d < receivers.size(); ++d) {
                if (!senders[c] || !receivers[d]) continue;
                const auto [u, v] = representatives(c, d);
                links.insert(link_between(in_, u, v));
                together.insert(link_between(in_, u, v), senders[c] * receivers[d]);
            }
        }
        if (in_.limits.any_shares) links.insert_whole(together.link());
        return links;
    }

    // How many devices of a set are members of each shared link; devices of a class are of the same.
    MemberCounts members_of(const Counts& counts) const {
        MemberCounts members(*in_.shared);
        for (std::size_t c = 0; c < counts.size(); ++c)
            for (int k = 0; k < counts[c]; ++k) members.add(members_[c][k]);
        return members;
    }

    // Fastest first.
    std::vector<double> speeds_of(const Counts& counts) const {
        std::vector<double> speeds;
        for (std::size_t c = 0; c < counts.size(); ++c)
            speeds.insert(speeds.end(), counts[c], in_.speed[members_[c][0]]);
        std::sort(speeds.begin(), speeds.end(), std::greater<double>());
        return speeds;
    }

    DeviceSet device_set(const Counts& counts) const {
        const int k = std::accumulate(counts.begin(), counts.end(), 0);
        double speed = kInfinity, slowest = kInfinity, latency_ms = 0.0;
        for (std::size_t c = 0; c < counts.size(); ++c) {
            if (!counts[c]) continue;
            speed = std::min(speed, in_.speed[members_[c][0]]);
            for (std::size_t d = 0; d < counts.size(); ++d) {
                if (!counts[d] || (c == d && counts[c] < 2)) continue;
                const auto [u, v] = representatives(c, d);
                slowest = std::min(slowest, in_.bytes_per_ms[in_.at(u, v)]);
                latency_ms = std::max(latency_ms, in_.latency_ms[in_.at(u, v)]);
            }
        }
        if (k == 0) return {0, {0.0, 0.0, 0.0}, {0.0, 0.0, false}, {}};
        if (in_.shared) slowest = std::min(slowest, shared_.back().ring_rate());
        const std::vector<double> speeds = speeds_of(counts);
        if (in_.limits.any_shares) {
            const Shares shares = any_shares(in_, speeds);
            return {k, shares, make_ring(in_, k, slowest, latency_ms), pooled_room(counts, shares)};
        }
        const int more = num_with_more_samples(in_, k);
        const double slowest_of_more = more ? speeds[more - 1] : speed;
        const Shares shares = whole_or_even_shares(in_, k, speed, slowest_of_more);
        return {k,
                shares,
                make_ring(in_, k, slowest, latency_ms),
                room_of(counts, shares),
                even_shares(k, speed).compute_rate,
                more ? whole_rate(in_, k, speed, slowest_of_more) : 0.0};
    }

    // At best: the devices with a sample more may be those with the most memory.
    Room room_of(const Counts& counts, const Shares& shares) const {
        if (!in_.has_memory()) return {};
        double most = 0.0, least = kInfinity;
        for_memories(counts, [&](double bytes, int) {
            most = std::max(most, bytes), least = std::min(least, bytes);
        });
        if (shares.least == shares.even) return {{shares.even, least}};
        return {{shares.even, most}, {shares.least, least}};
    }

    // With any shares: all devices together hold a microbatch, and each the least share of it.
    Room pooled_room(const Counts& counts, const Shares& shares) const {
        if (!in_.has_memory()) return {};
        Holding all{1.0, 0.0, 0}, one{shares.least, kInfinity};
        for_memories(counts, [&](double bytes, int count) {
            all.bytes += count * bytes, all.num_devices += count;
            one.bytes = std::min(one.bytes, bytes);
        });
        return {all, one};
    }

    template <class Visit>
    void for_memories(const Counts& counts, const Visit& visit) const {
        for (std::size_t c = 0; c < counts.size(); ++c)
            if (counts[c]) visit(in_.limits.memory_bytes[members_[c][0]], counts[c]);
    }

    const Instance& in_;
    std::vector<std::vector<int>> members_;  // [class]
    std::vector<Counts> sets_;
    std::vector<MemberCounts> shared_;       // [set], where links are shared
    std::vector<DeviceSet> device_sets_;
    std::vector<double> speed_;              // summed
    std::vector<int> sum_, difference_;      // [set][set], -1 where there is none
    std::vector<LinkSet> links_;             // [set][set], disjoint ones
};

}  // namespace pipeplan
