// Trips of local search: a large move that makes a plan slower, and small ones that may mend it.
//
// How many stages there are hardly changes by single moves, because each device then has a new place
// at once. So one move in a hundred dissolves or splits a stage, or moves a device, puts all cuts anew
// (search_balance.hpp), and is followed by small moves only. If these do not make the plan good
// enough, the search goes back. Dissolved stages were what plans on random links lacked: the recursion
// on orders begins with too many.
#pragma once
#include "search_plan.hpp"

namespace pipeplan {

// What a search knows of the time of a plan.
struct PlanTime {
    double ms;         // simulated, or the bound times the looseness
    double looseness;  // time by bound, where it was simulated last
    int age;           // accepted moves since then
};

class Trip {
  public:
    // One in so many moves starts a trip; how much slower a plan may be at first.
    static constexpr int kOneIn = 100;
    static constexpr double kSlower = 1.1;

    bool is_under_way() const { return num_left_ > 0; }
    // From a plan. Whatever takes at most `accept_ms` in the end is good enough to stay.
    void start(const SearchPlan& plan, const PlanTime& judged, double accept_ms) {
        num_left_ = kMoves;
        accept_ms_ = accept_ms;
        plan_ = plan;
        judged_ = judged;
    }
    void cancel() { num_left_ = 0; }
    // After a small move: whether it was the last one, and the search has to go back.
    bool has_failed(double ms) {
        if (ms <= accept_ms_) num_left_ = 0;
        else if (--num_left_ == 0) return true;
        return false;
    }
    // From which it set out.
    const SearchPlan& plan() const { return plan_; }
    const PlanTime& judged() const { return judged_; }

  private:
    static constexpr int kMoves = 50;

    int num_left_ = 0;  // moves until its end
    double accept_ms_ = 0.0;
    SearchPlan plan_;
    PlanTime judged_{};
};

}  // namespace pipeplan
