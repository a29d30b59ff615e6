// A plan on groups of devices, and the chain of costs that it makes.
#pragma once
#include <vector>

#include "chain.hpp"
#include "instance.hpp"
#include "plan_costs.hpp"

namespace pipeplan {

// What plans with split backwards need to know of the layers, beside the instance.
class ChainModel {
  public:
    // `weight_ms` is the part of each layer's backward that only computes weight gradients, and
    // `kept_bytes` what is kept for it; empty where backwards stay whole. A group's stages share the
    // optimizer's moments if `shards_optimizer`. A group serves at most `max_positions` stages.
    ChainModel(Instance instance, const std::vector<double>& weight_ms,
               const std::vector<double>& input_ms, const std::vector<double>& kept_bytes,
               int max_positions, bool shards_optimizer);

    const Instance in;
    const bool may_split;
    const int max_positions;
    const bool shards_optimizer;
    const RangeSums weight_ms, input_ms, kept_bytes;

    // The weight gradients of a stage whose backwards are cut; 0 where they stay whole. The parts are
    // known for whole microbatches only: where other times are measured for the share of a replica,
    // their sum would not be the whole.
    double cut_ms(const std::vector<int>& devices, int first, int end) const {
        return devices.size() == 1 || !in.has_measured() ? weight_ms(first, end) : 0.0;
    }

    double state_factor(int num_devices) const {
        const double whole = in.limits.state_bytes_per_parameter_byte;
        if (!shards_optimizer || whole <= 2) return whole;
        return 2 + (whole - 2) / num_devices;  // parameters and gradients stay whole
    }
};

struct ChainPlan {
    std::vector<std::vector<int>> devices;  // of each group, rising
    std::vector<int> group;                 // [stages]
    std::vector<int> end_layer;             // [stages]
    bool is_split = false;

    int num_stages() const { return static_cast<int>(group.size()); }
    int num_groups() const { return static_cast<int>(devices.size()); }
    int first_layer(int p) const { return p ? end_layer[p - 1] : 0; }
    // Makes one stage of neighbours on one group.
    void join_neighbours();
    // Drops groups without stages, and numbers the others by their first stages.
    void number_groups();
};

// The costs of plans, one after the other. A cut can be shifted at little cost.
class ChainCosts {
  public:
    explicit ChainCosts(const ChainModel& model) : model_(model) {}

    // Costs a plan with so many microbatches. False if a path is missing, if a group has too many
    // devices or stages, or if a constraint is broken. Memory may not suffice; see `fits`.
    bool take(const ChainPlan& plan, int num_microbatches);

    // Costs the plan anew, which has other cuts between these stages than before.
    void shift_cuts(const ChainPlan& plan, int first, int last);

    // Whether each group has room for one microbatch of all its stages; how much is missing in all, and
    // the group that lacks the most.
    bool fits() const { return !(missing_bytes() > 0); }
    double missing_bytes() const;
    int fullest() const;

    Chain& chain() { return chain_; }

  private:
    bool may_be(const ChainPlan& plan);
    void clear(const ChainPlan& plan, int num_microbatches);
    bool take_groups(const ChainPlan& plan);
    void take_stage(const ChainPlan& plan, int p);
    bool take_cut(const ChainPlan& plan, int p);
    void find_room(int g);
    double missing_bytes(int g) const { return held_bytes_[g] - chain_.room_bytes[g]; }

    const ChainModel& model_;
    Chain chain_;
    std::vector<Ring> rings_;          // [G]
    std::vector<SetShares> shares_;    // [G]
    std::vector<double> held_bytes_;   // [G], by one microbatch in all stages
    std::vector<double> state_bytes_;  // [P]
    std::vector<int> num_positions_;   // [G]
};

// Writes the chain of the plan with so many microbatches. False if a path is missing, if a group has
// too many devices or stages, if memory does not suffice or a constraint is broken.
bool cost_chain(const ChainModel& model, const ChainPlan& plan, int num_microbatches, Chain& chain);

}  // namespace pipeplan
