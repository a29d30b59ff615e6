// Progressive filling: all rates grow alike from 0; a flow stops at its limit, or when a side that it
// uses is full.
#include "flow_rates.hpp"

#include <algorithm>

namespace pipeplan {

FlowRates::FlowRates(const FlowTable& flows, std::vector<RateChange>* history)
    : groups_(flows.groups()), transfers_(flows.transfers()), sides_of_groups_(flows.sides()),
      history_(history), flows_(groups_.size()), sides_(flows.capacity().size()),
      num_left_(transfers_.size(), 0), latest_ms_(transfers_.size(), 0.0) {
    for (std::size_t side = 0; side < sides_.size(); ++side)
        sides_[side].capacity = flows.capacity()[side];
    for (std::size_t t = 0; t < transfers_.size(); ++t)
        for (int g = transfers_[t].first_group; g < transfers_[t].end_group; ++g)
            flows_[g].transfer = static_cast<int>(t);
}

void FlowRates::begin(int transfer, double now_ms) {
    const FlowTransfer& begun = transfers_[transfer];
    for (int g = begun.first_group; g < begun.end_group; ++g)
        events_.push({now_ms + groups_[g].latency_ms, transfer, g});
    latest_ms_[transfer] = 0.0;
    num_left_[transfer] = begun.end_group - begun.first_group;
    if (begun.timer_ms >= 0 || num_left_[transfer] == 0) {
        ++num_left_[transfer];
        events_.push({now_ms + std::max(begun.timer_ms, 0.0), transfer, -1});
    }
}

void FlowRates::mark_changed(int side) {
    if (sides_[side].has_changed || !sides_[side].is_tight()) return;
    sides_[side].has_changed = true;
    changed_sides_.push_back(side);
}

void FlowRates::start(int group) {
    const FlowGroup& kind = groups_[group];
    Flow& flow = flows_[group];
    under_way_.push_back(group);
    flow.left_bytes = kind.bytes;
    flow.rate = 0.0;
    flow.end_ms = kInfinity;
    for (int k = kind.first_side; k < kind.end_side; ++k) {
        Side& side = sides_[sides_of_groups_[k]];
        side.wanted += kind.count * kind.limit;
        side.groups.push_back(group);
        mark_changed(sides_of_groups_[k]);
    }
    started_.push_back(group);
}

void FlowRates::end(int group) {
    const FlowGroup& kind = groups_[group];
    under_way_.erase(std::find(under_way_.begin(), under_way_.end(), group));
    for (int k = kind.first_side; k < kind.end_side; ++k) {
        Side& side = sides_[sides_of_groups_[k]];
        mark_changed(sides_of_groups_[k]);
        side.groups.erase(std::find(side.groups.begin(), side.groups.end(), group));
        // Added up anew: after a difference small limits would vanish beside large ones.
        side.wanted = 0.0;
        for (int other : side.groups) side.wanted += groups_[other].count * groups_[other].limit;
    }
}

void FlowRates::visit_group(int group) {
    if (flows_[group].visited == visit_) return;
    flows_[group].visited = visit_;
    tied_groups_.push_back(group);
    for (int k = groups_[group].first_side; k < groups_[group].end_side; ++k)
        if (sides_[sides_of_groups_[k]].is_tight()) visit_side(sides_of_groups_[k]);
}

void FlowRates::visit_side(int side) {
    if (sides_[side].visited == visit_) return;
    sides_[side].visited = visit_;
    tied_sides_.push_back(side);
}

void FlowRates::settle(double now_ms) {
    if (changed_sides_.empty() && started_.empty()) return;
    ++visit_;
    tied_groups_.clear(), tied_sides_.clear();
    for (int side : changed_sides_) {
        sides_[side].has_changed = false;
        visit_side(side);
    }
    for (int group : started_) visit_group(group);
    for (std::size_t k = 0; k < tied_sides_.size(); ++k)
        for (int group : sides_[tied_sides_[k]].groups) visit_group(group);
    changed_sides_.clear(), started_.clear();
    fill();
    for (int group : tied_groups_) {
        Flow& flow = flows_[group];
        if (flow.new_rate == flow.rate) continue;
        if (flow.rate > 0)
            flow.left_bytes = std::max(0.0, flow.left_bytes - flow.rate * (now_ms - flow.since_ms));
        flow.since_ms = now_ms;
        flow.rate = flow.new_rate;
        flow.end_ms = now_ms + flow.left_bytes / flow.rate;
        if (history_) history_->push_back({now_ms, group, flow.rate});
    }
    next_end_ms_ = kInfinity;
    for (int group : under_way_) next_end_ms_ = std::min(next_end_ms_, flows_[group].end_ms);
}

void FlowRates::fill() {
    for (int group : tied_groups_) flows_[group].new_rate = -1.0;  // none yet
    for (int s : tied_sides_) {
        Side& side = sides_[s];
        side.left = side.capacity;
        side.num_open = 0;
        for (int group : side.groups) side.num_open += groups_[group].count;
    }
    open_ = tied_groups_;
    double reached = 0.0;  // rates grow; rounding must not let them fall
    while (!open_.empty()) {
        const Side* fullest = nullptr;
        double level = kInfinity;
        for (int s : tied_sides_) {
            const Side& side = sides_[s];
            if (side.num_open == 0) continue;
            const double even = std::max(side.left / side.num_open, reached);
            if (even < level) level = even, fullest = &side;
        }
        // Flows that reach their limits before any side is full.
        bool has_limited = false;
        for (int group : open_) {
            if (groups_[group].limit > level) continue;
            freeze(group, groups_[group].limit);
            has_limited = true;
        }
        if (!has_limited) {
            reached = level;
            for (int group : fullest->groups)
                if (flows_[group].new_rate < 0) freeze(group, level);
        }
        open_.erase(std::remove_if(open_.begin(), open_.end(),
                                   [&](int group) { return flows_[group].new_rate >= 0; }),
                    open_.end());
    }
}

void FlowRates::freeze(int group, double rate) {
    const FlowGroup& kind = groups_[group];
    flows_[group].new_rate = rate;
    for (int k = kind.first_side; k < kind.end_side; ++k) {
        Side& side = sides_[sides_of_groups_[k]];
        if (side.visited != visit_) continue;
        side.left -= kind.count * rate;
        side.num_open -= kind.count;
    }
}

}  // namespace pipeplan
