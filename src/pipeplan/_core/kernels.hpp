// The planning kernels. bindings.cpp is the only file that knows Python.
#pragma once
#include <cstdint>
#include <vector>

#include "control.hpp"
#include "instance.hpp"
#include "pool.hpp"

namespace pipeplan {

// The lightest set of edges whose removal disconnects a graph (Stoer and Wagner 1997).
struct Cut {
    double weight;
    std::vector<std::uint8_t> side;  // [vertices], 1 on the side that was cut off
};
// The weights are finite and >= 0, and so is their sum; there are at least two vertices.
Cut min_cut(const double* weights, int num_vertices, Control& control);

// How long every possible stage takes, for each number of devices that one may have.
struct StageTimes {
    int num_sizes;
    int num_layers;
    const double* ms;  // [sizes][layers + 1][layers + 1], from a first layer to one past the last

    const double* of(int size, int first) const {
        const std::size_t row = static_cast<std::size_t>(num_layers) + 1;
        return ms + (size * row + first) * row;
    }
};

// The stages whose times have the least sum, none above the limit, on all devices together.
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
// consecutive devices of the instance's order; none where all are above the limit.
std::vector<Partition> partition(const Instance& instance, int max_stages, double limit_ms,
                                 Pool& pool, Control& control);

struct Candidates {
    double least_ms;  // the least bound over all plans considered, at most limit_ms
    std::vector<PlacedPlan> plans;
};

// What the recursions on the fixed-plan bound have in common.
struct DpLimits {
    int capacity;      // points kept in a front
    double limit_ms;   // the time of a plan that is known: what cannot beat it is dropped
    int num_best;      // how many plans to trace back
};

// Plans on consecutive devices of the instance's order, with replica counts from `sizes` (rising).
Candidates plan_on_order(const Instance& instance, const std::vector<int>& sizes,
                         const DpLimits& limits, Pool& pool, Control& control);

// Plans on any sets of devices, and a lower bound on all of them. Devices of one class count as one
// kind; class_of is what `device_classes` gives, or finer.
Candidates plan_on_sets(const Instance& instance, const std::vector<int>& class_of,
                        const DpLimits& limits, Pool& pool, Control& control);

// A lower bound on all plans from optimistic links by the sizes of sets alone. `buckets` are the
// largest sizes of groups of sizes that are taken as one; rates of links are taken in at most
// `max_levels` groups.
double relaxed_bound(const Instance& instance, const std::vector<int>& buckets, int max_levels,
                     const DpLimits& limits, Pool& pool, Control& control);

// The iteration time of a plan under each rule of the portfolio. The others are tried only where the
// first takes at most `worth_ms`, else they are infinite. Empty where the plan lacks a path or
// has more replicas than are allowed.
std::vector<double> rule_times(const Instance& instance, const PlacedPlan& plan, double worth_ms,
                               Control& control);

struct SearchResult {
    double iteration_ms;
    int rule;  // of the schedule that takes that long
    PlacedPlan plan;
};

// Simulated annealing from each of the starts, each with its own random numbers and its own budget
// (about a nanosecond a unit). Stops at a plan that takes no longer than `target_ms`, and at the
// deadline with what it has.
std::vector<SearchResult> local_search(const Instance& instance,
                                       const std::vector<PlacedPlan>& starts, std::uint64_t seed,
                                       double budget, double target_ms, Pool& pool,
                                       Control& control);

}  // namespace pipeplan
