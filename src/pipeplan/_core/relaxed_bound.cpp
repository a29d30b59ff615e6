// A lower bound on every plan: Bellman's recursion on the fixed-plan bound, for sizes of sets only.
//
// Which devices a stage gets is forgotten. It has as good links as its size allows
// (best_links.hpp), and it uses up devices that are as fast as it computes (device_budget.hpp).
//
// Each run of the recursion has a limit, and drops what cannot be part of a plan within it: also
// what the layers in front still take counts. If nothing is left, no plan takes less than the
// limit. A low limit leaves little, so a run is quick and merges few suffixes. Hence limits start
// low and rise until a run finds something; then they close in on the highest one that leaves
// nothing.
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "front.hpp"
#include "kernels.hpp"
#include "relaxed_tables.hpp"

namespace pipeplan {
namespace {

// One run of the recursion: the least bound of all plans, at most the limit.
class RelaxedRun {
  public:
    RelaxedRun(const Instance& in, const RelaxedTables& tables, int capacity, double limit_ms,
               Pool& pool, Control& control)
        : in_(in), tables_(tables), capacity_(capacity), L_(in.num_layers),
          M_(in.num_microbatches), limit_ms_(limit_ms * (1 + 1e-9)), pool_(pool),
          control_(control), least_ms_(tables.num_groups(), limit_ms),
          behind_(static_cast<std::size_t>(tables.num_nodes()) * tables.num_groups()) {}

    double least_ms() {
        tabulate_heads();
        std::vector<std::unique_ptr<Work>> work(pool_.num_workers());
        std::vector<Row<Suffix>> rows(tables_.num_groups());
        for (int node = 1; node < tables_.num_nodes(); ++node) {
            bool any = false;
            for_groups(work, [&](int group, Work& mine) { fill_row(node, group, mine, rows[group]); });
            for (const Row<Suffix>& row : rows) any = any || row.alive();
            if (!any) continue;
            for_groups(work, [&](int group, Work& mine) { fill_behind(node, group, rows, mine); });
        }
        return *std::min_element(least_ms_.begin(), least_ms_.end());
    }

  private:
    // Fronts by layer or cut: those of l are points[begin[l] .. begin[l + 1]).
    template <class Value>
    struct Row {
        std::vector<Value> points;
        std::vector<int> begin;
        bool alive() const { return !points.empty(); }

        void take(const std::vector<Front<Value>>& fronts) {
            points.clear();
            begin.clear();
            for (const Front<Value>& front : fronts) {
                begin.push_back(static_cast<int>(points.size()));
                for (int k = 0; k < front.size(); ++k) points.push_back(front[k].value);
            }
            begin.push_back(static_cast<int>(points.size()));
        }
    };

    // What a thread needs.
    struct Work {
        explicit Work(int num_layers) : behind(num_layers), fronts(num_layers) {}
        std::vector<Front<Beyond>> behind;  // by the cut: what lies behind the channel
        std::vector<Front<Suffix>> fronts;  // by the first layer
    };

    // What has to run before a suffix can begin, and before and after it: forwards only, and both.
    struct Head {
        double forward, work;
    };

    static constexpr double kWorthThreads = 1e6;  // steps of a node from which waking threads pays
    static constexpr int kLayersBetweenChecks = 16;

    template <class Task>
    void for_groups(std::vector<std::unique_ptr<Work>>& work, const Task& task) {
        const int num = tables_.num_groups();
        const auto run = [&](int group, int worker) {
            if (!work[worker]) work[worker] = std::make_unique<Work>(L_);
            task(group, *work[worker]);
        };
        if (static_cast<double>(num) * L_ * L_ < kWorthThreads) {
            for (int group = 0; group < num; ++group) run(group, 0);
        } else {
            pool_.run(num, run);
        }
    }

    std::size_t at(int node, int cut) const { return static_cast<std::size_t>(node) * L_ + cut; }

    // Adds up layers from `first` on, and calls `visit(cut, stage)` for each end of a stage that
    // can be part of a plan within the limit, if `ahead_ms` pass before it begins; once for each way
    // in which the stage fits.
    template <class Visit>
    void for_stages(const Choice& choice, int first, int last_cut, double ahead_ms,
                    const Visit& visit) const {
        double forward_ms = 0.0, backward_ms = 0.0, parameter_bytes = 0.0;
        StageNeeds needs{0.0, 0.0, in_.bytes_into(first)};
        for (int cut = first + 1; cut <= last_cut; ++cut) {
            forward_ms += in_.forward_ms.value(cut - 1);
            backward_ms += in_.backward_ms.value(cut - 1);
            parameter_bytes += in_.parameter_bytes.value(cut - 1);
            const StageCosts stage{
                choice.rate * forward_ms, choice.rate * backward_ms,
                choice.ring.fixed_ms + choice.ring.ms_per_byte * parameter_bytes};
            if (M_ * (stage.forward + stage.backward) + stage.all_reduce + ahead_ms > limit_ms_)
                return;  // it only grows with the cut
            if (!in_.has_memory()) {
                visit(cut, stage);
                continue;
            }
            needs.state_bytes = in_.limits.state_bytes_per_parameter_byte * parameter_bytes;
            needs.activation_bytes += in_.activation_bytes.value(cut - 1);
            if (!for_modes(in_, choice.room, needs, stage, cut == L_,
                           [&](const StageCosts& one, int) { visit(cut, one); }))
                return;  // it only needs more with the cut
        }
    }

    // The least time of a microbatch through the layers before each cut, with what a node leaves.
    void tabulate_heads() {
        heads_.assign(at(tables_.num_nodes(), 0), {kInfinity, kInfinity});
        for (int node = tables_.num_nodes(); node-- > 0;) {
            control_.check();
            heads_[at(node, 0)] = {0.0, 0.0};
            for (int group = 0; group < tables_.num_groups(); ++group)
                for (const Step& step : tables_.steps(node, group))
                    extend_heads(step.from, node, tables_.choices()[step.choice]);
        }
    }

    // The stage stands directly in front of what `node` uses; before it stands what `after` leaves.
    void extend_heads(int node, int after, const Choice& choice) {
        for (int first = 0; first < L_ - 1; ++first) {
            const Head& before = heads_[at(after, first)];
            if (!(before.work < kInfinity)) continue;
            const ChannelCosts& channel = tables_.least_channel(first);
            const double ahead = before.forward + channel.there;
            const double around = before.work + channel.there + channel.back;
            for_stages(choice, first, L_ - 1, ahead, [&](int cut, const StageCosts& stage) {
                Head& least = heads_[at(node, cut)];
                least.forward = std::min(least.forward, ahead + stage.forward);
                least.work = std::min(least.work, around + stage.forward + stage.backward);
            });
        }
    }

    // The fronts of all suffixes that lead to the node, with a first stage of the group.
    void fill_row(int node, int group, Work& work, Row<Suffix>& row) {
        for (Front<Suffix>& front : work.fronts) front.clear();
        for (const Step& step : tables_.steps(node, group)) {
            const Row<Beyond>& behind = behind_[at_group(step.from, group)];
            if (step.from > 0 && !behind.alive()) continue;
            for (int first = 0; first < L_; ++first) {
                if (first % kLayersBetweenChecks == 0) control_.check();
                put_in_front(tables_.choices()[step.choice], first, step.from == 0, behind,
                             heads_[at(node, first)], work.fronts[first]);
            }
        }
        row.take(work.fronts);
        for (int k = row.begin[0]; k < row.begin[1]; ++k)
            least_ms_[group] = std::min(least_ms_[group], row.points[k].last_reduce);
    }

    void put_in_front(const Choice& choice, int first, bool may_end, const Row<Beyond>& behind,
                      Head head, Front<Suffix>& front) {
        if (!(head.work < kInfinity)) return;
        const ChannelCosts& channel = tables_.least_channel(first);
        head.forward += channel.there;
        head.work += channel.there + channel.back;
        const auto keep = [&](const Suffix& value) {
            if (value.last_backward + head.work <= limit_ms_ &&
                value.last_reduce + head.forward <= limit_ms_)
                front.insert(value, {}, capacity_, Overflow::kMerge);
        };
        for_stages(choice, first, L_, head.forward, [&](int cut, const StageCosts& stage) {
            if (cut == L_) {
                if (may_end) keep(last_stage(stage, M_));
            } else if (behind.alive()) {
                for (int k = behind.begin[cut]; k < behind.begin[cut + 1]; ++k)
                    keep(before(stage, behind.points[k], M_));
            }
        });
    }

    // For each cut the front of what lies behind the channel from a stage of the group.
    void fill_behind(int node, int group, const std::vector<Row<Suffix>>& rows, Work& work) {
        for (Front<Beyond>& front : work.behind) front.clear();
        for (int next = 0; next < tables_.num_groups(); ++next) {
            const Row<Suffix>& rest = rows[next];
            if (!rest.alive() || !tables_.connected(group, next)) continue;
            control_.check();
            for (int cut = 1; cut < L_; ++cut) {
                if (rest.begin[cut] == rest.begin[cut + 1]) continue;
                const ChannelCosts channel = tables_.channel(group, next, cut);
                if (M_ * channel_busy_ms(channel, in_.half_duplex) > limit_ms_) continue;
                const Head& head = heads_[at(node, cut)];
                for (int k = rest.begin[cut]; k < rest.begin[cut + 1]; ++k) {
                    const Beyond value = behind_channel(rest.points[k], channel, M_, in_.half_duplex);
                    if (value.busy + head.work <= limit_ms_ &&
                        value.last_reduce + head.forward <= limit_ms_)
                        work.behind[cut].insert(value, {}, capacity_, Overflow::kMerge);
                }
            }
        }
        behind_[at_group(node, group)].take(work.behind);
    }

    std::size_t at_group(int node, int group) const {
        return static_cast<std::size_t>(node) * tables_.num_groups() + group;
    }

    const Instance& in_;
    const RelaxedTables& tables_;
    const int capacity_;
    const int L_;
    const double M_;
    const double limit_ms_;
    Pool& pool_;
    Control& control_;
    std::vector<double> least_ms_;     // [group]
    std::vector<Row<Beyond>> behind_;  // [node][group]
    std::vector<Head> heads_;          // [node][cut]
};

// What all runs together may take, and how far they go. A step takes about a nanosecond.
constexpr double kAllSteps = 2e8;
constexpr int kMostRuns = 24, kFewestRuns = 4;
constexpr double kFirstRiseOfLimit = 1.06, kCloseToLimit = 1.005;

double steps_of_a_run(const Instance& in, const RelaxedTables& tables) {
    double num_steps = 0.0;
    for (int node = 0; node < tables.num_nodes(); ++node)
        for (int group = 0; group < tables.num_groups(); ++group)
            num_steps += static_cast<double>(tables.steps(node, group).size());
    return num_steps * in.num_layers * in.num_layers / 4;
}

// Classes of speeds for so many nodes that a run takes about a tenth of all steps.
DeviceBudget affordable_classes(const Instance& in) {
    constexpr double kMostNodes = 1000, kChoicesPerDevice = 3;
    const double steps_of_a_node =
        kChoicesPerDevice * in.num_devices * in.num_layers * in.num_layers / 4;
    return DeviceBudget::by_class(in.speed, std::min(kMostNodes, kAllSteps / 10 / steps_of_a_node));
}

// The same where stages take the very devices that they have: every set of them is a choice.
DeviceBudget affordable_crews(const Instance& in) {
    constexpr double kMostNodes = 1000;
    const double affordable = 4 * kAllSteps / 10 * 4 / in.num_layers / in.num_layers;
    return DeviceBudget::by_class(in.speed, std::min(kMostNodes, std::sqrt(affordable)));
}

// Raises `proved_ms`, below which no plan is known to be, as far as these tables allow.
double raise_bound(const Instance& in, const RelaxedTables& tables, double proved_ms,
                   const DpLimits& limits, Pool& pool, Control& control) {
    const double affordable = kAllSteps / steps_of_a_run(in, tables);
    const int capacity =
        std::max(1, static_cast<int>(std::min<double>(limits.capacity, affordable / 2)));
    const auto run = [&](double limit_ms) {
        return RelaxedRun(in, tables, capacity, limit_ms, pool, control).least_ms();
    };
    if (!(proved_ms > 0) || !(limits.limit_ms < kInfinity) || affordable < kFewestRuns)
        return std::max(proved_ms, run(limits.limit_ms));
    double open_ms = kInfinity, rise = kFirstRiseOfLimit;
    for (int runs = static_cast<int>(std::min<double>(affordable, kMostRuns)); runs > 0; --runs) {
        const bool found_one = open_ms < kInfinity;
        if (found_one && open_ms <= proved_ms * kCloseToLimit) break;
        const double limit_ms = found_one ? std::sqrt(proved_ms * open_ms)
                                          : std::min(proved_ms * rise, limits.limit_ms);
        const double least_ms = run(limit_ms);
        proved_ms = std::max(proved_ms, least_ms);
        if (least_ms < limit_ms) open_ms = limit_ms;
        else if (limit_ms == limits.limit_ms) break;
        else rise = 1 + 1.5 * (rise - 1);
    }
    return proved_ms;
}

}  // namespace

double relaxed_bound(const Instance& in, const std::vector<int>& buckets, int max_levels,
                     const DpLimits& limits, Pool& pool, Control& control) {
    in.require_proportional();
    const BestLinks best(in, max_levels, control);
    const SharedBest shared(in, control);
    double speed = 0.0;
    for (double one : in.speed) speed += one;
    const double work_ms = in.num_microbatches * (in.forward_sum.back() + in.backward_sum.back());
    double proved_ms = std::min(limits.limit_ms, work_ms / speed);
    const bool any_shares = in.limits.any_shares;
    const DeviceBudget counted = any_shares ? affordable_crews(in) : affordable_classes(in);
    // False if that would take too long.
    const auto raise = [&](const DeviceBudget& budget, bool must) {
        for (bool every_size : {true, false}) {
            const RelaxedTables tables(in, buckets, best, shared, budget, every_size);
            const bool affordable = steps_of_a_run(in, tables) * kFewestRuns <= kAllSteps;
            if (!affordable && (every_size || !must)) continue;
            proved_ms = raise_bound(in, tables, proved_ms, limits, pool, control);
            return true;
        }
        return false;
    };
    if (!counted.is_exact() && any_shares) {
        for (int nodes : {256, 128, 64})
            if (raise(DeviceBudget::by_fair_price(in.speed, nodes), false)) break;
    } else if (!counted.is_exact()) {
        raise(DeviceBudget::by_price(in.speed, 96, 16), false);
    }
    // With merged speeds the work bound mostly knows more. So that is not worth a long run.
    raise(counted, counted.is_exact());
    return proved_ms;
}

}  // namespace pipeplan
