// The event loop behind the simulator and the list schedulers.
//
// A pipeline of S stages is a chain of S stages and S - 1 channels (two directions each).
// Rule 7 of docs/formats.md fixes ties. At each instant all ends are handled first. Then channels
// start transfers, then stages start blocks. Work of no length ends in another round at the same
// instant. Only stages and channels next to an end can start something, so each round looks only at
// these. O(blocks * log stages).
//
// How long a transfer takes is the business of `Transfers`: a given time, or as long as its flows
// take beside those of others.
#pragma once
#include <algorithm>
#include <limits>
#include <queue>
#include <vector>

#include "flow_rates.hpp"
#include "pipeline.hpp"

namespace pipeplan {

constexpr double kNever = std::numeric_limits<double>::infinity();

struct End {
    double ms;
    int resource;  // stage n: n; channel c forward: S + 2c, backward: S + 2c + 1; with shared links
                   // the all-reduce of stage n: S + 2(S - 1) + n
    bool operator>(const End& other) const {
        return ms != other.ms ? ms > other.ms : resource > other.resource;
    }
};

struct Stage {
    bool busy = false;
    Code running = 0;
    int forwards_begun = 0;
    int backwards_begun = 0;
    int done = 0;
};

// One direction of a channel: a queue that is filled and served in the order of arrival.
struct Lane {
    bool busy = false;
    int queued = 0;
    int begun = 0;
};

using Ends = std::priority_queue<End, std::vector<End>, std::greater<End>>;

// Every transfer takes a given time. All-reduces come after everything else, so nobody waits for
// them here.
class GivenTimes {
  public:
    GivenTimes(const CostsView& costs, Trace&) : costs_(costs) {}
    void begin(int lane, double now_ms, Ends& ends) {
        const double* length_ms = lane % 2 == 0 ? costs_.send_forward_ms : costs_.send_backward_ms;
        ends.push({now_ms + length_ms[lane / 2], costs_.num_stages + lane});
    }
    void begin_all_reduce(int, double) {}
    double next_ms() { return kNever; }
    template <class Done>
    void take_until(double, Done&&) {}
    void settle(double) {}

  private:
    const CostsView& costs_;
};

// Transfers and all-reduces take as long as their flows, which share links with those of others.
class SharedTimes {
  public:
    SharedTimes(const CostsView& costs, Trace& trace)
        : num_lanes_(2 * (costs.num_stages - 1)),
          rates_(costs.flows->merged(), costs.records_rates ? &trace.rate_changes : nullptr) {}
    void begin(int lane, double now_ms, Ends&) { rates_.begin(lane, now_ms); }
    void begin_all_reduce(int n, double now_ms) { rates_.begin(num_lanes_ + n, now_ms); }
    double next_ms() { return rates_.next_ms(); }
    template <class Done>
    void take_until(double last_ms, Done&& done) {
        rates_.take_until(last_ms, done);
    }
    void settle(double now_ms) { rates_.settle(now_ms); }

  private:
    const int num_lanes_;
    FlowRates rates_;
};

template <class Transfers>
class Run {
  public:
    Run(const CostsView& costs, Trace& trace, Control& control)
        : costs_(costs), trace_(trace), control_(control), S_(costs.num_stages),
          M_(costs.num_microbatches), transfers_(costs, trace), stages_(S_),
          lanes_(2 * std::max(S_ - 1, 0)),
          has_forward_input_(static_cast<std::size_t>(S_) * M_, 0),
          has_backward_input_(static_cast<std::size_t>(S_) * M_, 0) {
        const std::size_t blocks = static_cast<std::size_t>(S_) * 2 * M_;
        trace_.order.assign(blocks, 0);
        trace_.block_start_ms.assign(blocks, 0.0);
        trace_.sent.assign(lanes_.size() * M_, 0);
        trace_.transfer_start_ms.assign(lanes_.size() * M_, 0.0);
        trace_.stage_end_ms.assign(S_, 0.0);
        if (costs.flows) {
            trace_.transfer_end_ms.assign(lanes_.size() * M_, 0.0);
            trace_.all_reduce_end_ms.assign(S_, 0.0);
        }
        std::fill_n(has_forward_input_.begin(), M_, 1);
    }

    // choose(n, stage, run, code) returns whether stage n may start a block, and writes its code.
    // run.ready(n, code) tells whether the block's input has arrived.
    template <class Choose>
    void operator()(Choose&& choose) {
        std::vector<int> channels, starters(S_);
        for (int n = 0; n < S_; ++n) starters[n] = n;
        start_stages(starters, choose);
        for (long instant = 1; next_ms() < kNever; ++instant) {
            if (instant % (costs_.flows ? kFewInstants : kInstantsBetweenChecks) == 0) control_.check();
            now_ms_ = next_ms();
            const double last_ms = now_ms_ + kSameInstantMs;
            while (next_ms() <= last_ms) {
                channels.clear();
                starters.clear();
                // Take all ends of this round first. Work that they start may end in the next
                // round.
                round_.clear();
                while (!ends_.empty() && ends_.top().ms <= last_ms) {
                    round_.push_back(ends_.top());
                    ends_.pop();
                }
                transfers_.take_until(last_ms, [&](int transfer, double end_ms) {
                    round_.push_back({end_ms, S_ + transfer});
                });
                for (const End& end : round_) take_end(end, channels, starters);
                for (int channel : channels) serve(channel);
                start_stages(starters, choose);
            }
            transfers_.settle(now_ms_);
        }
        trace_.blocks_done.resize(S_);
        for (int n = 0; n < S_; ++n) trace_.blocks_done[n] = stages_[n].done;
    }

    bool ready(int n, Code code) const {
        return code >= 0 ? has_forward_input_[static_cast<std::size_t>(n) * M_ + code]
                         : has_backward_input_[static_cast<std::size_t>(n) * M_ + (-1 - code)];
    }

  private:
    static constexpr long kInstantsBetweenChecks = 8192;
    static constexpr long kFewInstants = 32;  // where links are shared an instant may take a millisecond

    double next_ms() {
        return std::min(ends_.empty() ? kNever : ends_.top().ms, transfers_.next_ms());
    }

    void take_end(const End& end, std::vector<int>& channels, std::vector<int>& starters) {
        if (end.resource < S_) {
            const int n = end.resource;
            Stage& stage = stages_[n];
            stage.busy = false;
            ++stage.done;
            trace_.stage_end_ms[n] = end.ms;
            starters.push_back(n);
            if (stage.done == 2 * M_) transfers_.begin_all_reduce(n, end.ms);
            if (stage.running >= 0) {
                if (n + 1 < S_) enqueue(n, 0, stage.running, channels);
                else has_backward_input_[static_cast<std::size_t>(n) * M_ + stage.running] = 1;
            } else if (n > 0) {
                enqueue(n - 1, 1, stage.running, channels);
            }
            return;
        }
        const int lane_index = end.resource - S_;
        if (lane_index >= static_cast<int>(lanes_.size())) {
            trace_.all_reduce_end_ms[lane_index - lanes_.size()] = end.ms;
            return;
        }
        const int channel = lane_index / 2;
        Lane& lane = lanes_[lane_index];
        lane.busy = false;
        if (!trace_.transfer_end_ms.empty())
            trace_.transfer_end_ms[static_cast<std::size_t>(lane_index) * M_ + lane.begun - 1] =
                end.ms;
        const Code code = sent(lane_index, lane.begun - 1);
        channels.push_back(channel);
        if (lane_index % 2 == 0) {
            has_forward_input_[static_cast<std::size_t>(channel + 1) * M_ + code] = 1;
            starters.push_back(channel + 1);
        } else {
            has_backward_input_[static_cast<std::size_t>(channel) * M_ + (-1 - code)] = 1;
            starters.push_back(channel);
        }
    }

    void enqueue(int channel, int direction, Code code, std::vector<int>& channels) {
        Lane& lane = lanes_[2 * channel + direction];
        sent(2 * channel + direction, lane.queued++) = code;
        channels.push_back(channel);
    }

    void serve(int channel) {
        Lane& forward = lanes_[2 * channel];
        Lane& backward = lanes_[2 * channel + 1];
        const bool forward_waits = !forward.busy && forward.begun < forward.queued;
        const bool backward_waits = !backward.busy && backward.begun < backward.queued;
        if (!costs_.half_duplex) {
            if (forward_waits) begin_transfer(channel, 0);
            if (backward_waits) begin_transfer(channel, 1);
            return;
        }
        if (forward.busy || backward.busy) return;
        if (forward_waits && backward_waits) {
            // Rule 4: the order of a pipeline in which everything takes one unit.
            const bool backward_first = backward.begun + 4 * (S_ - 1) - 2 * channel - 1 <=
                                        forward.begun + 2 * channel + 1;
            begin_transfer(channel, backward_first ? 1 : 0);
        } else if (forward_waits) {
            begin_transfer(channel, 0);
        } else if (backward_waits) {
            begin_transfer(channel, 1);
        }
    }

    void begin_transfer(int channel, int direction) {
        const int lane_index = 2 * channel + direction;
        Lane& lane = lanes_[lane_index];
        lane.busy = true;
        trace_.transfer_start_ms[static_cast<std::size_t>(lane_index) * M_ + lane.begun++] = now_ms_;
        transfers_.begin(lane_index, now_ms_, ends_);
    }

    template <class Choose>
    void start_stages(const std::vector<int>& starters, Choose&& choose) {
        for (int n : starters) {
            Stage& stage = stages_[n];
            Code code;
            if (stage.busy || !choose(n, stage, *this, code)) continue;
            const std::size_t position = static_cast<std::size_t>(n) * 2 * M_ +
                                         stage.forwards_begun + stage.backwards_begun;
            stage.busy = true;
            stage.running = code;
            trace_.order[position] = code;
            trace_.block_start_ms[position] = now_ms_;
            ++(code >= 0 ? stage.forwards_begun : stage.backwards_begun);
            ends_.push({now_ms_ + (code >= 0 ? costs_.forward_ms : costs_.backward_ms)[n], n});
        }
    }

    Code& sent(int lane_index, int position) {
        return trace_.sent[static_cast<std::size_t>(lane_index) * M_ + position];
    }

    const CostsView& costs_;
    Trace& trace_;
    Control& control_;
    const int S_, M_;
    double now_ms_ = 0.0;
    Transfers transfers_;
    std::vector<Stage> stages_;
    std::vector<Lane> lanes_;
    std::vector<std::uint8_t> has_forward_input_;   // [stages][microbatches]
    std::vector<std::uint8_t> has_backward_input_;  // [stages][microbatches]
    Ends ends_;
    std::vector<End> round_;
};

}  // namespace pipeplan
