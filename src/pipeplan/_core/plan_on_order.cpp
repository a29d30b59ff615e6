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

// The devices stand in units of `unit` neighbours, of which a stage takes whole ones; the last unit
// may be smaller. Node U - j: the stages so far use the units from j on. Devices behind the last
// stage and in front of the first stage may stay unused.
class OrderTopology {
  public:
    static constexpr bool kKnowsFreeSets = false;
    OrderTopology(const Instance& in, const std::vector<int>& sizes, int unit, Pool& pool,
                  Control& control)
        : in_(in), sizes_(sizes), start_(starts(in.num_devices, unit)),
          U_(static_cast<int>(start_.size()) - 1), links_(in, start_, sizes, pool, control),
          keeps_link_sets_(unit == 1 && !in.latency_ms.is_one_number() &&
                           in.num_devices <= kMostDevicesForLinkSets),
          speed_(U_ + 1, 0.0) {
        for (int k = 0; k < U_; ++k) {
            speed_[k + 1] = speed_[k];
            for (int u = start_[k]; u < start_[k + 1]; ++u) speed_[k + 1] += in.speed[u];
        }
        tabulate_sets();
        const std::size_t K = sizes.size();
        if (!keeps_link_sets_) forward_.resize(K * K), backward_.resize(K * K);
    }
    int num_nodes() const { return U_ + 1; }
    int num_options() const { return static_cast<int>(sizes_.size()); }
    bool may_end(int) const { return true; }
    int attach(int node, int option) const {
        return sizes_[option] <= U_ - node ? node + sizes_[option] : -1;
    }
    int detach(int node, int option) const { return node - sizes_[option]; }
    DeviceSet set(int node, int option) const {
        return sets_[at(U_ - node - sizes_[option], option)];
    }
    // Only the links at one node are kept; those of all nodes would take V^3 of memory.
    void enter(int node) {
        const int boundary = U_ - node;
        if (keeps_link_sets_) channels_.emplace(in_, boundary, sizes_);
        else for_all_sizes(node, [&](int a, int b) {
            forward_[pair(a, b)] = LinkSet(links_.forward(boundary, a, b));
            backward_[pair(a, b)] = LinkSet(links_.backward(boundary, a, b));
        });
        if (!in_.shared) return;
        const Crossings crossings(*in_.shared, start_, boundary, sizes_);
        for_all_sizes(node, [&](int a, int b) {
            const MemberCounts &before = crossings.before(a), &behind = crossings.behind(b);
            LinkSet& forward = keeps_link_sets_ ? channels_->forward(a, b) : forward_[pair(a, b)];
            LinkSet& backward = keeps_link_sets_ ? channels_->backward(a, b) : backward_[pair(a, b)];
            insert_crossings(*in_.shared, before, behind, forward);
            insert_crossings(*in_.shared, behind, before, backward);
        });
    }
    LinkPair links(int, int option, int next) const {
        if (keeps_link_sets_) return {&channels_->forward(option, next), &channels_->backward(option, next)};
        return {&forward_[pair(option, next)], &backward_[pair(option, next)]};
    }
    double head_speed(int node) const { return speed_[U_ - node]; }
    bool contains(int node, int option, int device) const {
        const int first = U_ - node - sizes_[option];
        return device >= start_[first] && device < start_[first + sizes_[option]];
    }
    std::vector<int> devices(const PlacedStage& stage) const {
        const int first = U_ - stage.node - sizes_[stage.option];
        std::vector<int> result;
        for (int u = start_[first]; u < start_[first + sizes_[stage.option]]; ++u) result.push_back(u);
        return result;
    }

  private:
    static std::vector<int> starts(int num_devices, int unit) {
        std::vector<int> result;
        for (int u = 0; u < num_devices; u += unit) result.push_back(u);
        result.push_back(num_devices);
        return result;
    }
    std::size_t at(int first, int option) const {
        return static_cast<std::size_t>(first) * sizes_.size() + option;
    }
    // Calls visit(a, b) for all sizes that fit before and behind a node.
    template <class Visit>
    void for_all_sizes(int node, Visit&& visit) const {
        for (int a = 0; a < num_options() && sizes_[a] <= U_ - node; ++a)
            for (int b = 0; b < num_options() && sizes_[b] <= node; ++b) visit(a, b);
    }
    std::size_t pair(int a, int b) const { return static_cast<std::size_t>(a) * sizes_.size() + b; }

    void tabulate_sets() {
        sets_.resize(static_cast<std::size_t>(U_) * sizes_.size());
        for (int first = 0; first < U_; ++first) {
            std::vector<int> devices;
            double slowest = kInfinity;
            std::optional<MemberCounts> members;
            if (in_.shared) members.emplace(*in_.shared);
            for (int a = 0, u = start_[first]; a < num_options() && first + sizes_[a] <= U_; ++a) {
                for (; u < start_[first + sizes_[a]]; ++u) {
                    slowest = std::min(slowest, in_.speed[u]);
                    if (members) members->add(u);
                    if (static_cast<int>(devices.size()) < in_.max_replicas) devices.push_back(u);
                }
                const double shared_rate = members ? members->ring_rate() : kInfinity;
                const double rate = std::min(links_.inside_rate(first, a), shared_rate);
                const Ring ring =
                    make_ring(in_, u - start_[first], rate, links_.inside_latency_ms(first, a));
                sets_[at(first, a)] = device_set(ring, u - start_[first], slowest, devices);
            }
        }
    }

    // `devices` are those of the set, if it has not too many.
    DeviceSet device_set(const Ring& ring, int r, double slowest,
                         const std::vector<int>& devices) const {
        DeviceSet set{r, even_shares(r, slowest), ring, {}};
        if (!set.ring.connected || (in_.shares_evenly(r) && !in_.has_memory())) return set;
        const SetShares shares = shares_of_set(in_, devices, slowest);
        set.room = shares.room;
        // The slowest pair counts as if it carried the largest part.
        if (in_.shares_evenly(r)) return set;
        set.shares = {shares.room.more_share, shares.room.more_share, shares.rate};
        if (!can_share_by_memory(in_, r)) return set;
        const SetShares by_memory = shares_of_set(in_, devices, slowest, true);
        set.room_by_memory = by_memory.room, set.rate_by_memory = by_memory.rate;
        return set;
    }

    const Instance& in_;
    const std::vector<int>& sizes_;  // in units
    const std::vector<int> start_;   // [units + 1], devices
    const int U_;
    const OrderLinks links_;
    const bool keeps_link_sets_;
    std::vector<double> speed_;      // prefix sums over units
    std::vector<DeviceSet> sets_;    // [first unit][option]
    std::optional<ChannelTable> channels_;       // at the node entered last
    std::vector<LinkSet> forward_, backward_;    // the same, [option][next option]
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
