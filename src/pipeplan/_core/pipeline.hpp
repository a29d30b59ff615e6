// One iteration of a pipeline: its costs, its event loop, the schedules that the search tries.
#pragma once
#include <cstdint>
#include <vector>

#include "control.hpp"

namespace pipeplan {

// Times within this many milliseconds are the same instant (docs/formats.md, rule 7).
constexpr double kSameInstantMs = 1e-9;

// How long everything takes, as the event loop reads it.
struct CostsView {
    int num_stages;
    int num_microbatches;
    const double* forward_ms;        // [stages]
    const double* backward_ms;       // [stages]
    const double* send_forward_ms;   // [stages - 1]
    const double* send_backward_ms;  // [stages - 1]
    const double* all_reduce_ms;     // [stages]
    bool half_duplex;
};

// The same as an object that checks itself; what pipeplan.cost.PipelineCosts holds.
class PipelineCosts {
  public:
    // Throws std::invalid_argument where sizes differ or a time is not finite and >= 0.
    PipelineCosts(std::vector<double> forward_ms, std::vector<double> backward_ms,
                  std::vector<double> send_forward_ms, std::vector<double> send_backward_ms,
                  std::vector<double> all_reduce_ms, bool half_duplex);
    int num_stages() const { return static_cast<int>(forward_ms_.size()); }
    // Throws std::invalid_argument for a number of microbatches that cannot be.
    CostsView view(long num_microbatches) const;

  private:
    std::vector<double> forward_ms_, backward_ms_, send_forward_ms_, send_backward_ms_,
        all_reduce_ms_;
    bool half_duplex_;
};

// A block in a schedule: m >= 0 is the forward of microbatch m, -1 - m its backward.
using Code = std::int32_t;

struct Trace {
    std::vector<Code> order;                // [stages][2 * microbatches], as far as run
    std::vector<double> block_start_ms;     // the same, in the order run
    std::vector<Code> sent;                 // [channels][2][microbatches], in the order sent
    std::vector<double> transfer_start_ms;  // the same
    std::vector<int> blocks_done;           // [stages]; fewer than 2 * microbatches: deadlock
    std::vector<double> stage_end_ms;       // [stages], end of the last block
};

// Throws std::invalid_argument unless each stage has each microbatch once forward and once backward;
// codes is [stages][2 * microbatches].
void require_complete(const CostsView& costs, const Code* codes);

// Runs a given order of blocks that is complete.
Trace run_schedule(const CostsView& costs, const Code* codes, Control& control);

// Which block a free stage prefers when both its next forward and its next backward could run.
enum class Preference {
    kUnitPipeline = 0,  // PE: whichever comes first in a pipeline of unit times
    kBackward = 1,
    kForward = 2,
};

// Runs a list scheduler: the order is decided as the pipeline runs. caps[n] is the most
// microbatches that stage n may hold at once.
Trace run_list(const CostsView& costs, Preference preference, const int* caps, Control& control);

// The rules that the search tries, numbered as pipeplan.schedules.PORTFOLIO lists them.
constexpr int kNumRules = 6;
Trace run_rule(const CostsView& costs, int rule, Control& control);

// When the last all-reduce ends.
double iteration_ms(const Trace& trace, const CostsView& costs);

// The fixed-plan bound (bound.hpp): no schedule of these costs takes less. caps[n] is the most
// microbatches that stage n may hold.
double plan_bound(const CostsView& costs, const int* caps);

}  // namespace pipeplan
