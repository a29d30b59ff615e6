// The planning kernels. bindings.cpp knows Python.
#pragma once
#include <cstdint>
#include <vector>

#include "control.hpp"
#include "instance.hpp"
#include "pipeline.hpp"
#include "pool.hpp"

namespace pipeplan {

// The lightest set of edges whose removal disconnects a graph (Stoer and Wagner 1997).
struct Cut {
    double weight;
    std::vector<std::uint8_t> side;  // [vertices], 1 on the side that was cut off
};
// The weights are finite and >= 0, and so is their sum; there are at least two vertices.
Cut min_cut(const double* weights, int num_vertices, Control& control);

// The time of every possible stage, for each number of devices.
struct StageTimes {
    int num_sizes;
    int num_layers;
    const double* ms;  // [sizes][first layer][one past the last layer]; layers + 1 values each

    const double* of(int size, int first) const {
        const std::size_t row = static_cast<std::size_t>(num_layers) + 1;
        return ms + (size * row + first) * row;
    }
};

// The stages with the least sum of times. They use all devices, and no time is above the limit.
struct LeastSum {
    double sum_ms;               // infinite if there are none
    std::vector<int> end_layer;  // [stages]
    std::vector<int> size;       // [stages], devices
};
LeastSum least_sum(const StageTimes& times, const int* sizes, int num_devices, double limit_ms,
                   Control& control);

struct Partition {
    double bottleneck_ms;
    PlacedPlan plan;
};

// For each number of stages up to max_stages the partition with the least bottleneck, on
// consecutive devices of the instance's order. Numbers of stages whose bottleneck is above the
// limit are left out.
std::vector<Partition> partition(const Instance& instance, int max_stages, double limit_ms,
                                 Pool& pool, Control& control);

struct Candidates {
    double least_ms;  // the least bound over all plans considered, at most limit_ms
    std::vector<PlacedPlan> plans;
};

// The common settings of the recursions on the fixed-plan bound.
struct DpLimits {
    int capacity;      // points kept in a front
    double limit_ms;   // the time of a known plan: states that cannot beat it are dropped
    int num_best;      // the number of plans to return
};

// Plans on consecutive devices of the instance's order. Stages take whole units of `unit` devices
// that are neighbours in the order, in numbers from `sizes` (rising).
Candidates plan_on_order(const Instance& instance, const std::vector<int>& sizes, int unit,
                         const DpLimits& limits, Pool& pool, Control& control);

// Whether all layers fit on consecutive devices of the instance's order, in stages of `sizes` devices
// (rising), if each stage holds one microbatch. Links and constraints do not count.
bool fits_on_order(const Instance& instance, const std::vector<int>& sizes, Control& control);

// A plan with its schedule, as codes of blocks.
struct FoundPlan {
    double iteration_ms;
    PlacedPlan plan;
    std::vector<Code> codes;  // [stages][2 * microbatches]; empty if there is none
};

struct ProvedPlans {
    Candidates candidates;
    FoundPlan found;  // faster than the limit; else without codes
};

// Plans on any sets of devices, and a lower bound on the time of all plans. Devices of one class
// count as equal; class_of comes from `device_classes`, or has smaller classes. If `proof_steps` is
// not 0, single plans are looked at as well, to raise the bound or to find a faster plan.
ProvedPlans plan_on_sets(const Instance& instance, const std::vector<int>& class_of,
                         const DpLimits& limits, double proof_steps, Pool& pool, Control& control);

// The same where there are too many sets: only small ones are known, and of the larger ones the size.
// `proved_ms` is known to be a bound, and rises. `dp_steps` says how much the recursion may look at.
ProvedPlans prove_on_near_sets(const Instance& instance, const DpLimits& limits, double proved_ms,
                               double dp_steps, double proof_steps, Pool& pool, Control& control);

// A lower bound on the time of all plans. It knows only the size of each device set, and takes the
// best links that sets of this size could have. Neighbouring sizes form groups; `buckets` has the
// largest size of each group. Link rates form at most `max_levels` groups.
double relaxed_bound(const Instance& instance, const std::vector<int>& buckets, int max_levels,
                     const DpLimits& limits, Pool& pool, Control& control);

// The same by prices of devices: devices that many stages want are dear. No plan is known to take less than
// `proved_ms`, one takes `limit_ms`; the result lies between. `steps` says how much it may look at.
double price_bound(const Instance& instance, double proved_ms, double limit_ms, double steps,
                   Control& control);

// The share of each device of a stage (Instance::shares), as far as memory allows.
std::vector<double> shares_of_stage(const Instance& instance, int first_layer, int end_layer,
                                    const std::vector<int>& devices, int mode);

// The most microbatches that each stage of a plan may hold, at most all of them; empty if a stage
// does not fit or has too many replicas, or if a path is missing.
std::vector<int> caps_of(const Instance& instance, const PlacedPlan& plan);

// The iteration time of a plan under each schedule of the portfolio. If the first one takes longer
// than `worth_ms`, the others are not tried: their times are infinite. Empty if a path is missing
// or a stage has too many replicas.
std::vector<double> rule_times(const Instance& instance, const PlacedPlan& plan, double worth_ms,
                               Control& control);

// What a plan is worth: a time to rank it by, and the time under each schedule of the portfolio that
// was simulated in full; the others are infinite. No times if the plan is not possible.
struct Judgement {
    double rank_ms;
    std::vector<double> times_ms;
};
// The same as `rule_times` for few microbatches. For many, estimates say which schedules could be
// faster than `best_ms`, and only these are simulated in full.
Judgement judge_plan(const Instance& instance, const PlacedPlan& plan, double best_ms,
                     double worth_ms, Control& control);

struct SearchResult {
    double iteration_ms;
    int rule;  // the schedule with this time, as in pipeline.hpp
    PlacedPlan plan;
};

// Simulated annealing from each of the starts. Each has its own random numbers and its own budget
// (about a nanosecond a unit). At first it takes plans that are slower by the part `hottest`, later
// nearly none. It stops at a plan that takes no longer than `target_ms`. Plans that
// cannot beat `known_ms` are estimated, not simulated, but for the best one of each search. At the
// deadline it returns the best plans so far. With an `overflow_price`, as a part of `known_ms`, it
// also passes through plans that do not fit into memory; it never returns one.
std::vector<SearchResult> local_search(const Instance& instance,
                                       const std::vector<PlacedPlan>& starts, std::uint64_t seed,
                                       double budget, double target_ms, double known_ms,
                                       double hottest, Pool& pool, Control& control,
                                       double overflow_price = 0.0);

}  // namespace pipeplan
