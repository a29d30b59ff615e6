// The event loop behind the simulator and the list schedulers.
//
// A pipeline of S stages is a chain of S stages and S - 1 channels (two directions each).
// Rule 7 of docs/formats.md fixes ties. At each instant all ends are handled first. Then channels
// start transfers, then stages start blocks. Work of no length ends in another round at the same
// instant. Only stages and channels next to an end can start something, so each round looks only at
// these. O(blocks * log stages).
#include <algorithm>
#include <queue>
#include <vector>

#include "pipeline.hpp"

namespace pipeplan {
namespace {

struct End {
    double ms;
    int resource;  // stage n: n; channel c forward: S + 2c, backward: S + 2c + 1
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

class Run {
  public:
    Run(const CostsView& costs, Trace& trace, Control& control)
        : costs_(costs), trace_(trace), control_(control), S_(costs.num_stages), M_(costs.num_microbatches),
          stages_(S_), lanes_(2 * std::max(S_ - 1, 0)),
          has_forward_input_(static_cast<std::size_t>(S_) * M_, 0),
          has_backward_input_(static_cast<std::size_t>(S_) * M_, 0) {
        const std::size_t blocks = static_cast<std::size_t>(S_) * 2 * M_;
        trace_.order.assign(blocks, 0);
        trace_.block_start_ms.assign(blocks, 0.0);
        trace_.sent.assign(lanes_.size() * M_, 0);
        trace_.transfer_start_ms.assign(lanes_.size() * M_, 0.0);
        trace_.stage_end_ms.assign(S_, 0.0);
        std::fill_n(has_forward_input_.begin(), M_, 1);
    }

    // choose(n, stage, run, code) returns whether stage n may start a block, and writes its code.
    // run.ready(n, code) tells whether the block's input has arrived.
    template <class Choose>
    void operator()(Choose&& choose) {
        std::vector<int> channels, starters(S_);
        for (int n = 0; n < S_; ++n) starters[n] = n;
        start_stages(starters, choose);
        for (long instant = 1; !ends_.empty(); ++instant) {
            if (instant % kInstantsBetweenChecks == 0) control_.check();
            now_ms_ = ends_.top().ms;
            while (!ends_.empty() && ends_.top().ms <= now_ms_ + kSameInstantMs) {
                channels.clear();
                starters.clear();
                // Take all ends of this round first. Work that they start may end in the next
                // round.
                round_.clear();
                while (!ends_.empty() && ends_.top().ms <= now_ms_ + kSameInstantMs) {
                    round_.push_back(ends_.top());
                    ends_.pop();
                }
                for (const End& end : round_) take_end(end, channels, starters);
                for (int channel : channels) serve(channel);
                start_stages(starters, choose);
            }
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

    void take_end(const End& end, std::vector<int>& channels, std::vector<int>& starters) {
        if (end.resource < S_) {
            const int n = end.resource;
            Stage& stage = stages_[n];
            stage.busy = false;
            ++stage.done;
            trace_.stage_end_ms[n] = end.ms;
            starters.push_back(n);
            if (stage.running >= 0) {
                if (n + 1 < S_) enqueue(n, 0, stage.running, channels);
                else has_backward_input_[static_cast<std::size_t>(n) * M_ + stage.running] = 1;
            } else if (n > 0) {
                enqueue(n - 1, 1, stage.running, channels);
            }
            return;
        }
        const int lane_index = end.resource - S_;
        const int channel = lane_index / 2;
        Lane& lane = lanes_[lane_index];
        lane.busy = false;
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
        const double* length_ms = direction == 0 ? costs_.send_forward_ms : costs_.send_backward_ms;
        ends_.push({now_ms_ + length_ms[channel], S_ + lane_index});
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
    std::vector<Stage> stages_;
    std::vector<Lane> lanes_;
    std::vector<std::uint8_t> has_forward_input_;   // [stages][microbatches]
    std::vector<std::uint8_t> has_backward_input_;  // [stages][microbatches]
    std::priority_queue<End, std::vector<End>, std::greater<End>> ends_;
    std::vector<End> round_;
};

}  // namespace

Trace run_schedule(const CostsView& costs, const Code* codes, Control& control) {
    Trace trace;
    const int num_blocks = 2 * costs.num_microbatches;
    Run run(costs, trace, control);
    run([=](int n, const Stage& stage, const Run& state, Code& code) {
        const int position = stage.forwards_begun + stage.backwards_begun;
        if (position == num_blocks) return false;
        code = codes[static_cast<std::size_t>(n) * num_blocks + position];
        return state.ready(n, code);
    });
    return trace;
}

Trace run_list(const CostsView& costs, Preference preference, const int* caps, Control& control) {
    Trace trace;
    const int S = costs.num_stages, M = costs.num_microbatches;
    Run run(costs, trace, control);
    run([=](int n, const Stage& stage, const Run& state, Code& code) {
        const int i = stage.backwards_begun, j = stage.forwards_begun;
        const bool backward_ready = i < M && state.ready(n, -1 - i);
        const bool forward_ready = j < M && j - i < caps[n] && state.ready(n, j);
        if (!backward_ready && !forward_ready) return false;
        const bool backward_first =
            preference == Preference::kBackward ||
            (preference == Preference::kUnitPipeline && i + 4 * (S - 1) - 2 * n <= j + 2 * n);
        code = backward_ready && (backward_first || !forward_ready) ? -1 - i : j;
        return true;
    });
    return trace;
}

Trace run_rule(const CostsView& costs, int rule, Control& control) {
    const int S = costs.num_stages, M = costs.num_microbatches;
    std::vector<int> caps(S, M);
    if (costs.caps)
        for (int n = 0; n < S; ++n) caps[n] = std::min(M, costs.caps[n]);
    const auto leave_room = [&](int per_stage_behind) {
        for (int n = 0; n < S; ++n) {
            const int room = per_stage_behind * (S - 1 - n) + 1;
            caps[n] = costs.caps ? std::min(caps[n], room) : room;
        }
    };
    const auto run_warm_up = [&] {  // caps[n] forwards, then one backward and one forward in turn
        std::vector<Code> codes;
        for (int n = 0; n < S; ++n) {
            // With more forwards than the stage in front a stage would wait for ever.
            if (n > 0) caps[n] = std::min(caps[n], caps[n - 1]);
            for (int m = 0; m < std::min(caps[n], M); ++m) codes.push_back(m);
            for (int m = 0; m < M; ++m) {
                codes.push_back(-1 - m);
                if (caps[n] + m < M) codes.push_back(caps[n] + m);
            }
        }
        return run_schedule(costs, codes.data(), control);
    };
    switch (rule) {
        case 0: return run_list(costs, Preference::kUnitPipeline, caps.data(), control);
        case 1: leave_room(1); return run_warm_up();
        case 2: leave_room(2); return run_warm_up();
        case 3: return run_list(costs, Preference::kBackward, caps.data(), control);
        case 4: leave_room(4); return run_list(costs, Preference::kForward, caps.data(), control);
        default: leave_room(2); return run_list(costs, Preference::kForward, caps.data(), control);
    }
}

double iteration_ms(const Trace& trace, const CostsView& costs) {
    double latest = 0.0;
    for (int n = 0; n < costs.num_stages; ++n)
        latest = std::max(latest, trace.stage_end_ms[n] + costs.all_reduce_ms[n]);
    return latest;
}

}  // namespace pipeplan
