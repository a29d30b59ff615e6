// What sets of devices cost at least, if each device has a price.
//
// Every device serves one stage, so all stages together cost no more than all devices, whatever the
// prices are. A set is known by three things: its leader, its size and the level of its ring.
// The leader is its slowest device. All others are faster, or equally fast and earlier in one order
// of all devices. Each of them is linked to the leader at the level or faster. So the set costs at
// least as much as the leader and the cheapest of its neighbours that may follow it.
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "best_links.hpp"
#include "links.hpp"

namespace pipeplan {

// All sets of one leader, size and level of rings, or those of them that compute about as fast.
struct PricedSet {
    int size;
    int leader;
    int level;
    double rate;       // no such stage computes in less than its work times this
    double ring_rate;  // no such ring is faster
    double price;      // no such set costs less
};

class SetPrices {
  public:
    SetPrices(const Instance& in, const BestLinks& best)
        : in_(in), best_(best), V_(in.num_devices), linked_(V_) {
        find_levels();
        for (int u = 0; u < V_; ++u) {
            linked_[u].assign(V_, 0);
            for (int v = 0; v < V_; ++v) {
                const double both = std::min(in.bytes_per_ms(u, v), in.bytes_per_ms(v, u));
                int level = 0;
                while (level < num_levels() && both < levels_[level].slowest) ++level;
                linked_[u][v] = u == v ? num_levels() : level;
            }
        }
    }

    int num_levels() const { return static_cast<int>(levels_.size()); }

    // Calls `visit(set)` for all sets of these sizes, which rise. `finely`: whether sets that give some
    // devices a sample more are looked at apart by the speed of these.
    template <class Visit>
    void for_sets(const std::vector<double>& price, const std::vector<int>& sizes, bool finely,
                  const Visit& visit) const {
        const std::vector<int> order = leaders_last(price);
        std::vector<int> place(V_), cheapest(V_);
        for (int k = 0; k < V_; ++k) place[order[k]] = k;
        std::iota(cheapest.begin(), cheapest.end(), 0);
        std::stable_sort(cheapest.begin(), cheapest.end(),
                         [&](int u, int v) { return price[u] < price[v]; });
        std::vector<int> followers;
        std::vector<double> sum;
        for (int u = 0; u < V_; ++u) {
            for (int level = 0; level < std::max(1, num_levels()); ++level) {
                followers.clear();
                sum.assign(1, price[u]);
                for (int v : cheapest) {
                    if (place[v] >= place[u] || linked_[u][v] > level) continue;
                    followers.push_back(v);
                    sum.push_back(sum.back() + price[v]);
                }
                for (int size : sizes) {
                    if (size > static_cast<int>(sum.size()) || size > in_.max_replicas) break;
                    if (size == 1 && level > 0) continue;
                    const double ring = size == 1 ? kInfinity : ring_rate(size, level);
                    if (!(ring > 0)) continue;
                    visit_rates({size, u, level, 0.0, ring, sum[size - 1]}, followers, sum, price,
                                finely, visit);
                }
            }
        }
    }

    // The devices that a set has if it costs no more than its price.
    std::vector<int> cheapest_devices(const PricedSet& set, const std::vector<double>& price) const {
        const std::vector<int> order = leaders_last(price);
        std::vector<int> followers;
        for (int v : order) {
            if (v == set.leader) break;
            if (linked_[set.leader][v] <= set.level) followers.push_back(v);
        }
        std::stable_sort(followers.begin(), followers.end(), [&](int u, int v) {
            return price[u] < price[v] || (price[u] == price[v] && u < v);
        });
        followers.resize(set.size - 1);
        followers.push_back(set.leader);
        return followers;
    }

  private:
    static constexpr int kMostLevels = 8;
    static constexpr double kRateStep = 0.04;  // of a logarithm

    // Fastest first; of equally fast ones the dearest, so that a leader is the cheapest of these.
    std::vector<int> leaders_last(const std::vector<double>& price) const {
        std::vector<int> order(V_);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int u, int v) {
            return in_.speed[u] != in_.speed[v] ? in_.speed[u] > in_.speed[v] : price[u] > price[v];
        });
        return order;
    }

    // Between the best ring of two devices and that of many, in equal ratios; then all that is slower.
    void find_levels() {
        const int many = std::min({V_, in_.max_replicas, 32});
        double fastest = V_ > 1 ? best_.ring_rate(2) : 0.0, slowest = fastest, least = fastest;
        for (int size = 2; size <= many; ++size)
            if (best_.ring_rate(size) > 0) slowest = best_.ring_rate(size);
        for (int u = 0; u < V_; ++u)
            for (int v = 0; v < u; ++v) {
                const double both = std::min(in_.bytes_per_ms(u, v), in_.bytes_per_ms(v, u));
                if (both > 0) least = std::min(least, both);
            }
        if (!(fastest > 0)) return;
        const double ratio = std::pow(slowest / fastest, 1.0 / (kMostLevels - 1));
        double upper = fastest;
        for (int k = 1; k < kMostLevels && slowest < fastest; ++k) {
            const double lower = k == kMostLevels - 1 ? slowest : upper * ratio;
            if (lower < upper) levels_.push_back({lower, upper});
            upper = lower;
        }
        if (levels_.empty() || least < upper) levels_.push_back({least, upper});
    }

    // The fastest ring of a level; 0: there is none of this size.
    double ring_rate(int size, int level) const {
        if (num_levels() == 0) return 0.0;
        const double best = best_.ring_rate(size);
        return best < levels_[level].slowest ? 0.0 : std::min(best, levels_[level].fastest);
    }

    // Exactly even shares, or whole samples: then some devices with a sample more are faster than the
    // leader, and the set costs at least as much as these and the cheapest others.
    template <class Visit>
    void visit_rates(PricedSet set, const std::vector<int>& followers, const std::vector<double>& sum,
                     const std::vector<double>& price, bool finely, const Visit& visit) const {
        const double slowest = in_.speed[set.leader], samples = in_.microbatch_size;
        const int more = num_with_more_samples(in_, set.size), fewer = in_.microbatch_size / set.size;
        const bool splits = !in_.limits.whole_samples || more == 0;
        set.rate = splits || !finely ? even_shares(set.size, slowest).compute_rate
                                     : (fewer + 1) / samples / slowest;
        visit(set);
        if (more == 0 || !finely) return;
        const double least = fewer / samples / slowest;
        const int num_steps = static_cast<int>(std::ceil(std::log(set.rate / least) / kRateStep));
        const double ratio = std::pow(least / set.rate, 1.0 / num_steps);
        const double star = set.price;
        for (int step = 1; step <= num_steps && least < set.rate; ++step) {
            // Faster than the rate so far, at most as fast as the next one.
            const double needed = (fewer + 1) / samples / set.rate * (1 + 1e-12);
            double dear = sum[set.size - 1 - more];
            int missing = more;
            for (std::size_t k = 0; k < followers.size() && missing > 0; ++k)
                if (in_.speed[followers[k]] >= needed) dear += price[followers[k]], --missing;
            if (missing > 0) return;  // still faster ones are missing too
            set.rate = step == num_steps ? least : set.rate * ratio;
            set.price = std::max(star, dear);
            visit(set);
        }
    }

    const Instance& in_;
    const BestLinks& best_;
    const int V_;
    std::vector<RateLevel> levels_;         // fastest first
    std::vector<std::vector<int>> linked_;  // [device][device]: the fastest level that has the link
};

}  // namespace pipeplan
