// DP3: the recursion of suffix_dp.hpp on consecutive devices of an order.
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "crossings.hpp"
#include "order_links.hpp"
#include "plan_costs.hpp"
#include "suffix_dp.hpp"

namespace pipeplan {
namespace {

// Where latencies differ, the undominated links of each pair of intervals are kept up to this number
// of devices; beyond, that would take seconds.
constexpr int kMostDevicesForLinkSets = 512;
// Shares by speed need four tables of links. Beyond this number of devices, that would take seconds.
constexpr int kMostDevicesForSplits = 4096;

// The devices stand in units of `unit` neighbours, of which a stage takes whole ones; the last unit
// may be smaller. Node U - j: the stages so far use the units from j on. Devices behind the last
// stage and in front of the first stage may stay unused.
//
// Where devices of different speed may have different shares, there are two options for each size: the
// devices share evenly, or by speed. No device u then takes more than rate * speed(u), with `rate` the
// stage's time for all of a microbatch on a device of speed 1. So a pair carries at most the product of
// the two rates and of the two speeds: links count by these weights (Weights).
class OrderTopology {
  public:
    static constexpr bool kKnowsFreeSets = false;
    OrderTopology(const Instance& in, const std::vector<int>& sizes, int unit, Pool& pool,
                  Control& control)
        : in_(in), sizes_(sizes), K_(static_cast<int>(sizes.size())),
          num_splits_(in.limits.any_shares && in.has_many_speeds() &&
                              in.num_devices <= kMostDevicesForSplits
                          ? 2
                          : 1),
          start_(starts(in.num_devices, unit)), U_(static_cast<int>(start_.size()) - 1),
          keeps_link_sets_(unit == 1 && !in.latency_ms.is_one_number() &&
                           in.num_devices <= kMostDevicesForLinkSets),
          speed_(U_ + 1, 0.0) {
        links_.reserve(num_splits_ * num_splits_);
        channels_.reserve(num_splits_ * num_splits_);
        for (int split = 0; split < num_splits_; ++split)
            for (int next = 0; next < num_splits_; ++next)
                links_.emplace_back(in, start_, sizes, Weights{split > 0, next > 0}, pool, control);
        for (int k = 0; k < U_; ++k) {
            speed_[k + 1] = speed_[k];
            for (int u = start_[k]; u < start_[k + 1]; ++u) speed_[k + 1] += in.speed[u];
        }
        tabulate_sets();
        const std::size_t num = num_options();
        if (!keeps_link_sets_) forward_.resize(num * num), backward_.resize(num * num);
    }
    int num_nodes() const { return U_ + 1; }
    int num_options() const { return num_splits_ * K_; }
    bool may_end(int) const { return true; }
    int attach(int node, int option) const {
        const int size = size_of(option);
        if (size > U_ - node || set(node, option).num_devices == 0) return -1;
        return node + size;
    }
    int detach(int node, int option) const { return node - size_of(option); }
    const DeviceSet& set(int node, int option) const {
        return sets_[at(U_ - node - size_of(option), option)];
    }
    // Only the links at one node are kept; those of all nodes would take V^3 of memory.
    void enter(int node) {
        const int boundary = U_ - node;
        if (keeps_link_sets_) channels_.clear();
        for (int split = 0; split < num_splits_; ++split) {
            for (int next = 0; next < num_splits_; ++next) {
                if (keeps_link_sets_) channels_.emplace_back(in_, boundary, sizes_, Weights{split > 0, next > 0});
                else for_all_sizes(node, [&](int a, int b) {
                    const OrderLinks& links = links_[split * num_splits_ + next];
                    const std::size_t k = pair(split * K_ + a, next * K_ + b);
                    forward_[k] = LinkSet(links.forward(boundary, a, b));
                    backward_[k] = LinkSet(links.backward(boundary, a, b));
                });
            }
        }
        if (in_.shared) insert_shared(node);
    }
    LinkPair links(int, int option, int next) const {
        if (!keeps_link_sets_) return {&forward_[pair(option, next)], &backward_[pair(option, next)]};
        const ChannelTable& table = channels_[option / K_ * num_splits_ + next / K_];
        return {&table.forward(option % K_, next % K_), &table.backward(option % K_, next % K_)};
    }
    double head_speed(int node) const { return speed_[U_ - node]; }
    bool contains(int node, int option, int device) const {
        const int first = U_ - node - size_of(option);
        return device >= start_[first] && device < start_[first + size_of(option)];
    }
    std::vector<int> devices(const PlacedStage& stage) const {
        const int first = U_ - stage.node - size_of(stage.option);
        std::vector<int> result;
        for (int u = start_[first]; u < start_[first + size_of(stage.option)]; ++u) result.push_back(u);
        return result;
    }

  private:
    static std::vector<int> starts(int num_devices, int unit) {
        std::vector<int> result;
        for (int u = 0; u < num_devices; u += unit) result.push_back(u);
        result.push_back(num_devices);
        return result;
    }
    int size_of(int option) const { return sizes_[option % K_]; }
    std::size_t at(int first, int option) const {
        return static_cast<std::size_t>(first) * num_options() + option;
    }
    // Calls visit(a, b) for all sizes that fit before and behind a node.
    template <class Visit>
    void for_all_sizes(int node, Visit&& visit) const {
        for (int a = 0; a < K_ && sizes_[a] <= U_ - node; ++a)
            for (int b = 0; b < K_ && sizes_[b] <= node; ++b) visit(a, b);
    }
    std::size_t pair(int option, int next) const {
        return static_cast<std::size_t>(option) * num_options() + next;
    }

    // What links that devices share take at least, if shares are even. Whatever is kept is judged anew.
    void insert_shared(int node) {
        const int boundary = U_ - node;
        const Crossings crossings(*in_.shared, start_, boundary, sizes_);
        for_all_sizes(node, [&](int a, int b) {
            const MemberCounts &before = crossings.before(a), &behind = crossings.behind(b);
            for (int split = 0; split < num_splits_; ++split) {
                for (int next = 0; next < num_splits_; ++next) {
                    const DeviceSet& here = sets_[at(boundary - sizes_[a], split * K_ + a)];
                    const DeviceSet& there = sets_[at(boundary, next * K_ + b)];
                    if (here.num_devices == 0 || there.num_devices == 0) continue;
                    // In the unit in which links count: see `Shares::even` of the two sets.
                    const double part = 1.0 / (static_cast<double>(here.num_devices) * there.num_devices) /
                                        (here.shares.even * there.shares.even);
                    const double unit = split + next > 0 ? part : 1.0;
                    const std::size_t k = pair(split * K_ + a, next * K_ + b);
                    ChannelTable* table =
                        keeps_link_sets_ ? &channels_[split * num_splits_ + next] : nullptr;
                    LinkSet& forward = table ? table->forward(a, b) : forward_[k];
                    LinkSet& backward = table ? table->backward(a, b) : backward_[k];
                    insert_crossings(*in_.shared, before, behind, forward, unit);
                    insert_crossings(*in_.shared, behind, before, backward, unit);
                }
            }
        });
    }

    void tabulate_sets() {
        sets_.resize(static_cast<std::size_t>(U_) * num_options());
        for (int first = 0; first < U_; ++first) {
            std::vector<int> devices;
            double slowest = kInfinity;
            std::optional<MemberCounts> members;
            if (in_.shared) members.emplace(*in_.shared);
            for (int a = 0, u = start_[first]; a < K_ && first + sizes_[a] <= U_; ++a) {
                for (; u < start_[first + sizes_[a]]; ++u) {
                    slowest = std::min(slowest, in_.speed[u]);
                    if (members) members->add(u);
                    if (static_cast<int>(devices.size()) < in_.max_replicas) devices.push_back(u);
                }
                const double shared_rate = members ? members->ring_rate() : kInfinity;
                const double rate = std::min(links_[0].inside_rate(first, a), shared_rate);
                const Ring ring =
                    make_ring(in_, u - start_[first], rate, links_[0].inside_latency_ms(first, a));
                sets_[at(first, a)] = device_set(ring, u - start_[first], slowest, devices);
                if (num_splits_ > 1 && ring.connected && in_.has_many_speeds(devices))
                    sets_[at(first, K_ + a)] = set_by_speed(ring, slowest, devices);
            }
        }
    }

    // `devices` are those of the set, if it has not too many.
    DeviceSet device_set(const Ring& ring, int r, double slowest,
                         const std::vector<int>& devices) const {
        DeviceSet set{r, even_shares(r, slowest), ring, {}};
        if (in_.has_measured() && in_.shares_evenly(r)) set.paces = {{1.0 / r, slowest}};
        if (!set.ring.connected || (in_.shares_evenly(r) && !in_.has_memory())) return set;
        const SetShares shares = shares_of_set(in_, devices, slowest);
        set.room = shares.room, set.paces = shares.paces;
        // The slowest pair counts as if it carried the largest part.
        if (in_.shares_evenly(r)) return set;
        set.shares = {in_.largest_share(r), in_.largest_share(r), shares.rate};
        if (!can_share_by_memory(in_, r)) return set;
        const SetShares by_memory = shares_of_set(in_, devices, slowest, Split::kByMemory);
        set.room_by_memory = by_memory.room, set.rate_by_memory = by_memory.rate;
        return set;
    }

    DeviceSet set_by_speed(const Ring& ring, double slowest, const std::vector<int>& devices) const {
        const SetShares shares = shares_of_set(in_, devices, slowest, Split::kBySpeed);
        DeviceSet set{static_cast<int>(devices.size()), {shares.rate, shares.rate, shares.rate}, ring,
                      shares.room};
        set.mode = kBySpeed, set.paces = shares.paces;
        return set;
    }

    const Instance& in_;
    const std::vector<int>& sizes_;  // in units
    const int K_;                    // sizes; option split * K + a has size a
    const int num_splits_;           // ways to share: evenly, and by speed
    const std::vector<int> start_;   // [units + 1], devices
    const int U_;
    std::vector<OrderLinks> links_;  // [split][next split]
    const bool keeps_link_sets_;
    std::vector<double> speed_;      // prefix sums over units
    std::vector<DeviceSet> sets_;    // [first unit][option]; no devices: not possible
    std::vector<ChannelTable> channels_;       // [split][next split], at the node entered last
    std::vector<LinkSet> forward_, backward_;  // the same, [option][next option]
};

}  // namespace

Candidates plan_on_order(const Instance& instance, const std::vector<int>& sizes, int unit,
                         const DpLimits& limits, Pool& pool, Control& control) {
    OrderTopology topology(instance, sizes, unit, pool, control);
    SuffixDp<OrderTopology> dp(instance, topology, limits, Overflow::kDrop, pool, control);
    const DpResult found = dp.run();
    Candidates result{found.least_ms, {}};
    for (const std::vector<PlacedStage>& stages : found.best) {
        std::vector<std::vector<int>> devices;
        for (const PlacedStage& stage : stages) devices.push_back(topology.devices(stage));
        result.plans.emplace_back(instance, end_layers(stages), std::move(devices), modes_of(stages));
    }
    return result;
}

}  // namespace pipeplan
