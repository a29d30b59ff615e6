// Flows under way and their max-min fair rates (docs/formats.md, rules 9-11).
//
// A side of a shared link whose flows could all run at their limits at once limits nobody. Only the
// other sides tie flows together. A start or an end therefore changes only the rates of flows that
// are tied to it through such sides: these are filled anew, all others keep their rates.
#pragma once
#include <algorithm>
#include <queue>
#include <vector>

#include "flow_table.hpp"

namespace pipeplan {

// From `ms` on each flow of a group has this rate, in bytes per ms; 0: it has ended.
struct RateChange {
    double ms;
    int group;
    double rate;
};

class FlowRates {
  public:
    // The table has to outlive this. All changes of rates are added to `history`, if there is one.
    explicit FlowRates(const FlowTable& flows, std::vector<RateChange>* history = nullptr);

    // Begins a transfer; it must not be under way. A transfer without flows ends at once.
    void begin(int transfer, double now_ms);
    // When something starts or ends next; infinite if nothing is under way.
    double next_ms() const {
        return events_.empty() ? next_end_ms_ : std::min(events_.top().ms, next_end_ms_);
    }
    // Takes all starts and ends until `last_ms`. Calls done(transfer, end_ms) for each transfer whose
    // last flow has ended.
    template <class Done>
    void take_until(double last_ms, Done&& done) {
        const auto take_end = [&](int transfer, double end_ms) {
            latest_ms_[transfer] = std::max(latest_ms_[transfer], end_ms);
            if (--num_left_[transfer] == 0) done(transfer, latest_ms_[transfer]);
        };
        if (next_end_ms_ <= last_ms) {
            ended_.clear();
            next_end_ms_ = kInfinity;
            for (int group : under_way_) {
                if (flows_[group].end_ms <= last_ms) ended_.push_back(group);
                else next_end_ms_ = std::min(next_end_ms_, flows_[group].end_ms);
            }
            for (int group : ended_) {
                end(group);
                if (history_) history_->push_back({flows_[group].end_ms, group, 0.0});
                take_end(flows_[group].transfer, flows_[group].end_ms);
            }
        }
        while (!events_.empty() && events_.top().ms <= last_ms) {
            const Event event = events_.top();
            events_.pop();
            if (event.group >= 0) start(event.group);
            else take_end(event.transfer, event.ms);
        }
    }
    // Gives all flows their rates, once everything of an instant is done.
    void settle(double now_ms);

  private:
    // Flows that start after their latency, and timers.
    struct Event {
        double ms;
        int transfer, group;  // a timer has no group
        bool operator>(const Event& other) const {
            if (ms != other.ms) return ms > other.ms;
            return transfer != other.transfer ? transfer > other.transfer : group > other.group;
        }
    };
    struct Flow {
        int transfer = 0;
        double left_bytes = 0.0, rate = 0.0, since_ms = 0.0;  // left at `since_ms`
        double end_ms = 0.0;  // at this rate
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
    std::vector<RateChange>* history_;
    std::vector<Flow> flows_;    // [groups]
    std::vector<Side> sides_;
    std::vector<int> under_way_, ended_;  // groups
    double next_end_ms_ = kInfinity;      // of these
    std::vector<int> num_left_;           // [transfers], flows and timers
    std::vector<double> latest_ms_;       // [transfers], the latest end so far
    std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events_;
    std::vector<int> changed_sides_, started_;
    long visit_ = 0;
    std::vector<int> tied_groups_, tied_sides_, open_;
};

}  // namespace pipeplan
