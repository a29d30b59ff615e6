// Fills sides of shared links, lowest level first, as far as a change reaches.
#include "max_min.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

namespace pipeplan {

namespace {

// Selection without a branch, which would be guessed wrong half of the time. Numbers that are not
// negative are ordered as their bits are.
std::int64_t bits_of(double number) {
    std::int64_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    return bits;
}

double number_of(std::int64_t bits) {
    double number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

// All bits if a < b, else none.
std::int64_t all_if_below(double a, double b) { return (bits_of(a) - bits_of(b)) >> 63; }

}  // namespace

MaxMinRates::MaxMinRates(const FlowTable& flows, std::size_t most_fillings)
    : most_fillings_(most_fillings), kinds_(flows.classes()), sides_of_kinds_(flows.sides()),
      flows_on_(flows.flows_on()), num_sides_(static_cast<int>(flows.capacity().size())), sides_(num_sides_ + 1),
      level_(num_sides_ + 1, kInfinity), users_(sides_of_kinds_.size()),
      place_(sides_of_kinds_.size()), num_flows_(kinds_.size(), 0), rate_(kinds_.size(), 0.0),
      touched_(num_sides_ / 64 + 1, 0), has_moved_(num_sides_, 0), changed_(kinds_.size() + 1), bounds_(kinds_.size()) {
    for (int side : sides_of_kinds_) ++sides_[side + 1].first_user;
    for (int side = 0; side < num_sides_; ++side) {
        sides_[side].capacity = flows.capacity()[side];
        sides_[side + 1].first_user += sides_[side].first_user;
    }
}

void MaxMinRates::add(int index, int num_flows) {
    const FlowClass& kind = kinds_[index];
    const bool is_new = num_flows_[index] == 0;
    num_flows_[index] += num_flows;
    const bool is_gone = num_flows_[index] == 0;
    for (int k = kind.first_side; k < kind.end_side; ++k) {
        Side& side = sides_[sides_of_kinds_[k]];
        User* const users = users_.data() + side.first_user;
        if (is_new) {
            int other = num_sides_;
            if (kind.end_side - kind.first_side == 2)
                other = sides_of_kinds_[kind.first_side + kind.end_side - 1 - k];
            else if (kind.end_side - kind.first_side > 2)
                other = kMany;
            place_[k] = side.num_users++;
            users[place_[k]] = {kind.limit, 0.0, other, index, k};
        }
        users[place_[k]].num_flows = static_cast<double>(flows_on_[k]) * num_flows_[index];
        if (is_gone) {
            const User last = users[--side.num_users];
            users[place_[k]] = last;
            place_[last.slot] = place_[k];
        }
        // Who leaves a side that limits nobody makes no difference to it.
        if (num_flows > 0 || level_[sides_of_kinds_[k]] < kInfinity) touch(sides_of_kinds_[k]);
    }
    counted_.push_back(index);
}

// What limits a class beside this side.
inline double MaxMinRates::bound(const User& user, int side) const {
    if (user.other != kMany) return std::min(user.limit, level_[user.other]);
    double least = user.limit;
    for (int k = kinds_[user.index].first_side; k < kinds_[user.index].end_side; ++k)
        if (sides_of_kinds_[k] != side) least = std::min(least, level_[sides_of_kinds_[k]]);
    return least;
}

// Newton's method on the capacity that is used at a level: concave and piecewise linear, so that every
// step but the first one rises, and the right piece is found after a few. Mostly it is still that of the
// old level, and one step is enough.
inline double MaxMinRates::level_of(int side) {
    const double capacity = sides_[side].capacity;
    const User* const users = users_.data() + sides_[side].first_user;
    const int num_users = sides_[side].num_users;
    double* const bounds = bounds_.data();
    double level = level_[side], used = 0.0, num_open = 0.0, num_all = 0.0;
    double low = 0.0, high = kInfinity;  // the piece: no class has its bound between
    for (int k = 0; k < num_users; ++k) {
        const double most = bound(users[k], side), count = users[k].num_flows;
        const std::int64_t is_below = all_if_below(most, level);
        bounds[k] = most;
        used += number_of(bits_of(count * most) & is_below);
        num_open += number_of(bits_of(count) & ~is_below);
        num_all += count;
        low = std::max(low, number_of(bits_of(most) & is_below));
        high = std::min(high, number_of((bits_of(most) & ~is_below) |
                                        (bits_of(kInfinity) & is_below)));
    }
    if (num_open == 0.0) {  // all are below this level
        if (used <= capacity) return kInfinity;
        used = 0.0, num_open = num_all, low = 1.0, high = 0.0;  // from 0 on
    }
    level = std::max(0.0, capacity - used) / num_open;
    if (low < level && level <= high) return level;
    for (bool is_first = true;; is_first = false) {
        const double num_before = num_open;
        used = num_open = 0.0;
        for (int k = 0; k < num_users; ++k) {
            const double most = bounds[k], count = users[k].num_flows;
            const std::int64_t is_below = all_if_below(most, level);
            used += number_of(bits_of(count * most) & is_below);
            num_open += number_of(bits_of(count) & ~is_below);
        }
        if (num_open == num_before) return level;
        // None is left: the side cannot be filled, or rounding made its level too high by a hair.
        if (num_open == 0.0) return used <= capacity ? kInfinity : level;
        if (num_open > num_before && !is_first) return level;  // rounding again
        level = std::max(0.0, capacity - used) / num_open;
    }
}

inline int MaxMinRates::take_lowest() {
    int lowest = num_sides_;
    double level = kInfinity;
    for (std::size_t word = 0; word < touched_.size(); ++word) {
        for (std::uint64_t bits = touched_[word]; bits; bits &= bits - 1) {
            const int side = static_cast<int>(64 * word) + __builtin_ctzll(bits);
            const bool is_lower = level_[side] <= level;
            lowest = is_lower ? side : lowest;
            level = is_lower ? level_[side] : level;
        }
    }
    touched_[lowest / 64] &= ~(std::uint64_t{1} << lowest % 64);
    return lowest;
}

// Gives a side its level, and touches those to which that makes a difference: their own level is above
// the lower one of old and new. Where this one falls, sides that limit nobody have still more room.
inline void MaxMinRates::fill_again(int side, double level) {
    const double low = std::min(level, level_[side]);
    const bool rises = level > level_[side];
    level_[side] = level;
    if (!has_moved_[side]) has_moved_[side] = 1, moved_.push_back(side);
    const User* const users = users_.data() + sides_[side].first_user;
    const double high = rises ? kInfinity : std::numeric_limits<double>::max();
    const auto pass_on = [&](int other, const User& user) {
        const bool is_touched =
            (level_[other] > low) & (level_[other] <= high) & (user.limit > low);
        touched_[other / 64] |= std::uint64_t{is_touched} << other % 64;
    };
    for (int k = 0; k < sides_[side].num_users; ++k) {
        const User& user = users[k];
        if (user.other != kMany) {
            pass_on(user.other, user);
            continue;
        }
        for (int j = kinds_[user.index].first_side; j < kinds_[user.index].end_side; ++j)
            if (sides_of_kinds_[j] != side) pass_on(sides_of_kinds_[j], user);
    }
    touched_[num_sides_ / 64] &= ~(std::uint64_t{1} << num_sides_ % 64);  // it limits nobody
}

// Progressive filling from nothing: always the side that is full first.
void MaxMinRates::fill_all() {
    std::fill(touched_.begin(), touched_.end(), 0);
    std::vector<int> open(num_sides_);
    std::iota(open.begin(), open.end(), 0);
    moved_ = open;
    std::fill(level_.begin(), level_.end(), kInfinity);
    while (!open.empty()) {
        std::vector<double> levels;
        for (int side : open) levels.push_back(level_of(side));
        const auto lowest = std::min_element(levels.begin(), levels.end()) - levels.begin();
        level_[open[lowest]] = levels[lowest];
        open.erase(open.begin() + lowest);
    }
}

inline void MaxMinRates::look_at(int index, double rate) {
    changed_[num_changed_] = index;  // stays only if it is counted
    num_changed_ += rate != rate_[index];
    rate_[index] = rate;
}

MaxMinRates::Changed MaxMinRates::update() {
    num_changed_ = 0;
    std::size_t num_left = most_fillings_;
    for (int side; (side = take_lowest()) < num_sides_; --num_left) {
        if (num_left == 0) {
            fill_all();
            break;
        }
        const double level = level_of(side);
        if (level != level_[side]) fill_again(side, level);
    }
    for (int side : moved_) {
        has_moved_[side] = 0;
        const User* const users = users_.data() + sides_[side].first_user;
        for (int k = 0; k < sides_[side].num_users; ++k)
            look_at(users[k].index, std::min(level_[side], bound(users[k], side)));
    }
    moved_.clear();
    for (int index : counted_) {
        double rate = num_flows_[index] > 0 ? kinds_[index].limit : 0.0;
        for (int k = kinds_[index].first_side; k < kinds_[index].end_side; ++k)
            rate = std::min(rate, level_[sides_of_kinds_[k]]);
        look_at(index, rate);
    }
    counted_.clear();
    return {changed_.data(), changed_.data() + num_changed_};
}

}  // namespace pipeplan
