// Fills sides of shared links, lowest level first, as far as a change reaches.
#include "max_min.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

namespace pipeplan {

namespace {

// Parts of a capacity, or of a level, that make no difference: sums are rounded.
constexpr double kHair = 1e-15, kSame = 1e-13;
// A rate that changes by so many times the least capacity leaves rounding errors that count.
constexpr double kMuch = 256.0;

// Numbers that are not negative are ordered as their bits are.
std::int64_t bits_of(double number) {
    std::int64_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    return bits;
}

}  // namespace

MaxMinRates::MaxMinRates(const FlowTable& flows, std::size_t most_fillings)
    : most_fillings_(most_fillings), kinds_(flows.classes()), sides_of_kinds_(flows.sides()),
      flows_on_(flows.flows_on()), num_sides_(static_cast<int>(flows.capacity().size())),
      sides_(num_sides_ + 1), level_(num_sides_ + 1, kInfinity), left_(num_sides_ + 1, 0.0),
      place_(sides_of_kinds_.size()),
      num_flows_(kinds_.size(), 0), source_(kinds_.size(), kNone), own_(kinds_.size()),
      is_special_(kinds_.size(), 0), touched_(num_sides_ / 64 + 1, 0), is_full_(touched_), moved_(touched_) {
    std::vector<int> room(num_sides_ + 1, 0);
    for (int side : sides_of_kinds_) ++room[side];
    int num_places = 0;
    double least = kInfinity;
    for (int side = 0; side < num_sides_; ++side) {
        sides_[side].capacity = left_[side] = flows.capacity()[side];
        sides_[side].first_user = num_places;
        num_places += (room[side] + kChunk - 1) / kChunk * kChunk;
        least = std::min(least, sides_[side].capacity);
    }
    much_ = kMuch * least;
    User nobody;
    nobody.other = num_sides_;
    users_.assign(num_places, nobody), slot_.assign(num_places, 0);
    std::map<double, int> source_of;
    for (std::size_t c = 0; c < kinds_.size(); ++c) {
        const auto found = source_of.emplace(kinds_[c].limit, static_cast<int>(level_.size()));
        if (found.second) level_.push_back(kinds_[c].limit);
        own_[c] = found.first->second;
        bool counts = true;
        for (int k = kinds_[c].first_side; k < kinds_[c].end_side; ++k)
            counts = counts && kinds_[c].limit * flows_on_[k] < sides_[sides_of_kinds_[k]].capacity;
        is_special_[c] = counts || num_sides_of(static_cast<int>(c)) > 2;
    }
}

inline void MaxMinRates::set_user(int place, int slot, int index) {
    const FlowClass& kind = kinds_[index];
    User& user = users_[place];
    user.other = num_sides_of(index) == 2 ? sides_of_kinds_[kind.first_side + kind.end_side - 1 - slot]
                                          : num_sides_;
    user.index = index;
    user.mine = 0;
    slot_[place] = slot;
}

void MaxMinRates::enter(int index) {
    const FlowClass& kind = kinds_[index];
    for (int k = kind.first_side; k < kind.end_side; ++k) {
        Side& side = sides_[sides_of_kinds_[k]];
        place_[k] = side.first_user + side.num_users++;
        side.num_special += is_special_[index];
        set_user(place_[k], k, index);
    }
    source_[index] = least_source(index);
    switched_.push_back(index);
}

void MaxMinRates::leave(int index) {
    const FlowClass& kind = kinds_[index];
    for (int k = kind.first_side; k < kind.end_side; ++k) {
        Side& side = sides_[sides_of_kinds_[k]];
        const int last = side.first_user + --side.num_users;
        side.num_special -= is_special_[index];
        users_[place_[k]] = users_[last], slot_[place_[k]] = slot_[last];
        place_[slot_[last]] = place_[k];
        users_[last] = User();
        users_[last].other = num_sides_;
    }
    source_[index] = kNone;
    switched_.push_back(index);
}

// Says whether the source of a class is the side of this slot.
inline void MaxMinRates::give(int slot, int index, bool is_mine) {
    const FlowClass& kind = kinds_[index];
    User& user = users_[place_[slot]];
    user.mine = is_mine ? -1 : 0;
    if (user.other == num_sides_) return;
    user.weight = is_mine ? flows_on(kind.first_side + kind.end_side - 1 - slot, index) : 0.0;
    user.bit = std::uint64_t{is_mine} << (user.other & 63);
}

// Flows use so much more of a side, because a rate has changed by `change`.
inline void MaxMinRates::take(int side, double bytes_per_ms, double change) {
    left_[side] -= bytes_per_ms;
    sides_[side].is_rough |= std::abs(change) > much_;
    touch(side);
}

inline void MaxMinRates::count_mine(int side, double num_flows) {
    sides_[side].num_mine += num_flows;
    sides_[side].per_mine = 1.0 / sides_[side].num_mine;
}

void MaxMinRates::add(int index, int num_flows) {
    if (num_flows_[index] == 0) enter(index);
    num_flows_[index] += num_flows;
    const FlowClass& kind = kinds_[index];
    const double rate = level_[source_[index]];
    for (int k = kind.first_side; k < kind.end_side; ++k) {
        const int side = sides_of_kinds_[k];
        const double flows = static_cast<double>(flows_on_[k]) * num_flows;
        take(side, flows * rate, rate);
        if (side != source_[index]) continue;
        count_mine(side, flows);
        give(k, index, true);
    }
    if (num_flows_[index] == 0) leave(index);
}

double MaxMinRates::least_elsewhere(int index, int side) const {
    double least = level_[own_[index]];
    const FlowClass& kind = kinds_[index];
    for (int k = kind.first_side; k < kind.end_side; ++k)
        if (sides_of_kinds_[k] != side) least = std::min(least, level_[sides_of_kinds_[k]]);
    return least;
}

int MaxMinRates::least_source(int index) const {
    int least = own_[index];
    const FlowClass& kind = kinds_[index];
    for (int k = kind.first_side; k < kind.end_side; ++k)
        if (level_[sides_of_kinds_[k]] < level_[least]) least = sides_of_kinds_[k];
    return least;
}

void MaxMinRates::set_source(int index, int source) {
    const int before = source_[index];
    const double change = level_[source] - level_[before];
    const FlowClass& kind = kinds_[index];
    source_[index] = source;
    for (int k = kind.first_side; k < kind.end_side; ++k) {
        const int side = sides_of_kinds_[k];
        const double flows = flows_on(k, index);
        take(side, flows * change, change);
        if (side == before) count_mine(side, -flows), give(k, index, false);
        if (side == source) count_mine(side, flows), give(k, index, true);
    }
    switched_.push_back(index);
}

// What is left, from nothing.
void MaxMinRates::recount(int index) {
    const Side& side = sides_[index];
    double used = 0.0;
    for (int k = side.first_user; k < side.first_user + side.num_users; ++k)
        used += flows_on(slot_[k], users_[k].index) * level_[source_[users_[k].index]];
    left_[index] = side.capacity - used;
    sides_[index].is_rough = 0;
}

inline void MaxMinRates::set_level(int index, double level) {
    const Side& side = sides_[index];
    const double change = level - level_[index];
    level_[index] = level;
    moved_[word_of(index)] |= bit_of(index);
    if (side.num_mine == 0.0) return;
    left_[index] -= side.num_mine * change;
    if (side.num_special == 0 && std::abs(change) <= much_) {
        double* const left = left_.data();
        const User *user = &users_[side.first_user], *const end = user + side.num_users;
        if (num_sides_ <= 64) {
            std::uint64_t word = 0;
            for (; user != end; ++user) {
                left[user->other] -= user->weight * change;
                word |= user->bit;
            }
            touched_[0] |= word;
            return;
        }
        for (; user != end; ++user) {
            left[user->other] -= user->weight * change;
            touched_[word_of(user->other)] |= user->bit;
        }
        return;
    }
    for (int k = side.first_user, end = k + side.num_users; k < end; ++k) {
        const FlowClass& kind = kinds_[users_[k].index];
        if (!users_[k].mine) continue;
        for (int j = kind.first_side; j < kind.end_side; ++j) {
            const int next = sides_of_kinds_[j];
            if (next == index) continue;
            take(next, flows_on(j, users_[k].index) * change, change);
        }
    }
}

// Gives a side a new level; false if its users keep their sources whatever it is.
inline bool MaxMinRates::find_level(int index) {
    const Side& side = sides_[index];
    if (side.is_rough) recount(index);
    const double before = level_[index], left = left_[index], hair = kHair * side.capacity;
    if (side.num_mine > 0.0) {
        if (std::abs(left) <= hair) return false;
        const double level = std::max(0.0, before + left * side.per_mine);
        if (level == before) return false;
        set_level(index, level);
        return true;
    }
    if (left >= -hair) {
        if (before < kInfinity) {
            set_level(index, kInfinity);
            is_full_[word_of(index)] &= ~bit_of(index);
        }
        return false;
    }
    double num_flows = 0.0;
    for (int k = side.first_user; k < side.first_user + side.num_users; ++k)
        num_flows += flows_on(slot_[k], users_[k].index);
    set_level(index, side.capacity / num_flows);
    is_full_[word_of(index)] |= bit_of(index);
    return true;
}

// The users whose source is wrong at the level of this side, as bits; all where they cannot be told so fast.
inline std::uint64_t MaxMinRates::wrong_users(int index) const {
    const Side& side = sides_[index];
    if (side.num_special > 0 || side.num_users >= 64) return ~std::uint64_t{0};
    const double low = level_[index] * (1 - kSame), high = level_[index] * (1 + kSame);
    const Two lows = {low, low}, highs = {high, high};
    const double* const level = level_.data();
    TwoBits wrong = {0, 0}, bit = {1, 2};
    const User *user = &users_[side.first_user], *const end = user + side.num_users;
    for (; user < end; user += kChunk) {
        for (int k = 0; k < kChunk; k += 2) {
            const Two most = {level[user[k].other], level[user[k + 1].other]};
            const TwoBits is_mine = {user[k].mine, user[k + 1].mine};
            wrong |= bit & ((is_mine & (most < lows)) | (~is_mine & (most > highs)));
            bit <<= 2;
        }
    }
    return wrong[0] | wrong[1];
}

// Gives these users another source.
void MaxMinRates::switch_users(int index, std::uint64_t wrong) {
    if (wrong == ~std::uint64_t{0}) return switch_special(index);
    for (; wrong; wrong &= wrong - 1) {
        const User& user = users_[sides_[index].first_user + __builtin_ctzll(wrong)];
        set_source(user.index, user.mine ? user.other : index);
    }
}

// The same for all users, one by one, where their source is wrong.
void MaxMinRates::switch_special(int index) {
    const Side& side = sides_[index];
    const double low = level_[index] * (1 - kSame), high = level_[index] * (1 + kSame);
    for (int k = side.first_user; k < side.first_user + side.num_users; ++k) {
        const User& user = users_[k];
        const double most = least_elsewhere(user.index, index);
        if (user.mine ? most >= low : most <= high) continue;
        set_source(user.index, user.mine ? least_source(user.index) : index);
    }
}

// One step to the level of a side: Newton's method on the capacity that is used at a level, which is
// concave and piecewise linear. Where classes get another source, the side is touched again.
inline void MaxMinRates::fill(int index) {
    if (!find_level(index)) return;
    const std::uint64_t wrong = wrong_users(index);
    if (wrong) switch_users(index, wrong);
}

// The side with the lowest level of those that are touched and full.
inline int MaxMinRates::take_lowest() {
    const double* const level = level_.data();
    if (num_sides_ <= 64) {
        // The number of a side stands in the last bits of its level: the order need not be exact.
        std::int64_t lowest = std::numeric_limits<std::int64_t>::max();
        std::uint64_t bits = touched_[0] & is_full_[0];
        if (!bits) return kNone;
        do {  // four at once, the last one again where there are fewer
            for (int k = 0; k < 4; ++k) {
                const int side = __builtin_ctzll(bits);
                lowest = std::min(lowest, (bits_of(level[side]) & -64) | side);
                const std::uint64_t rest = bits & (bits - 1);
                bits = rest | (bits & -std::uint64_t{rest == 0});
            }
        } while (bits & (bits - 1));
        const int last = __builtin_ctzll(bits);
        lowest = std::min(lowest, (bits_of(level[last]) & -64) | last);
        const int side = static_cast<int>(lowest & 63);
        touched_[0] &= ~bit_of(side);
        return side;
    }
    int lowest = kNone;
    for (std::size_t word = 0; word < touched_.size(); ++word) {
        for (std::uint64_t bits = touched_[word] & is_full_[word]; bits; bits &= bits - 1) {
            const int side = static_cast<int>(64 * word) + __builtin_ctzll(bits);
            if (lowest == kNone || level[side] <= level[lowest]) lowest = side;
        }
    }
    if (lowest != kNone) touched_[word_of(lowest)] &= ~bit_of(lowest);
    return lowest;
}

// A side that was not full and has too little now, where all others are done.
inline int MaxMinRates::take_overfull() {
    for (std::size_t word = 0; word < touched_.size(); ++word) {
        while (touched_[word]) {
            const int side = static_cast<int>(64 * word) + __builtin_ctzll(touched_[word]);
            touched_[word] &= touched_[word] - 1;
            if (left_[side] < 0.0 || sides_[side].is_rough) return side;
        }
    }
    return kNone;
}

void MaxMinRates::update() {
    std::size_t num_left = most_fillings_;
    while (true) {
        int side = take_lowest();
        if (side == kNone && (side = take_overfull()) == kNone) break;
        if (num_left-- == 0) {
            fill_all();
            break;
        }
        fill(side);
    }
    std::fill(touched_.begin(), touched_.end(), 0);
}

// The level of a side where others limit its users as far as they are filled.
double MaxMinRates::level_from_nothing(int index) const {
    const Side& side = sides_[index];
    double level = 0.0;
    while (true) {
        double used = 0.0, num_open = 0.0;
        for (int k = side.first_user; k < side.first_user + side.num_users; ++k) {
            const double most = least_elsewhere(users_[k].index, index);
            const double flows = flows_on(slot_[k], users_[k].index);
            if (most <= level) used += flows * most;
            else num_open += flows;
        }
        if (num_open == 0.0) return used <= side.capacity * (1 + kHair) ? kInfinity : level;
        const double next = (side.capacity - used) / num_open;
        if (next <= level) return level;
        level = next;
    }
}

// Progressive filling from nothing: always the side that is full first.
void MaxMinRates::fill_all() {
    std::vector<int> open(num_sides_);
    std::iota(open.begin(), open.end(), 0);
    for (std::size_t c = 0; c < kinds_.size(); ++c)
        if (source_[c] != kNone) set_source(static_cast<int>(c), own_[c]);
    for (int side : open) {
        moved_[word_of(side)] |= bit_of(side);
        level_[side] = kInfinity;
    }
    std::fill(is_full_.begin(), is_full_.end(), 0);
    while (!open.empty()) {
        std::vector<double> levels;
        for (int side : open) levels.push_back(level_from_nothing(side));
        const auto at = std::min_element(levels.begin(), levels.end()) - levels.begin();
        const int lowest = open[at];
        if (levels[at] == kInfinity) break;
        level_[lowest] = levels[at];
        is_full_[word_of(lowest)] |= bit_of(lowest);
        const Side& side = sides_[lowest];
        for (int k = side.first_user; k < side.first_user + side.num_users; ++k)
            if (least_elsewhere(users_[k].index, lowest) > levels[at]) set_source(users_[k].index, lowest);
        open.erase(open.begin() + at);
    }
    for (int side = 0; side < num_sides_; ++side) recount(side);
}

}  // namespace pipeplan
