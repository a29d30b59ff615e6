// Max-min fair rates of classes of flows, kept up to date while flows come and go (docs/formats.md, rule
// 10). After Ros-Giralt et al., "On the bottleneck structure of congestion-controlled networks", 2019.
//
// The *level* of a side of a shared link is the rate of the fastest flows there, which the side limits: the
// water level at which they fill it. A side that is not full has an infinite level. Each class has a
// *source*, which limits it: the side with the least level of those that it uses, or its own limit, which is
// a source too, and whose level never changes. The rate of a class is the level of its source.
//
// Rates are max-min fair if sides that are the source of some class are full, no side is above its capacity,
// and no class uses a side with a level below its source's (docs/theory.md, "Rates that are kept"). After a
// change the sides that it touches are filled anew, lowest first. As long as classes keep their
// sources, a side's level changes by what is left on it over the number of its flows, and what is left
// on other sides changes by a product.
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
    // Gives all classes their sources, and all sources their levels.
    void update();

    static constexpr int kNone = -1;
    int num_sources() const { return static_cast<int>(level_.size()); }
    // Of a class; kNone without flows.
    int source(int index) const { return source_[index]; }
    double level(int source) const { return level_[source]; }
    double rate(int index) const { return source_[index] == kNone ? 0.0 : level_[source_[index]]; }
    // What may differ since these were cleared: sources' levels, and classes' sources.
    template <class Take>
    void for_moved(Take&& take) const {
        for (std::size_t word = 0; word < moved_.size(); ++word)
            for (std::uint64_t bits = moved_[word]; bits; bits &= bits - 1)
                take(static_cast<int>(64 * word) + __builtin_ctzll(bits));
    }
    const std::vector<int>& switched() const { return switched_; }
    void clear_changes() {
        std::fill(moved_.begin(), moved_.end(), 0);
        switched_.clear();
    }

  private:
    // A class on one of its sides. Flows that use two sides, as nearly all do, are limited by the other one;
    // `other` is the side that limits nobody where there is none, or where there are several.
    struct User {
        int other = 0, index = 0;  // index: of the class
        // Where this side is the source of the class: all bits, the flows on `other`, and the bit of
        // `other` among touched sides. Else 0.
        std::int64_t mine = -1;
        double weight = 0.0;
        std::uint64_t bit = 0;
    };
    // A side has its users one after the other in `users_`, and behind them, up to a multiple of
    // kChunk, users without flows: loops may go over whole chunks.
    static constexpr int kChunk = 4;
    struct Side {
        double capacity = 0.0;
        double num_mine = 0.0, per_mine = 0.0;  // flows of classes whose source this is; 1 / this
        int first_user = 0;
        int num_users = 0;    // classes that have flows
        int num_special = 0;  // of these, with more than two sides, or a limit that counts
        int is_rough = 0;     // whether what is left has to be counted again
    };

    int num_sides_of(int index) const { return kinds_[index].end_side - kinds_[index].first_side; }
    double flows_on(int slot, int index) const {
        return static_cast<double>(flows_on_[slot]) * num_flows_[index];
    }
    void enter(int index);
    void leave(int index);
    void set_user(int place, int slot, int index);
    void give(int slot, int index, bool is_mine);
    double least_elsewhere(int index, int side) const;
    int least_source(int index) const;
    void set_source(int index, int source);
    void take(int side, double bytes_per_ms, double change);
    void count_mine(int side, double num_flows);
    static std::uint64_t bit_of(int side) { return std::uint64_t{1} << (side & 63); }
    static unsigned word_of(int side) { return static_cast<unsigned>(side) / 64; }
    void touch(int side) { touched_[word_of(side)] |= bit_of(side); }
    int take_lowest();
    int take_overfull();
    void fill(int side);
    bool find_level(int side);
    void set_level(int side, double level);
    void switch_users(int side, std::uint64_t wrong);
    void switch_special(int side);
    std::uint64_t wrong_users(int side) const;
    void recount(int side);
    void fill_all();
    double level_from_nothing(int side) const;

    const std::size_t most_fillings_;
    const std::vector<FlowClass>& kinds_;
    const std::vector<int>&sides_of_kinds_, &flows_on_;
    const int num_sides_;
    std::vector<Side> sides_;
    std::vector<double> level_;           // [sources]: sides, one that limits nobody, limits
    std::vector<double> left_;            // [sides + 1], capacity that no flow uses
    double much_ = 0.0;                   // a change of a rate that leaves errors of rounding in it
    std::vector<User> users_;             // with room for all classes that use a side
    std::vector<int> slot_;               // [users], in sides_of_kinds_
    std::vector<int> place_;              // [sides of kinds], where the class stands in users_
    std::vector<int> num_flows_;          // [classes]
    std::vector<int> source_, own_;       // [classes]
    std::vector<int> is_special_;         // [classes]
    std::vector<std::uint64_t> touched_, is_full_;  // a bit a side; full: its level is finite
    std::vector<std::uint64_t> moved_;    // a bit a side
    std::vector<int> switched_;           // classes
};

}  // namespace pipeplan
