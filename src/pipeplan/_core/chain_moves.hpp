// The moves of the search for plans on groups of devices.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "chain_plan.hpp"
#include "random.hpp"

namespace pipeplan {

class ChainMoves {
  public:
    ChainMoves(const ChainModel& model, Random& random)
        : model_(model), random_(random), num_layers_(model.in.num_layers),
          num_devices_(model.in.num_devices) {}

    // Changes the plan at random; false if the move is not possible, and the plan then of no use.
    bool make(ChainPlan& plan) {
        is_far_ = false;
        if (!make_one(plan)) return false;
        if (random_.below(4)) return true;
        ChainPlan twice = plan;  // a move that fails may have changed something
        if (make_one(twice)) plan = std::move(twice);
        return true;
    }

    // Whether the last change was of more than cuts.
    bool is_far() const { return is_far_; }

  private:
    static constexpr int kJoinEvery = 4;
    static constexpr int kCuts = 42;  // so many moves of a hundred only shift cuts

    bool make_one(ChainPlan& plan) {
        const int die = random_.below(100);
        bool done = false;
        is_far_ |= die >= kCuts;
        if (die < 24) done = shift_cut(plan);
        else if (die < kCuts) done = carry_layer(plan);
        else if (die < 52) done = insert_stage(plan);
        else if (die < 59) done = remove_stage(plan);
        else if (die < 66) done = reassign(plan);
        else if (die < 72) done = swap_groups_of_stages(plan);
        else if (die < 78) done = swap_sets(plan);
        else if (die < 84) done = move_device(plan);
        else if (die < 90) done = swap_devices(plan);
        else if (die < 94) done = divide_group(plan);
        else if (die < 97) done = join_groups(plan);
        else if (die < 99 || !model_.may_split) done = reverse_run(plan);
        else done = true, plan.is_split = !plan.is_split;
        if (!done) return false;
        // Two stages of a group in a row hold less at once than one large stage, which rarely pays.
        if (model_.max_positions == 1 || random_.below(kJoinEvery)) plan.join_neighbours();
        plan.number_groups();
        return true;
    }

    bool shift_cut(ChainPlan& plan) {
        const int P = plan.num_stages();
        if (P < 2) return false;
        const int p = random_.below(P - 1), by = (1 + random_.below(3)) * (random_.below(2) ? 1 : -1);
        const int end = plan.end_layer[p] + by;
        if (end <= plan.first_layer(p) || end >= plan.end_layer[p + 1]) return false;
        plan.end_layer[p] = end;
        return true;
    }

    // One stage gives some layers, another one far away takes as many; all between move along.
    bool carry_layer(ChainPlan& plan) {
        const int P = plan.num_stages();
        if (P < 3) return false;
        int from = random_.below(P), to = random_.below(P);
        if (from == to) return false;
        const int by = from < to ? -1 : 1;
        const int count = 1 + (random_.below(4) == 0);
        for (int p = std::min(from, to); p < std::max(from, to); ++p) plan.end_layer[p] += by * count;
        for (int p = 0; p < P; ++p)
            if (plan.end_layer[p] <= plan.first_layer(p)) return false;
        return true;
    }

    bool insert_stage(ChainPlan& plan) {
        const int P = plan.num_stages(), p = random_.below(P);
        const int first = plan.first_layer(p), end = plan.end_layer[p];
        if (end - first < 2) return false;
        const int cut = first + 1 + random_.below(end - first - 1);
        const int g = random_.below(plan.num_groups());
        if (g == plan.group[p]) return false;
        plan.group.insert(plan.group.begin() + p + (random_.below(2) ? 1 : 0), g);
        plan.end_layer.insert(plan.end_layer.begin() + p, cut);
        return true;
    }

    bool remove_stage(ChainPlan& plan) {
        const int P = plan.num_stages();
        if (P < 2) return false;
        const int p = random_.below(P);
        const int first = plan.first_layer(p), end = plan.end_layer[p];
        if (p == 0) {
            plan.end_layer.erase(plan.end_layer.begin());
        } else if (p == P - 1) {
            plan.end_layer.erase(plan.end_layer.begin() + p - 1);
        } else {
            const int way = random_.below(3);
            plan.end_layer[p - 1] = way == 0 ? first : way == 1 ? end : (first + end) / 2;
            plan.end_layer.erase(plan.end_layer.begin() + p);
        }
        plan.group.erase(plan.group.begin() + p);
        return true;
    }

    bool reassign(ChainPlan& plan) {
        const int g = random_.below(plan.num_groups()), p = random_.below(plan.num_stages());
        if (plan.group[p] == g) return false;
        plan.group[p] = g;
        return true;
    }

    bool swap_groups_of_stages(ChainPlan& plan) {
        const int P = plan.num_stages(), p = random_.below(P);
        const int q = random_.below(2) ? random_.below(P) : p + 1;
        if (q >= P || plan.group[p] == plan.group[q]) return false;
        std::swap(plan.group[p], plan.group[q]);
        return true;
    }

    bool swap_sets(ChainPlan& plan) {
        const int g = random_.below(plan.num_groups()), h = random_.below(plan.num_groups());
        if (g == h) return false;
        std::swap(plan.devices[g], plan.devices[h]);
        return true;
    }

    std::vector<int> unused(const ChainPlan& plan) const {
        std::vector<char> is_used(num_devices_, 0);
        for (const auto& devices : plan.devices)
            for (int device : devices) is_used[device] = 1;
        std::vector<int> result;
        for (int device = 0; device < num_devices_; ++device)
            if (!is_used[device]) result.push_back(device);
        return result;
    }

    static void put(std::vector<int>& devices, int device) {
        devices.insert(std::lower_bound(devices.begin(), devices.end(), device), device);
    }

    bool move_device(ChainPlan& plan) {
        const std::vector<int> free = unused(plan);
        const int h = random_.below(plan.num_groups());
        if (!free.empty() && random_.below(2)) {
            const int device = free[random_.below(static_cast<int>(free.size()))];
            if (random_.below(3) == 0) {  // a group of its own, with a part of some stage
                plan.devices.push_back({device});
                return split_for(plan, random_.below(plan.num_stages()), plan.num_groups() - 1);
            }
            put(plan.devices[h], device);
            return true;
        }
        const int g = random_.below(plan.num_groups());
        if (plan.devices[g].size() < 2) return false;
        const int k = random_.below(static_cast<int>(plan.devices[g].size()));
        const int device = plan.devices[g][k];
        if (g == h && random_.below(4)) return false;
        plan.devices[g].erase(plan.devices[g].begin() + k);
        if (g != h) put(plan.devices[h], device);
        return true;
    }

    bool swap_devices(ChainPlan& plan) {
        const std::vector<int> free = unused(plan);
        const int g = random_.below(plan.num_groups()), h = random_.below(plan.num_groups());
        auto& here = plan.devices[g];
        const int k = random_.below(static_cast<int>(here.size()));
        const int device = here[k];
        if (!free.empty() && random_.below(3) == 0) {
            here.erase(here.begin() + k);
            put(here, free[random_.below(static_cast<int>(free.size()))]);
            return true;
        }
        if (g == h) return false;
        auto& there = plan.devices[h];
        const int l = random_.below(static_cast<int>(there.size())), other = there[l];
        here.erase(here.begin() + k), there.erase(there.begin() + l);
        put(here, other), put(there, device);
        return true;
    }

    // The stage gives a part of its layers to a stage of the group.
    bool split_for(ChainPlan& plan, int p, int g) {
        const int first = plan.first_layer(p), end = plan.end_layer[p];
        if (end - first < 2) return false;
        plan.group.insert(plan.group.begin() + p + (random_.below(2) ? 1 : 0), g);
        plan.end_layer.insert(plan.end_layer.begin() + p, first + 1 + random_.below(end - first - 1));
        return true;
    }

    // A group becomes two; each of its stages goes to one of them, or is cut for both.
    bool divide_group(ChainPlan& plan) {
        const int g = random_.below(plan.num_groups());
        const int size = static_cast<int>(plan.devices[g].size());
        if (size < 2) return false;
        const int kept = random_.below(2) ? size / 2 : 1 + random_.below(size - 1);
        std::vector<int> moved(plan.devices[g].begin() + kept, plan.devices[g].end());
        plan.devices[g].resize(kept);
        plan.devices.push_back(std::move(moved));
        const int h = plan.num_groups() - 1;
        bool has_both = false;
        for (int p = plan.num_stages() - 1; p >= 0; --p) {
            if (plan.group[p] != g) continue;
            if (random_.below(3) == 0) plan.group[p] = h, has_both = true;
            else if (random_.below(2) || !has_both) has_both |= split_for(plan, p, h);
        }
        return has_both;
    }

    bool join_groups(ChainPlan& plan) {
        const int g = random_.below(plan.num_groups()), h = random_.below(plan.num_groups());
        if (g == h) return false;
        for (int device : plan.devices[h]) put(plan.devices[g], device);
        for (int& each : plan.group)
            if (each == h) each = g;
        return true;
    }

    bool reverse_run(ChainPlan& plan) {
        const int P = plan.num_stages();
        if (P < 3) return false;
        int p = random_.below(P), q = random_.below(P);
        if (p > q) std::swap(p, q);
        if (q - p < 2) return false;
        std::reverse(plan.group.begin() + p, plan.group.begin() + q + 1);
        return true;
    }

    bool is_far_ = false;
    const ChainModel& model_;
    Random& random_;
    const int num_layers_, num_devices_;
};

}  // namespace pipeplan
