// The kernels: plain arrays in, plain arrays out. bindings.cpp is the only file that knows Python.
#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace pipeplan {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Times within this many milliseconds are the same instant (docs/formats.md, rule 7).
constexpr double kSameInstantMs = 1e-9;

// How long everything takes in a pipeline; what pipeplan.cost.PipelineCosts holds.
struct PipelineCosts {
    int num_stages;
    int num_microbatches;
    const double* forward_ms;        // [stages]
    const double* backward_ms;       // [stages]
    const double* send_forward_ms;   // [stages - 1]
    const double* send_backward_ms;  // [stages - 1]
    bool half_duplex;
};

// A block in a schedule: m >= 0 is the forward of microbatch m, -1 - m its backward.
using Code = std::int32_t;

struct Trace {
    std::vector<Code> order;                  // [stages][2 * microbatches], as far as run
    std::vector<double> block_start_ms;       // the same, in the order run
    std::vector<Code> sent;                   // [channels][2][microbatches], in the order sent
    std::vector<double> transfer_start_ms;    // the same
    std::vector<int> blocks_done;             // [stages]; fewer than 2 * microbatches: deadlock
    std::vector<double> stage_end_ms;         // [stages], end of the last block
};

// Runs a given order of blocks; codes is [stages][2 * microbatches].
Trace run_schedule(const PipelineCosts& costs, const Code* codes);

// Which block a free stage prefers when both its next forward and its next backward could run.
enum class Preference {
    kUnitPipeline = 0,   // PE: whichever comes first in a pipeline of unit times
    kBackward = 1,
    kForward = 2,
};

// Runs a list scheduler: the order is decided as the pipeline runs. caps[n] is the most
// microbatches that stage n may hold at once.
Trace run_list(const PipelineCosts& costs, Preference preference, const int* caps);

// The rules that the search tries, numbered as pipeplan.schedules.PORTFOLIO lists them.
constexpr int kNumRules = 6;
Trace run_rule(const PipelineCosts& costs, int rule);

// When the last all-reduce ends.
double iteration_ms(const Trace& trace, const double* all_reduce_ms, int num_stages);

// The lightest set of edges whose removal disconnects a graph (Stoer and Wagner 1997).
struct Cut {
    double weight;
    std::vector<std::uint8_t> side;  // [vertices], 1 on the side that was cut off
};
Cut min_cut(const double* weights, int num_vertices);

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
    double sum_ms;                // infinite if there are none
    std::vector<int> end_layer;   // [stages]
    std::vector<int> size;        // [stages], devices
};
LeastSum least_sum(const StageTimes& times, const int* sizes, int num_devices, double limit_ms);

// What planning kernels read: a chain of layers, and devices (in the order that the caller chose).
struct Instance {
    int num_layers;
    int num_devices;
    int num_microbatches;
    const double* forward_ms;        // [layers]
    const double* backward_ms;       // [layers]
    const double* output_bytes;      // [layers]
    const double* gradient_bytes;    // [layers]
    const double* parameter_bytes;   // [layers]
    const double* speed;             // [devices]
    const double* bytes_per_ms;      // [devices][devices]; 0 = no path
    const double* latency_ms;        // [devices][devices]
    bool half_duplex;
    int max_replicas;                // no stage may have more devices
};

struct Partition {
    double bottleneck_ms;            // infinite where there is none within the limit
    std::vector<int> end_layer;      // one past the last layer of each stage
    std::vector<int> num_replicas;   // of each stage
};

// For each number of stages up to max_stages the partition with the least bottleneck.
std::vector<Partition> partition(const Instance& input, int max_stages, double limit_ms,
                                 int num_threads);

// The fixed-plan bound (bound.hpp): no schedule of these costs takes less. caps[n] is the most
// microbatches that stage n may hold.
double plan_bound(const PipelineCosts& costs, const double* all_reduce_ms, const int* caps);

// A plan's stages: layers [end_layer[n-1], end_layer[n]) on the given devices.
struct PlacedPlan {
    std::vector<int> end_layer;
    std::vector<std::vector<int>> devices;
};

struct Candidates {
    double least_ms;  // the least bound over all plans considered, at most limit_ms
    std::vector<PlacedPlan> plans;
};

// Plans on consecutive devices of the instance's order, with replica counts from `sizes` (rising).
Candidates plan_on_order(const Instance& instance, const std::vector<int>& sizes, int capacity,
                         double limit_ms, int num_best, int num_threads);

// Plans on any sets of devices, and a lower bound on all of them. Devices that can be exchanged
// for one another count as one class, class_of[device] from 0.
Candidates plan_on_sets(const Instance& instance, const std::vector<int>& class_of, int capacity,
                        double limit_ms, int num_best, int num_threads);

struct SearchResult {
    double iteration_ms;
    int rule;         // of the schedule that takes that long
    PlacedPlan plan;
};

// Simulated annealing from each of the starts, each with its own random numbers and its own budget
// (about a nanosecond a unit); stops at a plan that takes no longer than `target_ms`.
std::vector<SearchResult> local_search(const Instance& instance,
                                       const std::vector<PlacedPlan>& starts, std::uint64_t seed,
                                       double budget, double target_ms, int num_threads);

// A lower bound on all plans from optimistic links by the sizes of sets alone. `buckets` are the
// largest sizes of groups of sizes that are taken as one.
double relaxed_bound(const Instance& instance, const std::vector<int>& buckets, int capacity,
                     double limit_ms, int num_threads);

}  // namespace pipeplan
