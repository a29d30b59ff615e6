// PRM: partition, replication and mapping of a chain of layers over ordered devices.
//
// Luo et al. 2022, arXiv:2204.10562, section IV. W(l, x, r, i) is the least bottleneck if the
// first l layers form x stages on the first i devices, the last stage on the last r of these:
//
//   W(l, x, r, i) = min over l', r' of max( W(l', x-1, r', i-r), channel(l', r', r), stage(l', l, r) )
//
// Differs: the minimum is taken in two steps, first over r' for each cut l' (`best_before`), then
// over l'. So each number of stages takes L V^3 + L^2 V^2 steps instead of L^2 V^3. The stage term
// grows as l' falls. So the second step stops where this term alone reaches the best value so far,
// after about the length of one stage. The caller knows a plan that takes the limit, so larger
// bottlenecks are of no use: values above the limit are dropped. States are dropped too if their
// remaining layers exceed the limit even when all remaining devices share them evenly. The result
// stays exact.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

#include "kernels.hpp"
#include "links.hpp"

namespace pipeplan {
namespace {

using Index = std::int32_t;

constexpr int kWorthThreads = 32;  // devices; below, threads do not pay

// W(., x, r, i) for one (i, r), with the choice that led to each value.
struct Row {
    std::vector<double> bottleneck_ms;  // [layers + 1]
    std::vector<Index> cut;             // [layers + 1], l'
    std::vector<Index> replicas_before; // [layers + 1], r'
    int first = 0, end = 0;             // values outside [first, end) are infinite
    bool alive() const { return !bottleneck_ms.empty(); }
};

class Table {
  public:
    Table(const Instance& in, double limit_ms, Control& control)
        : in_(in), L_(in.num_layers), V_(in.num_devices), limit_ms_(limit_ms), control_(control),
          intervals_(in), work_ms_(L_), work_behind_ms_(L_ + 1, 0.0), speed_behind_(V_ + 1, 0.0) {
        for (int l = L_; l-- > 0;) {
            work_ms_[l] = in.forward_ms.value(l) + in.backward_ms.value(l);
            work_behind_ms_[l] = work_behind_ms_[l + 1] + work_ms_[l];
        }
        for (int u = V_; u-- > 0;) speed_behind_[u] = speed_behind_[u + 1] + in.speed[u];
        std::vector<int> sizes(V_);
        std::iota(sizes.begin(), sizes.end(), 1);
        for (int j = 0; j < V_; ++j) {
            control.check();
            channels_.emplace_back(in, j, sizes);
            channel_ms_.emplace_back(static_cast<std::size_t>(j) * (V_ - j));
        }
    }

    void add_level(Pool& pool) {
        levels_.emplace_back(static_cast<std::size_t>(V_ + 1) * (V_ + 1));
        const int x = static_cast<int>(levels_.size());
        // Tasks write different rows, and read only the level before. So they can run in parallel.
        const auto add = [&](int k, int) { add_rows(x, x - 1 + k); };
        const int num_tasks = V_ - (x - 1);
        if (V_ >= kWorthThreads) return pool.run(num_tasks, add);
        for (int k = 0; k < num_tasks; ++k) add(k, 0);
    }

    // The best partition into x stages; nothing if none is within the limit.
    std::optional<Partition> best(int x) const {
        double bottleneck_ms = kInfinity;
        int i = 0, r = 0;
        for (int devices = 1; devices <= V_; ++devices) {
            for (int replicas = 1; replicas <= devices; ++replicas) {
                const Row& row = levels_[x - 1][index(devices, replicas)];
                if (row.alive() && row.bottleneck_ms[L_] < bottleneck_ms) {
                    bottleneck_ms = row.bottleneck_ms[L_];
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
            r = row.replicas_before[l];
            l = row.cut[l];
        }
        return Partition{bottleneck_ms, PlacedPlan(in_, std::move(end_layer), std::move(devices))};
    }

  private:
    // All rows of x stages whose first x - 1 stages use the first j devices.
    void add_rows(int x, int j) {
        std::vector<double> before(L_ + 1);
        std::vector<std::int64_t> replicas_before(L_ + 1);  // as wide as the times
        for (int r = 1; j + r <= V_; ++r) {
            if (!intervals_.ring(j, r).connected) break;
            control_.check();
            if (!best_before(x, j, r, before, replicas_before)) continue;
            Row row = best_cuts(x, j, r, before, replicas_before);
            if (row.alive()) levels_.back()[index(j + r, r)] = std::move(row);
        }
    }

    std::size_t index(int i, int r) const { return static_cast<std::size_t>(i) * (V_ + 1) + r; }

    // For each cut l' the best way to place the layers before it on the first j devices, if r
    // devices follow. False if there is none within the limit.
    bool best_before(int x, int j, int r, std::vector<double>& before,
                     std::vector<std::int64_t>& replicas_before) const {
        std::fill(before.begin(), before.end(), kInfinity);
        if (x == 1) {
            if (j != 0) return false;  // the first stage starts at the first device
            before[0] = 0.0;
            return true;
        }
        bool any = false;
        const int first = first_layer_within_limit(x - 1, j);
        for (int r_before = 1; r_before <= j; ++r_before) {
            const Row& row = levels_[x - 2][index(j, r_before)];
            if (!row.alive() || !channels_[j].forward(r_before - 1, r - 1).connected()) continue;
            const double* channel_ms = channel_times(j, r_before, r);
            const double* so_far = row.bottleneck_ms.data();
            // Without branches, so that the compiler can take several cuts at once.
            const int end = std::min(L_, row.end);
            for (int l = std::max(first, row.first); l < end; ++l) {
                const double value = std::max(so_far[l], channel_ms[l]);
                const bool better = value < before[l];
                before[l] = better ? value : before[l];
                replicas_before[l] = better ? r_before : replicas_before[l];
            }
        }
        for (int l = first; l < L_; ++l) {
            if (before[l] > limit_ms_) before[l] = kInfinity;
            any = any || before[l] < kInfinity;
        }
        return any;
    }

    // For each cut the time that the channel between r_before devices, the last of which is j - 1,
    // and the r devices from j on takes for an iteration.
    const double* channel_times(int j, int r_before, int r) const {
        std::vector<double>& times = channel_ms_[j][static_cast<std::size_t>(r_before - 1) * (V_ - j) + r - 1];
        if (!times.empty()) return times.data();
        times.resize(L_);
        const LinkSet& forward = channels_[j].forward(r_before - 1, r - 1);
        const LinkSet& backward = channels_[j].backward(r_before - 1, r - 1);
        const double part = 1.0 / (static_cast<double>(r_before) * r);
        for (int l = 1; l < L_; ++l) {
            const double there = forward.transfer_ms(part * in_.output_bytes[l - 1]);
            const double back = backward.transfer_ms(part * in_.gradient_bytes[l - 1]);
            times[l] = in_.num_microbatches *
                       (in_.half_duplex ? there + back : std::max(there, back));
        }
        return times.data();
    }

    // The first l for which the devices from i on could run the layers from l on within the limit.
    int first_layer_within_limit(int x, int i) const {
        const double M = in_.num_microbatches;
        const double most = limit_ms_ * speed_behind_[i] * (1 + 1e-9);  // a tie is within
        int l = x;
        while (l < L_ && M * work_behind_ms_[l] > most) ++l;
        return l;
    }

    // For each l the best cut l' in front of a stage of layers [l', l) on r devices behind j.
    Row best_cuts(int x, int j, int r, const std::vector<double>& before,
                  const std::vector<std::int64_t>& replicas_before) const {
        const Ring& ring = intervals_.ring(j, r);
        const double per_work = in_.num_microbatches / (r * intervals_.slowest_speed(j, r));
        std::vector<double> bottleneck(L_ + 1, kInfinity);
        std::vector<Index> cut(L_ + 1, -1), behind(L_ + 1, -1);
        int first = 0, end = 0;
        for (int l = first_layer_within_limit(x, j + r); l <= L_; ++l) {
            double best = kInfinity, work_ms = 0.0, parameter_bytes = 0.0;
            int best_cut = -1;
            for (int k = l - 1; k >= x - 1; --k) {
                work_ms += work_ms_[k];
                parameter_bytes += in_.parameter_bytes.value(k);
                const double stage =
                    per_work * work_ms + ring.fixed_ms + ring.ms_per_byte * parameter_bytes;
                if (stage >= best || stage > limit_ms_) break;
                const double value = std::max(stage, before[k]);
                if (value < best) best = value, best_cut = k;
            }
            if (best_cut < 0 || best > limit_ms_) continue;
            bottleneck[l] = best;
            cut[l] = static_cast<Index>(best_cut);
            behind[l] = static_cast<Index>(x == 1 ? 0 : replicas_before[best_cut]);
            if (end == 0) first = l;
            end = l + 1;
        }
        if (end == 0) return {};
        return {std::move(bottleneck), std::move(cut), std::move(behind), first, end};
    }

    const Instance& in_;
    const int L_, V_;
    const double limit_ms_;
    Control& control_;
    const IntervalTable intervals_;
    std::vector<ChannelTable> channels_;                               // [j]
    mutable std::vector<std::vector<std::vector<double>>> channel_ms_;  // [j][(r', r)][l], as needed
    std::vector<double> work_ms_;         // [layers], forward and backward
    std::vector<double> work_behind_ms_;  // [layers + 1], suffix sums
    std::vector<double> speed_behind_;    // [devices + 1], suffix sums
    std::vector<std::vector<Row>> levels_;           // [stages - 1][(i, r)]
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
