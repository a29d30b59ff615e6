// The event loop for groups. Rule 20 of docs/formats.md fixes ties: at each instant all ends and arrivals
// are taken first, parts that become ready among them. Then channels and rings are served, then groups
// start. Work of no length ends in another round at the same instant. O(blocks * log groups).
#include <algorithm>
#include <limits>
#include <queue>
#include <vector>

#include "flow_rates.hpp"
#include "groups.hpp"
#include "pipeline.hpp"

namespace pipeplan {
namespace {

constexpr long kInstantsBetweenChecks = 4096;  // for Ctrl-C and deadlines

struct Event {
    double ms;
    int what;  // the end of group g's block: g; of what is sent as number t: groups + t; a part of stage n
               // becomes ready: behind these, + n
    bool operator>(const Event& other) const {
        return ms != other.ms ? ms > other.ms : what > other.what;
    }
};
using Events = std::priority_queue<Event, std::vector<Event>, std::greater<Event>>;

// Everything sent takes a given time.
class GivenGroupTimes {
  public:
    explicit GivenGroupTimes(const GroupCostsView& costs) : costs_(costs) {}
    void begin(int number, double now_ms, Events& events) {
        events.push({now_ms + costs_.send_ms[number], costs_.num_groups + number});
    }
    double next_ms() { return kInfinity; }
    template <class Done>
    void take_until(double, Done&&) {}
    void settle(double) {}

  private:
    const GroupCostsView& costs_;
};

// It takes as long as its flows, which share links with those of others.
class SharedGroupTimes {
  public:
    explicit SharedGroupTimes(const GroupCostsView& costs)
        : rates_(costs.flows->merged(), costs.rate_changes) {}
    void begin(int number, double now_ms, Events&) { rates_.begin(number, now_ms); }
    double next_ms() { return rates_.next_ms(); }
    template <class Done>
    void take_until(double last_ms, Done&& done) {
        rates_.take_until(last_ms, done);
    }
    void settle(double now_ms) { rates_.settle(now_ms); }

  private:
    FlowRates rates_;
};

// What waits to be sent, in the order in which it became ready.
struct Queue {
    std::vector<int> numbers;  // by number, see GroupCostsView
    std::vector<int> details;  // microbatch, or number of the part
    std::size_t head = 0;
    bool is_empty() const { return head == numbers.size(); }
    void push(int number, int detail) {
        numbers.push_back(number);
        details.push_back(detail);
    }
};

struct Channel {
    int cut = -1;  // where half duplex has one cut, that; it queues by direction
    bool is_busy = false;
    int begun[2] = {0, 0};
    Queue queues[2];
};

struct Ready {
    int number, detail;
};

template <class Times>
class GroupRun {
  public:
    GroupRun(const GroupCostsView& costs, const GroupOrders& orders, GroupTrace& trace,
             Control& control)
        : costs_(costs), orders_(orders), trace_(trace), control_(control), S_(costs.num_stages),
          G_(costs.num_groups), num_cut_numbers_(2 * (S_ - 1)), M_(costs.num_microbatches),
          times_(costs), next_(orders.first, orders.first + G_), is_busy_(G_, 0),
          input_(S_ * M_, 0), gradient_(S_ * M_, 0), num_closed_(S_, 0), num_ready_(S_, 0),
          channels_(costs.num_channels), rings_(G_), ring_is_busy_(G_, 0),
          first_sent_(num_cut_numbers_ + S_ + 1, 0), num_begun_(num_cut_numbers_ + S_, 0),
          num_ended_(num_cut_numbers_ + S_, 0) {
        std::fill_n(input_.begin(), M_, 1);
        find_single_cuts();
        std::size_t count = 0;
        for (int t = 0; t < num_cut_numbers_; ++t) {
            first_sent_[t] = count;
            if (costs.channel_of[t] >= 0) count += M_;
        }
        trace_.sent.resize(count);
        trace_.transfer_start_ms.resize(count);
        trace_.transfer_end_ms.resize(count);
        count = 0;
        for (int n = 0; n < S_; ++n) {
            first_sent_[num_cut_numbers_ + n] = count;
            count += costs.num_parts[n];
            for (int j = 1; j <= costs.num_parts[n]; ++j) {
                trace_.part_stage.push_back(n);
                trace_.part_number.push_back(j);
            }
        }
        trace_.part_start_ms.resize(count);
        trace_.part_end_ms.resize(count);
        trace_.block_start_ms.resize(orders.first[G_]);
        trace_.block_end_ms.resize(orders.first[G_]);
    }

    void operator()() {
        std::vector<int> starters(G_);
        for (int g = 0; g < G_; ++g) starters[g] = g;
        start_groups(starters);
        for (long instant = 1; next_ms() < kInfinity; ++instant) {
            if (instant % kInstantsBetweenChecks == 0) control_.check();
            now_ms_ = next_ms();
            const double last_ms = now_ms_ + kSameInstantMs;
            while (next_ms() <= last_ms) {
                starters.clear();
                take_ends(last_ms, starters);
                queue_ready();
                for (int channel : channels_to_serve_) serve_channel(channel);
                for (int g : rings_to_serve_) serve_ring(g);
                start_groups(starters);
            }
            times_.settle(now_ms_);
        }
        for (int g = 0; g < G_; ++g)
            trace_.blocks_done.push_back(static_cast<int>(next_[g] - orders_.first[g]));
    }

  private:
    double next_ms() {
        return std::min(times_.next_ms(), events_.empty() ? kInfinity : events_.top().ms);
    }

    // Rule 17: with half duplex, groups with one cut between them go by the rule of stages.
    void find_single_cuts() {
        if (!costs_.half_duplex) return;
        std::vector<int> num_cuts(channels_.size(), 0);
        for (int c = 0; c + 1 < S_; ++c) {
            const int channel = costs_.channel_of[2 * c];
            if (channel < 0) continue;
            channels_[channel].cut = ++num_cuts[channel] == 1 ? c : -1;
        }
    }

    void take_ends(double last_ms, std::vector<int>& starters) {
        round_.clear();
        while (!events_.empty() && events_.top().ms <= last_ms) {
            round_.push_back(events_.top());
            events_.pop();
        }
        times_.take_until(last_ms, [&](int number, double end_ms) {
            round_.push_back({end_ms, G_ + number});
        });
        for (const Event& event : round_) {
            if (event.what < G_) {
                starters.push_back(event.what);
                end_block(event.what);
            } else if (event.what < G_ + num_cut_numbers_) {
                end_transfer(event.what - G_, event.ms, starters);
            } else if (event.what < G_ + num_cut_numbers_ + S_) {
                end_part(event.what - G_, event.ms);
            } else {
                const int n = event.what - G_ - num_cut_numbers_ - S_;
                ready_.push_back({num_cut_numbers_ + n, ++num_ready_[n]});
            }
        }
    }

    void end_block(int g) {
        const std::size_t position = next_[g]++;
        const GroupCode code = orders_.codes[position];
        const int n = stage_of(code), kind = kind_of(code), m = microbatch_of(code);
        const std::size_t at = n * static_cast<std::size_t>(M_) + m;
        is_busy_[g] = 0;
        trace_.iteration_ms = std::max(trace_.iteration_ms, trace_.block_end_ms[position]);
        if (kind == kForward) {
            if (n == S_ - 1) gradient_[at] = 1;
            else if (costs_.channel_of[2 * n] < 0) input_[at + M_] = 1;
            else ready_.push_back({2 * n, m});
            return;
        }
        if (kind != kWeightGradient && n > 0) {
            if (costs_.channel_of[2 * n - 1] < 0) gradient_[at - M_] = 1;
            else ready_.push_back({2 * n - 1, m});
        }
        if (kind != kInputGradient && num_closed_[n] == M_ && costs_.num_parts[n] > 0)
            ready_.push_back({num_cut_numbers_ + n, costs_.num_parts[n]});
    }

    void end_transfer(int number, double end_ms, std::vector<int>& starters) {
        const int channel = costs_.channel_of[number];
        const std::size_t k = first_sent_[number] + num_ended_[number]++;
        trace_.transfer_end_ms[k] = end_ms;
        const int m = microbatch_of(trace_.sent[k]), c = number / 2;
        const int receiver = number % 2 == 0 ? c + 1 : c;
        (number % 2 == 0 ? input_ : gradient_)[receiver * static_cast<std::size_t>(M_) + m] = 1;
        channels_[channel].is_busy = false;
        channels_to_serve_.push_back(channel);
        starters.push_back(costs_.group_of[receiver]);
    }

    void end_part(int number, double end_ms) {
        const std::size_t k = first_sent_[number] + num_ended_[number]++;
        trace_.part_end_ms[k] = end_ms;
        trace_.iteration_ms = std::max(trace_.iteration_ms, end_ms);
        const int g = costs_.group_of[number - num_cut_numbers_];
        ring_is_busy_[g] = 0;
        rings_to_serve_.push_back(g);
    }

    // Queues what became ready in this round: gradients before activations, smaller microbatches first,
    // parts by their numbers. On a channel of one direction it is never more than one.
    void queue_ready() {
        if (ready_.size() > 1)
            std::sort(ready_.begin(), ready_.end(), [](const Ready& a, const Ready& b) {
                if (a.number % 2 != b.number % 2) return a.number % 2 > b.number % 2;
                return a.detail != b.detail ? a.detail < b.detail : a.number < b.number;
            });
        for (const Ready& ready : ready_) {
            if (ready.number >= num_cut_numbers_) {
                const int g = costs_.group_of[ready.number - num_cut_numbers_];
                rings_[g].push(ready.number, ready.detail);
                rings_to_serve_.push_back(g);
            } else {
                const int index = costs_.channel_of[ready.number];
                Channel& channel = channels_[index];
                channel.queues[channel.cut >= 0 ? ready.number % 2 : 0].push(ready.number, ready.detail);
                channels_to_serve_.push_back(index);
            }
        }
        ready_.clear();
    }

    void serve_channel(int index) {
        Channel& channel = channels_[index];
        if (channel.is_busy) return;
        int direction = 0;
        if (channel.cut >= 0) {
            const bool forward_waits = !channel.queues[0].is_empty();
            const bool backward_waits = !channel.queues[1].is_empty();
            const int i = channel.begun[1], j = channel.begun[0], n = channel.cut;
            const bool is_backward_first = i + 4 * (S_ - 1) - 2 * n - 1 <= j + 2 * n + 1;
            direction = backward_waits && (!forward_waits || is_backward_first);
        }
        Queue& queue = channel.queues[direction];
        if (queue.is_empty()) return;
        const int number = queue.numbers[queue.head], m = queue.details[queue.head];
        ++queue.head;
        ++channel.begun[direction];
        channel.is_busy = true;
        const std::size_t k = first_sent_[number] + num_begun_[number]++;
        const int c = number / 2;
        // The gradient of an I is listed as that of a B.
        trace_.sent[k] = number % 2 == 0 ? group_code(c, kForward, m) : group_code(c + 1, kBackward, m);
        trace_.transfer_start_ms[k] = now_ms_;
        times_.begin(number, now_ms_, events_);
    }

    void serve_ring(int g) {
        Queue& queue = rings_[g];
        if (ring_is_busy_[g] || queue.is_empty()) return;
        const int number = queue.numbers[queue.head++];
        ring_is_busy_[g] = 1;
        trace_.part_start_ms[first_sent_[number] + num_begun_[number]++] = now_ms_;
        times_.begin(number, now_ms_, events_);
    }

    void start_groups(const std::vector<int>& starters) {
        channels_to_serve_.clear();
        rings_to_serve_.clear();
        for (int g : starters) {
            const std::size_t position = next_[g];
            if (is_busy_[g] || position == orders_.first[g + 1]) continue;
            const GroupCode code = orders_.codes[position];
            const int n = stage_of(code), kind = kind_of(code);
            const std::size_t at = n * static_cast<std::size_t>(M_) + microbatch_of(code);
            if (kind != kWeightGradient && !(kind == kForward ? input_ : gradient_)[at]) continue;
            const double length_ms = costs_.length_ms[kNumBlockKinds * n + kind];
            is_busy_[g] = 1;
            trace_.block_start_ms[position] = now_ms_;
            trace_.block_end_ms[position] = now_ms_ + length_ms;
            events_.push({now_ms_ + length_ms, g});
            if (kind == kForward || kind == kInputGradient || ++num_closed_[n] < M_) continue;
            const double first_ms = kind == kBackward ? costs_.recompute_ms[n] : 0.0;
            for (int j = 1; j < costs_.num_parts[n]; ++j)  // the last one comes with the block's end
                events_.push({now_ms_ + first_ms + (length_ms - first_ms) * j / costs_.num_parts[n],
                              G_ + num_cut_numbers_ + S_ + n});
        }
    }

    const GroupCostsView& costs_;
    const GroupOrders& orders_;
    GroupTrace& trace_;
    Control& control_;
    const int S_, G_, num_cut_numbers_, M_;
    double now_ms_ = 0.0;
    Times times_;
    std::vector<std::size_t> next_;                // [groups], the block that runs or comes next
    std::vector<char> is_busy_;                    // [groups]
    std::vector<char> input_, gradient_;           // [stages][microbatches], whether they are there
    std::vector<int> num_closed_;                  // [stages], B and W begun
    std::vector<int> num_ready_;                   // [stages], parts
    std::vector<Channel> channels_;
    std::vector<Queue> rings_;                     // [groups]
    std::vector<char> ring_is_busy_;               // [groups]
    std::vector<std::size_t> first_sent_;          // by number, where its records begin
    std::vector<int> num_begun_, num_ended_;       // by number
    std::vector<Ready> ready_;
    std::vector<int> channels_to_serve_, rings_to_serve_;
    Events events_;
    std::vector<Event> round_;
};

}  // namespace

GroupTrace run_groups(const GroupCostsView& costs, const GroupOrders& orders, Control& control) {
    GroupTrace trace;
    if (costs.flows) GroupRun<SharedGroupTimes>(costs, orders, trace, control)();
    else GroupRun<GivenGroupTimes>(costs, orders, trace, control)();
    return trace;
}

}  // namespace pipeplan
