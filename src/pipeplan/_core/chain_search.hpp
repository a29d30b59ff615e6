// Searching for plans on groups of devices.
#pragma once
#include <cstdint>
#include <vector>

#include "chain_plan.hpp"
#include "chain_schedule.hpp"
#include "control.hpp"
#include "pool.hpp"

namespace pipeplan {

struct ChainResult {
    double iteration_ms = kInfinity;
    double bound_ms = 0.0;
    ChainPlan plan;
    std::vector<int> order;      // blocks, in the order of decisions; see `chain_block`
    std::vector<int> num_parts;  // [stages], of the all-reduces
    bool is_start = false;       // whether the search began with this plan
};

struct ChainBudget {
    int num_starts;  // as many walks as this share the budget: more short ones, and fewer long ones
    double anneal;   // blocks that each of so many may schedule
    double polish;   // and that may be scheduled for each of the best plans
    int num_best;    // plans that are polished and returned, a start beside them
};

// The plans by the time of their list schedules, without those that are not possible.
std::vector<ChainPlan> rank_chains(const ChainModel& model, std::vector<ChainPlan> starts, Pool& pool,
                                   Control& control);

// The best plans near the starts, the fastest first. The starts are looked at as they are, too.
std::vector<ChainResult> search_chains(const ChainModel& model, std::vector<ChainPlan> starts,
                                       std::uint64_t seed, const ChainBudget& budget, Pool& pool,
                                       Control& control);

}  // namespace pipeplan
