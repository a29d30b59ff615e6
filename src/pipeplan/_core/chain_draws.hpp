// Chains drawn at random, for the search to start from: groups of any size, with even work.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "chain_plan.hpp"
#include "random.hpp"

namespace pipeplan {

// Draws chains that go round groups of neighbours in an order of devices, or up and down.
class ChainDraws {
  public:
    ChainDraws(const ChainModel& model, Random& random) : model_(model), random_(random) {}

    ChainPlan draw(const std::vector<int>& order) {
        const int V = static_cast<int>(order.size()), L = model_.in.num_layers;
        const int G = 1 + random_.below(std::min({V, L, kMostGroups}));
        ChainPlan plan;
        // What cut backwards keep may be too much for the memory.
        const bool keeps = model_.kept_bytes(0, L) > 0;
        plan.is_split = model_.may_split && !(keeps && random_.below(2));
        plan.devices = cut(order, G);
        const int most = G == 1 ? 1 : std::min({model_.max_positions, kMostRounds, L / G});
        const int num_rounds = 1 + random_.below(most);
        const bool turns = random_.below(2);
        for (int round = 0; round < num_rounds; ++round)
            for (int k = 0; k < G; ++k) plan.group.push_back(turns && round % 2 ? G - 1 - k : k);
        set_even_ends(plan);
        plan.join_neighbours();
        plan.number_groups();
        return plan;
    }

  private:
    static constexpr int kMostGroups = 16, kMostRounds = 4;

    std::vector<std::vector<int>> cut(const std::vector<int>& order, int num_groups) {
        const int V = static_cast<int>(order.size());
        std::vector<int> cuts(V - 1);
        for (int k = 0; k + 1 < V; ++k) cuts[k] = k + 1;
        for (int k = 0; k + 1 < num_groups; ++k) std::swap(cuts[k], cuts[k + random_.below(V - 1 - k)]);
        cuts.resize(num_groups - 1);
        std::sort(cuts.begin(), cuts.end());
        cuts.push_back(V);
        std::vector<std::vector<int>> groups;
        int from = 0;
        for (const int end : cuts) {
            groups.emplace_back(order.begin() + from, order.begin() + end);
            std::sort(groups.back().begin(), groups.back().end());
            from = end;
        }
        return groups;
    }

    // Each stage has work in proportion to the speed of its devices, and a layer at least.
    void set_even_ends(ChainPlan& plan) const {
        const Instance& in = model_.in;
        const int P = plan.num_stages(), L = in.num_layers;
        const auto work = [&](int end) { return in.forward_ms(0, end) + in.backward_ms(0, end); };
        std::vector<double> speed;
        double all = 0.0;
        for (const auto& devices : plan.devices) {
            double slowest = kInfinity;
            for (int device : devices) slowest = std::min(slowest, in.speed[device]);
            speed.push_back(slowest * static_cast<double>(devices.size()));
        }
        for (int g : plan.group) all += speed[g];
        double goal = 0.0;
        int end = 0;
        for (int p = 0; p + 1 < P; ++p) {
            goal += speed[plan.group[p]] / all * work(L);
            ++end;
            while (end < L - (P - 1 - p) && work(end) < goal) ++end;
            plan.end_layer.push_back(end);
        }
        plan.end_layer.push_back(L);
    }

    const ChainModel& model_;
    Random& random_;
};

}  // namespace pipeplan
