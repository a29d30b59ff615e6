// The fixed-plan bound of chains: one machine at a time, with heads and tails (Jackson 1955).
//
// The k-th forward of a stage has a head: so much time passes before it can start. The forward behind
// which j others follow has a tail: so much passes after its end. So have backwards, weight gradients
// and transfers. A group, or a channel, is one machine that runs these jobs. If it may interrupt them,
// running the longest tail first is optimal, and that time is a bound. docs/theory.md proves the heads
// and tails.
//
// O(stages * groups * microbatches + jobs * log(jobs)).
#include "chain_bound.hpp"

#include <algorithm>
#include <map>
#include <queue>
#include <utility>
#include <vector>

namespace pipeplan {
namespace {

struct Job {
    double head, length, tail;
};

// The preemptive optimum of jobs on one machine.
double one_machine(std::vector<Job>& jobs) {
    std::sort(jobs.begin(), jobs.end(), [](const Job& a, const Job& b) { return a.head < b.head; });
    std::priority_queue<std::pair<double, double>> ready;  // tail, what is left
    double now = 0.0, last = 0.0;
    std::size_t next = 0;
    while (next < jobs.size() || !ready.empty()) {
        if (ready.empty()) now = std::max(now, jobs[next].head);
        for (; next < jobs.size() && jobs[next].head <= now; ++next)
            ready.emplace(jobs[next].tail, jobs[next].length);
        auto [tail, left] = ready.top();
        ready.pop();
        const double until = next < jobs.size() ? jobs[next].head : kInfinity;
        if (now + left <= until) {
            now += left;
            last = std::max(last, now + tail);
        } else {
            ready.emplace(tail, left - (until - now));
            now = until;
        }
    }
    return last;
}

class ChainBound {
  public:
    explicit ChainBound(const Chain& chain)
        : c_(chain), P_(chain.num_stages), M_(chain.num_microbatches), stages_(chain.num_groups),
          forward_(P_ + 1, 0.0), backward_(P_ + 1, 0.0) {
        for (int p = 0; p < P_; ++p) {
            stages_[c_.group[p]].push_back(p);
            // The way from the first stage's start to p's, and from p's end of a backward to the
            // first stage's end of one.
            forward_[p + 1] = forward_[p] + c_.forward_ms[p] + c_.there_ms[p];
            backward_[p + 1] = backward_[p] + c_.backward_ms[p] + c_.back_ms[p];
        }
        find_heads();
        find_tails();
    }

    double value() const {
        double least = 0.0;
        std::map<std::pair<int, int>, std::vector<Job>> channels;
        std::vector<Job> jobs;
        for (int g = 0; g < c_.num_groups; ++g) {
            jobs.clear();
            std::vector<Job> rings;
            for (int p : stages_[g]) {
                for (int k = 0; k < M_; ++k) {
                    const int j = M_ - 1 - k;
                    jobs.push_back({at(forward_head_, p, k), c_.forward_ms[p], at(forward_tail_, p, j)});
                    jobs.push_back({at(backward_head_, p, k), c_.backward_ms[p], at(backward_tail_, p, j)});
                    if (c_.is_split[p])
                        jobs.push_back({at(backward_head_, p, k) + c_.backward_ms[p], c_.weight_ms[p],
                                        j * c_.weight_ms[p] + c_.left_ms(p)});
                }
                const double end = at(backward_head_, p, M_ - 1) + c_.backward_ms[p] + c_.weight_ms[p];
                const double before = c_.reduce_ms[p] - c_.last_part_ms[p];
                rings.push_back({std::max(0.0, end - c_.early_ms[p]), std::max(0.0, before), 0.0});
                rings.push_back({end, c_.last_part_ms[p], 0.0});
            }
            least = std::max(least, one_machine(jobs));
            least = std::max(least, one_machine(rings));
            least = std::max(least, memory_term(g));
        }
        for (int p = 0; p + 1 < P_; ++p) {
            const int g = c_.group[p], h = c_.group[p + 1];
            if (g == h) continue;
            const bool swaps = c_.half_duplex && g > h;
            auto& there = channels[swaps ? std::pair(h, g) : std::pair(g, h)];
            for (int k = 0; k < M_; ++k)
                there.push_back({at(forward_head_, p, k) + c_.forward_ms[p], c_.there_ms[p],
                                 c_.forward_ms[p + 1] + at(forward_tail_, p + 1, M_ - 1 - k)});
            auto& back = channels[c_.half_duplex != swaps ? std::pair(g, h) : std::pair(h, g)];
            for (int k = 0; k < M_; ++k)
                back.push_back({at(backward_head_, p + 1, k) + c_.backward_ms[p + 1], c_.back_ms[p],
                                c_.backward_ms[p] + at(backward_tail_, p, M_ - 1 - k)});
        }
        for (auto& [ends, transfers] : channels) least = std::max(least, one_machine(transfers));
        return least;
    }

  private:
    using Table = std::vector<double>;  // [stages][microbatches]
    double at(const Table& table, int p, int k) const { return table[static_cast<std::size_t>(p) * M_ + k]; }
    double& at(Table& table, int p, int k) { return table[static_cast<std::size_t>(p) * M_ + k]; }

    // From the end of a forward of p to the start of the same microbatch's backward of q.
    double around(int p, int q) const {
        return forward_[P_] - forward_[p] - c_.forward_ms[p] + backward_[P_] - backward_[q] -
               c_.backward_ms[q];
    }

    void find_heads() {
        forward_head_.assign(static_cast<std::size_t>(P_) * M_, 0.0);
        backward_head_ = forward_head_;
        for (int p = 0; p < P_; ++p) {
            double sent = 0.0;  // when the channel has carried the one before
            for (int k = 0; k < M_; ++k) {
                double head = k ? at(forward_head_, p, k - 1) + c_.forward_ms[p] : 0.0;
                if (p > 0) {
                    const double ready = at(forward_head_, p - 1, k) + c_.forward_ms[p - 1];
                    sent = std::max(ready, sent) + c_.there_ms[p - 1];
                    head = std::max(head, sent);
                }
                at(forward_head_, p, k) = head;
            }
            raise_by_groups_before(p);
        }
        for (int p = P_ - 1; p >= 0; --p) {
            double sent = 0.0;
            for (int k = 0; k < M_; ++k) {
                double head = k ? at(backward_head_, p, k - 1) + c_.backward_ms[p] : 0.0;
                if (p == P_ - 1) {
                    head = std::max(head, at(forward_head_, p, k) + c_.forward_ms[p]);
                } else {
                    const double ready = at(backward_head_, p + 1, k) + c_.backward_ms[p + 1];
                    sent = std::max(ready, sent) + c_.back_ms[p];
                    head = std::max(head, sent);
                }
                at(backward_head_, p, k) = head;
            }
            raise_by_groups_around(p);
        }
    }

    // k + 1 microbatches have run all stages before p. A group has run its share of that.
    void raise_by_groups_before(int p) {
        for (const std::vector<int>& stages : stages_) {
            double work = 0.0;
            int last = -1;
            for (int q : stages)
                if (q < p) work += c_.forward_ms[q], last = q;
            if (last < 0) continue;
            const double rest = forward_[stages[0]] + forward_[p] - forward_[last] - c_.forward_ms[last];
            for (int k = 0; k < M_; ++k)
                at(forward_head_, p, k) = std::max(at(forward_head_, p, k), (k + 1) * work + rest);
        }
    }

    // The same for all forwards and the backwards behind p.
    void raise_by_groups_around(int p) {
        for (const std::vector<int>& stages : stages_) {
            double work = 0.0;
            int nearest = -1;
            for (int q : stages) {
                work += c_.forward_ms[q];
                if (q <= p) continue;
                work += c_.backward_ms[q];
                if (nearest < 0) nearest = q;
            }
            const double rest =
                forward_[stages[0]] + (nearest < 0 ? around(stages.back(), p)
                                                   : backward_[nearest] - backward_[p] - c_.backward_ms[p]);
            for (int k = 0; k < M_; ++k)
                at(backward_head_, p, k) = std::max(at(backward_head_, p, k), (k + 1) * work + rest);
        }
    }

    void find_tails() {
        forward_tail_.assign(static_cast<std::size_t>(P_) * M_, 0.0);
        backward_tail_ = forward_tail_;
        for (int p = 0; p < P_; ++p) {
            double sent = 0.0;
            for (int j = 0; j < M_; ++j) {
                double tail = j * c_.backward_ms[p] + (j + 1) * c_.weight_ms[p] + c_.left_ms(p);
                if (j > 0) tail = std::max(tail, c_.backward_ms[p] + at(backward_tail_, p, j - 1));
                if (p > 0) {
                    const double after = c_.backward_ms[p - 1] + at(backward_tail_, p - 1, j);
                    sent = std::max(after, sent) + c_.back_ms[p - 1];
                    tail = std::max(tail, sent);
                }
                at(backward_tail_, p, j) = tail;
            }
            raise_by_groups_after_backward(p);
        }
        for (int p = P_ - 1; p >= 0; --p) {
            double sent = 0.0;
            for (int j = 0; j < M_; ++j) {
                double tail = j ? c_.forward_ms[p] + at(forward_tail_, p, j - 1) : 0.0;
                if (p == P_ - 1) {
                    tail = std::max(tail, c_.backward_ms[p] + at(backward_tail_, p, j));
                } else {
                    const double after = c_.forward_ms[p + 1] + at(forward_tail_, p + 1, j);
                    sent = std::max(after, sent) + c_.there_ms[p];
                    tail = std::max(tail, sent);
                }
                at(forward_tail_, p, j) = tail;
            }
            raise_by_groups_after_forward(p);
        }
    }

    // j + 1 microbatches end their backward of p at this time or later. What a group still has to do
    // for them comes afterwards: backwards in front of p, with or without their weight gradients.
    void raise_by_groups_after_backward(int p) {
        for (const std::vector<int>& stages : stages_) {
            double work = 0.0, weights = 0.0, least_reduce = kInfinity;
            int nearest = -1;
            for (int q : stages) {
                if (q > p) break;
                if (c_.is_split[q] || q < p)
                    least_reduce = std::min(least_reduce, c_.is_split[q] ? c_.left_ms(q) : at(backward_tail_, q, 0));
                weights += c_.weight_ms[q];
                if (q == p) continue;
                work += c_.backward_ms[q], nearest = q;
            }
            const bool begins_here = c_.group[p] == c_.group[stages[0]] && c_.is_split[p];
            if (nearest < 0 && !begins_here) continue;
            const double way = nearest < 0 ? 0.0 : backward_[p] - backward_[nearest] - c_.backward_ms[nearest];
            const double tail = nearest < 0 ? 0.0 : at(backward_tail_, stages[0], 0);
            for (int j = 0; j < M_; ++j) {
                double& least = at(backward_tail_, p, j);
                if (nearest >= 0) least = std::max(least, way + (j + 1) * work + tail);
                least = std::max(least, (begins_here ? 0.0 : way) + (j + 1) * (work + weights) + least_reduce);
            }
        }
    }

    void raise_by_groups_after_forward(int p) {
        for (const std::vector<int>& stages : stages_) {
            double work = 0.0, weights = 0.0, least_reduce = kInfinity;
            int nearest = -1;
            for (int q : stages) {
                least_reduce = std::min(least_reduce, c_.is_split[q] ? c_.left_ms(q) : at(backward_tail_, q, 0));
                weights += c_.weight_ms[q];
                work += c_.backward_ms[q];
                if (q <= p) continue;
                work += c_.forward_ms[q];
                if (nearest < 0) nearest = q;
            }
            const double way = nearest < 0 ? around(p, stages.back())
                                           : forward_[nearest] - forward_[p] - c_.forward_ms[p];
            for (int j = 0; j < M_; ++j) {
                double& least = at(forward_tail_, p, j);
                least = std::max(least, way + (j + 1) * work + at(backward_tail_, stages[0], 0));
                least = std::max(least, way + (j + 1) * (work + weights) + least_reduce);
            }
        }
    }

    // What a group holds, summed over time, has to fit into its room.
    double memory_term(int g) const {
        const double room = c_.room_bytes[g];
        if (room == kInfinity || !(room > 0)) return 0.0;
        double held = 0.0, tail = kInfinity;
        for (int p : stages_[g]) {
            const double way = c_.forward_ms[p] + around(p, p) + c_.backward_ms[p];
            held += c_.held_bytes[p] * way + (c_.is_split[p] ? c_.kept_bytes[p] * c_.weight_ms[p] : 0.0);
            tail = std::min(tail, c_.is_split[p] ? c_.left_ms(p) : at(backward_tail_, p, 0));
        }
        return forward_[stages_[g][0]] + M_ * held / (room * (1 + 1e-9)) + tail;
    }

    const Chain& c_;
    const int P_, M_;
    std::vector<std::vector<int>> stages_;     // of each group, rising
    std::vector<double> forward_, backward_;  // [stages + 1]
    Table forward_head_, backward_head_, forward_tail_, backward_tail_;
};

}  // namespace

double chain_bound(const Chain& chain) { return ChainBound(chain).value(); }

}  // namespace pipeplan
