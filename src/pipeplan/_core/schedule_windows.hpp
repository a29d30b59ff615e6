// When each block of a pipeline can run, if the whole iteration has to end by a deadline.
//
// Every block has a head, before which it cannot start, and a tail, the time that still passes after
// it. Microbatches go through every stage in one order (docs/theory.md, section 8). So the blocks of a
// stage are two rows, forwards and backwards, and an order of them is a path in a grid: (i, j) means
// that i forwards and j backwards are done. The earliest arrival at each point of the grid, and the
// least time from there to the end, say which steps are possible, and so raise heads and tails.
// Neighbouring stages hand theirs over. This repeats until nothing changes. If some stage has no
// path left, no schedule ends by the deadline. A stage that may hold few microbatches has only the
// points near the diagonal. O(M^2) for a stage and a round.
#pragma once
#include <algorithm>
#include <vector>

#include "instance.hpp"
#include "pipeline.hpp"

namespace pipeplan {

class ScheduleWindows {
  public:
    explicit ScheduleWindows(const CostsView& costs)
        : costs_(costs), S_(costs.num_stages), M_(costs.num_microbatches) {
        for (int n = 0; n < S_; ++n) {
            forward_.push_back(shorter(costs.forward_ms[n]));
            backward_.push_back(shorter(costs.backward_ms[n]));
            reduce_.push_back(shorter(costs.all_reduce_ms[n]));
            there_.push_back(n + 1 < S_ ? shorter(costs.send_forward_ms[n]) : 0.0);
            back_.push_back(n + 1 < S_ ? shorter(costs.send_backward_ms[n]) : 0.0);
        }
        const std::size_t points = static_cast<std::size_t>(M_ + 1) * (M_ + 1);
        arrival_.resize(points);
        rest_.assign(points * S_, kInfinity);
    }

    // False: no schedule ends by the deadline. True: nothing is known.
    bool may_end_by(double deadline_ms, int max_rounds) {
        deadline_ms_ = deadline_ms * (1 + kTolerance);
        step_ms_ = deadline_ms * kWorthARound;
        start_over();
        for (int round = 0; round < max_rounds; ++round) {
            changed_ = false;
            for (int n = 0; n < S_; ++n) {
                if (n > 0) take_from_front(n);
                if (!narrow(n)) return false;
            }
            for (int n = S_ - 1; n >= 0; --n) {
                take_from_behind(n);
                if (!narrow(n)) return false;
            }
            if (!changed_) break;
        }
        return true;
    }

    // Of the last question, if its answer was true.
    double forward_head(int n, int m) const { return forward_head_[at(n, m)]; }
    double forward_tail(int n, int m) const { return forward_tail_[at(n, m)]; }
    double backward_head(int n, int m) const { return backward_head_[at(n, m)]; }
    double backward_tail(int n, int m) const { return backward_tail_[at(n, m)]; }
    // What passes at least after so many forwards and backwards of a stage; infinite: no way is left.
    double rest(int n, int forwards, int backwards) const {
        const std::size_t row = M_ + 1;
        return rest_[n * row * row + forwards * row + backwards];
    }

  private:
    static constexpr double kTolerance = 1e-11;    // relative, for rounding
    static constexpr double kWorthARound = 1e-7;   // relative; a smaller change is no reason to go on

    // Ends within an instant are one, so everything may take an instant less than its length.
    static double shorter(double ms) { return std::max(0.0, ms - kSameInstantMs); }

    std::size_t at(int n, int m) const { return static_cast<std::size_t>(n) * M_ + m; }

    void start_over() {
        for (std::vector<double>* times :
             {&forward_head_, &forward_tail_, &backward_head_, &backward_tail_})
            times->assign(static_cast<std::size_t>(S_) * M_, 0.0);
        for (int n = 0; n < S_; ++n) {
            if (n > 0) take_from_front(n);
            for (int m = 0; m < M_; ++m) {
                if (m > 0) raise(forward_head_[at(n, m)], forward_head_[at(n, m - 1)] + forward_[n]);
                raise(backward_tail_[at(n, m)], reduce_[n]);
            }
            for (int m = M_ - 1; m-- > 0;)
                raise(backward_tail_[at(n, m)], backward_tail_[at(n, m + 1)] + backward_[n]);
        }
        for (int n = S_ - 1; n >= 0; --n) {
            take_from_behind(n);
            for (int m = 1; m < M_; ++m)
                raise(backward_head_[at(n, m)], backward_head_[at(n, m - 1)] + backward_[n]);
            for (int m = M_ - 1; m-- > 0;)
                raise(forward_tail_[at(n, m)], forward_tail_[at(n, m + 1)] + forward_[n]);
        }
    }

    void raise(double& old, double now) {
        if (now > old) old = now;
    }

    // The channel in front of stage n brings activations, and takes gradients away.
    void take_from_front(int n) {
        double sent = 0.0, needed = 0.0;
        for (int m = 0; m < M_; ++m) {
            sent = std::max(sent, forward_head_[at(n - 1, m)] + forward_[n - 1]) + there_[n - 1];
            raise(forward_head_[at(n, m)], sent);
        }
        for (int m = M_; m-- > 0;) {
            needed = std::max(needed, backward_tail_[at(n - 1, m)] + backward_[n - 1]) + back_[n - 1];
            raise(backward_tail_[at(n, m)], needed);
        }
    }

    // The channel behind stage n brings gradients, and takes activations away.
    void take_from_behind(int n) {
        if (n == S_ - 1) {
            for (int m = 0; m < M_; ++m) {
                raise(backward_head_[at(n, m)], forward_head_[at(n, m)] + forward_[n]);
                raise(forward_tail_[at(n, m)], backward_tail_[at(n, m)] + backward_[n]);
            }
            return;
        }
        double sent = 0.0, needed = 0.0;
        for (int m = 0; m < M_; ++m) {
            sent = std::max(sent, backward_head_[at(n + 1, m)] + backward_[n + 1]) + back_[n];
            raise(backward_head_[at(n, m)], sent);
        }
        for (int m = M_; m-- > 0;) {
            needed = std::max(needed, forward_tail_[at(n + 1, m)] + forward_[n + 1]) + there_[n];
            raise(forward_tail_[at(n, m)], needed);
        }
    }

    // Raises heads and tails of a stage's blocks; false if no order of them ends by the deadline.
    bool narrow(int n) {
        const double f = forward_[n], b = backward_[n];
        double *fh = &forward_head_[at(n, 0)], *ft = &forward_tail_[at(n, 0)];
        double *bh = &backward_head_[at(n, 0)], *bt = &backward_tail_[at(n, 0)];
        const std::size_t row = M_ + 1;
        double *arrival = arrival_.data(), *rest = &rest_[n * row * row];
        const int cap = costs_.caps ? costs_.caps[n] : M_;  // of i - j; beyond, all stays infinite
        if (cap < M_) std::fill(arrival_.begin(), arrival_.end(), kInfinity);
        for (int i = 0; i <= M_; ++i) {
            for (int j = std::max(0, i - cap); j <= i; ++j) {
                double least = i + j ? kInfinity : 0.0;
                if (i > j) {  // the last step was a forward
                    const double start = std::max(arrival[(i - 1) * row + j], fh[i - 1]);
                    if (start + f + ft[i - 1] <= deadline_ms_) least = start + f;
                }
                if (j > 0) {
                    const double start = std::max(arrival[i * row + j - 1], bh[j - 1]);
                    if (start + b + bt[j - 1] <= deadline_ms_) least = std::min(least, start + b);
                }
                arrival[i * row + j] = least;
            }
        }
        if (!(arrival[M_ * row + M_] < kInfinity)) return false;
        first_.assign(2 * M_, kInfinity);
        last_.assign(2 * M_, kInfinity);
        for (int i = M_; i >= 0; --i) {
            for (int j = i; j >= std::max(0, i - cap); --j) {
                double least = i + j < 2 * M_ ? kInfinity : 0.0;
                const double here = arrival[i * row + j];
                if (i < M_) {
                    const double tail = std::max(rest[(i + 1) * row + j], ft[i]);
                    const double start = std::max(here, fh[i]);
                    if (fh[i] + f + tail <= deadline_ms_) least = tail + f;
                    if (start + f + tail <= deadline_ms_) {
                        first_[i] = std::min(first_[i], start);
                        last_[i] = std::min(last_[i], tail);
                    }
                }
                if (j < i) {
                    const double tail = std::max(rest[i * row + j + 1], bt[j]);
                    const double start = std::max(here, bh[j]);
                    if (bh[j] + b + tail <= deadline_ms_) least = std::min(least, tail + b);
                    if (start + b + tail <= deadline_ms_) {
                        first_[M_ + j] = std::min(first_[M_ + j], start);
                        last_[M_ + j] = std::min(last_[M_ + j], tail);
                    }
                }
                rest[i * row + j] = least;
            }
        }
        for (int m = 0; m < M_; ++m) {
            if (!(first_[m] < kInfinity && first_[M_ + m] < kInfinity)) return false;
            set(fh[m], first_[m]), set(ft[m], last_[m]);
            set(bh[m], first_[M_ + m]), set(bt[m], last_[M_ + m]);
        }
        return true;
    }

    void set(double& old, double now) {
        if (now > old + step_ms_) changed_ = true;
        if (now > old) old = now;
    }

    const CostsView costs_;
    const int S_, M_;
    double deadline_ms_ = 0.0, step_ms_ = 0.0;
    bool changed_ = false;
    std::vector<double> forward_, backward_, reduce_, there_, back_;  // [stages]
    std::vector<double> forward_head_, forward_tail_, backward_head_, backward_tail_;  // [stages][M]
    std::vector<double> arrival_;         // [forwards done][backwards done]
    std::vector<double> rest_;            // [stages][forwards done][backwards done]
    std::vector<double> first_, last_;    // [forwards, then backwards]
};

}  // namespace pipeplan
