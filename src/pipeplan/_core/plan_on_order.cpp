// DP3: the recursion of suffix_dp.hpp on consecutive devices of an order.
#include <memory>
#include <vector>

#include "suffix_dp.hpp"

namespace pipeplan {
namespace {

// Node V - j: the stages so far use devices from j on. Devices behind the last stage and in front
// of the first stage may stay unused.
class OrderTopology {
  public:
    static constexpr bool kKnowsFreeSets = false;
    OrderTopology(const Instance& in, const std::vector<int>& sizes)
        : in_(in), sizes_(sizes), V_(in.num_devices), intervals_(in), speed_(V_ + 1, 0.0) {
        for (int u = 0; u < V_; ++u) speed_[u + 1] = speed_[u] + in.speed[u];
    }
    int num_nodes() const { return V_ + 1; }
    int num_options() const { return static_cast<int>(sizes_.size()); }
    bool may_end(int) const { return true; }
    int attach(int node, int option) const {
        return sizes_[option] <= V_ - node ? node + sizes_[option] : -1;
    }
    int detach(int node, int option) const { return node - sizes_[option]; }
    DeviceSet set(int node, int option) const {
        const int r = sizes_[option], first = V_ - node - r;
        return {r, even_shares(r, intervals_.slowest_speed(first, r)), intervals_.ring(first, r)};
    }
    // Only the links at one node are kept; those of all nodes would take V^3 of memory.
    void enter(int node) { channels_ = std::make_unique<ChannelTable>(in_, V_ - node, sizes_); }
    LinkPair links(int, int option, int next) const {
        return {&channels_->forward(option, next), &channels_->backward(option, next)};
    }
    double head_speed(int node) const { return speed_[V_ - node]; }
    std::vector<int> devices(const PlacedStage& stage) const {
        std::vector<int> result;
        for (int r = sizes_[stage.option], u = V_ - stage.node - r; r > 0; --r) result.push_back(u++);
        return result;
    }

  private:
    const Instance& in_;
    const std::vector<int>& sizes_;
    const int V_;
    const IntervalTable intervals_;
    std::vector<double> speed_;  // prefix sums
    std::unique_ptr<ChannelTable> channels_;
};

}  // namespace

Candidates plan_on_order(const Instance& instance, const std::vector<int>& sizes,
                         const DpLimits& limits, Pool& pool, Control& control) {
    OrderTopology topology(instance, sizes);
    SuffixDp<OrderTopology> dp(instance, topology, limits, Overflow::kDrop, pool, control);
    const DpResult found = dp.run();
    Candidates result{found.least_ms, {}};
    for (const std::vector<PlacedStage>& stages : found.best) {
        std::vector<std::vector<int>> devices;
        for (const PlacedStage& stage : stages) devices.push_back(topology.devices(stage));
        result.plans.emplace_back(instance, end_layers(stages), std::move(devices));
    }
    return result;
}

}  // namespace pipeplan
