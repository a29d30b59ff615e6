// Flows under way and their max-min fair rates (docs/formats.md, rules 9-11).
//
// Flows of one class (flow_table.hpp) always have the same rate: the level of the class's source (max_min.hpp).
// So a source counts how many bytes a flow has been sent since some time that always has its level as its rate. A
// class says how much more or less its own flows have been sent; a flow ends when this number has
// risen by its bytes. A change of a level is one change for all classes of a source.
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
                for (unsigned ended = ended_of_chunk(first, last_ms); ended; ended &= ended - 1) {
                    const std::size_t s = first + __builtin_ctz(ended);
                    do {
                        const double end_ms = end_ms_[s];
                        take_end(transfer_of_[end_first(static_cast<int>(s))], end_ms);
                    } while (end_ms_[s] <= last_ms);
                }
            }
            next_end_ms_ = kInfinity;  // until flows have new rates
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
    };
    // What a flow has been sent until `since_ms` that always has a source's level as its rate. Of the
    // classes with this source: when the next flow ends, in these bytes.
    struct Source {
        double rate = 0.0, sent_bytes = 0.0, since_ms = 0.0, least_goal = kInfinity;
        std::vector<int> classes;
        std::vector<double> goals;  // of the classes
        double sent_at(double now_ms) const { return sent_bytes + rate * (now_ms - since_ms); }
    };
    struct Class {
        int source = MaxMinRates::kNone, place = 0;  // among the source's classes
        double more_bytes = 0.0;                     // that its flows have been sent than the source says
        std::vector<Goal> goals;                     // rising; of groups that have ended up to first_goal
        std::size_t first_goal = 0;
        std::vector<int> new_groups;                 // those that have no rate yet
        bool is_idle() const { return first_goal == goals.size(); }
        double least_goal() const { return is_idle() ? kInfinity : goals[first_goal].bytes; }
    };
    // Bytes are counted from 0 again before they are so many times those of a new flow: small numbers
    // lose less.
    static constexpr double kManyTimes = 16.0;

    static constexpr std::size_t kChunk = 8;  // sources that are looked at together
    // As bits.
    unsigned ended_of_chunk(std::size_t first, double last_ms) const {
        const Two last = {last_ms, last_ms};
        TwoBits ended = {0, 0}, bit = {1, 2};
        for (std::size_t k = first; k < first + kChunk; k += 2, bit <<= 2)
            ended |= bit & (Two{end_ms_[k], end_ms_[k + 1]} <= last);
        return static_cast<unsigned>(ended[0] | ended[1]);
    }

    void start(int first_group, int end_group);
    int end_first(int index);
    void change_rates(double now_ms);
    void record_changes(double now_ms);
    void move_on(int index, double now_ms);
    void enter(int index, double sent_bytes, double now_ms);
    double leave(int index, double now_ms);
    void start_groups(int index, double now_ms);
    void set_goal(int index, double bytes);
    void find_least_goal(int index);
    void count_from_zero(int index);
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
    std::vector<Source> sources_;
    std::vector<double> end_ms_;     // [sources, and one more if that is odd], the next end of a group
    std::vector<Class> classes_;
    double next_end_ms_ = kInfinity;
    std::vector<int> num_left_;      // [transfers], groups and timers
    std::vector<double> latest_ms_;  // [transfers], the latest end so far
    std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events_;
    std::vector<int> started_;       // classes
};

}  // namespace pipeplan
