// A lower bound on every plan: the recursion of suffix_dp.hpp with links as good as sizes allow.
//
// Which devices a stage gets is forgotten; only their number counts. A set of r devices has a ring
// no faster than the largest rate whose graph of links at least as fast has an (r-1)-core, and
// r devices send to r' others no faster than the largest rate whose graph has a component of r + r'
// devices, r of them with r' such links and r' with r. Both are necessary for any such
// sets, so no real plan has better links. Latencies count with the least of all. Sizes may be
// grouped: a group takes as few devices as its smallest size and computes as fast as its largest.
#include <algorithm>
#include <functional>
#include <vector>

#include "suffix_dp.hpp"

namespace pipeplan {
namespace {

// A group of neighbouring rates. The graph of links is looked at with the slowest of them, which
// gives it the most links, and what is possible there is valued at the fastest. So a bound from it
// is never above the one that all rates give.
struct Level {
    double slowest, fastest;
};

// All rates above zero in groups, fastest first; one rate a group where there are few.
std::vector<Level> levels_of(std::vector<double> rates, int max_levels) {
    std::sort(rates.begin(), rates.end(), std::greater<double>());
    rates.erase(std::unique(rates.begin(), rates.end()), rates.end());
    while (!rates.empty() && !(rates.back() > 0)) rates.pop_back();
    const std::size_t size = rates.size(), num = std::min<std::size_t>(size, max_levels);
    std::vector<Level> levels;
    for (std::size_t k = 0; k < num; ++k)
        levels.push_back({rates[(k + 1) * size / num - 1], rates[k * size / num]});
    return levels;
}

class RelaxedTopology {
  public:
    RelaxedTopology(const Instance& in, const std::vector<int>& buckets, int max_levels,
                    Control& control)
        : in_(in), control_(control), max_levels_(max_levels), V_(in.num_devices), largest_(buckets), speeds_(in.speed) {
        for (std::size_t k = 0; k < buckets.size(); ++k)
            smallest_.push_back(k ? buckets[k - 1] + 1 : 1);
        std::sort(speeds_.begin(), speeds_.end(), std::greater<double>());
        least_latency_ms_ = kInfinity;
        for (int u = 0; u < V_; ++u)
            for (int v = 0; v < V_; ++v)
                if (u != v) least_latency_ms_ = std::min(least_latency_ms_, in.latency_ms[at(u, v)]);
        total_speed_.assign(V_ + 1, 0.0);
        for (int u = 0; u < V_; ++u) total_speed_[u + 1] = total_speed_[u] + speeds_[u];
        for (std::size_t k = 0; k < largest_.size(); ++k) shares_.push_back(shares_of(k));
        tabulate_rings();
        tabulate_links();
    }
    int num_nodes() const { return V_ + 1; }
    int num_options() const { return static_cast<int>(largest_.size()); }
    bool may_end(int node) const { return node == 0; }
    int attach(int node, int option) const {
        return node + smallest_[option] <= V_ ? node + smallest_[option] : -1;
    }
    int detach(int node, int option) const { return node - smallest_[option]; }
    DeviceSet set(int, int option) const {
        return {largest_[option], shares_[option], rings_[option]};
    }
    void enter(int) {}
    LinkPair links(int, int option, int next) const {
        const LinkSet* links = &links_[static_cast<std::size_t>(option) * num_options() + next];
        return {links, links};
    }
    double head_speed(int node) const { return total_speed_[V_ - node]; }

  private:
    // The least that any size of the group allows.
    Shares shares_of(std::size_t option) const {
        const double fastest = speeds_[smallest_[option] - 1];
        Shares least = even_shares(largest_[option], fastest);
        for (int k = smallest_[option]; k <= largest_[option]; ++k) {
            const Shares one = whole_or_even_shares(in_, k, fastest, total_speed_[k]);
            least.least = std::min(least.least, one.least);
            least.compute_rate = std::min(least.compute_rate, one.compute_rate);
        }
        return least;
    }

    std::size_t at(int u, int v) const { return static_cast<std::size_t>(u) * V_ + v; }

    template <class Combine>
    std::vector<double> rates(Combine combine) const {
        std::vector<double> result(static_cast<std::size_t>(V_) * V_, 0.0);
        for (int u = 0; u < V_; ++u)
            for (int v = 0; v < V_; ++v)
                if (u != v && in_.bytes_per_ms[at(u, v)] > 0 && in_.bytes_per_ms[at(v, u)] > 0)
                    result[at(u, v)] = combine(in_.bytes_per_ms[at(u, v)], in_.bytes_per_ms[at(v, u)]);
        return result;
    }

    // A ring needs both directions of every pair, so the slower of the two counts.
    void tabulate_rings() {
        const std::vector<double> rate = rates([](double a, double b) { return std::min(a, b); });
        std::vector<double> fastest(V_ + 1, 0.0);  // by the size of the set
        int reached = 1;
        for (const Level& level : levels_of(rate, max_levels_)) {
            const int core = degeneracy(rate, level.slowest);
            for (; reached <= core; ++reached) fastest[reached + 1] = level.fastest;
            if (reached >= V_) break;
        }
        for (std::size_t k = 0; k < largest_.size(); ++k) {
            const int r = smallest_[k];
            rings_.push_back(make_ring(in_, r, r == 1 ? kInfinity : fastest[r], least_latency_ms_));
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

    // Either direction may be the one that is used, so the faster of the two counts.
    void tabulate_links() {
        const std::vector<double> rate = rates([](double a, double b) { return std::max(a, b); });
        const int K = num_options();
        links_.resize(static_cast<std::size_t>(K) * K);
        std::vector<double> fastest(links_.size(), 0.0);
        for (const Level& level : levels_of(rate, max_levels_)) {
            control_.check();
            for (const std::vector<int>& at_least : components(rate, level.slowest)) {
                // at_least[d]: how many devices of the component have d or more links.
                const int size = at_least[0];
                for (int a = 0; a < K && smallest_[a] < size; ++a) {
                    for (int b = 0; b < K && smallest_[a] + smallest_[b] <= size; ++b) {
                        double& best = fastest[static_cast<std::size_t>(a) * K + b];
                        if (best == 0.0 && at_least[smallest_[b]] >= smallest_[a] &&
                            at_least[smallest_[a]] >= smallest_[b])
                            best = level.fastest;
                    }
                }
            }
        }
        const double best = *std::max_element(rate.begin(), rate.end());
        for (std::size_t k = 0; k < links_.size(); ++k) {
            links_[k].insert(fastest[k] > 0 ? Link{least_latency_ms_, 1.0 / fastest[k]}
                                            : Link{kInfinity, 0.0});
            if (best > 0) links_[k].insert_best({least_latency_ms_, 1.0 / best});
        }
    }

    std::vector<std::vector<int>> components(const std::vector<double>& rate, double level) const {
        std::vector<std::vector<int>> result;
        std::vector<std::uint8_t> seen(V_, 0);
        for (int start = 0; start < V_; ++start) {
            if (seen[start]) continue;
            std::vector<int> stack{start}, at_least(V_ + 1, 0);
            seen[start] = 1;
            while (!stack.empty()) {
                const int u = stack.back();
                stack.pop_back();
                int degree = 0;
                for (int v = 0; v < V_; ++v) {
                    if (!(rate[at(u, v)] >= level)) continue;
                    ++degree;
                    if (!seen[v]) seen[v] = 1, stack.push_back(v);
                }
                for (int d = 0; d <= degree; ++d) ++at_least[d];
            }
            result.push_back(std::move(at_least));
        }
        return result;
    }

    const Instance& in_;
    Control& control_;
    const int max_levels_;
    const int V_;
    const std::vector<int> largest_;
    std::vector<int> smallest_;
    std::vector<double> speeds_;       // falling
    std::vector<double> total_speed_;  // of the fastest k devices
    double least_latency_ms_;
    std::vector<Shares> shares_;       // [option]
    std::vector<Ring> rings_;          // [option]
    std::vector<LinkSet> links_;       // [option][option]
};

}  // namespace

double relaxed_bound(const Instance& instance, const std::vector<int>& buckets, int max_levels,
                     const DpLimits& limits, Pool& pool, Control& control) {
    RelaxedTopology topology(instance, buckets, max_levels, control);
    SuffixDp<RelaxedTopology> dp(instance, topology, limits, Overflow::kMerge, pool, control);
    return dp.run().least_ms;
}

}  // namespace pipeplan
