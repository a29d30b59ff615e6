// Progressive filling: all rates grow alike from 0; a flow stops at its limit, or when a side that it
// uses is full.
#include "flow_rates.hpp"

#include <algorithm>
#include <functional>
#include <numeric>

namespace pipeplan {

FlowRates::FlowRates(const FlowTable& flows, std::vector<RateChange>* history)
    : groups_(flows.groups()), transfers_(flows.transfers()), kinds_(flows.classes()),
      sides_of_kinds_(flows.sides()), history_(history), transfer_of_(groups_.size()),
      classes_(kinds_.size()), end_ms_(kinds_.size(), kInfinity), by_limit_(kinds_.size()),
      sides_(flows.capacity().size()), num_left_(transfers_.size(), 0),
      latest_ms_(transfers_.size(), 0.0) {
    for (std::size_t side = 0; side < sides_.size(); ++side)
        sides_[side].capacity = flows.capacity()[side];
    for (std::size_t c = 0; c < kinds_.size(); ++c)
        for (int k = kinds_[c].first_side; k < kinds_[c].end_side; ++k)
            sides_[sides_of_kinds_[k]].classes.push_back(static_cast<int>(c));
    for (std::size_t t = 0; t < transfers_.size(); ++t)
        for (int g = transfers_[t].first_group; g < transfers_[t].end_group; ++g)
            transfer_of_[g] = static_cast<int>(t);
    std::iota(by_limit_.begin(), by_limit_.end(), 0);
    std::stable_sort(by_limit_.begin(), by_limit_.end(),
                     [&](int a, int b) { return kinds_[a].limit < kinds_[b].limit; });
}

void FlowRates::begin(int transfer, double now_ms) {
    const FlowTransfer& begun = transfers_[transfer];
    for (int first = begun.first_group, g = first; g < begun.end_group; first = g) {
        while (g < begun.end_group && groups_[g].latency_ms == groups_[first].latency_ms) ++g;
        events_.push({now_ms + groups_[first].latency_ms, transfer, first, g});
    }
    latest_ms_[transfer] = 0.0;
    num_left_[transfer] = begun.end_group - begun.first_group;
    if (begun.timer_ms >= 0 || num_left_[transfer] == 0) {
        ++num_left_[transfer];
        events_.push({now_ms + std::max(begun.timer_ms, 0.0), transfer, 0, 0});
    }
}

// Sides that limit somebody before or after a change are filled anew.
void FlowRates::count_flows(int index, int more) {
    classes_[index].num_flows += more;
    for (int k = kinds_[index].first_side; k < kinds_[index].end_side; ++k) {
        Side& side = sides_[sides_of_kinds_[k]];
        const bool was_tight = side.is_tight;
        double wanted = 0.0;  // added up anew, so that rounding leaves nothing behind
        for (int c : side.classes) wanted += classes_[c].num_flows * kinds_[c].limit;
        side.is_tight = wanted > side.capacity;
        if ((was_tight || side.is_tight) && !side.has_changed) {
            side.has_changed = true;
            changed_sides_.push_back(sides_of_kinds_[k]);
        }
    }
}

void FlowRates::start(int first_group, int end_group) {
    for (int g = first_group; g < end_group; ++g) {
        const int index = groups_[g].flow_class;
        if (classes_[index].started.empty()) started_.push_back(index);
        classes_[index].started.push_back(g);
        count_flows(index, groups_[g].count);
    }
}

// Ends the group of a class that ends next, and returns it.
int FlowRates::end_first(int index) {
    Class& its = classes_[index];
    std::pop_heap(its.goals.begin(), its.goals.end(), std::greater<Goal>());
    const int group = its.goals.back().group;
    its.goals.pop_back();
    if (history_) history_->push_back({end_ms_[index], group, 0.0});
    count_flows(index, -groups_[group].count);
    find_end(index);
    return group;
}

void FlowRates::find_end(int index) {
    Class& its = classes_[index];
    if (its.goals.empty()) {
        its.rate = its.sent_bytes = 0.0;
        end_ms_[index] = kInfinity;
    } else {
        const double left = std::max(0.0, its.goals.front().bytes - its.sent_bytes);
        end_ms_[index] = its.since_ms + left / its.rate;
    }
}

void FlowRates::find_next_end() {
    next_end_ms_ = kInfinity;
    for (double end_ms : end_ms_) next_end_ms_ = std::min(next_end_ms_, end_ms);
}

void FlowRates::visit_class(int index) {
    if (classes_[index].visited == visit_) return;
    classes_[index].visited = visit_;
    tied_classes_.push_back(index);
    for (int k = kinds_[index].first_side; k < kinds_[index].end_side; ++k)
        if (sides_[sides_of_kinds_[k]].is_tight) visit_side(sides_of_kinds_[k]);
}

void FlowRates::visit_side(int side) {
    if (sides_[side].visited == visit_) return;
    sides_[side].visited = visit_;
    tied_sides_.push_back(side);
}

// Counts what the flows of a class have been sent until now.
void FlowRates::move_on(Class& moved, double now_ms) {
    moved.sent_bytes += moved.rate * (now_ms - moved.since_ms);
    moved.since_ms = now_ms;
    if (moved.goals.size() > kFewGoals) return;
    // From 0 on again: small numbers lose less. The order of the heap stays.
    for (Goal& goal : moved.goals) goal.bytes -= moved.sent_bytes;
    moved.sent_bytes = 0.0;
}

void FlowRates::settle(double now_ms) {
    if (changed_sides_.empty() && started_.empty()) return;
    ++visit_;
    tied_classes_.clear(), tied_sides_.clear();
    for (int side : changed_sides_) {
        sides_[side].has_changed = false;
        visit_side(side);
    }
    for (int index : started_) visit_class(index);
    for (std::size_t k = 0; k < tied_sides_.size(); ++k)
        for (int index : sides_[tied_sides_[k]].classes)
            if (classes_[index].num_flows > 0) visit_class(index);
    changed_sides_.clear(), started_.clear();
    fill();
    for (int index : tied_classes_) {
        Class& its = classes_[index];
        const bool has_changed = its.new_rate != its.rate;
        if (!has_changed && its.started.empty()) continue;
        move_on(its, now_ms);
        its.rate = its.new_rate;
        if (history_ && has_changed)
            for (const Goal& goal : its.goals) history_->push_back({now_ms, goal.group, its.rate});
        for (int group : its.started) {
            its.goals.push_back({its.sent_bytes + groups_[group].bytes, group});
            std::push_heap(its.goals.begin(), its.goals.end(), std::greater<Goal>());
            if (history_) history_->push_back({now_ms, group, its.rate});
        }
        its.started.clear();
        find_end(index);
    }
    find_next_end();
}

void FlowRates::fill() {
    open_.clear();
    // In the order of limits; few classes are sorted, for many all are passed through.
    if (tied_classes_.size() * 8 < by_limit_.size()) {
        open_ = tied_classes_;
        std::sort(open_.begin(), open_.end(), [&](int a, int b) {
            return kinds_[a].limit != kinds_[b].limit ? kinds_[a].limit < kinds_[b].limit : a < b;
        });
    } else {
        for (int index : by_limit_)
            if (classes_[index].visited == visit_) open_.push_back(index);
    }
    for (int index : open_) classes_[index].new_rate = -1.0;  // none yet
    for (int s : tied_sides_) {
        Side& side = sides_[s];
        side.left = side.capacity;
        side.num_open = 0;
        for (int index : side.classes) side.num_open += classes_[index].num_flows;
    }
    double reached = 0.0;  // rates grow; rounding must not let them fall
    for (std::size_t next = 0;;) {
        while (next < open_.size() && classes_[open_[next]].new_rate >= 0) ++next;
        if (next == open_.size()) break;
        const Side* fullest = nullptr;
        double level = kInfinity;
        for (int s : tied_sides_) {
            const Side& side = sides_[s];
            if (side.num_open == 0) continue;
            const double even = std::max(side.left / side.num_open, reached);
            if (even < level) level = even, fullest = &side;
        }
        // Flows that reach their limits before any side is full. They leave more to the others.
        if (kinds_[open_[next]].limit <= level) {
            for (; next < open_.size() && kinds_[open_[next]].limit <= level; ++next)
                if (classes_[open_[next]].new_rate < 0)
                    freeze(open_[next], kinds_[open_[next]].limit);
            continue;
        }
        reached = level;
        for (int index : fullest->classes)
            if (classes_[index].visited == visit_ && classes_[index].new_rate < 0)
                freeze(index, level);
    }
}

void FlowRates::freeze(int index, double rate) {
    classes_[index].new_rate = rate;
    const int num_flows = classes_[index].num_flows;
    for (int k = kinds_[index].first_side; k < kinds_[index].end_side; ++k) {
        Side& side = sides_[sides_of_kinds_[k]];
        if (side.visited != visit_) continue;
        side.left -= num_flows * rate;
        side.num_open -= num_flows;
    }
}

}  // namespace pipeplan
