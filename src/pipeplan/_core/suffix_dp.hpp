// Bellman recursion on the fixed-plan bound, over suffixes of the pipeline.
//
// A node is what the stages placed so far (the last ones) occupy; an option is a device set
// that may be put in front of it, as the next stage towards the input. For each node and first set
// the recursion keeps, for each first layer, the Pareto front of suffix values: every term of the
// bound is monotone in them, so nothing that could become the best is lost (except by overflow).
//
// A topology says which nodes and options there are:
//   int num_nodes(); nodes are numbered so that putting a set in front leads to a later node
//   bool may_end(node): whether the pipeline's last stage may stand directly in front of it
//   int num_options(): options are 0 .. num_options() - 1
//   int attach(node, option): the node that results, or -1
//   const DeviceSet& set(node, option): what the option is there
//   int detach(node, option): the node without its first set
//   void enter(node): called before anything is put in front of the node
//   LinkPair links(node, option, next_option): the channel from the option to the node's first set
//   bool may_follow(option, next): whether a stage on one set may stand in front of the other
//   double head_speed(node): the summed speed of all devices that could still stand in front
//   bool contains(node, option, device): whether the option has the device there
//
// A stage keeps its activations or computes them again (StageMode). Both ways are tried where memory
// does not let it hold all microbatches. Where the number of stages is limited, a node is known
// apart for each number of stages behind it.
//
// Whatever the bound puts above `limit_ms`, the time of a plan that the caller has, is dropped.
// Complexity: O(L) channel steps for each (node, option, next option), O(L^2) stage steps for each
// (node, option), each times the size of a front.
#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "front.hpp"
#include "front_room.hpp"
#include "kernels.hpp"
#include "links.hpp"
#include "memory.hpp"
#include "stage_work.hpp"

namespace pipeplan {

// What decides the times of a set of devices.
struct DeviceSet {
    int num_devices = 0;
    Shares shares;
    Ring ring;
    Room room;
    // The compute rates of exactly even shares and of whole samples as evenly as can be; the second
    // is 0 where there is no such difference. Only for sets that are known.
    double even_rate = 0.0, whole_rate = 0.0;
    // The same if the devices with the most memory take more samples; a rate of 0: nothing differs.
    Room room_by_memory = {};
    double rate_by_memory = 0.0;
    int mode = kKeeps;  // how the devices share a microbatch, a bit of StageMode
    std::vector<Pace> paces = {};  // where layers were measured at several sizes; not for bounds
};

struct LinkPair {
    const LinkSet* forward;
    const LinkSet* backward;
};

struct PlacedStage {
    int first_layer, end_layer;
    int node, option;  // the option put in front of the node
    int mode;          // bits of StageMode
};

inline std::vector<int> end_layers(const std::vector<PlacedStage>& stages) {
    std::vector<int> ends;
    for (const PlacedStage& stage : stages) ends.push_back(stage.end_layer);
    return ends;
}

inline std::vector<int> modes_of(const std::vector<PlacedStage>& stages) {
    std::vector<int> modes;
    for (const PlacedStage& stage : stages) modes.push_back(stage.mode);
    return modes;
}

struct DpResult {
    double least_ms;  // the least bound of all plans, at most limit_ms
    std::vector<std::vector<PlacedStage>> best;
};

template <class Topology>
class SuffixDp {
  public:
    SuffixDp(const Instance& in, Topology& topology, const DpLimits& limits, Overflow overflow,
             Pool& pool, Control& control)
        : in_(in), topology_(topology), limits_(limits), overflow_(overflow), pool_(pool),
          control_(control), L_(in.num_layers), M_(in.num_microbatches),
          limit_ms_(limits.limit_ms * (1 + 1e-9)), forward_(in.forward_sum),
          backward_(in.backward_sum),
          counts_stages_(in.limits.min_stages > 1 || in.limits.max_stages < in.num_layers),
          num_counts_(counts_stages_ ? std::min(in.limits.max_stages, in.num_layers) + 1 : 1),
          rows_(static_cast<std::size_t>(num_counts_) * topology.num_nodes() *
                topology.num_options()),
          room_(in, topology, control) {}

    DpResult run() {
        if (room_.most_layers(0) < L_) return {limits_.limit_ms, {}};  // nothing fits
        if constexpr (Topology::kKnowsFreeSets) tabulate_heads();
        std::vector<std::unique_ptr<Work>> work(pool_.num_workers());
        for (int node = 0; node < topology_.num_nodes(); ++node) {
            topology_.enter(node);
            std::vector<int> options;
            for (int option = 0; option < topology_.num_options(); ++option)
                if (topology_.attach(node, option) >= 0) options.push_back(option);
            for (int count = 0; count < std::max(1, num_counts_ - 1); ++count)
                fill_rows(node, count, options, work);
        }
        return collect();
    }

    // The cheapest channels do not depend on the limit. So a later run may take them over.
    std::vector<ChannelCosts> take_channels() { return std::move(nearest_); }
    void use_channels(std::vector<ChannelCosts> channels) { nearest_ = std::move(channels); }

    // What the run has found, for those who list plans: the points of one front, and channels. Only
    // where the number of stages is not limited.
    int num_points(int node, int option, int layer) const {
        const Row& known = row(0, node, option);
        return known.alive() ? known.begin[layer + 1] - known.begin[layer] : 0;
    }
    const Suffix& point(int node, int option, int layer, int k) const {
        const Row& known = row(0, node, option);
        return known.points[known.begin[layer] + k].value;
    }
    bool is_alive(int node, int option) const { return row(0, node, option).alive(); }
    ChannelCosts channel_costs(const LinkPair& links, const Shares& mine, const Shares& theirs,
                               int cut) const {
        const double least = mine.least * theirs.least, even = mine.even * theirs.even;
        const double output = in_.output_bytes[cut - 1], gradient = in_.gradient_bytes[cut - 1];
        return {links.forward->transfer_ms(least * output, even * output, output),
                links.backward->transfer_ms(least * gradient, even * gradient, gradient)};
    }

  private:
    // The fronts of one (node, first set): those of first layer l are points[begin[l] .. begin[l+1]).
    struct Row {
        std::vector<Point<Suffix>> points;
        std::vector<int> begin;
        int first_layer = 0, end_layer = 0;  // no other layer has any
        bool alive() const { return !points.empty(); }
    };

    // What has to run before a suffix can begin, and before and after it: forwards only, and both.
    struct Head {
        double forward, work;
    };

    // What a thread needs to fill rows.
    struct Work {
        explicit Work(int num_layers) : behind(num_layers + 1), fronts(num_layers) {}
        std::vector<Front<Beyond>> behind;  // by the cut: what lies behind the channel
        std::vector<Front<Suffix>> fronts;  // by the first layer
    };

    static constexpr int kLayersBetweenChecks = 16, kStepsBetweenChecks = 4096;

    // `count` is the number of stages; 0 where these do not count.
    std::size_t row_index(int count, int node, int option) const {
        return (static_cast<std::size_t>(count) * topology_.num_nodes() + node) *
                   topology_.num_options() + option;
    }
    Row& row(int count, int node, int option) { return rows_[row_index(count, node, option)]; }
    const Row& row(int count, int node, int option) const {
        return rows_[row_index(count, node, option)];
    }

    // Different options in front of one node fill different rows.
    void fill_rows(int node, int count, const std::vector<int>& options,
                   std::vector<std::unique_ptr<Work>>& work) {
        behind_.clear();
        for (int next = 0; next < topology_.num_options(); ++next)
            if (row(count, node, next).alive()) behind_.push_back(next);
        const auto fill = [&](int k, int worker) {
            if (!work[worker]) work[worker] = std::make_unique<Work>(L_);
            fill_row(count, node, options[k], *work[worker]);
        };
        pool_.run(static_cast<int>(options.size()), fill, Tasks::kShort);
    }

    // All stages of the option directly in front of the node, which has `count` stages.
    void fill_row(int count, int node, int option, Work& work) {
        const DeviceSet& set = topology_.set(node, option);
        if (!set.ring.connected) return;
        const bool any_behind = fill_behind(count, node, option, set, work);
        const int last_device = in_.limits.last_device;
        const bool may_end = count == 0 && topology_.may_end(node) &&
                             (last_device < 0 || topology_.contains(node, option, last_device));
        if (!any_behind && !may_end) return;
        const int new_node = topology_.attach(node, option);
        bool any = false;
        for (int l = 0; l < L_; ++l) {
            Front<Suffix>& front = work.fronts[l];
            front.clear();
            if (l % kLayersBetweenChecks == 0) control_.check();
            const Head ahead = head(new_node, option, l);
            if (!(ahead.work < kInfinity)) continue;
            put_in_front(set, l, may_end, ahead, work.behind, front);
            any = any || front.size() > 0;
        }
        if (any) store(work.fronts, row(counts_stages_ ? count + 1 : 0, new_node, option));
    }

    void store(const std::vector<Front<Suffix>>& fronts, Row& result) const {
        result.begin.resize(L_ + 1);
        for (int l = 0; l < L_; ++l) {
            result.begin[l] = static_cast<int>(result.points.size());
            for (int k = 0; k < fronts[l].size(); ++k) result.points.push_back(fronts[l][k]);
        }
        result.begin[L_] = static_cast<int>(result.points.size());
        while (fronts[result.first_layer].size() == 0) ++result.first_layer;
        for (result.end_layer = L_; fronts[result.end_layer - 1].size() == 0;) --result.end_layer;
    }

    // All stages of the set that begin at layer l.
    void put_in_front(const DeviceSet& set, int l, bool may_end, const Head& ahead,
                      const std::vector<Front<Beyond>>& behind, Front<Suffix>& front) const {
        const double rate = set.shares.compute_rate;
        const auto keep = [&](const Suffix& value, Origin origin, int mode) {
            if (value.last_backward + ahead.work > limit_ms_ ||
                value.last_reduce + ahead.forward > limit_ms_)
                return;
            origin.mode = static_cast<std::uint32_t>(mode | set.mode);
            front.insert(value, origin, limits_.capacity, overflow_);
        };
        // Whether a suffix leaves time for a stage: some terms of `before`, which is not worth its time
        // for most.
        const auto leaves_time = [&](const StageCosts& stage, const Beyond& rest) {
            const double stage_ms = stage.forward + stage.backward;
            return M_ * stage_ms + stage.all_reduce + ahead.forward <= limit_ms_ &&
                   stage_ms + rest.busy + ahead.work <= limit_ms_ &&
                   stage.rounds * (stage_ms + rest.round_trip) + ahead.work <= limit_ms_;
        };
        const auto may_end_at = [&](const StageCosts& stage, int cut) {
            bool any = cut == L_ && may_end;
            for (int k = 0; k < behind[cut].size() && !any; ++k)
                any = leaves_time(stage, behind[cut][k].value);
            return any;
        };
        const auto put = [&](const StageCosts& stage, int cut, int mode) {
            if (cut == L_) keep(last_stage(stage, M_), {L_, 0, -1, -1}, mode);
            for (int k = 0; k < behind[cut].size(); ++k)
                if (leaves_time(stage, behind[cut][k].value))
                    keep(before(stage, behind[cut][k].value, M_), behind[cut][k].origin, mode);
        };
        StageWork work(in_, rate, set.paces);
        double parameter_bytes = 0.0;
        StageNeeds needs{0.0, 0.0, in_.bytes_into(l)};
        for (int cut = l + 1; cut <= L_; ++cut) {
            work.add(cut - 1);
            parameter_bytes += in_.parameter_bytes.value(cut - 1);
            const StageCosts stage{work.forward(), work.backward(),
                                   set.ring.fixed_ms + set.ring.ms_per_byte * parameter_bytes};
            if (M_ * (stage.forward + stage.backward) + stage.all_reduce + ahead.forward > limit_ms_)
                return;  // it only grows with the cut
            if (in_.has_memory()) needs.activation_bytes += in_.activation_bytes.value(cut - 1);
            if (!may_end_at(stage, cut)) continue;
            if (!in_.has_memory()) {
                put(stage, cut, kKeeps);
                continue;
            }
            needs.state_bytes = in_.limits.state_bytes_per_parameter_byte * parameter_bytes;
            const auto put_mode = [&](const StageCosts& one, int mode) { put(one, cut, mode); };
            if (for_modes(in_, set.room, needs, stage, cut == L_, put_mode)) continue;
            const double slower = set.rate_by_memory / rate;
            const StageCosts other{slower * stage.forward, slower * stage.backward, stage.all_reduce};
            if (!(slower > 0) ||
                !for_modes(in_, set.room_by_memory, needs, other, cut == L_, put_mode))
                return;  // it only needs more with the cut
        }
    }

    // The layers before `cut` on devices that the node does not use.
    Head head_on(int node, int cut) const {
        if constexpr (Topology::kKnowsFreeSets) return heads_[at(node, cut)];
        if (cut > room_.most_layers(node)) return {kInfinity, kInfinity};
        const double speed = topology_.head_speed(node);
        if (cut > 0 && !(speed > 0)) return {kInfinity, kInfinity};
        const double forward = cut > 0 ? forward_[cut] / speed : 0.0;
        const double work = cut > 0 ? forward + backward_[cut] / speed : 0.0;
        return M_ * work > limit_ms_ ? Head{kInfinity, kInfinity} : Head{forward, work};
    }

    // The same and the channel to the node's first set.
    Head head(int node, int option, int cut) const {
        Head head = head_on(node, cut);
        if constexpr (Topology::kKnowsFreeSets) {
            if (cut == 0) return head;
            const ChannelCosts& channel = nearest_[at(option, cut)];
            head.forward += channel.there;
            head.work += channel.there + channel.back;
        }
        return head;
    }

    std::size_t at(int node, int cut) const { return static_cast<std::size_t>(node) * L_ + cut; }

    // The cheapest channel to each set at each cut, from whatever set.
    void tabulate_channels() {
        nearest_.assign(at(topology_.num_options(), 0), {kInfinity, kInfinity});
        for (int next = 1; next < topology_.num_options(); ++next) {
            control_.check();
            for (int option = 1; option < topology_.num_options(); ++option) {
                if (!topology_.may_follow(option, next)) continue;
                const LinkPair links = topology_.links(next, option, next);
                if (!links.forward->connected()) continue;
                const Shares& mine = topology_.set(next, option).shares;
                const Shares& theirs = topology_.set(0, next).shares;
                for (int cut = 1; cut < L_; ++cut) {
                    const ChannelCosts one = channel_costs(links, mine, theirs, cut);
                    ChannelCosts& least = nearest_[at(next, cut)];
                    least.there = std::min(least.there, one.there);
                    least.back = std::min(least.back, one.back);
                }
            }
        }
    }

    // The least time of a microbatch through the layers before each cut, on stages of devices that
    // the node does not use, each of which could be part of a plan within the limit.
    void tabulate_heads() {
        if (nearest_.empty()) tabulate_channels();
        heads_.assign(at(topology_.num_nodes(), 0), {kInfinity, kInfinity});
        int unchecked = 0;
        for (int node = topology_.num_nodes(); node-- > 0;) {
            heads_[at(node, 0)] = {0.0, 0.0};
            for (int option = 0; option < topology_.num_options(); ++option) {
                const int next = topology_.attach(node, option);
                if (next < 0 || !topology_.set(node, option).ring.connected) continue;
                if ((unchecked += L_) >= kStepsBetweenChecks) control_.check(), unchecked = 0;
                extend_heads(node, next, option);
            }
        }
    }

    void extend_heads(int node, int next, int option) {
        const DeviceSet& set = topology_.set(node, option);
        const double rate = set.shares.compute_rate;
        for (int first = 0; first < L_ - 1; ++first) {
            const Head before = heads_[at(next, first)];
            if (!(before.work < kInfinity)) continue;
            const ChannelCosts channel = first ? nearest_[at(option, first)] : ChannelCosts{0.0, 0.0};
            double forward_ms = 0.0, backward_ms = 0.0, parameter_bytes = 0.0;
            const int end = std::min(room_.stage_end(option, first) + 1, L_);
            for (int cut = first + 1; cut < end; ++cut) {
                forward_ms += in_.forward_ms.value(cut - 1);
                backward_ms += in_.backward_ms.value(cut - 1);
                parameter_bytes += in_.parameter_bytes.value(cut - 1);
                const double forward = rate * forward_ms, work = forward + rate * backward_ms;
                const double all_reduce = set.ring.fixed_ms + set.ring.ms_per_byte * parameter_bytes;
                const double ahead = before.forward + channel.there;
                if (M_ * work + all_reduce + ahead > limit_ms_) break;  // it only grows with the cut
                Head& least = heads_[at(node, cut)];
                least.forward = std::min(least.forward, ahead + forward);
                least.work = std::min(least.work, before.work + channel.there + channel.back + work);
            }
        }
    }

    // For each cut the front of what lies behind the channel between `option` and the node.
    bool fill_behind(int count, int node, int option, const DeviceSet& set, Work& work) {
        for (Front<Beyond>& front : work.behind) front.clear();
        bool any = false;
        int unchecked = kStepsBetweenChecks;
        for (int next : behind_) {
            const Row& rest = row(count, node, next);
            if ((unchecked += L_) >= kStepsBetweenChecks) control_.check(), unchecked = 0;
            const LinkPair links = topology_.links(node, option, next);
            if (!links.forward->connected()) continue;
            const Shares& theirs = topology_.set(topology_.detach(node, next), next).shares;
            for (int cut = std::max(1, rest.first_layer); cut < rest.end_layer; ++cut) {
                if (rest.begin[cut] == rest.begin[cut + 1]) continue;
                const ChannelCosts channel = channel_costs(links, set.shares, theirs, cut);
                if (M_ * channel_busy_ms(channel, in_.half_duplex) > limit_ms_) continue;
                const auto [head_forward, head_work] = head_on(node, cut);
                for (int k = rest.begin[cut]; k < rest.begin[cut + 1]; ++k) {
                    const Beyond value =
                        behind_channel(rest.points[k].value, channel, M_, in_.half_duplex);
                    if (value.busy + head_work > limit_ms_ ||
                        value.last_reduce + head_forward > limit_ms_)
                        continue;
                    const Origin origin{cut, 0, static_cast<std::int16_t>(next),
                                        static_cast<std::int16_t>(k - rest.begin[cut])};
                    work.behind[cut].insert(value, origin, limits_.capacity,
                                            overflow_);
                    any = true;
                }
            }
        }
        return any;
    }

    // Whether a plan may have so many stages; always where these do not count.
    bool is_number(int count) const {
        return !counts_stages_ || (count >= in_.limits.min_stages && count <= in_.limits.max_stages);
    }

    struct End {
        double ms;
        int count, node, option, index;
    };

    std::vector<End> complete_plans() const {
        std::vector<End> ends;
        const int first_device = in_.limits.first_device;
        for (int count = 0; count < num_counts_; ++count) {
            if (!is_number(count)) continue;
            for (int node = 0; node < topology_.num_nodes(); ++node) {
                for (int option = 0; option < topology_.num_options(); ++option) {
                    const Row& whole = row(count, node, option);
                    if (!whole.alive()) continue;
                    if (first_device >= 0 && !topology_.contains(topology_.detach(node, option),
                                                                 option, first_device))
                        continue;
                    for (int k = whole.begin[0]; k < whole.begin[1]; ++k)
                        ends.push_back(
                            {whole.points[k].value.last_reduce, count, node, option, k});
                }
            }
        }
        std::stable_sort(ends.begin(), ends.end(),
                         [](const End& a, const End& b) { return a.ms < b.ms; });
        return ends;
    }

    DpResult collect() const {
        const std::vector<End> ends = complete_plans();
        DpResult result{limits_.limit_ms, {}};
        if (!ends.empty()) result.least_ms = std::min(result.least_ms, ends[0].ms);
        for (std::size_t k = 0; k < ends.size() && static_cast<int>(k) < limits_.num_best; ++k)
            result.best.push_back(trace_back(ends[k]));
        return result;
    }

    std::vector<PlacedStage> trace_back(End end) const {
        std::vector<PlacedStage> stages;
        for (int layer = 0;;) {
            const Point<Suffix>& point = row(end.count, end.node, end.option).points[end.index];
            const int behind = topology_.detach(end.node, end.option);
            stages.push_back({layer, point.origin.cut, behind, end.option,
                              static_cast<int>(point.origin.mode)});
            if (point.origin.cut == L_) return stages;
            layer = point.origin.cut;
            end.count = std::max(0, end.count - 1);
            end.node = behind;
            end.option = point.origin.option;
            end.index = row(end.count, end.node, end.option).begin[layer] + point.origin.index;
        }
    }

    const Instance& in_;
    Topology& topology_;
    const DpLimits limits_;
    const Overflow overflow_;
    Pool& pool_;
    Control& control_;
    const int L_;
    const double M_;
    const double limit_ms_;
    const std::vector<double>&forward_, &backward_;  // prefix sums
    const bool counts_stages_;                             // whether their number is limited
    const int num_counts_;
    std::vector<Row> rows_;                                // [number of stages][node][option]
    std::vector<int> behind_;                              // options that begin a suffix at a node
    std::vector<Head> heads_;                              // [node][cut], where sets are known
    std::vector<ChannelCosts> nearest_;                    // [option][cut], likewise
    const FrontRoom<Topology> room_;
};

}  // namespace pipeplan
