// Whether all layers fit on consecutive devices of an order, whatever time a plan takes.
#include <vector>

#include "front_room.hpp"
#include "kernels.hpp"
#include "plan_costs.hpp"

namespace pipeplan {
namespace {

struct RoomSet {
    Ring ring;
    Room room, room_by_memory = {};
    double rate_by_memory = 0.0;
};

// As OrderTopology (plan_on_order.cpp), with one device a unit and without links: only room counts.
class RoomTopology {
  public:
    static constexpr bool kKnowsFreeSets = false;
    RoomTopology(const Instance& in, const std::vector<int>& sizes)
        : V_(in.num_devices), K_(static_cast<int>(sizes.size())),
          num_splits_(in.limits.any_shares && in.has_many_speeds() ? 2 : 1), sizes_(sizes),
          sets_(static_cast<std::size_t>(V_) * num_options(), RoomSet{{0.0, 0.0, false}, {}}) {
        for (int first = 0; first < V_; ++first)
            for (int a = 0; a < K_ && first + sizes[a] <= V_ && sizes[a] <= in.max_replicas; ++a)
                tabulate(in, first, a);
    }
    int num_nodes() const { return V_ + 1; }
    int num_options() const { return num_splits_ * K_; }
    int attach(int node, int option) const {
        return sizes_[option % K_] > V_ - node ? -1 : node + sizes_[option % K_];
    }
    const RoomSet& set(int node, int option) const {
        return sets_[at(V_ - node - sizes_[option % K_], option)];
    }

  private:
    std::size_t at(int first, int option) const {
        return static_cast<std::size_t>(first) * num_options() + option;
    }
    void tabulate(const Instance& in, int first, int a) {
        std::vector<int> devices;
        double slowest = kInfinity;
        for (int u = first; u < first + sizes_[a]; ++u) {
            devices.push_back(u);
            slowest = std::min(slowest, in.speed[u]);
        }
        RoomSet& even = sets_[at(first, a)];
        even = {{0.0, 0.0, true}, shares_of_set(in, devices, slowest).room};
        if (can_share_by_memory(in, sizes_[a])) {
            const SetShares by_memory = shares_of_set(in, devices, slowest, Split::kByMemory);
            even.room_by_memory = by_memory.room, even.rate_by_memory = by_memory.rate;
        }
        if (num_splits_ > 1)
            sets_[at(first, K_ + a)] = {{0.0, 0.0, true},
                                        shares_of_set(in, devices, slowest, Split::kBySpeed).room};
    }

    const int V_, K_, num_splits_;
    const std::vector<int>& sizes_;
    std::vector<RoomSet> sets_;  // [first device][option]
};

}  // namespace

bool fits_on_order(const Instance& instance, const std::vector<int>& sizes, Control& control) {
    const RoomTopology topology(instance, sizes);
    return FrontRoom<RoomTopology>(instance, topology, control).most_layers(0) == instance.num_layers;
}

}  // namespace pipeplan
