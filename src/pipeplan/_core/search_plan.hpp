// A plan as local search changes it, with what is known of its stages and channels.
//
// Links are known for the first devices of a set, and are extended when devices join. A device that
// leaves takes nothing with it unless it has the slowest link. So most changes cost one look at the
// links of one device instead of those of all pairs.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "bound.hpp"
#include "instance.hpp"
#include "plan_costs.hpp"

namespace pipeplan {

// The slowest link among the first `count` devices of a set, and its two ends.
struct SlowestInside {
    double bytes_per_ms = kInfinity;
    int one = -1, other = -1;
    int count = 0;
};

// The slowest link in each direction between the first devices of two sets.
struct SlowestBetween {
    struct Link {
        double bytes_per_ms = kInfinity;
        int here = -1, there = -1;  // its ends in the first and in the second set
    };
    Link forth, back;
    int count_here = 0, count_there = 0;
};

struct SearchStage {
    int first_layer, end_layer;
    std::vector<int> devices;
    int mode = kKeeps;  // bits of StageMode
    SlowestInside inside;
    SlowestBetween next;  // to the next stage
    StageCosts costs{};
    ChannelCosts channel{};    // to the next stage
    double overflow = 0.0;     // how far memory is too short for it (SearchCosts); 0: it fits
    bool costs_known = false;  // of this stage
    bool channel_known = false;
};

using SearchPlan = std::vector<SearchStage>;

inline bool fits_memory(const SearchPlan& plan) {
    return std::all_of(plan.begin(), plan.end(), [](const SearchStage& s) { return !(s.overflow > 0); });
}

// How fast the devices of a stage are together: no stage of theirs is faster.
inline double joint_speed(const Instance& in, const SearchStage& stage) {
    double slowest = kInfinity, sum = 0.0;
    for (int u : stage.devices) slowest = std::min(slowest, in.speed[u]), sum += in.speed[u];
    return stage.mode & kBySpeed ? sum : slowest * static_cast<double>(stage.devices.size());
}

inline SearchPlan from_placed(const PlacedPlan& placed) {
    SearchPlan plan;
    int first = 0;
    for (int n = 0; n < placed.num_stages(); ++n) {
        SearchStage stage;
        stage.first_layer = first;
        stage.end_layer = first = placed.end_layer()[n];
        stage.devices = placed.devices()[n];
        stage.mode = placed.modes()[n];
        plan.push_back(std::move(stage));
    }
    return plan;
}

inline PlacedPlan to_placed(const Instance& instance, const SearchPlan& plan) {
    std::vector<int> end_layer, modes;
    std::vector<std::vector<int>> devices;
    for (const SearchStage& stage : plan) {
        end_layer.push_back(stage.end_layer);
        devices.push_back(stage.devices);
        modes.push_back(stage.mode);
    }
    return PlacedPlan(instance, std::move(end_layer), std::move(devices), std::move(modes));
}

// Fills in the costs of stages and channels, from links that were known before where it can.
class SearchCosts {
  public:
    explicit SearchCosts(const Instance& in)
        : in_(in), keeps_links_(in.bytes_per_ms.is_full() && in.latency_ms.is_one_number()) {
        const std::vector<double>& memory = in.limits.memory_bytes;
        tabulate_layers();
        for (double speed : in.speed) has_one_speed_ = has_one_speed_ && speed == in.speed[0];
        first_take_more_ = has_one_speed_;
        for (double bytes : memory) first_take_more_ = first_take_more_ && bytes == memory[0];
        if (!keeps_links_ || in.num_devices > kMostTabulated) return;
        for (int u = 0; u < in.num_devices; ++u)
            for (int v = 0; v < in.num_devices; ++v)
                both_ways_.push_back({in.bytes_per_ms[in.at(u, v)], in.bytes_per_ms[in.at(v, u)]});
    }
    // What a stage that does not fit costs, in ms a unit of overflow; 0: it is refused. What was
    // known of costs is then wrong.
    void set_price(double overflow_ms) { overflow_ms_ = overflow_ms; }
    double slowest_speed(const SearchStage& stage) const {
        double slowest = in_.speed[stage.devices[0]];
        if (has_one_speed_) return slowest;
        for (int u : stage.devices) slowest = std::min(slowest, in_.speed[u]);
        return slowest;
    }
    Split split_of(const SearchStage& stage) const {
        const bool by_speed = stage.mode & kBySpeed && can_share_by_speed(in_, stage.devices);
        return by_speed ? Split::kBySpeed : Split::kEven;
    }
    // About how long a microbatch keeps the stage busy; without a look at links.
    double work_ms(const SearchStage& stage) const {
        const auto until = [&](int l) { return in_.forward_sum[l] + in_.backward_sum[l]; };
        const double speed = has_one_speed_ ? in_.speed[0] * static_cast<double>(stage.devices.size())
                                            : joint_speed(in_, stage);
        return (until(stage.end_layer) - until(stage.first_layer)) / speed;
    }
    // False where a path is missing. Adds the pairs of devices that were looked at to `num_pairs`.
    bool fill_stage(SearchStage& stage, double& num_pairs) const {
        return stage.costs_known = find_stage(stage, num_pairs);
    }
    // The same for the channel from a stage to the next.
    bool fill_channel(SearchStage& stage, const SearchStage& behind, double& num_pairs) const {
        return stage.channel_known = find_channel(stage, behind, num_pairs);
    }

  private:
    bool find_stage(SearchStage& stage, double& num_pairs) const {
        const int k = static_cast<int>(stage.devices.size());
        if (!keeps_links_) {
            num_pairs += static_cast<double>(k) * k;
            return cost(stage, links_of_set(in_, stage.devices));
        }
        SlowestInside& inside = stage.inside;
        num_pairs += 0.5 * (k - inside.count) * (k + inside.count);
        for (; inside.count < k; ++inside.count) {
            const int u = stage.devices[inside.count];
            for (int a = 0; a < inside.count; ++a) {
                const int v = stage.devices[a];
                const auto [forth, back] = both_ways(u, v);
                const double rate = std::min(forth, back);
                if (rate >= inside.bytes_per_ms) continue;
                inside.bytes_per_ms = rate, inside.one = u, inside.other = v;
            }
        }
        SetLinks links{k, slowest_speed(stage), inside.bytes_per_ms, latency_ms()};
        if (in_.shared)
            links.slowest_bytes_per_ms =
                std::min(links.slowest_bytes_per_ms, in_.shared->ring_rate(stage.devices));
        return cost(stage, links);
    }
    // What cost_channel says, with links that were known before.
    bool find_channel(SearchStage& stage, const SearchStage& behind, double& num_pairs) const {
        const ChannelEnd here{stage.devices, split_of(stage)}, there{behind.devices, split_of(behind)};
        if (!keeps_links_) {
            num_pairs += static_cast<double>(stage.devices.size()) * behind.devices.size();
            return cost_channel(in_, stage.end_layer, here, there, stage.channel);
        }
        if (!find_own_channel(stage, behind, num_pairs)) return false;
        if (in_.shared) raise_by_shared(in_, stage.end_layer, here, there, stage.channel);
        return true;
    }
    // The same without shared links.
    bool find_own_channel(SearchStage& stage, const SearchStage& behind, double& num_pairs) const {
        const int k = static_cast<int>(stage.devices.size());
        const int k_behind = static_cast<int>(behind.devices.size());
        const ChannelEnd here{stage.devices, split_of(stage)}, there{behind.devices, split_of(behind)};
        if (!here.is_even(in_) || !there.is_even(in_)) {
            num_pairs += static_cast<double>(k) * k_behind;
            if (first_take_more_) return find_uneven_channel(stage, behind);
            return cost_own_channel(in_, stage.end_layer, here, there, stage.channel);
        }
        SlowestBetween& next = stage.next;
        const auto look = [&](int from_here, int to_here, int from_there, int to_there) {
            for (int a = from_here; a < to_here; ++a) {
                const int u = stage.devices[a];
                for (int b = from_there; b < to_there; ++b) {
                    const int v = behind.devices[b];
                    const auto [forth, back] = both_ways(u, v);
                    if (forth < next.forth.bytes_per_ms) next.forth = {forth, u, v};
                    if (back < next.back.bytes_per_ms) next.back = {back, u, v};
                }
            }
        };
        num_pairs += static_cast<double>(k) * k_behind;
        num_pairs -= static_cast<double>(next.count_here) * next.count_there;
        look(next.count_here, k, 0, k_behind);
        look(0, next.count_here, next.count_there, k_behind);
        next.count_here = k, next.count_there = k_behind;
        if (!(next.forth.bytes_per_ms > 0 && next.back.bytes_per_ms > 0)) return false;
        const double part = 1.0 / (static_cast<double>(k) * k_behind);
        const double there_bytes = part * in_.output_bytes[stage.end_layer - 1];
        const double back_bytes = part * in_.gradient_bytes[stage.end_layer - 1];
        stage.channel = {latency_ms() + there_bytes / next.forth.bytes_per_ms,
                         latency_ms() + back_bytes / next.back.bytes_per_ms};
        return true;
    }

    // Where some devices of a set take one sample more than the others: the slowest link between
    // devices of the same shares. The same as `cost_channel`, without a table of shares.
    bool find_uneven_channel(SearchStage& stage, const SearchStage& behind) const {
        const Parts here(in_, stage.devices, here_), there(in_, behind.devices, there_);
        stage.channel = {0.0, 0.0};
        for (int one = 0; one < 2; ++one) {
            for (int other = 0; other < 2; ++other) {
                double forth = kInfinity, back = kInfinity;
                for (int a = here.begin[one]; a < here.begin[one + 1]; ++a) {
                    const int u = here_[a];
                    for (int b = there.begin[other]; b < there.begin[other + 1]; ++b) {
                        const auto [one_way, other_way] = both_ways(u, there_[b]);
                        forth = std::min(forth, one_way), back = std::min(back, other_way);
                    }
                }
                if (!(forth > 0 && back > 0)) return false;
                const double part = here.share[one] * there.share[other];
                const double output = part * in_.output_bytes[stage.end_layer - 1];
                const double gradient = part * in_.gradient_bytes[stage.end_layer - 1];
                stage.channel.there = std::max(stage.channel.there, latency_ms() + output / forth);
                stage.channel.back = std::max(stage.channel.back, latency_ms() + gradient / back);
            }
        }
        return true;
    }
    // The devices of a set that take a sample more, then the others, and the shares of both.
    struct Parts {
        Parts(const Instance& in, const std::vector<int>& devices, std::vector<int>& parted) {
            const int k = static_cast<int>(devices.size()), samples = in.microbatch_size;
            const int num_more = in.shares_evenly(k) ? k : samples % k;
            part(devices, num_more, parted);
            begin[1] = num_more, begin[2] = k;
            share[0] = in.largest_share(k);
            share[1] = static_cast<double>(samples / k) / samples;
        }
        // Those with the least numbers first.
        static void part(const std::vector<int>& devices, int num_first, std::vector<int>& parted) {
            constexpr std::size_t kFew = 16;  // to count takes less time than to sort
            parted = devices;
            if (devices.size() > kFew) {
                std::nth_element(parted.begin(), parted.begin() + num_first, parted.end());
                return;
            }
            int first = 0, other = num_first;
            for (int u : devices) {
                int num_less = 0;
                for (int v : devices) num_less += v < u;
                parted[num_less < num_first ? first++ : other++] = u;
            }
        }
        int begin[3] = {0, 0, 0};
        double share[2];
    };

    // The costs of the stage in its mode. If memory is too short for it, it recomputes; and it does
    // not if there is room for all microbatches.
    bool cost(SearchStage& stage, const SetLinks& links) const {
        stage.overflow = 0.0;
        return cost_fitting(stage, links) || (overflow_ms_ > 0 && cost_overflowing(stage, links));
    }
    bool cost_fitting(SearchStage& stage, const SetLinks& links) const {
        if (has_one_speed_ && !in_.has_memory() && !in_.has_measured() && !(stage.mode & kRecomputes))
            return cost_alike(stage, links);
        const auto in_mode = [&](int mode, StageCosts& costs) {
            return cost_stage(in_, stage.first_layer, stage.end_layer, links, stage.devices, mode, costs);
        };
        const bool fits = in_mode(stage.mode, stage.costs);
        if (!in_.has_memory() || !in_.limits.may_recompute) return fits;
        if (!(stage.mode & kRecomputes)) {
            if (fits) return true;
            stage.mode |= kRecomputes;
            return in_mode(stage.mode, stage.costs);
        }
        StageCosts kept;
        const int keeping = stage.mode & ~kRecomputes;
        if (in_mode(keeping, kept) && kept.cap == kNoCap) stage.mode = keeping, stage.costs = kept;
        return fits;
    }

    // A stage that does not fit, as if it could hold one microbatch. The price of its overflow is
    // added to its all-reduce, so that the search looks for a way out here.
    bool cost_overflowing(SearchStage& stage, const SetLinks& links) const {
        const int first = stage.first_layer, end = stage.end_layer;
        if (!in_.has_memory() ||
            !make_ring(in_, links.num_devices, links.slowest_bytes_per_ms, links.latency_ms).connected)
            return false;
        stage.mode &= ~kRecomputes;  // to keep one microbatch needs the least
        cost_stage(in_, first, end, links, stage.devices, stage.mode, stage.costs);
        set_cap(stage.costs, 1, in_.num_microbatches);
        stage.overflow = overflow_of(stage);
        stage.costs.all_reduce += overflow_ms_ * stage.overflow;
        return true;
    }
    // The part of what its devices need that is missing, in the mean of them.
    double overflow_of(const SearchStage& stage) const {
        const StageNeeds needs = needs_of(in_, stage.first_layer, stage.end_layer);
        const std::vector<double> shares = in_.shares(stage.devices, split_of(stage));
        double missing = 0.0;
        for (std::size_t i = 0; i < shares.size(); ++i) {
            const double needed = needs.state_bytes + shares[i] * needs.activation_bytes;
            const double bytes = in_.limits.memory_bytes[stage.devices[i]];
            if (needed > bytes) missing += 1 - bytes / needed;
        }
        return kLeastOverflow + missing / static_cast<double>(shares.size());
    }

    // The same for devices of one speed without limits of memory: none of them needs to be looked at.
    bool cost_alike(SearchStage& stage, const SetLinks& links) const {
        const int k = links.num_devices, first = stage.first_layer, end = stage.end_layer;
        const Ring ring = make_ring(in_, k, links.slowest_bytes_per_ms, links.latency_ms);
        if (!ring.connected) return false;
        const double rate = in_.shares_evenly(k) ? 1.0 / (k * links.slowest_speed)
                                                 : in_.largest_share(k) / links.slowest_speed;
        LayerSums sums{0.0, 0.0, 0.0};
        RangeSums::for_nodes(in_.num_layers, first, end, [&](std::size_t node) {
            sums.forward_ms += layer_sums_[node].forward_ms;
            sums.backward_ms += layer_sums_[node].backward_ms;
            sums.parameter_bytes += layer_sums_[node].parameter_bytes;
        });
        stage.costs = {rate * sums.forward_ms, rate * sums.backward_ms,
                       ring.fixed_ms + ring.ms_per_byte * sums.parameter_bytes};
        return true;
    }

    double latency_ms() const { return in_.latency_ms.one_number(); }

    // The rates of a link there and back. On small clusters they stand side by side.
    struct Rates {
        double forth, back;
    };
    Rates both_ways(int u, int v) const {
        if (!both_ways_.empty()) return both_ways_[in_.at(u, v)];
        return {in_.bytes_per_ms[in_.at(u, v)], in_.bytes_per_ms[in_.at(v, u)]};
    }

    // The nodes of the sums of layers (RangeSums), side by side.
    struct LayerSums {
        double forward_ms, backward_ms, parameter_bytes;
    };
    void tabulate_layers() {
        for (std::size_t k = 0; k < in_.forward_ms.nodes().size(); ++k)
            layer_sums_.push_back({in_.forward_ms.nodes()[k], in_.backward_ms.nodes()[k],
                                   in_.parameter_bytes.nodes()[k]});
    }

    const Instance& in_;
    const bool keeps_links_;
    std::vector<LayerSums> layer_sums_;
    static constexpr int kMostTabulated = 256;
    static constexpr double kLeastOverflow = 0.01;  // so that a little too much counts as well
    double overflow_ms_ = 0.0;
    std::vector<Rates> both_ways_;  // [devices][devices], of large clusters nothing
    bool has_one_speed_ = true;
    bool first_take_more_ = true;  // of devices that differ by one sample, those with the least number
    mutable std::vector<int> here_, there_;
};

}  // namespace pipeplan
