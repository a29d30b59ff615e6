// Flows under way and their max-min fair rates (docs/formats.md, rules 9-11).
//
// A side of a shared link whose flows could all run at their limits at once limits nobody. Only the
// other sides tie flows together. A start or an end therefore changes only the rates of flows that
// are tied to it through such sides: these are filled anew, all others keep their rates.
#pragma once
#include <queue>
#include <vector>

#include "flows.hpp"

namespace pipeplan {

class FlowRates {
  public:
    explicit FlowRates(const PlanFlows& flows);

    // Begins a transfer; it must not be under way. A transfer without flows ends at once.
    void begin(int transfer, double now_ms);
    // When something starts or ends next; infinite if nothing is under way.
    double next_ms();
    // Takes all starts and ends until `last_ms`. Calls done(transfer, end_ms) for each transfer whose
    // last flow has ended.
    template <class Done>
    void take_until(double last_ms, Done&& done) {
        while (next_ms() <= last_ms) {
            const Event event = events_.top();
            events_.pop();
            if (event.kind == Kind::kStart) {
                start(event.group);
                continue;
            }
            if (event.kind == Kind::kEnd) end(event.group);
            if (--num_left_[event.transfer] == 0) done(event.transfer, event.ms);
        }
    }
    // Gives all flows their rates, once everything of an instant is done.
    void settle(double now_ms);

    double rate(int group) const { return flows_[group].is_under_way ? flows_[group].rate : 0.0; }

  private:
    enum class Kind { kTimer, kStart, kEnd };
    struct Event {
        double ms;
        Kind kind;
        int transfer, group;  // a timer has no group
        int version;          // an end that a change of rates has moved has an old one
        bool operator>(const Event& other) const {
            if (ms != other.ms) return ms > other.ms;
            return transfer != other.transfer ? transfer > other.transfer : group > other.group;
        }
    };
    struct Flow {
        bool is_under_way = false;
        int transfer = 0, version = 0;
        double left_bytes = 0.0, rate = 0.0, since_ms = 0.0;  // left at `since_ms`
        double new_rate = 0.0;
        long visited = 0;
    };
    struct Side {
        double capacity = 0.0;
        double wanted = 0.0;  // by all flows under way, at their limits
        std::vector<int> groups;  // under way
        bool has_changed = false;
        long visited = 0;
        double left = 0.0;   // while filling: capacity, and flows without a rate
        int num_open = 0;
        bool is_tight() const { return wanted > capacity; }
    };

    void start(int group);
    void end(int group);
    void mark_changed(int side);
    void visit_group(int group);
    void visit_side(int side);
    void fill();
    void freeze(int group, double rate);

    const std::vector<FlowGroup>& groups_;
    const std::vector<FlowTransfer>& transfers_;
    const std::vector<int>& sides_of_groups_;
    std::vector<Flow> flows_;    // [groups]
    std::vector<Side> sides_;
    std::vector<int> num_left_;  // [transfers], flows and timers
    std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events_;
    std::vector<int> changed_sides_, started_;
    long visit_ = 0;
    std::vector<int> tied_groups_, tied_sides_;
};

}  // namespace pipeplan
