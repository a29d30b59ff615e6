// PRM: partition, replication and mapping of a chain of layers over ordered devices.
//
// Luo et al. 2022, arXiv:2204.10562, section IV. W(l, x, r, i) is the least bottleneck if the
// first l layers form x stages on the first i devices, the last stage on the last r of these:
//
//   W(l, x, r, i) = min over l', r' of max( W(l', x-1, r', i-r), channel(l', r', r), stage(l', l, r) )
//
// Differs: the minimum is taken in two steps, first over r' for each cut l' (`best_before`), then
// over l'. So each number of stages takes L V^3 steps instead of L^2 V^3. The stage term
// grows as l' falls. So the second step takes L V^2 steps in all, with a window of cuts that only
// moves on (`best_cuts`). The caller knows a plan that takes the limit, so larger
// bottlenecks are of no use: values above the limit are dropped. States are dropped too if their
// remaining layers exceed the limit even when all remaining devices share them evenly. The result
// stays exact.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "kernels.hpp"
#include "links.hpp"

namespace pipeplan {
namespace {

using Index = std::int32_t;


// W(., x, r, i) for one (i, r), with the choice that led to each value. Values of layers outside
// [first, end) are infinite.
struct Row {
    Row() = default;
    Row(int first_layer, int end_layer)
        : first(first_layer), end(end_layer), bottleneck_ms(end - first, kInfinity),
          cut(end - first, -1), replicas_before(end - first, -1) {}
    void set(int l, double ms, int cut_before, int replicas) {
        bottleneck_ms[l - first] = ms;
        cut[l - first] = static_cast<Index>(cut_before);
        replicas_before[l - first] = static_cast<std::int16_t>(replicas);
    }
    bool alive() const { return !cut.empty(); }

    int first = 0, end = 0;
    std::vector<double> bottleneck_ms;
    std::vector<Index> cut;                     // l'
    std::vector<std::int16_t> replicas_before;  // r'
};

// Sums of neighbouring values in O(1), right to the last place or two. A prefix sum is kept as the
// sum of two numbers, so that small values do not vanish beside large ones.
class ExactSums {
  public:
    explicit ExactSums(const std::vector<double>& values) : sums_(values.size() + 1, Pair{0.0, 0.0}) {
        for (std::size_t k = 0; k < values.size(); ++k) {
            const Pair whole = add(sums_[k].high, values[k]);
            sums_[k + 1] = add(whole.high, whole.low + sums_[k].low);
        }
    }
    double operator()(int first, int end) const {
        const Pair whole = add(sums_[end].high, -sums_[first].high);
        return whole.high + (whole.low + (sums_[end].low - sums_[first].low));
    }

  private:
    struct Pair {
        double high, low;
    };
    // The sum of two numbers and what rounding takes from it (Knuth's two-sum).
    static Pair add(double a, double b) {
        const double sum = a + b, part = sum - a;
        return {sum, (a - (sum - part)) + (b - part)};
    }
    std::vector<Pair> sums_;
};

// The cuts [first, end) with the least time before any of them. Both ends only move on. Only cuts
// that no later and better one replaces are kept, so each step costs O(1).
class CutWindow {
  public:
    explicit CutWindow(int num_layers) : best_(num_layers + 1) {}

    void reset(int first) { first_ = end_ = first, head_ = tail_ = 0; }
    void push(const std::vector<double>& before) {
        while (tail_ > head_ && before[best_[tail_ - 1]] >= before[end_]) --tail_;
        best_[tail_++] = end_++;
    }
    void pop() {
        if (best_[head_] == first_) ++head_;
        ++first_;
    }
    bool empty() const { return first_ == end_; }
    int first() const { return first_; }
    int end() const { return end_; }
    int best() const { return best_[head_]; }  // the last one, where several are least

  private:
    int first_ = 0, end_ = 0;
    std::vector<int> best_;  // in [head_, tail_): later cuts with longer times
    int head_ = 0, tail_ = 0;
};

std::vector<double> work_of_layers(const Instance& in) {
    std::vector<double> work_ms;
    for (int l = 0; l < in.num_layers; ++l)
        work_ms.push_back(in.forward_ms.value(l) + in.backward_ms.value(l));
    return work_ms;
}

std::vector<double> parameters_of_layers(const Instance& in) {
    std::vector<double> bytes;
    for (int l = 0; l < in.num_layers; ++l) bytes.push_back(in.parameter_bytes.value(l));
    return bytes;
}

class Table {
  public:
    Table(const Instance& in, double limit_ms, Control& control)
        : in_(in), L_(in.num_layers), V_(in.num_devices), limit_ms_(limit_ms), control_(control),
          intervals_(in), work_ms_(work_of_layers(in)),
          parameter_bytes_(parameters_of_layers(in)), work_behind_ms_(L_ + 1, 0.0), speed_behind_(V_ + 1, 0.0) {
        for (int l = L_; l-- > 0;)
            work_behind_ms_[l] = work_behind_ms_[l + 1] + work_ms_(l, l + 1);
        for (int u = V_; u-- > 0;) speed_behind_[u] = speed_behind_[u + 1] + in.speed[u];
        std::vector<int> sizes(V_);
        std::iota(sizes.begin(), sizes.end(), 1);
        for (int j = 0; j < V_; ++j) {
            control.check();
            channels_.emplace_back(in, j, sizes);
        }
    }

    void add_level(Pool& pool) {
        levels_.emplace_back(static_cast<std::size_t>(V_ + 1) * (V_ + 1));
        const int x = static_cast<int>(levels_.size());
        // Tasks write different rows, and read only the level before. So they can run in parallel.
        work_.resize(pool.num_workers());
        const auto add = [&](int k, int worker) {
            if (!work_[worker]) work_[worker] = std::make_unique<Work>(L_);
            add_rows(x, x - 1 + k, *work_[worker]);
        };
        pool.run(V_ - (x - 1), add, Tasks::kShort);
        // The way back needs only the choices of earlier levels.
        if (x > 1)
            for (Row& row : levels_[x - 2]) std::vector<double>().swap(row.bottleneck_ms);
    }

    // The best partition into x stages; nothing if none is within the limit.
    std::optional<Partition> best(int x) const {
        double bottleneck_ms = kInfinity;
        int i = 0, r = 0;
        for (int devices = 1; devices <= V_; ++devices) {
            for (int replicas = 1; replicas <= devices; ++replicas) {
                const Row& row = levels_[x - 1][index(devices, replicas)];
                if (row.alive() && row.bottleneck_ms.back() < bottleneck_ms) {
                    bottleneck_ms = row.bottleneck_ms.back();
                    i = devices;
                    r = replicas;
                }
            }
        }
        if (bottleneck_ms == kInfinity) return std::nullopt;
        std::vector<int> end_layer(x);
        std::vector<std::vector<int>> devices(x);
        for (int stage = x - 1, l = L_; stage >= 0; --stage) {
            const Row& row = levels_[stage][index(i, r)];
            end_layer[stage] = l;
            devices[stage].resize(r);
            std::iota(devices[stage].begin(), devices[stage].end(), i - r);
            i -= r;
            r = row.replicas_before[l - row.first];
            l = row.cut[l - row.first];
        }
        return Partition{bottleneck_ms, PlacedPlan(in_, std::move(end_layer), std::move(devices))};
    }

  private:
    // What a thread needs to add rows.
    struct Work {
        explicit Work(int num_layers)
            : before_ms(num_layers + 1), replicas_before(num_layers + 1),
              channel_ms(num_layers + 1), window(num_layers) {}
        std::vector<double> before_ms;               // [layers + 1], by the cut
        std::vector<std::int64_t> replicas_before;   // the same; as wide as the times
        std::vector<double> channel_ms;              // the same
        CutWindow window;
    };

    // All rows of x stages whose first x - 1 stages use the first j devices.
    void add_rows(int x, int j, Work& work) {
        for (int r = 1; j + r <= V_; ++r) {
            if (!intervals_.ring(j, r).connected) break;
            control_.check();
            if (!best_before(x, j, r, work)) continue;
            Row row = best_cuts(x, j, r, work);
            if (row.alive()) levels_.back()[index(j + r, r)] = std::move(row);
        }
    }

    std::size_t index(int i, int r) const { return static_cast<std::size_t>(i) * (V_ + 1) + r; }

    // For each cut l' the best way to place the layers before it on the first j devices, if r
    // devices follow. False if there is none within the limit.
    bool best_before(int x, int j, int r, Work& work) const {
        std::fill(work.before_ms.begin(), work.before_ms.end(), kInfinity);
        if (x == 1) {
            if (j != 0) return false;  // the first stage starts at the first device
            work.before_ms[0] = 0.0;
            return true;
        }
        double* before = work.before_ms.data();
        std::int64_t* replicas_before = work.replicas_before.data();
        const double* channel_ms = work.channel_ms.data();
        const int first = first_layer_within_limit(x - 1, j);
        for (int r_before = 1; r_before <= j; ++r_before) {
            const Row& row = levels_[x - 2][index(j, r_before)];
            if (!row.alive() || !channels_[j].forward(r_before - 1, r - 1).connected()) continue;
            const int begin = std::max(first, row.first), end = std::min(L_, row.end);
            time_channels(j, r_before, r, {begin, end}, work.channel_ms.data());
            const double* so_far = row.bottleneck_ms.data() - row.first;
            // Without branches, so that the compiler can take several cuts at once.
            for (int l = begin; l < end; ++l) {
                const double value = std::max(so_far[l], channel_ms[l]);
                const bool better = value < before[l];
                before[l] = better ? value : before[l];
                replicas_before[l] = better ? r_before : replicas_before[l];
            }
        }
        bool any = false;
        for (int l = first; l < L_; ++l) {
            if (before[l] > limit_ms_) before[l] = kInfinity;
            any = any || before[l] < kInfinity;
        }
        return any;
    }

    // For each cut of a range the time that the channel between r_before devices, the last of which
    // is j - 1, and the r devices from j on takes for an iteration. Made anew each time: a table for
    // all pairs of sizes would take longer to read than to make.
    void time_channels(int j, int r_before, int r, Range cuts, double* times_ms) const {
        const LinkSet& forward = channels_[j].forward(r_before - 1, r - 1);
        const LinkSet& backward = channels_[j].backward(r_before - 1, r - 1);
        const double part = 1.0 / (static_cast<double>(r_before) * r), M = in_.num_microbatches;
        const double *output = in_.output_bytes.data() - 1, *gradient = in_.gradient_bytes.data() - 1;
        const auto time_all = [&](auto there_ms, auto back_ms) {
            if (in_.half_duplex) {
                for (int l = cuts.first; l < cuts.end; ++l)
                    times_ms[l] = M * (there_ms(part * output[l]) + back_ms(part * gradient[l]));
            } else {
                for (int l = cuts.first; l < cuts.end; ++l)
                    times_ms[l] =
                        M * std::max(there_ms(part * output[l]), back_ms(part * gradient[l]));
            }
        };
        if (forward.is_single() && backward.is_single()) {
            const Link there = forward.single(), back = backward.single();
            time_all([=](double q) { return there.latency_ms + q * there.ms_per_byte; },
                     [=](double q) { return back.latency_ms + q * back.ms_per_byte; });
        } else {
            time_all([&](double q) { return forward.transfer_ms(q); },
                     [&](double q) { return backward.transfer_ms(q); });
        }
    }

    // The first l for which the devices from i on could run the layers from l on within the limit.
    int first_layer_within_limit(int x, int i) const {
        const double M = in_.num_microbatches;
        const double most = limit_ms_ * speed_behind_[i] * (1 + 1e-9);  // a tie is within
        const auto begin = work_behind_ms_.begin();
        return static_cast<int>(std::partition_point(begin + x, begin + L_,
                                                     [&](double ms) { return M * ms > most; }) -
                                begin);
    }

    // For each l the best cut l' in front of a stage of layers [l', l) on r devices behind j.
    //
    // A stage gets longer the earlier its cut, so the cuts from which it takes no longer than the
    // best way to reach any of them form a window that ends at l. The best cut is the best one of
    // the window, or the one in front of it, where the stage itself decides.
    Row best_cuts(int x, int j, int r, Work& work) const {
        const std::vector<double>& before = work.before_ms;
        CutWindow& window = work.window;
        const Ring& ring = intervals_.ring(j, r);
        const double per_work = in_.num_microbatches / (r * intervals_.slowest_speed(j, r));
        const auto stage_ms = [&](int first, int end) {
            return per_work * work_ms_(first, end) + ring.fixed_ms +
                   ring.ms_per_byte * parameter_bytes_(first, end);
        };
        int start = x - 1;
        while (start < L_ && before[start] == kInfinity) ++start;
        window.reset(start);
        Row row;
        for (int l = std::max(first_layer_within_limit(x, j + r), start + 1); l <= L_; ++l) {
            while (window.end() < l) window.push(before);
            while (!window.empty() &&
                   stage_ms(window.first(), l) > std::min(limit_ms_, before[window.best()]))
                window.pop();
            double best = kInfinity;
            int best_cut = -1;
            if (!window.empty()) best_cut = window.best(), best = before[best_cut];
            if (const int cut = window.first() - 1; cut >= start) {
                const double value = std::max(stage_ms(cut, l), before[cut]);
                if (value < best) best = value, best_cut = cut;
            }
            if (best_cut < 0 || !(best <= limit_ms_)) continue;
            if (!row.alive()) row = Row(l, L_ + 1);
            row.set(l, best, best_cut, x == 1 ? 0 : static_cast<int>(work.replicas_before[best_cut]));
        }
        return row;
    }

    const Instance& in_;
    const int L_, V_;
    const double limit_ms_;
    Control& control_;
    const IntervalTable intervals_;
    std::vector<ChannelTable> channels_;                               // [j]
    const ExactSums work_ms_, parameter_bytes_;  // of layers [first, end)
    std::vector<double> work_behind_ms_;  // [layers + 1], suffix sums
    std::vector<double> speed_behind_;    // [devices + 1], suffix sums
    std::vector<std::vector<Row>> levels_;  // [stages - 1][(i, r)]
    std::vector<std::unique_ptr<Work>> work_;
};

}  // namespace

std::vector<Partition> partition(const Instance& instance, int max_stages, double limit_ms,
                                 Pool& pool, Control& control) {
    Table table(instance, limit_ms, control);
    std::vector<Partition> result;
    for (int x = 1; x <= max_stages; ++x) {
        table.add_level(pool);
        if (std::optional<Partition> best = table.best(x)) result.push_back(std::move(*best));
    }
    return result;
}

}  // namespace pipeplan
