// One iteration of a pipeline: its costs, its event loop, and the schedules of the
// portfolio.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "control.hpp"
#include "flow_rates.hpp"
#include "flows.hpp"

namespace pipeplan {

// Times within this many milliseconds are the same instant (docs/formats.md, rule 7).
constexpr double kSameInstantMs = 1e-9;

// The times of all blocks, transfers and all-reduces, as the event loop reads them.
struct CostsView {
    int num_stages;
    int num_microbatches;
    const double* forward_ms;        // [stages]
    const double* backward_ms;       // [stages]
    const double* send_forward_ms;   // [stages - 1]
    const double* send_backward_ms;  // [stages - 1]
    const double* all_reduce_ms;     // [stages]
    bool half_duplex;
    const int* caps = nullptr;       // [stages], the most microbatches each may hold; null: no limit
    // Where the cluster has shared links: what decides how long transfers and all-reduces take. The
    // times above are then the least that they can take.
    const PlanFlows* flows = nullptr;
    bool records_rates = false;  // whether a trace has all changes of rates
};

// The same costs as an object that validates itself, made from a pipeplan.cost.PipelineCosts.
class PipelineCosts {
  public:
    // Throws std::invalid_argument if sizes differ, a time is not finite and >= 0, or a cap below 1.
    // Without caps stages may hold all microbatches.
    PipelineCosts(std::vector<double> forward_ms, std::vector<double> backward_ms,
                  std::vector<double> send_forward_ms, std::vector<double> send_backward_ms,
                  std::vector<double> all_reduce_ms, bool half_duplex, std::vector<int> caps = {},
                  std::shared_ptr<const PlanFlows> flows = nullptr);
    int num_stages() const { return static_cast<int>(forward_ms_.size()); }
    // Throws std::invalid_argument if the number of microbatches is out of range.
    CostsView view(long num_microbatches) const;

  private:
    std::vector<double> forward_ms_, backward_ms_, send_forward_ms_, send_backward_ms_,
        all_reduce_ms_;
    bool half_duplex_;
    std::vector<int> caps_;
    std::shared_ptr<const PlanFlows> flows_;
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
    // Only with shared links; else they follow from the given times.
    std::vector<double> transfer_end_ms;    // [channels][2][microbatches], in the order sent
    std::vector<double> all_reduce_end_ms;  // [stages]
    std::vector<RateChange> rate_changes;   // only where they are recorded
};

// Throws std::invalid_argument unless each stage has each microbatch once forward and once
// backward. codes is [stages][2 * microbatches].
void require_complete(const CostsView& costs, const Code* codes);

// Runs a given order of blocks; the order has to be complete.
Trace run_schedule(const CostsView& costs, const Code* codes, Control& control);

// The block that a free stage prefers if both its next forward and its next backward could run.
enum class Preference {
    kUnitPipeline = 0,  // PE: the block that comes first in a pipeline of unit times
    kBackward = 1,
    kForward = 2,
};

// Runs a list scheduler, which decides the order while the pipeline runs. caps[n] is the most
// microbatches that stage n may hold at once.
Trace run_list(const CostsView& costs, Preference preference, const int* caps, Control& control);

// The schedules of the portfolio, numbered as in pipeplan.schedules.PORTFOLIO. They keep the caps of
// the costs.
constexpr int kNumRules = 6;
Trace run_rule(const CostsView& costs, int rule, Control& control);

// The end of the last all-reduce.
double iteration_ms(const Trace& trace, const CostsView& costs);

// An estimate of a rule's iteration time, from few microbatches: after a while each one more takes
// the same time (rule_estimate.cpp). `num_microbatches` is what is really simulated. Where there
// are not many more, the time is exact.
struct RuleEstimate {
    bool is_exact;
    int num_microbatches;
};
RuleEstimate estimate_of(const CostsView& costs);
double estimate_rule_ms(const CostsView& costs, int rule, Control& control);

// The fixed-plan bound (bound.hpp): no schedule of these costs takes less. caps[n] is the most
// microbatches that stage n may hold; null: no limit.
double plan_bound(const CostsView& costs, const int* caps);

// More microbatches, and the grids of schedule_windows.hpp take too long: nothing better is found.
constexpr int kMostForWindows = 256;

// A higher one, between `proved_ms`, below which no schedule is known to be, and `limit_ms`. Each
// question that it asks takes at most `max_rounds` rounds (schedule_windows.hpp). Where the limit cannot
// be proved, no bound above `worth_ms` is looked for. The result is so exact as `within` says.
double schedule_bound(const CostsView& costs, double proved_ms, double limit_ms, int max_rounds,
                      Control& control, double worth_ms = kInfinity, double within = 1e-5);

// A schedule, and the time that an iteration takes under it.
struct Schedule {
    double iteration_ms;
    std::vector<Code> codes;  // [stages][2 * microbatches]; empty if none was found
};

// A schedule that is faster than `limit_ms`, if one is found. None is faster than `proved_ms`.
Schedule urgent_schedule(const CostsView& costs, double proved_ms, double limit_ms, int num_deadlines,
                         Control& control);

// Both of the above: `proved_ms` becomes a lower bound on all schedules, at most `limit_ms`.
Schedule best_schedule(const CostsView& costs, double limit_ms, int num_deadlines, double& proved_ms,
                       Control& control);

}  // namespace pipeplan
