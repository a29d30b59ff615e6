// Max-min fair rates of classes of flows, kept up to date while flows come and go (docs/formats.md, rule
// 10). After Ros-Giralt et al., "On the bottleneck structure of congestion-controlled networks", 2019.
//
// The *level* of a side of a shared link is the rate that its flows have unless something else limits
// them: the water level at which they fill it. A side that cannot be filled has an infinite level. The rate
// of a class is the least of its limit and the levels of its sides. Levels that fit each other in this
// way give the max-min fair rates, and there is only one such assignment of rates.
//
// A side's level depends on lower levels only. So after a change the sides that it touches are filled
// anew, lowest first, and then those to which a changed level makes a difference: all others keep
// theirs.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "flow_table.hpp"

namespace pipeplan {

// Two numbers at once.
typedef double Two __attribute__((vector_size(16)));
typedef std::int64_t TwoBits __attribute__((vector_size(16)));

class MaxMinRates {
  public:
    // The table has to outlive this. No flow is under way.
    // Where a change goes on and on, all sides are filled from nothing: after `most_fillings`.
    explicit MaxMinRates(const FlowTable& flows, std::size_t most_fillings = 1000);

    // So many flows of a class come; below 0: go. Rates change with `update`.
    void add(int index, int num_flows);
    // Classes, until the next change.
    struct Changed {
        const int *first, *last;
        const int* begin() const { return first; }
        const int* end() const { return last; }
    };
    // Gives all classes their rates, and returns those whose rate differs. Without flows it is 0.
    Changed update();
    double rate(int index) const { return rate_[index]; }

  private:
    // A side has its users one after the other in `users_`, and behind them, up to a multiple of
    // kChunk, users without flows: loops go over whole chunks.
    struct Side {
        double capacity = 0.0;
        int first_user = 0;
        int num_users = 0;  // classes that have flows
        int num_many = 0;   // of these, with more than two sides
        int end_chunk() const { return first_user + (num_users + kChunk - 1) / kChunk * kChunk; }
    };
    // The classes among those of all sides. Flows that use two sides, as nearly all do, are limited by
    // the other one; `other` is the side that limits nobody where there is none, or where there are several.
    struct Users {
        std::vector<double> limit, num_flows;
        std::vector<double> num_there;  // flows on `other`; more or less where flows were merged
        std::vector<int> other, index;
        std::vector<int> slot;  // in sides_of_kinds_
    };
    static constexpr int kChunk = 4;

    void set_user(int place, int slot, int index);
    void count_user(int place, int slot, int index);
    void copy_user(int from, int to);
    void clear_user(int place);
    bool has_many(int index) const { return kinds_[index].end_side - kinds_[index].first_side > 2; }
    double bound(int user) const { return std::min(users_.limit[user], level_[users_.other[user]]); }
    double bound_of_many(int user, int side) const;
    double level_of(int side);
    template <class Bound>
    double level_with(int side, Bound&& bound);
    double level_from(int side, double level, double num_open);
    void touch(int side) { touched_[side / 64] |= std::uint64_t{1} << side % 64; }
    template <class Sides>
    void fill(Sides touched);
    template <class Sides>
    void fill_again(int side, double level, Sides& touched);
    void fill_all();
    int look_at(int index, double rate, int num_changed);

    const std::size_t most_fillings_;
    const std::vector<FlowClass>& kinds_;
    const std::vector<int>&sides_of_kinds_, &flows_on_;
    const int num_sides_;
    std::vector<Side> sides_;
    std::vector<double> level_;           // [sides + 1]; the last one limits nobody
    std::vector<double> room_;            // [sides + 1], capacity that is left where nobody is limited
    Users users_;                         // with room for all classes that use a side
    std::vector<int> place_;              // [sides of kinds], where the class stands in users_
    std::vector<int> num_flows_;          // [classes]
    std::vector<double> rate_;            // [classes]
    std::vector<std::uint64_t> touched_;  // a bit a side
    std::vector<char> has_moved_;         // [sides]
    std::vector<int> moved_;              // sides
    std::vector<int> counted_, changed_;  // classes
    std::vector<Two> bounds_;             // of one side's users
};

}  // namespace pipeplan
