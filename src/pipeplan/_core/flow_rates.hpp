// Flows under way and their max-min fair rates (docs/formats.md, rules 9-11).
//
// Flows of one class (flow_table.hpp) always have the same rate. So a class counts how many bytes each
// of its flows has been sent since some time, whoever they belong to; a flow ends when this number has
// risen by its bytes. A change of rates is one change for the whole class.
#pragma once
#include <algorithm>
#include <queue>
#include <vector>

#include "max_min.hpp"

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
            for (std::size_t first = 0; first < end_ms_.size(); first += kChunk) {
                if (least_of_chunk(first) > last_ms) continue;
                for (std::size_t c = first; c < first + kChunk; ++c) {
                    while (end_ms_[c] <= last_ms) {
                        const double end_ms = end_ms_[c];
                        take_end(transfer_of_[end_first(static_cast<int>(c))], end_ms);
                    }
                }
            }
            find_next_end();
        }
        while (!events_.empty() && events_.top().ms <= last_ms) {
            const Event event = events_.top();
            events_.pop();
            if (event.first_group < event.end_group) start(event.first_group, event.end_group);
            else take_end(event.transfer, event.ms);
        }
    }
    // Gives all flows their rates, once everything of an instant is done.
    void settle(double now_ms);

  private:
    // Groups that start after their latency, and timers.
    struct Event {
        double ms;
        int transfer, first_group, end_group;  // a timer has no groups
        bool operator>(const Event& other) const {
            if (ms != other.ms) return ms > other.ms;
            if (transfer != other.transfer) return transfer > other.transfer;
            return first_group > other.first_group;
        }
    };
    // A group under way ends when each flow of its class has been sent so many bytes.
    struct Goal {
        double bytes;
        int group;
        bool operator>(const Goal& other) const {
            return bytes != other.bytes ? bytes > other.bytes : group > other.group;
        }
    };
    // What each flow of a class has been sent until `since_ms`, and the least goal.
    struct Progress {
        double rate = 0.0, sent_bytes = 0.0, since_ms = 0.0, goal_bytes = kInfinity;
    };
    // Bytes are counted from 0 again before they are so many times those of a new flow: small numbers
    // lose less.
    static constexpr double kManyTimes = 16.0;

    static constexpr std::size_t kChunk = 8;  // classes that are looked at together
    double least_of_chunk(std::size_t first) const {
        double least[4];
        for (int k = 0; k < 4; ++k) least[k] = std::min(end_ms_[first + k], end_ms_[first + 4 + k]);
        return std::min(std::min(least[0], least[1]), std::min(least[2], least[3]));
    }

    void start(int first_group, int end_group);
    int end_first(int index);
    void change_rates(double now_ms);
    void start_groups(int index, double now_ms);
    void find_end(int index);
    void find_next_end();
    void record(double ms, int group, double rate);

    const std::vector<FlowGroup>& groups_;
    const std::vector<FlowTransfer>& transfers_;
    const std::vector<std::vector<int>>& members_;
    std::vector<RateChange>* history_;
    MaxMinRates rates_;
    bool has_changed_ = false;       // whether flows have come or gone since rates were given
    std::vector<int> transfer_of_;   // [groups]
    std::vector<Progress> progress_;            // [classes]
    std::vector<double> end_ms_;                // [whole chunks of classes], the next end of a group
    std::vector<std::vector<Goal>> goals_;      // [classes], heaps, the least one first
    std::vector<std::vector<int>> new_groups_;  // [classes], those that have no rate yet
    double next_end_ms_ = kInfinity;
    std::vector<int> num_left_;      // [transfers], groups and timers
    std::vector<double> latest_ms_;  // [transfers], the latest end so far
    std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events_;
    std::vector<int> started_;       // classes
};

}  // namespace pipeplan
