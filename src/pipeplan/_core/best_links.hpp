// The best links that device sets of given sizes could have, whichever devices they are.
//
// A ring of r devices needs a clique of r devices in the graph of links that are fast enough in both
// directions. A transfer from a devices to b others needs all a * b links. Rates are looked at from
// the fastest to the slowest; the first rate at which the graph has such a clique, or such two sets,
// is the answer. Cliques are searched for up to a number of steps, small sets of senders or
// receivers one by one. Where that would take too long, a necessary condition stands instead, so an
// answer is never slower than the truth.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "control.hpp"
#include "instance.hpp"

namespace pipeplan {

// A group of neighbouring rates. The graph of links is looked at with the slowest of them, which
// gives it the most links, and what is possible there is valued at the fastest. So a rate from it
// is never below the one that all rates give.
struct RateLevel {
    double slowest, fastest;
};

// All rates above zero in groups, fastest first; one rate a group where there are few.
inline std::vector<RateLevel> rate_levels(std::vector<double> rates, std::size_t max_levels) {
    std::sort(rates.begin(), rates.end(), std::greater<double>());
    rates.erase(std::unique(rates.begin(), rates.end()), rates.end());
    while (!rates.empty() && !(rates.back() > 0)) rates.pop_back();
    const std::size_t size = rates.size(), num = std::min(size, max_levels);
    std::vector<RateLevel> levels;
    for (std::size_t k = 0; k < num; ++k)
        levels.push_back({rates[(k + 1) * size / num - 1], rates[k * size / num]});
    return levels;
}

// A set of up to 128 devices.
class DeviceBits {
  public:
    static constexpr int kMost = 128;
    void insert(int u) { words_[u / 64] |= std::uint64_t{1} << (u % 64); }
    void erase(int u) { words_[u / 64] &= ~(std::uint64_t{1} << (u % 64)); }
    bool empty() const { return !(words_[0] | words_[1]); }
    int count() const { return ones(words_[0]) + (words_[1] ? ones(words_[1]) : 0); }
    int first() const {
        return words_[0] ? __builtin_ctzll(words_[0]) : 64 + __builtin_ctzll(words_[1]);
    }
    DeviceBits operator&(const DeviceBits& other) const {
        return {words_[0] & other.words_[0], words_[1] & other.words_[1]};
    }
    DeviceBits without(const DeviceBits& other) const {
        return {words_[0] & ~other.words_[0], words_[1] & ~other.words_[1]};
    }
    DeviceBits() = default;

  private:
    // Without an instruction for it a call of the compiler's own takes twice as long.
    static int ones(std::uint64_t word) {
        word -= word >> 1 & 0x5555555555555555u;
        word = (word & 0x3333333333333333u) + (word >> 2 & 0x3333333333333333u);
        return static_cast<int>(((word + (word >> 4)) & 0x0f0f0f0f0f0f0f0fu) * 0x0101010101010101u >> 56);
    }
    DeviceBits(std::uint64_t a, std::uint64_t b) : words_{a, b} {}
    std::uint64_t words_[2] = {0, 0};
};

// Whether a graph has a clique of a given size: branch and bound with colours.
class CliqueSearch {
  public:
    CliqueSearch(const std::vector<DeviceBits>& neighbours, long steps)
        : neighbours_(neighbours), steps_left_(steps) {}

    bool gave_up() const { return steps_left_ <= 0; }

    // True also if the steps are spent before the answer is known.
    bool has_clique(const DeviceBits& among, int size) {
        if (size <= 0) return true;
        if (among.count() < size) return false;
        if (--steps_left_ <= 0) return true;
        // Devices of one colour are not linked, so a clique has at most one of each. Those of the
        // first size - 1 colours alone have no such clique: one of the others is in it.
        std::array<std::uint8_t, DeviceBits::kMost> order;
        int num_others = 0, colour = 0;
        for (DeviceBits left = among; !left.empty(); ++colour) {
            for (DeviceBits open = left; !open.empty();) {
                const int u = open.first();
                left.erase(u);
                open.erase(u);
                open = open.without(neighbours_[u]);
                if (colour >= size - 1) order[num_others++] = static_cast<std::uint8_t>(u);
            }
        }
        DeviceBits rest = among;
        for (int k = num_others; k-- > 0;) {
            if (has_clique(rest & neighbours_[order[k]], size - 1)) return true;
            rest.erase(order[k]);
        }
        return false;
    }

  private:
    const std::vector<DeviceBits>& neighbours_;
    long steps_left_;
};

class BestLinks {
  public:
    BestLinks(const Instance& in, std::size_t max_levels, Control& control)
        : control_(control), V_(in.num_devices), max_levels_(max_levels),
          rate_(in.bytes_per_ms.table().size(), 0.0), ring_rate_(V_ + 1, 0.0),
          star_rates_(2) {
        for (int u = 0; u < V_; ++u)
            for (int v = 0; v < V_; ++v)  // a link without a way back is no link
                if (u != v && in.bytes_per_ms[at(v, u)] > 0)
                    rate_[at(u, v)] = in.bytes_per_ms[at(u, v)];
        find_rings();
        find_transfers();
    }

    // For each number of devices, the highest rate at which so many send to `num_others` others
    // together, each over its best links; or receive from them.
    std::vector<double> summed_rates(int num_others, bool sends) const {
        std::vector<double> sums;
        for (int u = 0; u < V_; ++u) {
            std::vector<double> rates;
            for (int v = 0; v < V_; ++v) rates.push_back(rate_[sends ? at(u, v) : at(v, u)]);
            std::sort(rates.begin(), rates.end(), std::greater<double>());
            sums.push_back(std::accumulate(rates.begin(), rates.begin() + num_others, 0.0));
        }
        std::sort(sums.begin(), sums.end(), std::greater<double>());
        std::partial_sum(sums.begin(), sums.end(), sums.begin());
        sums.insert(sums.begin(), 0.0);
        return sums;
    }
    double best_rate() const { return *std::max_element(rate_.begin(), rate_.end()); }

    // No ring of r devices is faster; 0: there is none.
    double ring_rate(int r) const { return r == 1 ? kInfinity : ring_rate_[r]; }

    // No transfer from a devices to b others is faster; 0: there is none.
    double transfer_rate(int a, int b) const {
        if (a + b > V_) return 0.0;
        const int most = static_cast<int>(star_rates_[0].size()) - 1;
        if (std::min(a, b) <= most)
            return a <= b ? star_rates_[0][a][b] : star_rates_[1][b][a];
        // Some of the senders send to all receivers, and all senders to some of the receivers.
        return std::min({star_rates_[0][most][b], star_rates_[1][most][a], degree_rate_[at(a, b)]});
    }

  private:
    static constexpr long kCliqueSteps = 200'000;
    static constexpr double kTransferSteps = 4e5;

    std::size_t at(int u, int v) const { return static_cast<std::size_t>(u) * V_ + v; }

    // A ring needs both directions of every pair, so the slower of the two counts.
    void find_rings() {
        std::vector<double> rate(rate_.size(), 0.0);
        for (int u = 0; u < V_; ++u)
            for (int v = 0; v < V_; ++v) rate[at(u, v)] = std::min(rate_[at(u, v)], rate_[at(v, u)]);
        std::vector<std::pair<int, int>> pairs;  // fastest first
        for (int u = 0; u < V_; ++u)
            for (int v = 0; v < u; ++v)
                if (rate[at(u, v)] > 0) pairs.emplace_back(u, v);
        std::stable_sort(pairs.begin(), pairs.end(), [&](const auto& a, const auto& b) {
            return rate[at(a.first, a.second)] > rate[at(b.first, b.second)];
        });
        std::vector<DeviceBits> neighbours(V_ <= DeviceBits::kMost ? V_ : 0);
        DeviceBits everyone;
        for (int u = 0; u < V_ && V_ <= DeviceBits::kMost; ++u) everyone.insert(u);
        CliqueSearch search(neighbours, V_ <= DeviceBits::kMost ? kCliqueSteps : 0);
        std::size_t begin = 0;
        int reached = 1;
        for (const RateLevel& level : rate_levels(rate, max_levels_)) {
            control_.check();
            std::size_t end = begin;
            for (; end < pairs.size() &&
                   rate[at(pairs[end].first, pairs[end].second)] >= level.slowest; ++end) {
                if (neighbours.empty()) continue;
                neighbours[pairs[end].first].insert(pairs[end].second);
                neighbours[pairs[end].second].insert(pairs[end].first);
            }
            // A clique that was not there before has one of the new links.
            const auto grows = [&] {
                if (search.gave_up()) return degeneracy(rate, level.slowest) >= reached;
                if (end - begin > kFewLinks) return search.has_clique(everyone, reached + 1);
                for (std::size_t k = begin; k < end; ++k)
                    if (search.has_clique(neighbours[pairs[k].first] & neighbours[pairs[k].second],
                                          reached - 1))
                        return true;
                return false;
            };
            while (reached < V_ && grows()) ring_rate_[++reached] = level.fastest;
            if (reached >= V_) break;
            begin = end;
        }
    }

    // The largest k for which the graph of links at least as fast as `level` has a k-core.
    int degeneracy(const std::vector<double>& rate, double level) const {
        control_.check();
        std::vector<int> degree(V_, 0);
        std::vector<std::uint8_t> removed(V_, 0);
        for (int u = 0; u < V_; ++u)
            for (int v = 0; v < V_; ++v) degree[u] += rate[at(u, v)] >= level;
        int core = 0;
        for (int step = 0; step < V_; ++step) {
            int least = -1;
            for (int u = 0; u < V_; ++u)
                if (!removed[u] && (least < 0 || degree[u] < degree[least])) least = u;
            core = std::max(core, degree[least]);
            removed[least] = 1;
            for (int v = 0; v < V_; ++v)
                if (!removed[v] && rate[at(least, v)] >= level) --degree[v];
        }
        return core;
    }

    // For both directions: the best rate between some `a` devices on this side and `b` on the other.
    void find_transfers() {
        double num_sets = 0.0, of_size = 1.0;
        int most = 0;
        while (most < (V_ <= DeviceBits::kMost ? (V_ + 1) / 2 : 1)) {
            of_size = of_size * (V_ - most) / (most + 1);
            if (most > 0 && (num_sets + of_size) * kFewestLevels > kTransferSteps) break;
            num_sets += of_size, ++most;
        }
        const std::size_t num_levels =
            std::min<std::size_t>(max_levels_, std::max(double{kFewestLevels}, kTransferSteps / num_sets));
        const std::vector<RateLevel> levels = rate_levels(rate_, num_levels);
        for (int side = 0; side < 2; ++side) {
            std::vector<std::vector<double>>& rates = star_rates_[side];
            rates.assign(most + 1, std::vector<double>(V_ + 1, 0.0));
            if (V_ <= DeviceBits::kMost)
                count_partners(levels, side == 0, most, rates);
            else
                count_links(levels, side == 0, rates);
        }
        if (most < V_ / 2) count_degrees(levels, most);
    }

    // Which devices a set of devices is linked to in common, at each level.
    void count_partners(const std::vector<RateLevel>& levels, bool sends, int most,
                        std::vector<std::vector<double>>& rates) {
        const std::size_t num = levels.size();
        std::vector<std::vector<DeviceBits>> linked(V_, std::vector<DeviceBits>(num));
        for (int u = 0; u < V_; ++u)
            for (int v = 0; v < V_; ++v)
                for (std::size_t k = 0; k < num; ++k)
                    if ((sends ? rate_[at(u, v)] : rate_[at(v, u)]) >= levels[k].slowest)
                        linked[u][k].insert(v);
        std::vector<std::vector<int>> partners(most + 1, std::vector<int>(num, 0));
        std::vector<std::vector<DeviceBits>> common(most + 1, std::vector<DeviceBits>(num));
        const std::function<void(int, int)> extend = [&](int first, int size) {
            control_.check();
            for (int u = first; u < V_; ++u) {
                for (std::size_t k = 0; k < num; ++k) {
                    common[size + 1][k] = size ? common[size][k] & linked[u][k] : linked[u][k];
                    partners[size + 1][k] =
                        std::max(partners[size + 1][k], common[size + 1][k].count());
                }
                if (size + 1 < most) extend(u + 1, size + 1);
            }
        };
        extend(0, 0);
        for (int a = 1; a <= most; ++a)
            for (std::size_t k = num; k-- > 0;)  // the fastest level stays
                for (int b = 1; b <= partners[a][k]; ++b) rates[a][b] = levels[k].fastest;
    }

    // The same for one device, on clusters that are too large for sets of bits.
    void count_links(const std::vector<RateLevel>& levels, bool sends,
                     std::vector<std::vector<double>>& rates) {
        for (std::size_t k = levels.size(); k-- > 0;) {
            control_.check();
            for (int u = 0; u < V_; ++u) {
                int partners = 0;
                for (int v = 0; v < V_; ++v)
                    partners += (sends ? rate_[at(u, v)] : rate_[at(v, u)]) >= levels[k].slowest;
                for (int b = 1; b <= partners; ++b)
                    rates[1][b] = std::max(rates[1][b], levels[k].fastest);
            }
        }
    }

    // If a devices send to b others, these a + b are connected; a of them have b links or more to
    // others, and b of them have a links or more from others.
    void count_degrees(const std::vector<RateLevel>& levels, int more_than) {
        degree_rate_.assign(rate_.size(), 0.0);
        for (std::size_t k = levels.size(); k-- > 0;) {
            for (const Component& part : components(levels[k].slowest)) {
                for (int a = more_than + 1; a + more_than < part.size; ++a)
                    for (int b = more_than + 1; a + b <= part.size; ++b)
                        if (part.sends[b] >= a && part.receives[a] >= b)
                            degree_rate_[at(a, b)] = levels[k].fastest;
            }
        }
    }

    // How many devices of a connected part send to d others or more, and receive from as many.
    struct Component {
        int size = 0;
        std::vector<int> sends, receives;
    };

    std::vector<Component> components(double level) const {
        control_.check();
        std::vector<Component> result;
        std::vector<std::uint8_t> seen(V_, 0);
        for (int start = 0; start < V_; ++start) {
            if (seen[start]) continue;
            Component part{0, std::vector<int>(V_ + 1, 0), std::vector<int>(V_ + 1, 0)};
            std::vector<int> stack{start};
            seen[start] = 1;
            while (!stack.empty()) {
                const int u = stack.back();
                stack.pop_back();
                int sends = 0, receives = 0;
                for (int v = 0; v < V_; ++v) {
                    const bool there = rate_[at(u, v)] >= level, back = rate_[at(v, u)] >= level;
                    sends += there, receives += back;
                    if ((there || back) && !seen[v]) seen[v] = 1, stack.push_back(v);
                }
                ++part.size;
                for (int d = 0; d <= sends; ++d) ++part.sends[d];
                for (int d = 0; d <= receives; ++d) ++part.receives[d];
            }
            result.push_back(std::move(part));
        }
        return result;
    }

    static constexpr std::size_t kFewLinks = 8;
    static constexpr int kFewestLevels = 32;

    Control& control_;
    const int V_;
    const std::size_t max_levels_;
    std::vector<double> rate_;       // [devices][devices]
    std::vector<double> ring_rate_;  // [size]
    std::vector<double> degree_rate_;  // [senders][receivers]
    std::vector<std::vector<std::vector<double>>> star_rates_;  // [sends, receives][size][other size]
};

}  // namespace pipeplan
