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
#include <cstdint>
#include <vector>

#include "flow_table.hpp"

namespace pipeplan {

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
    // A class among those of a side. Flows that use two sides, as nearly all do, are limited by the
    // other one; `other` is the side that limits nobody where there is none, and kMany for several.
    struct User {
        double limit, num_flows;
        int other, index;
        int slot;  // in sides_of_kinds_
    };
    static constexpr int kMany = -1;
    struct Side {
        double capacity = 0.0;
        int first_user = 0, num_users = 0;  // classes that have flows
    };

    double bound(const User& user, int side) const;
    double level_of(int side);
    void touch(int side) { touched_[side / 64] |= std::uint64_t{1} << side % 64; }
    void fill_again(int side, double level);
    void fill_all();
    int take_lowest();
    void look_at(int index, double rate);

    const std::size_t most_fillings_;
    const std::vector<FlowClass>& kinds_;
    const std::vector<int>&sides_of_kinds_, &flows_on_;
    const int num_sides_;
    std::vector<Side> sides_;
    std::vector<double> level_;           // [sides + 1]; the last one limits nobody
    std::vector<User> users_;             // of all sides, with room for all classes that use them
    std::vector<int> place_;              // [sides of kinds], where the class stands in users_
    std::vector<int> num_flows_;          // [classes]
    std::vector<double> rate_;            // [classes]
    std::vector<std::uint64_t> touched_;  // a bit a side
    std::vector<char> has_moved_;         // [sides]
    std::vector<int> moved_;              // sides
    std::vector<int> counted_, changed_;  // classes
    int num_changed_ = 0;
    std::vector<double> bounds_;          // of one side's users
};

}  // namespace pipeplan
