// Counts what flows have been sent, and finds when they end.
#include "flow_rates.hpp"

#include <algorithm>

namespace pipeplan {

FlowRates::FlowRates(const FlowTable& flows, std::vector<RateChange>* history)
    : groups_(flows.groups()), transfers_(flows.transfers()), members_(flows.members()), history_(history),
      rates_(flows), transfer_of_(groups_.size()), sources_(rates_.num_sources()),
      end_ms_((sources_.size() + kChunk - 1) / kChunk * kChunk, kInfinity), classes_(flows.classes().size()),
      num_left_(transfers_.size(), 0), latest_ms_(transfers_.size(), 0.0) {
    for (std::size_t t = 0; t < transfers_.size(); ++t)
        for (int g = transfers_[t].first_group; g < transfers_[t].end_group; ++g)
            transfer_of_[g] = static_cast<int>(t);
    for (std::size_t s = 0; s < sources_.size(); ++s) {
        const double level = rates_.level(static_cast<int>(s));
        sources_[s].rate = level < kInfinity ? level : 0.0;
    }
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
        Class& its = classes_[index];
        if (its.new_groups.empty()) started_.push_back(index);
        its.new_groups.push_back(g);
        rates_.add(index, groups_[g].count);
    }
}

// Ends the group that ends next at a source, and returns it.
int FlowRates::end_first(int index) {
    Source& source = sources_[index];
    int place = 0;
    while (source.goals[place] != source.least_goal) ++place;
    const int its_class = source.classes[place];
    Class& its = classes_[its_class];
    const int group = its.goals[its.first_goal++].group;
    if (its.is_idle()) its.goals.clear(), its.first_goal = 0;
    if (history_) record(end_ms_[index], group, 0.0);
    has_changed_ = true;
    rates_.add(its_class, -groups_[group].count);
    source.goals[place] = its.least_goal() - its.more_bytes;
    find_least_goal(index);
    return group;
}

void FlowRates::find_least_goal(int index) {
    double least = kInfinity;
    for (double goal : sources_[index].goals) least = std::min(least, goal);
    sources_[index].least_goal = least;
    find_end(index);
}

inline void FlowRates::find_end(int index) {
    const Source& source = sources_[index];
    end_ms_[index] = source.least_goal < kInfinity
        ? source.since_ms + std::max(0.0, source.least_goal - source.sent_bytes) / source.rate : kInfinity;
}

void FlowRates::find_next_end() {
    Two least = {kInfinity, kInfinity};
    for (std::size_t s = 0; s < end_ms_.size(); s += 2) {
        const Two ends = {end_ms_[s], end_ms_[s + 1]};
        least = ends < least ? ends : least;
    }
    next_end_ms_ = std::min(least[0], least[1]);
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

inline void FlowRates::move_on(int index, double now_ms) {
    Source& source = sources_[index];
    source.sent_bytes = source.sent_at(now_ms);
    source.since_ms = now_ms;
    const double level = rates_.level(index);
    source.rate = level < kInfinity ? level : 0.0;
    find_end(index);
}

// Returns what flows of the class have been sent.
double FlowRates::leave(int index, double now_ms) {
    Class& its = classes_[index];
    if (its.source == MaxMinRates::kNone) return 0.0;
    Source& source = sources_[its.source];
    const double goal = source.goals[its.place];
    source.classes[its.place] = source.classes.back();
    source.goals[its.place] = source.goals.back();
    classes_[source.classes[its.place]].place = its.place;
    source.classes.pop_back(), source.goals.pop_back();
    if (goal == source.least_goal) find_least_goal(its.source);
    return source.sent_at(now_ms) + its.more_bytes;
}

void FlowRates::enter(int index, double sent_bytes, double now_ms) {
    Class& its = classes_[index];
    its.source = rates_.source(index);
    if (its.source == MaxMinRates::kNone) return;
    Source& source = sources_[its.source];
    its.place = static_cast<int>(source.classes.size());
    its.more_bytes = sent_bytes - source.sent_at(now_ms);
    source.classes.push_back(index);
    source.goals.push_back(kInfinity);
    if (!its.is_idle()) set_goal(index, its.least_goal());
}

// The least goal of a class.
void FlowRates::set_goal(int index, double bytes) {
    Class& its = classes_[index];
    Source& source = sources_[its.source];
    const double goal = bytes - its.more_bytes, before = source.goals[its.place];
    source.goals[its.place] = goal;
    if (before == source.least_goal && goal > before) return find_least_goal(its.source);
    if (goal >= source.least_goal) return;
    source.least_goal = goal;
    find_end(its.source);
}

// Counts the bytes of a source anew.
void FlowRates::count_from_zero(int index) {
    Source& source = sources_[index];
    for (std::size_t k = 0; k < source.classes.size(); ++k) {
        source.goals[k] -= source.sent_bytes;
        classes_[source.classes[k]].more_bytes += source.sent_bytes;
    }
    source.least_goal -= source.sent_bytes;
    source.sent_bytes = 0.0;
}

void FlowRates::change_rates(double now_ms) {
    rates_.update();
    rates_.for_moved([&](int source) { move_on(source, now_ms); });
    for (int index : rates_.switched()) {
        if (rates_.source(index) == classes_[index].source) continue;
        const double sent_bytes = leave(index, now_ms);
        enter(index, sent_bytes, now_ms);
    }
    if (history_) record_changes(now_ms);
    rates_.clear_changes();
}

void FlowRates::record_changes(double now_ms) {
    const auto record_class = [&](int index) {
        const Class& its = classes_[index];
        for (std::size_t k = its.first_goal; k < its.goals.size(); ++k)
            record(now_ms, its.goals[k].group, rates_.rate(index));
    };
    rates_.for_moved([&](int source) {
        for (int index : sources_[source].classes) record_class(index);
    });
    for (int index : rates_.switched()) record_class(index);
}

void FlowRates::start_groups(int index, double now_ms) {
    Class& its = classes_[index];
    Source& source = sources_[its.source];
    std::vector<Goal>& goals = its.goals;
    goals.erase(goals.begin(), goals.begin() + its.first_goal);
    its.first_goal = 0;
    source.sent_bytes = source.sent_at(now_ms);
    source.since_ms = now_ms;
    for (int group : its.new_groups) {
        const double bytes = groups_[group].bytes;
        if (source.sent_bytes > kManyTimes * bytes) count_from_zero(its.source);
        if (goals.empty()) its.more_bytes = -source.sent_bytes;
        double sent_bytes = source.sent_bytes + its.more_bytes;
        if (sent_bytes > kManyTimes * bytes) {  // the order stays
            for (Goal& goal : goals) goal.bytes -= sent_bytes;
            its.more_bytes -= sent_bytes;
            sent_bytes = 0.0;
        }
        const Goal goal{sent_bytes + bytes, group};
        goals.push_back(goal);
        std::size_t at = goals.size() - 1;
        for (; at > 0 && goals[at - 1].bytes > goal.bytes; --at) goals[at] = goals[at - 1];
        goals[at] = goal;
        if (history_) record(now_ms, group, rates_.rate(index));
    }
    its.new_groups.clear();
    set_goal(index, its.least_goal());
}

}  // namespace pipeplan
