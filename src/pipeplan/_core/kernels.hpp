// The kernels: plain arrays in, plain arrays out. bindings.cpp is the only file that knows Python.
#pragma once
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

// The lightest set of edges whose removal disconnects a graph (Stoer and Wagner 1997).
struct Cut {
    double weight;
    std::vector<std::uint8_t> side;  // [vertices], 1 on the side that was cut off
};
Cut min_cut(const double* weights, int num_vertices);

// What the partition reads: a chain of layers, and devices in a linear order.
struct PartitionInput {
    int num_layers;
    int num_devices;
    int num_microbatches;
    const double* work_ms;           // [layers], forward + backward
    const double* output_bytes;      // [layers]
    const double* gradient_bytes;    // [layers]
    const double* parameter_bytes;   // [layers]
    const double* speed;             // [devices], in the order
    const double* bytes_per_ms;      // [devices][devices], in the order; 0 = no path
    const double* latency_ms;        // [devices][devices], in the order
    bool half_duplex;
};

struct Partition {
    double bottleneck_ms;            // infinite where there is none within the limit
    std::vector<int> end_layer;      // one past the last layer of each stage
    std::vector<int> num_replicas;   // of each stage
};

// For each number of stages up to max_stages the partition with the least bottleneck.
std::vector<Partition> partition(const PartitionInput& input, int max_stages, double limit_ms);

}  // namespace pipeplan
