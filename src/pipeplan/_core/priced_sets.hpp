// What sets of devices cost at least, if each device has a price.
//
// Every device serves one stage, so all stages together cost no more than all devices, whatever the
// prices are. A set is known by two things: its rate, which is how long it takes for a work of 1, and
// the level of its ring. At a rate r a device of speed s takes at most the share r * s of a
// microbatch, or as many whole samples as that allows. So a set has to buy shares that sum to 1. Of the
// members of a set one stands first in an order of all devices; all others stand behind it and are
// linked to it at the level of the ring. The least price is that of the first one and of the cheapest
// of the others, the last of which may be bought in part (Dantzig's bound of a knapsack, 1957).
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

#include "best_links.hpp"
#include "instance.hpp"

namespace pipeplan {

// All sets with a rate between `rate` and the next one, and a ring of one level.
struct PricedOption {
    double price;  // no such set costs less
    double rate;   // no such stage computes in less than its work times this
    double reduce_ms_per_byte, reduce_fixed_ms;  // nor has a shorter all-reduce
    int step, level;                             // level -1: one device alone
};

class PricedSets {
  public:
    PricedSets(const Instance& in, const BestLinks& best)
        : in_(in), best_(best), V_(in.num_devices), most_(std::min(in.num_devices, in.max_replicas)) {
        std::vector<double> fastest = in.speed;
        std::sort(fastest.begin(), fastest.end(), std::greater<double>());
        slowest_rate_ = 1.0 / fastest.back();
        fastest_rate_ = 1.0 / std::accumulate(fastest.begin(), fastest.begin() + most_, 0.0);
        fastest_rate_ *= 1 - 1e-8;
        find_least_latency();
        if (most_ > 1) find_levels();
    }

    // All sets, cheapest first, with at most `num_steps` different rates.
    std::vector<PricedOption> options(const std::vector<double>& price, int num_steps) const {
        std::vector<PricedOption> result;
        const double span = std::log(slowest_rate_ / fastest_rate_);
        const double ratio = std::exp(std::max(kFinestStep, span / num_steps));
        int step = 0;
        for (double rate = fastest_rate_; rate < slowest_rate_; rate *= ratio, ++step)
            add_options(price, step, rate, rate * ratio, result);
        add_options(price, step, slowest_rate_ * (1 - 1e-9), slowest_rate_ * (1 + 1e-9), result);
        std::stable_sort(result.begin(), result.end(), [](const PricedOption& a, const PricedOption& b) {
            return a.price != b.price ? a.price < b.price : a.rate < b.rate;
        });
        return without_worse(result);
    }

    // Adds to `used` which part of each device such a set has if it costs no more than its price.
    void use(const PricedOption& option, const std::vector<double>& price, double next_rate,
             std::vector<double>& used) const {
        const Purchase cheapest(*this, price, next_rate);
        const auto add = [&](int u, double part) { used[u] += part; };
        if (option.level < 0) add(cheapest.single(), 1.0);
        else cheapest.least_price(levels_[option.level], add);
    }

    // The upper end of the rates of an option.
    double next_rate(const PricedOption& option, int num_steps) const {
        const double span = std::log(slowest_rate_ / fastest_rate_);
        return option.rate * std::exp(std::max(kFinestStep, span / num_steps)) * (1 + 1e-12);
    }

    double least_latency_ms() const { return latency_ms_; }
    double best_rate() const { return best_rate_; }
    int most_replicas() const { return most_; }

  private:
    static constexpr std::size_t kMostLevels = 12;
    static constexpr double kFinestStep = 0.004;  // of a logarithm
    static constexpr double kEnough = 1 - 1e-8;   // shares sum to 1, but for rounding

    // All rings from `slowest` up to `fastest`.
    struct Level {
        double slowest, fastest;
        int largest_ring;                 // no clique of such links is larger
        std::vector<int> place;           // [device], the order in which one of a set is the first
        std::vector<std::uint8_t> linked; // [device][device], in both directions
    };

    // What devices can do at a rate, those first that do the most for their price.
    class Purchase {
      public:
        Purchase(const PricedSets& sets, const std::vector<double>& price, double rate)
            : V_(sets.V_), price_(price), share_(V_), order_(V_) {
            const double samples = sets.in_.microbatch_size;
            for (int u = 0; u < V_; ++u) {
                const double share = std::min(1.0, rate * sets.in_.speed[u] * (1 + 1e-9));
                share_[u] = sets.in_.limits.whole_samples
                                ? std::floor(share * samples * (1 + 1e-9) + 1e-9) / samples
                                : share;
            }
            std::iota(order_.begin(), order_.end(), 0);
            std::stable_sort(order_.begin(), order_.end(), [&](int u, int v) {
                return share_[u] * price_[v] > share_[v] * price_[u];
            });
        }

        // The cheapest device that does all alone; -1: there is none.
        int single() const {
            int best = -1;
            for (int u = 0; u < V_; ++u)
                if (share_[u] >= kEnough && (best < 0 || price_[u] < price_[best])) best = u;
            return best;
        }

        // How many devices do all together at least.
        int fewest() const {
            std::vector<double> largest = share_;
            std::sort(largest.begin(), largest.end(), std::greater<double>());
            double sum = 0.0;
            for (int k = 0; k < V_; ++k)
                if ((sum += largest[k]) >= kEnough) return k + 1;
            return V_ + 1;
        }

        double least_price(const Level& level) const {
            double least = kInfinity;
            for (int u = 0; u < V_; ++u)
                least = std::min(least, price_with(u, level, least, [](int, double) {}));
            return least;
        }

        // The same, and which part of each device is bought.
        template <class Add>
        void least_price(const Level& level, const Add& add) const {
            double least = kInfinity;
            int first = -1;
            for (int u = 0; u < V_; ++u) {
                const double cost = price_with(u, level, least, [](int, double) {});
                if (cost < least) least = cost, first = u;
            }
            if (first >= 0) price_with(first, level, kInfinity, add);
        }

      private:
        // Of sets with `first` as their first device; infinite if none is cheaper than `known`.
        template <class Add>
        double price_with(int first, const Level& level, double known, const Add& add) const {
            if (!(share_[first] > 0)) return kInfinity;
            const std::uint8_t* linked = &level.linked[static_cast<std::size_t>(first) * V_];
            double cost = price_[first], missing = kEnough - share_[first];
            add(first, 1.0);
            int num_others = 0;
            for (int k = 0; k < V_ && (missing > 0 || num_others == 0); ++k) {
                const int v = order_[k];
                if (!linked[v] || level.place[v] < level.place[first] || !(share_[v] > 0)) continue;
                ++num_others;
                const double part = missing > 0 ? std::min(1.0, missing / share_[v]) : 0.0;
                add(v, part);
                cost += part * price_[v];
                missing -= share_[v];
                if (cost >= known) return kInfinity;
            }
            return missing > 0 || num_others == 0 ? kInfinity : cost;
        }

        const int V_;
        const std::vector<double>& price_;
        std::vector<double> share_;  // the most that each device takes
        std::vector<int> order_;
    };

    double both_ways(int u, int v) const {
        return std::min(in_.bytes_per_ms(u, v), in_.bytes_per_ms(v, u));
    }

    void find_least_latency() {
        latency_ms_ = kInfinity;
        best_rate_ = 0.0;
        for (int u = 0; u < V_; ++u)
            for (int v = 0; v < V_; ++v)
                if (u != v) {
                    latency_ms_ = std::min(latency_ms_, in_.latency_ms(u, v));
                    best_rate_ = std::max(best_rate_, in_.bytes_per_ms(u, v));
                }
        if (V_ == 1) latency_ms_ = 0.0;
    }

    // All different rates if there are few; else in equal ratios.
    void find_levels() {
        std::vector<double> rates;
        for (int u = 0; u < V_; ++u)
            for (int v = 0; v < u; ++v)
                if (both_ways(u, v) > 0) rates.push_back(both_ways(u, v));
        std::sort(rates.begin(), rates.end(), std::greater<double>());
        rates.erase(std::unique(rates.begin(), rates.end()), rates.end());
        if (rates.empty()) return;
        double fastest = rates.front();
        if (rates.size() <= kMostLevels) {
            for (double rate : rates) add_level(rate, rate);
            return;
        }
        const double ratio = std::pow(rates.back() / rates.front(), 1.0 / kMostLevels);
        for (std::size_t k = 1; k <= kMostLevels; ++k) {
            const double slowest = k == kMostLevels ? rates.back() : fastest * ratio;
            add_level(slowest, fastest);
            fastest = slowest;
        }
    }

    // Whoever has the fewest links at the level comes first. Taken out one by one, that is also the
    // order which shows how large a clique can be.
    void add_level(double slowest, double fastest) {
        Level level{slowest, fastest, 1, std::vector<int>(V_), {}};
        level.linked.assign(static_cast<std::size_t>(V_) * V_, 0);
        std::vector<int> degree(V_, 0);
        for (int u = 0; u < V_; ++u)
            for (int v = 0; v < V_; ++v)
                if (u != v && both_ways(u, v) >= slowest)
                    level.linked[static_cast<std::size_t>(u) * V_ + v] = 1, ++degree[u];
        std::vector<bool> gone(V_, false);
        for (int k = 0; k < V_; ++k) {
            int least = -1;
            for (int u = 0; u < V_; ++u)
                if (!gone[u] && (least < 0 || degree[u] < degree[least])) least = u;
            gone[least] = true;
            level.place[least] = k;
            level.largest_ring = std::max(level.largest_ring, degree[least] + 1);
            for (int v = 0; v < V_; ++v)
                if (level.linked[static_cast<std::size_t>(least) * V_ + v]) --degree[v];
        }
        levels_.push_back(std::move(level));
    }

    // Sets with rates from `rate` to `next`.
    void add_options(const std::vector<double>& price, int step, double rate, double next,
                     std::vector<PricedOption>& result) const {
        const Purchase purchase(*this, price, next);
        const int alone = purchase.single();
        if (alone >= 0) result.push_back({price[alone], rate, 0.0, 0.0, step, -1});
        const int fewest = std::max(2, purchase.fewest());
        if (fewest > most_) return;
        const double k = fewest;
        for (std::size_t level = 0; level < levels_.size(); ++level) {
            const double ring_rate = std::min(best_.ring_rate(fewest), levels_[level].fastest);
            if (fewest > levels_[level].largest_ring || ring_rate < levels_[level].slowest) continue;
            const double least = purchase.least_price(levels_[level]);
            if (!(least < kInfinity)) continue;
            result.push_back({least, rate, 2.0 * (k - 1) / k / ring_rate,
                              2.0 * (k - 1) * latency_ms_, step, static_cast<int>(level)});
        }
    }

    // Leaves out what is no better than a cheaper one in any way.
    static std::vector<PricedOption> without_worse(const std::vector<PricedOption>& options) {
        std::vector<PricedOption> kept;
        for (const PricedOption& one : options) {
            const bool is_worse = std::any_of(kept.begin(), kept.end(), [&](const PricedOption& other) {
                return other.rate <= one.rate && other.reduce_ms_per_byte <= one.reduce_ms_per_byte &&
                       other.reduce_fixed_ms <= one.reduce_fixed_ms;
            });
            if (!is_worse) kept.push_back(one);
        }
        return kept;
    }

    const Instance& in_;
    const BestLinks& best_;
    const int V_, most_;
    double fastest_rate_, slowest_rate_, latency_ms_, best_rate_;
    std::vector<Level> levels_;  // fastest first
};

}  // namespace pipeplan
