// Counts what flows have been sent, and finds when they end.
#include "flow_rates.hpp"

#include <algorithm>
#include <functional>

namespace pipeplan {

FlowRates::FlowRates(const FlowTable& flows, std::vector<RateChange>* history)
    : groups_(flows.groups()), transfers_(flows.transfers()), members_(flows.members()), history_(history),
      rates_(flows),
      transfer_of_(groups_.size()), progress_(flows.classes().size()),
      end_ms_((progress_.size() + kChunk - 1) / kChunk * kChunk, kInfinity), goals_(progress_.size()), new_groups_(progress_.size()),
      num_left_(transfers_.size(), 0), latest_ms_(transfers_.size(), 0.0) {
    for (std::size_t t = 0; t < transfers_.size(); ++t)
        for (int g = transfers_[t].first_group; g < transfers_[t].end_group; ++g)
            transfer_of_[g] = static_cast<int>(t);
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

void FlowRates::start(int first_group, int end_group) {
    has_changed_ = true;
    for (int g = first_group; g < end_group; ++g) {
        const int index = groups_[g].flow_class;
        if (new_groups_[index].empty()) started_.push_back(index);
        new_groups_[index].push_back(g);
        rates_.add(index, groups_[g].count);
    }
}

// Ends the group of a class that ends next, and returns it.
int FlowRates::end_first(int index) {
    std::vector<Goal>& goals = goals_[index];
    std::pop_heap(goals.begin(), goals.end(), std::greater<Goal>());
    const int group = goals.back().group;
    goals.pop_back();
    if (history_) record(end_ms_[index], group, 0.0);
    has_changed_ = true;
    rates_.add(index, -groups_[group].count);
    progress_[index].goal_bytes = goals.empty() ? kInfinity : goals.front().bytes;
    find_end(index);
    return group;
}

inline void FlowRates::find_end(int index) {
    const Progress& its = progress_[index];
    end_ms_[index] = its.since_ms + std::max(0.0, its.goal_bytes - its.sent_bytes) / its.rate;
}

void FlowRates::find_next_end() {
    // In two chains, because each step of one waits for the one before it.
    Two least[2] = {{kInfinity, kInfinity}, {kInfinity, kInfinity}};
    for (std::size_t k = 0; k < end_ms_.size(); k += 4) {
        for (int chain = 0; chain < 2; ++chain) {
            const Two ends = {end_ms_[k + 2 * chain], end_ms_[k + 2 * chain + 1]};
            least[chain] = ends < least[chain] ? ends : least[chain];
        }
    }
    const Two both = least[0] < least[1] ? least[0] : least[1];
    next_end_ms_ = std::min(both[0], both[1]);
}

// A merged group stands for several.
void FlowRates::record(double ms, int group, double rate) {
    if (members_.empty()) return history_->push_back({ms, group, rate});
    for (int member : members_[group]) history_->push_back({ms, member, rate});
}

void FlowRates::settle(double now_ms) {
    if (!has_changed_) return;
    has_changed_ = false;
    change_rates(now_ms);
    for (int index : started_) start_groups(index, now_ms);
    started_.clear();
    find_next_end();
}

void FlowRates::change_rates(double now_ms) {
    for (int index : rates_.update()) {
        Progress& its = progress_[index];
        its.sent_bytes += its.rate * (now_ms - its.since_ms);
        its.since_ms = now_ms;
        its.rate = rates_.rate(index);
        // Nothing is under way: no end, whatever the rate.
        if (its.goal_bytes < kInfinity) find_end(index);
        if (!history_) continue;
        for (const Goal& goal : goals_[index]) record(now_ms, goal.group, its.rate);
    }
}

void FlowRates::start_groups(int index, double now_ms) {
    Progress& its = progress_[index];
    std::vector<Goal>& goals = goals_[index];
    its.sent_bytes += its.rate * (now_ms - its.since_ms);
    its.since_ms = now_ms;
    if (goals.empty()) its.sent_bytes = 0.0;
    for (int group : new_groups_[index]) {
        if (its.sent_bytes > kManyTimes * groups_[group].bytes) {  // the order of the heap stays
            for (Goal& goal : goals) goal.bytes -= its.sent_bytes;
            its.sent_bytes = 0.0;
        }
        goals.push_back({its.sent_bytes + groups_[group].bytes, group});
        std::push_heap(goals.begin(), goals.end(), std::greater<Goal>());
        if (history_) record(now_ms, group, its.rate);
    }
    new_groups_[index].clear();
    its.goal_bytes = goals.front().bytes;
    find_end(index);
}

}  // namespace pipeplan
