// Fills sides of shared links, lowest level first, as far as a change reaches.
#include "max_min.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

namespace pipeplan {

namespace {

// Selection without a branch, which would be guessed wrong half of the time.
Two only_where(TwoBits mask, Two numbers) {
    return reinterpret_cast<Two>(reinterpret_cast<TwoBits>(numbers) & mask);
}

double sum(Two a, Two b) { return (a[0] + a[1]) + (b[0] + b[1]); }

// Numbers that are not negative are ordered as their bits are.
std::int64_t bits_of(double number) {
    std::int64_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    return bits;
}

// Sides that have to be filled again; here all of them fit into a register. The last one limits nobody,
// and is not among them.
class FewSides {
  public:
    FewSides(std::vector<std::uint64_t>& words, int num_sides)
        : word_(words[0]), valid_((std::uint64_t{1} << num_sides) - 1) {}
    bool is_empty() const { return (word_ & valid_) == 0; }
    void add_if(bool is_added, int side) { word_ |= std::uint64_t{is_added} << side; }
    int take_lowest(const double* level) {
        // The number of a side stands in the last bits of its level: the order need not be exact.
        std::int64_t lowest = std::numeric_limits<std::int64_t>::max();
        for (std::uint64_t bits = word_ & valid_; bits; bits &= bits - 1) {
            const int side = __builtin_ctzll(bits);
            lowest = std::min(lowest, (bits_of(level[side]) & -64) | side);
        }
        const int side = static_cast<int>(lowest & 63);
        word_ &= ~(std::uint64_t{1} << side);
        return side;
    }

  private:
    std::uint64_t word_;
    const std::uint64_t valid_;
};

class ManySides {
  public:
    ManySides(std::vector<std::uint64_t>& words, int num_sides) : words_(words), num_sides_(num_sides) {}
    bool is_empty() const {
        return std::all_of(words_.begin(), words_.end(), [](std::uint64_t word) { return word == 0; });
    }
    void add_if(bool is_added, int side) {
        words_[side / 64] |= std::uint64_t{is_added && side < num_sides_} << side % 64;
    }
    int take_lowest(const double* level) {
        int lowest = num_sides_;
        for (std::size_t word = 0; word < words_.size(); ++word) {
            for (std::uint64_t bits = words_[word]; bits; bits &= bits - 1) {
                const int side = static_cast<int>(64 * word) + __builtin_ctzll(bits);
                lowest = level[side] <= level[lowest] ? side : lowest;
            }
        }
        words_[lowest / 64] &= ~(std::uint64_t{1} << lowest % 64);
        return lowest;
    }

  private:
    std::vector<std::uint64_t>& words_;
    const int num_sides_;
};

// What is used below a level, and how many flows are not below it.
struct Filling {
    Two used[2] = {{0, 0}, {0, 0}}, num_open[2] = {{0, 0}, {0, 0}};

    void add(int half, Two most, Two num_flows, TwoBits is_below) {
        used[half] += only_where(is_below, num_flows * most);
        num_open[half] += only_where(~is_below, num_flows);
    }
};

}  // namespace

MaxMinRates::MaxMinRates(const FlowTable& flows, std::size_t most_fillings)
    : most_fillings_(most_fillings), kinds_(flows.classes()), sides_of_kinds_(flows.sides()),
      flows_on_(flows.flows_on()), num_sides_(static_cast<int>(flows.capacity().size())),
      sides_(num_sides_ + 1), level_(num_sides_ + 1, kInfinity), room_(num_sides_ + 1, 0.0), place_(sides_of_kinds_.size()),
      num_flows_(kinds_.size(), 0), rate_(kinds_.size(), 0.0), touched_(num_sides_ / 64 + 1, 0),
      has_moved_(num_sides_, 0), changed_(kinds_.size() + 1), bounds_(kinds_.size() / 2 + kChunk) {
    std::vector<int> room(num_sides_ + 1, 0);
    for (int side : sides_of_kinds_) ++room[side];
    int num_places = 0;
    for (int side = 0; side < num_sides_; ++side) {
        sides_[side].capacity = flows.capacity()[side];
        sides_[side].first_user = num_places;
        num_places += (room[side] + kChunk - 1) / kChunk * kChunk;
    }
    users_.limit.assign(num_places, kInfinity), users_.num_flows.assign(num_places, 0.0);
    users_.num_there.assign(num_places, 0.0);
    users_.other.assign(num_places, num_sides_);
    users_.index.assign(num_places, 0), users_.slot.assign(num_places, 0);
}

inline void MaxMinRates::set_user(int place, int slot, int index) {
    const FlowClass& kind = kinds_[index];
    users_.limit[place] = kind.limit;
    users_.index[place] = index, users_.slot[place] = slot;
    if (kind.end_side - kind.first_side == 2)
        users_.other[place] = sides_of_kinds_[kind.first_side + kind.end_side - 1 - slot];
}

inline void MaxMinRates::count_user(int place, int slot, int index) {
    const FlowClass& kind = kinds_[index];
    const int other = kind.end_side - kind.first_side == 2 ? kind.first_side + kind.end_side - 1 - slot : slot;
    users_.num_flows[place] = static_cast<double>(flows_on_[slot]) * num_flows_[index];
    users_.num_there[place] = static_cast<double>(flows_on_[other]) * num_flows_[index];
}

inline void MaxMinRates::copy_user(int from, int to) {
    users_.limit[to] = users_.limit[from], users_.num_flows[to] = users_.num_flows[from];
    users_.num_there[to] = users_.num_there[from];
    users_.other[to] = users_.other[from], users_.index[to] = users_.index[from];
    users_.slot[to] = users_.slot[from];
}

inline void MaxMinRates::clear_user(int place) {
    users_.limit[place] = kInfinity, users_.other[place] = num_sides_;
    users_.num_flows[place] = users_.num_there[place] = 0.0;
}

void MaxMinRates::add(int index, int num_flows) {
    const FlowClass& kind = kinds_[index];
    const bool is_new = num_flows_[index] == 0;
    num_flows_[index] += num_flows;
    const bool is_gone = num_flows_[index] == 0;
    for (int k = kind.first_side; k < kind.end_side; ++k) {
        Side& side = sides_[sides_of_kinds_[k]];
        if (is_new) {
            place_[k] = side.first_user + side.num_users++;
            side.num_many += has_many(index);
            set_user(place_[k], k, index);
        }
        count_user(place_[k], k, index);
        if (is_gone) {
            const int last = side.first_user + --side.num_users;
            side.num_many -= has_many(index);
            copy_user(last, place_[k]);
            place_[users_.slot[last]] = place_[k];
            clear_user(last);
        }
        // Who leaves a side that limits nobody makes no difference to it.
        if (num_flows > 0 || level_[sides_of_kinds_[k]] < kInfinity) touch(sides_of_kinds_[k]);
        else room_[sides_of_kinds_[k]] -= flows_on_[k] * num_flows * rate_[index];
    }
    counted_.push_back(index);
}

// What limits a class beside this side, where it has more than two.
double MaxMinRates::bound_of_many(int user, int side) const {
    double least = bound(user);
    const FlowClass& kind = kinds_[users_.index[user]];
    for (int k = kind.first_side; has_many(users_.index[user]) && k < kind.end_side; ++k)
        if (sides_of_kinds_[k] != side) least = std::min(least, level_[sides_of_kinds_[k]]);
    return least;
}

inline double MaxMinRates::level_of(int side) {
    if (sides_[side].num_many == 0) {
        const double *const limit = users_.limit.data(), *const level = level_.data();
        const int* const other = users_.other.data();
        return level_with(side, [=](int user) { return std::min(limit[user], level[other[user]]); });
    }
    const int end = sides_[side].first_user + sides_[side].num_users;
    return level_with(side, [&](int user) {
        return user < end ? bound_of_many(user, side) : kInfinity;
    });
}

// Newton's method on the capacity that is used at a level: concave and piecewise linear, so that every
// step but the first one rises, and the right piece is found after a few. Mostly it is still that of the
// old level, and one step is enough.
template <class Bound>
inline double MaxMinRates::level_with(int index, Bound&& bound) {
    const Side& side = sides_[index];
    const Two level = {level_[index], level_[index]};
    const double* const flows = users_.num_flows.data();
    Two* bounds = bounds_.data();
    Filling filling;
    Two low = {0.0, 0.0}, high = {kInfinity, kInfinity};  // the piece: no class has its bound between
    for (int k = side.first_user, end = side.end_chunk(); k < end; k += kChunk) {
        for (int half = 0; half < 2; ++half) {
            const int user = k + 2 * half;
            const Two most = {bound(user), bound(user + 1)};
            const Two num_flows = {flows[user], flows[user + 1]};
            *bounds++ = most;
            const TwoBits is_below = most < level;
            filling.add(half, most, num_flows, is_below);
            const Two below = only_where(is_below, most), above = is_below ? high : most;
            low = below > low ? below : low;
            high = above < high ? above : high;
        }
    }
    double used = sum(filling.used[0], filling.used[1]);
    double num_open = sum(filling.num_open[0], filling.num_open[1]);
    if (num_open == 0.0) {  // all are below this level
        room_[index] = side.capacity - used;
        if (used <= side.capacity) return kInfinity;
        for (int k = 0; k < side.num_users; ++k) num_open += users_.num_flows[side.first_user + k];
        return level_from(index, side.capacity / num_open, num_open);  // from 0 on
    }
    const double next = std::max(0.0, side.capacity - used) / num_open;
    if (std::max(low[0], low[1]) < next && next <= std::min(high[0], high[1])) return next;
    return level_from(index, next, num_open);
}

// Further steps, after one to `level` where so many flows were not below their bounds.
double MaxMinRates::level_from(int index, double level, double num_open) {
    const Side& side = sides_[index];
    for (bool is_first = true;; is_first = false) {
        const double num_before = num_open;
        double used = 0.0;
        Filling filling;
        const Two levels = {level, level};
        const double* const flows = users_.num_flows.data();
        const Two* bounds = bounds_.data();
        for (int k = side.first_user, end = side.end_chunk(); k < end; k += kChunk) {
            for (int half = 0; half < 2; ++half, ++bounds) {
                const Two num_flows = {flows[k + 2 * half], flows[k + 2 * half + 1]};
                filling.add(half, *bounds, num_flows, *bounds < levels);
            }
        }
        used = sum(filling.used[0], filling.used[1]);
        num_open = sum(filling.num_open[0], filling.num_open[1]);
        if (num_open == num_before) return level;
        // None is left: the side cannot be filled, or rounding made its level too high by a hair.
        room_[index] = side.capacity - used;
        if (num_open == 0.0) return used <= side.capacity ? kInfinity : level;
        if (num_open > num_before && !is_first) return level;  // rounding again
        level = std::max(0.0, side.capacity - used) / num_open;
    }
}

// Gives a side its level, and touches those to which that makes a difference: they are above the lower one
// of old and new, and if they limit nobody, they have too little room for what flows get here.
template <class Sides>
inline void MaxMinRates::fill_again(int index, double level, Sides& touched) {
    const double before = level_[index], low = std::min(level, before);
    level_[index] = level;
    if (!has_moved_[index]) has_moved_[index] = 1, moved_.push_back(index);
    const Side& side = sides_[index];
    const double *const levels = level_.data(), *const limit = users_.limit.data();
    const double* const num_there = users_.num_there.data();
    const int* const other = users_.other.data();
    double* const room = room_.data();
    const auto pass_on = [=, &touched](int next, int user, double left) {
        const bool may_be_full = (levels[next] < kInfinity) | (left < 0.0);
        touched.add_if((levels[next] > low) & (limit[user] > low) & may_be_full, next);
    };
    for (int k = side.first_user, end = side.end_chunk(); k < end; ++k) {
        const double more = std::min(limit[k], level) - std::min(limit[k], before);
        const double left = room[other[k]] - num_there[k] * more;
        room[other[k]] = left;
        pass_on(other[k], k, left);
    }
    for (int k = side.first_user; side.num_many > 0 && k < side.first_user + side.num_users; ++k) {
        const FlowClass& kind = kinds_[users_.index[k]];
        for (int j = kind.first_side; has_many(users_.index[k]) && j < kind.end_side; ++j)
            if (sides_of_kinds_[j] != index) pass_on(sides_of_kinds_[j], k, before - level);
    }
}

// Until no level changes any more.
template <class Sides>
inline void MaxMinRates::fill(Sides touched) {
    for (std::size_t num_left = most_fillings_; !touched.is_empty(); --num_left) {
        if (num_left == 0) return fill_all();
        const int side = touched.take_lowest(level_.data());
        const double level = level_of(side);
        if (level != level_[side]) fill_again(side, level, touched);
    }
}

// Progressive filling from nothing: always the side that is full first.
void MaxMinRates::fill_all() {
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

inline int MaxMinRates::look_at(int index, double rate, int num_changed) {
    changed_[num_changed] = index;  // stays only if it is counted
    num_changed += rate != rate_[index];
    rate_[index] = rate;
    return num_changed;
}

MaxMinRates::Changed MaxMinRates::update() {
    if (touched_.size() == 1) fill(FewSides(touched_, num_sides_));
    else fill(ManySides(touched_, num_sides_));
    std::fill(touched_.begin(), touched_.end(), 0);
    int num_changed = 0;
    for (int index : moved_) {
        has_moved_[index] = 0;
        const Side& side = sides_[index];
        const double level = level_[index];
        for (int k = side.first_user, end = k + side.num_users; k < end; ++k) {
            const double most = side.num_many ? bound_of_many(k, index) : bound(k);
            num_changed = look_at(users_.index[k], std::min(level, most), num_changed);
        }
    }
    moved_.clear();
    for (int index : counted_) {
        double rate = num_flows_[index] > 0 ? kinds_[index].limit : 0.0;
        for (int k = kinds_[index].first_side; k < kinds_[index].end_side; ++k)
            rate = std::min(rate, level_[sides_of_kinds_[k]]);
        num_changed = look_at(index, rate, num_changed);
    }
    counted_.clear();
    return {changed_.data(), changed_.data() + num_changed};
}

}  // namespace pipeplan
