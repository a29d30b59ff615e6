// The least that shared links cost device sets of given sizes, whichever devices they are.
//
// Links that have no device in common form a family: call their members hosts, and a device of none of
// them free. Let n of a senders and m of b receivers be on a host. Then n * (b - m) pairs leave it and
// m * (a - n) enter it. All hosts can stay below a level if these numbers, divided by their
// capacities, do: for each n that leaves an interval of possible m. A recursion over the hosts adds
// the ends of these intervals for each sum of all n, the lower ends and the upper ends apart. It thus
// finds ways that are none, but never misses one. The least level is found by halving. A cluster with
// racks around its hosts has two families; the larger of their values counts.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "control.hpp"
#include "instance.hpp"

namespace pipeplan {

class SharedBest {
  public:
    // Knows nothing where the instance has no shared links. For pairs of sizes up to `most_steps` in all.
    SharedBest(const Instance& in, Control& control, double most_steps = 6e7)
        : control_(control), V_(in.num_devices) {
        if (!in.shared) return;
        const SharedLinks& links = *in.shared;
        latency_ms_ = kInfinity;
        for (int side = 0; side < links.num_sides(); ++side)
            latency_ms_ = std::min(latency_ms_, links.latency_ms(side));
        find_families(links);
        crossing_.assign(static_cast<std::size_t>(V_ + 1) * (V_ + 1), 0.0);
        tabulate(most_steps);
    }

    bool knows_links() const { return !families_.empty(); }
    double latency_ms() const { return latency_ms_; }  // the least on any shared link
    // No ring of so many devices is always faster.
    double ring_rate(int num_devices) const {
        double rate = kInfinity;
        for (const Family& family : families_) rate = std::min(rate, family.ring_rate(num_devices));
        return rate;
    }
    // In a transfer from a devices to b others some side carries at least so many pairs, times the ms
    // that each byte takes there.
    double crossing(int a, int b) const {
        return crossing_.empty() ? 0.0 : crossing_[static_cast<std::size_t>(a) * (V_ + 1) + b];
    }

  private:
    static constexpr std::size_t kMostFamilies = 3;
    static constexpr int kHalvings = 12;

    struct Host {
        int size;
        double out, in;
    };

    struct Family {
        std::vector<Host> hosts;
        int num_free = 0;

        double ring_rate(int num_devices) const {
            int largest = num_free;
            std::vector<std::pair<double, int>> by_rate;  // fastest first
            for (const Host& host : hosts) {
                largest = std::max(largest, host.size);
                by_rate.emplace_back(-std::min(host.out, host.in), host.size);
            }
            if (num_devices <= largest) return kInfinity;
            std::sort(by_rate.begin(), by_rate.end());
            int num = num_free;
            for (const auto& [rate, size] : by_rate)
                if ((num += size) >= num_devices) return -rate;
            return kInfinity;  // there are not so many devices
        }
    };

    void find_families(const SharedLinks& links) {
        std::vector<std::vector<int>> members(links.num_links());
        for (int u = 0; u < V_; ++u)
            for (int link : links.links_of(u)) members[link].push_back(u);
        std::vector<std::vector<char>> taken;  // [family][device]
        for (int link = 0; link < links.num_links(); ++link) {
            if (members[link].empty()) continue;
            std::size_t f = 0;
            const auto is_apart = [&] {
                return std::none_of(members[link].begin(), members[link].end(),
                                    [&](int u) { return taken[f][u]; });
            };
            while (f < taken.size() && !is_apart()) ++f;
            if (f == kMostFamilies) continue;
            if (f == taken.size()) taken.emplace_back(V_, 0), families_.emplace_back();
            for (int u : members[link]) taken[f][u] = 1;
            families_[f].hosts.push_back(
                {static_cast<int>(members[link].size()), links.out(link), links.in(link)});
        }
        for (std::size_t f = 0; f < taken.size(); ++f)
            families_[f].num_free = static_cast<int>(std::count(taken[f].begin(), taken[f].end(), 0));
    }

    void tabulate(double most_steps) {
        for (const Family& family : families_) {
            double steps_of_one = 0.0;
            for (const Host& host : family.hosts) steps_of_one += 2.0 * kHalvings * host.size * V_;
            const bool is_symmetric = std::all_of(family.hosts.begin(), family.hosts.end(),
                                                  [](const Host& host) { return host.out == host.in; });
            double steps = 0.0;
            // Small sets first: they are the most likely ones.
            for (int total = 2; total <= V_; ++total) {
                control_.check();
                for (int a = 1; a < total; ++a) {
                    const int b = total - a;
                    if (is_symmetric && a > b) continue;
                    if ((steps += steps_of_one * a / V_) > most_steps) return;
                    const double level = least_level(family, a, b);
                    raise(a, b, level);
                    if (is_symmetric) raise(b, a, level);
                }
            }
        }
    }

    void raise(int a, int b, double level) {
        double& known = crossing_[static_cast<std::size_t>(a) * (V_ + 1) + b];
        known = std::max(known, level);
    }

    // No way to place a senders and b receivers keeps all hosts below this level.
    double least_level(const Family& family, int a, int b) {
        if (is_possible(family, a, b, 0.0)) return 0.0;
        double slowest = kInfinity;
        for (const Host& host : family.hosts) slowest = std::min({slowest, host.out, host.in});
        double low = 0.0, high = static_cast<double>(a) * b / slowest;
        for (int k = 0; k < kHalvings; ++k) {
            const double middle = 0.5 * (low + high);
            (is_possible(family, a, b, middle) ? high : low) = middle;
        }
        // Where all capacities are alike, levels are whole numbers of pairs.
        return next_level(family, low);
    }

    static double next_level(const Family& family, double low) {
        double next = kInfinity;
        for (const Host& host : family.hosts)
            for (double rate : {host.out, host.in})
                next = std::min(next, (std::floor(low * rate * (1 - 1e-9)) + 1) / rate);
        return std::max(low, next * (1 - 1e-12));
    }

    bool is_possible(const Family& family, int a, int b, double level) {
        const double most = level * (1 + 1e-12);
        fewest_.assign(a + 1, kNone), most_.assign(a + 1, -kNone);
        // Free devices: any numbers.
        for (int n = 0; n <= std::min(a, family.num_free); ++n)
            fewest_[n] = 0, most_[n] = std::min(b, family.num_free - n);
        for (const Host& host : family.hosts) {
            next_fewest_.assign(a + 1, kNone), next_most_.assign(a + 1, -kNone);
            for (int n = 0; n <= std::min(a, host.size); ++n) {
                // n * (b - m) <= most * out, and m * (a - n) <= most * in.
                const double leaving = n ? b - most * host.out / n : 0.0;
                const int low = leaving > 0 ? static_cast<int>(std::ceil(leaving - 1e-9)) : 0;
                int high = std::min(host.size - n, b);
                if (n < a) {
                    const double entering = most * host.in / (a - n);
                    if (entering < high) high = static_cast<int>(entering + 1e-9);
                }
                if (low > high) continue;
                for (int sum = n; sum <= a; ++sum) {
                    if (fewest_[sum - n] == kNone) continue;
                    next_fewest_[sum] = std::min(next_fewest_[sum], fewest_[sum - n] + low);
                    next_most_[sum] = std::max(next_most_[sum], most_[sum - n] + high);
                }
            }
            fewest_.swap(next_fewest_), most_.swap(next_most_);
        }
        return fewest_[a] <= b && b <= most_[a];
    }

    static constexpr int kNone = 1 << 28;
    Control& control_;
    const int V_;
    double latency_ms_ = 0.0;
    std::vector<Family> families_;
    std::vector<double> crossing_;  // [senders][receivers]
    std::vector<int> fewest_, most_, next_fewest_, next_most_;  // receivers, by the number of senders
};

}  // namespace pipeplan
