// Schedules of a fixed plan that know which blocks are urgent.
//
// For a deadline, the windows of schedule_windows.hpp say how much time has to be left after each block.
// A list scheduler runs the block after which its stage can wait longest. It may let a stage wait for
// a block. Deadlines between the lower bound and the best time so far give different schedules; the
// fastest one counts. Where the bound can be reached, the first schedule nearly always reaches it.
#include <algorithm>
#include <vector>

#include "kernels.hpp"
#include "schedule_windows.hpp"

namespace pipeplan {
namespace {

// Builds one order of blocks. O(blocks * stages).
class UrgentOrder {
  public:
    UrgentOrder(const CostsView& costs, const ScheduleWindows& windows)
        : costs_(costs), windows_(windows), S_(costs.num_stages),
          M_(costs.num_microbatches), stages_(S_),
          forward_ready_(static_cast<std::size_t>(S_) * M_, kInfinity),
          backward_ready_(forward_ready_.size(), kInfinity), sent_(S_, 0.0), returned_(S_, 0.0) {
        std::fill_n(forward_ready_.begin(), M_, 0.0);
    }

    std::vector<Code> codes() {
        std::vector<Code> codes(static_cast<std::size_t>(S_) * 2 * M_);
        for (int left = 2 * M_ * S_; left > 0; --left) {
            // The block that could end first decides for its stage: all that could start before that.
            int first = 0;
            double least_end_ms = kInfinity;
            for (int n = 0; n < S_; ++n) {
                const double end_ms = std::min(end(n, true), end(n, false));
                if (end_ms < least_end_ms) least_end_ms = end_ms, first = n;
            }
            Stage& stage = stages_[first];
            const bool forward = prefers_forward(first, least_end_ms);
            codes[static_cast<std::size_t>(first) * 2 * M_ + stage.forwards + stage.backwards] =
                forward ? stage.forwards : -1 - stage.backwards;
            run(first, forward);
        }
        return codes;
    }

  private:
    struct Stage {
        double free_ms = 0.0;
        int forwards = 0, backwards = 0;
    };

    std::size_t at(int n, int m) const { return static_cast<std::size_t>(n) * M_ + m; }

    // The earliest start of the next forward or backward; infinite if its input is not on its way.
    double start(int n, bool forward) const {
        const Stage& stage = stages_[n];
        const int m = forward ? stage.forwards : stage.backwards;
        if (m == M_) return kInfinity;
        if (forward && costs_.caps && m - stage.backwards >= costs_.caps[n]) return kInfinity;
        return std::max(stage.free_ms, (forward ? forward_ready_ : backward_ready_)[at(n, m)]);
    }
    double end(int n, bool forward) const {
        return start(n, forward) + (forward ? costs_.forward_ms : costs_.backward_ms)[n];
    }
    // How much the stage can still wait if this block runs next.
    double slack(int n, bool forward) const {
        const Stage& stage = stages_[n];
        const double own = forward ? windows_.forward_tail(n, stage.forwards)
                                   : windows_.backward_tail(n, stage.backwards);
        const double others =
            windows_.rest(n, stage.forwards + forward, stage.backwards + !forward);
        return -end(n, forward) - std::max(own, others);
    }

    bool prefers_forward(int n, double least_end_ms) const {
        const double forward_ms = start(n, true), backward_ms = start(n, false);
        const bool forward = forward_ms < least_end_ms || end(n, true) <= least_end_ms;
        const bool backward = backward_ms < least_end_ms || end(n, false) <= least_end_ms;
        if (!forward || !backward) return forward;
        return slack(n, true) > slack(n, false);
    }

    void run(int n, bool forward) {
        Stage& stage = stages_[n];
        stage.free_ms = end(n, forward);
        const int m = forward ? stage.forwards++ : stage.backwards++;
        if (forward && n + 1 < S_) {
            sent_[n] = std::max(sent_[n], stage.free_ms) + costs_.send_forward_ms[n];
            forward_ready_[at(n + 1, m)] = sent_[n];
        } else if (forward) {
            backward_ready_[at(n, m)] = stage.free_ms;
        } else if (n > 0) {
            returned_[n] = std::max(returned_[n], stage.free_ms) + costs_.send_backward_ms[n - 1];
            backward_ready_[at(n - 1, m)] = returned_[n];
        }
    }

    const CostsView& costs_;
    const ScheduleWindows& windows_;
    const int S_, M_;
    std::vector<Stage> stages_;
    std::vector<double> forward_ready_, backward_ready_;  // [stages][microbatches]
    std::vector<double> sent_, returned_;                 // [channels], the end of the last transfer
};

// Where links are shared, a simulation takes long. Nearly always an order is no faster with shared links
// than without, so one that is too slow without them is not tried.
bool may_beat(double best_ms, CostsView costs, const std::vector<Code>& codes, Control& control) {
    if (!costs.flows) return true;
    costs.flows = nullptr;
    return iteration_ms(run_schedule(costs, codes.data(), control), costs) < best_ms;
}

}  // namespace

Schedule urgent_schedule(const CostsView& costs, double proved_ms, double limit_ms, int num_deadlines,
                         Control& control) {
    constexpr int kRounds = 3;
    Schedule best{limit_ms, {}};
    if (costs.num_microbatches > kMostForWindows) return best;
    ScheduleWindows windows(costs);
    std::vector<Code> last;
    for (int k = 0; k < num_deadlines; ++k) {
        control.check();
        const double part = static_cast<double>(k) / num_deadlines;
        const double deadline_ms = proved_ms + part * part * (limit_ms - proved_ms);
        if (deadline_ms >= best.iteration_ms) break;
        if (!windows.may_end_by(deadline_ms, kRounds)) continue;
        std::vector<Code> codes = UrgentOrder(costs, windows).codes();
        if (codes != last && may_beat(best.iteration_ms, costs, codes, control)) {
            const double ms = iteration_ms(run_schedule(costs, codes.data(), control), costs);
            if (ms < best.iteration_ms) best = {ms, codes};
        }
        last = std::move(codes);
        if (best.iteration_ms <= deadline_ms * (1 + 1e-9)) break;
    }
    return best;
}

Schedule best_schedule(const CostsView& costs, double limit_ms, int num_deadlines, double& proved_ms,
                       Control& control) {
    // Where links are shared, the bound is loose, however long it is worked on.
    const int max_rounds = costs.flows ? 3 : 10;
    const double within = costs.flows ? 1e-4 : 1e-5;
    proved_ms = std::min(limit_ms, plan_bound(costs, costs.caps));
    if (proved_ms < limit_ms)
        proved_ms = schedule_bound(costs, proved_ms, limit_ms, max_rounds, control, kInfinity, within);
    return urgent_schedule(costs, proved_ms, limit_ms, num_deadlines, control);
}

}  // namespace pipeplan
