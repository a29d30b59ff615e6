// A lower bound on all schedules of a fixed plan, from the windows of its blocks.
#include <cmath>

#include "schedule_windows.hpp"

namespace pipeplan {

double schedule_bound(const CostsView& costs, double proved_ms, double limit_ms, int max_rounds,
                      Control& control, double worth_ms, double within) {
    if (costs.num_microbatches > kMostForWindows || !(limit_ms < kInfinity)) return proved_ms;
    ScheduleWindows windows(costs);
    if (!windows.may_end_by(limit_ms, max_rounds)) return limit_ms;
    double open_ms = limit_ms;
    if (worth_ms < limit_ms) {
        if (proved_ms >= worth_ms) return proved_ms;
        if (!windows.may_end_by(worth_ms, max_rounds)) return worth_ms;
        open_ms = worth_ms;
    }
    while (open_ms > proved_ms * (1 + within)) {
        control.check();
        const double middle_ms = 0.5 * (proved_ms + open_ms);
        (windows.may_end_by(middle_ms, max_rounds) ? open_ms : proved_ms) = middle_ms;
    }
    return proved_ms;
}

}  // namespace pipeplan
