// Validation of the costs and orders of groups, and the quick pass over orders.
#include "groups.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "sizes.hpp"

namespace pipeplan {
namespace {

void require(bool condition, const std::string& message) {
    if (!condition) throw std::invalid_argument(message);
}

bool is_time(double ms) { return ms >= 0 && ms <= kMostMs; }

// The time of a flat array must be there; I and W of a stage may be NaN, both or none.
void require_lengths(const std::vector<double>& length_ms, std::size_t num_stages) {
    require(length_ms.size() == num_stages * kNumBlockKinds, "length_ms: four for each stage");
    for (std::size_t n = 0; n < num_stages; ++n) {
        const double* of_stage = &length_ms[n * kNumBlockKinds];
        require(is_time(of_stage[kForward]) && is_time(of_stage[kBackward]),
                "length_ms: a forward or backward is no finite time >= 0");
        const double input_ms = of_stage[kInputGradient], weight_ms = of_stage[kWeightGradient];
        require((std::isnan(input_ms) && std::isnan(weight_ms)) ||
                    (is_time(input_ms) && is_time(weight_ms)),
                "length_ms: an input or weight gradient is no finite time >= 0");
    }
}

}  // namespace

Channels number_channels(const std::vector<int>& group_of, bool half_duplex) {
    std::map<std::pair<int, int>, int> channels;
    Channels made{0, {}};
    const auto add = [&](int from, int to) {
        if (from == to) return -1;
        if (half_duplex && from > to) std::swap(from, to);
        return channels.emplace(std::make_pair(from, to), static_cast<int>(channels.size()))
            .first->second;
    };
    for (std::size_t c = 0; c + 1 < group_of.size(); ++c) {
        made.channel_of.push_back(add(group_of[c], group_of[c + 1]));
        made.channel_of.push_back(add(group_of[c + 1], group_of[c]));
    }
    made.count = static_cast<int>(channels.size());
    return made;
}

GroupCosts::GroupCosts(std::vector<int> group_of, std::vector<double> length_ms,
                       std::vector<double> recompute_ms, std::vector<double> send_ms,
                       std::vector<int> num_parts, bool half_duplex,
                       std::shared_ptr<const GroupFlows> flows)
    : group_of_(std::move(group_of)), length_ms_(std::move(length_ms)),
      recompute_ms_(std::move(recompute_ms)), send_ms_(std::move(send_ms)),
      num_parts_(std::move(num_parts)), half_duplex_(half_duplex), flows_(std::move(flows)) {
    const std::size_t S = group_of_.size();
    require(S >= 1 && S <= static_cast<std::size_t>(std::numeric_limits<int>::max() / 8),
            "group_of: a pipeline has at least one stage");
    for (int group : group_of_) {
        require(group >= 0 && group <= num_groups_, "group_of: groups go by their first stages");
        num_groups_ = std::max(num_groups_, group + 1);
    }
    require_lengths(length_ms_, S);
    require(recompute_ms_.size() == S && num_parts_.size() == S, "recompute_ms, num_parts: one a stage");
    require(send_ms_.size() == 3 * S - 2, "send_ms: two a cut, and one a stage");
    for (std::size_t n = 0; n < S; ++n) {
        require(recompute_ms_[n] >= 0 && recompute_ms_[n] <= length_ms_[n * kNumBlockKinds + kBackward],
                "recompute_ms: is no part of the backward");
        require(num_parts_[n] >= 0 && num_parts_[n] <= 1000, "num_parts: is not within 0..1000");
    }
    require(std::all_of(send_ms_.begin(), send_ms_.end(), is_time),
            "send_ms: one is no finite time >= 0");
    require(!flows_ || flows_->num_stages() == static_cast<int>(S),
            "flows: are of a plan with another number of stages");
    Channels channels = number_channels(group_of_, half_duplex_);
    channel_of_ = std::move(channels.channel_of);
    num_channels_ = channels.count;
}

GroupCostsView GroupCosts::view(long num_microbatches) const {
    require(num_microbatches >= 1 && num_microbatches <= kMaxMicrobatches &&
                group_of_.size() * num_microbatches <= kMaxBlocks,
            "num_microbatches: " + std::to_string(num_microbatches) +
                " is not at least 1, or too many for the stages");
    return {num_groups_,          num_stages(),         static_cast<int>(num_microbatches),
            group_of_.data(),     length_ms_.data(),    recompute_ms_.data(),
            send_ms_.data(),      num_parts_.data(),    num_channels_,
            channel_of_.data(),   half_duplex_,         flows_.get()};
}

void require_complete(const GroupCostsView& costs, const GroupOrders& orders) {
    const std::size_t M = costs.num_microbatches;
    // What comes next for a microbatch in a stage: F, then B or I, then after an I its W.
    enum Next : std::uint8_t { kNextForward, kNextBackward, kNextWeight, kNextNothing };
    std::vector<std::uint8_t> next(costs.num_stages * M, kNextForward);
    for (int g = 0; g < costs.num_groups; ++g) {
        for (std::size_t k = orders.first[g]; k < orders.first[g + 1]; ++k) {
            const GroupCode code = orders.codes[k];
            const GroupCode stage = code >> 32;
            const std::size_t m = microbatch_of(code);
            const auto refuse = [&](const char* why) {
                throw std::invalid_argument("codes: group " + std::to_string(g) + ", block " +
                                            std::to_string(k - orders.first[g]) + " " + why);
            };
            if (code < 0 || stage >= costs.num_stages || costs.group_of[stage] != g || m >= M)
                refuse("is of another group, or of no microbatch");
            std::uint8_t& state = next[stage * M + m];
            const int kind = kind_of(code);
            if (kind == kForward && state == kNextForward) state = kNextBackward;
            else if (kind == kBackward && state == kNextBackward) state = kNextNothing;
            else if (kind == kInputGradient && state == kNextBackward) state = kNextWeight;
            else if (kind == kWeightGradient && state == kNextWeight) state = kNextNothing;
            else refuse("stands twice or before what it needs");
            if (kind >= kInputGradient && std::isnan(costs.length_ms[stage * kNumBlockKinds + kind]))
                refuse("is half of a backward that cannot be cut");
        }
    }
    require(std::all_of(next.begin(), next.end(), [](auto state) { return state == kNextNothing; }),
            "codes: a microbatch does not go forward and backward through every stage");
}

double GroupTimer::operator()(const GroupCostsView& costs, const GroupOrders& orders,
                              Control& control) {
    if (!costs.half_duplex && !costs.flows) return pass(costs, orders);
    const GroupTrace trace = run_groups(costs, orders, control);
    for (int g = 0; g < costs.num_groups; ++g)
        if (trace.blocks_done[g] < static_cast<int>(orders.first[g + 1] - orders.first[g]))
            return std::numeric_limits<double>::infinity();
    return trace.iteration_ms;
}

void GroupTimer::begin(const GroupCostsView& costs, const GroupOrders& orders) {
    const std::size_t M = costs.num_microbatches, G = costs.num_groups, S = costs.num_stages;
    input_ms_.assign(S * M, -1.0);
    gradient_ms_.assign(S * M, -1.0);
    std::fill_n(input_ms_.begin(), M, 0.0);
    free_ms_.assign(G, 0.0);
    ring_free_ms_.assign(G, 0.0);
    channel_free_ms_.assign(costs.num_channels, 0.0);
    num_closed_.assign(S, 0);
    next_.assign(orders.first, orders.first + G);
    is_listed_.assign(G, 1);
    groups_to_go_.resize(G);
    for (std::size_t g = 0; g < G; ++g) groups_to_go_[g] = static_cast<int>(G - 1 - g);
}

// A group sends over a channel in the order in which it computes, so the order alone decides. Each group
// runs as far as its inputs are there; what it makes lets others go on. O(blocks).
double GroupTimer::pass(const GroupCostsView& costs, const GroupOrders& orders) {
    begin(costs, orders);
    double latest_ms = 0.0;
    std::size_t num_left = orders.first[costs.num_groups];
    while (!groups_to_go_.empty()) {
        const int g = groups_to_go_.back();
        groups_to_go_.pop_back();
        is_listed_[g] = 0;
        num_left -= run_group(costs, orders, g);
        latest_ms = std::max({latest_ms, free_ms_[g], ring_free_ms_[g]});
    }
    return num_left == 0 ? latest_ms : std::numeric_limits<double>::infinity();
}

// Runs a group's blocks until one has no input yet. Returns how many it ran.
std::size_t GroupTimer::run_group(const GroupCostsView& costs, const GroupOrders& orders, int g) {
    const int S = costs.num_stages;
    const std::size_t M = costs.num_microbatches, begun = next_[g];
    double now_ms = free_ms_[g];
    std::size_t k = begun;
    for (const std::size_t end = orders.first[g + 1]; k < end; ++k) {
        const GroupCode code = orders.codes[k];
        const int n = stage_of(code), kind = kind_of(code);
        const std::size_t at = n * M + microbatch_of(code);
        if (kind != kWeightGradient) {  // that one follows its I in the same group
            const double there_ms = (kind == kForward ? input_ms_ : gradient_ms_)[at];
            if (there_ms < 0) break;
            now_ms = std::max(now_ms, there_ms);
        }
        const double start_ms = now_ms;
        now_ms += costs.length_ms[kNumBlockKinds * n + kind];
        if (kind == kForward) {
            if (n == S - 1) gradient_ms_[at] = now_ms;
            else input_ms_[at + M] = deliver(costs, 2 * n, n + 1, now_ms);
            continue;
        }
        if (kind != kWeightGradient && n > 0)
            gradient_ms_[at - M] = deliver(costs, 2 * n - 1, n - 1, now_ms);
        if (kind == kInputGradient || ++num_closed_[n] < static_cast<int>(M)) continue;
        const double before_ms = kind == kBackward ? costs.recompute_ms[n] : 0.0;
        const double gradients_ms = start_ms + before_ms;  // from then on they come
        for (int j = 1; j <= costs.num_parts[n]; ++j) {
            const double part = static_cast<double>(j) / costs.num_parts[n];
            const double ready_ms = gradients_ms + part * (now_ms - gradients_ms);
            ring_free_ms_[g] =
                std::max(ready_ms, ring_free_ms_[g]) + costs.send_ms[2 * (S - 1) + n];
        }
    }
    next_[g] = k;
    free_ms_[g] = now_ms;
    return k - begun;
}

// When the result of a block that ends now is there for another stage, at once or after its transfer.
double GroupTimer::deliver(const GroupCostsView& costs, int sent, int stage, double now_ms) {
    const int channel = costs.channel_of[sent];
    if (channel < 0) return now_ms;
    double& free_ms = channel_free_ms_[channel];
    free_ms = std::max(now_ms, free_ms) + costs.send_ms[sent];
    const int h = costs.group_of[stage];
    if (!is_listed_[h]) {
        is_listed_[h] = 1;
        groups_to_go_.push_back(h);
    }
    return free_ms;
}

}  // namespace pipeplan
