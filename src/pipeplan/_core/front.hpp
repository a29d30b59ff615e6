// A small set of suffixes; no suffix in it is better than another in every component.
#pragma once
#include <cstdint>

#include "bound.hpp"

namespace pipeplan {

// The suffix without its first stage: the cut behind that stage, and the index of the suffix there.
struct Origin {
    std::int32_t cut : 30;
    std::uint32_t mode : 2;  // of that first stage, bits of StageMode
    std::int16_t option;  // the device set of the next stage
    std::int16_t index;   // in that set's front
};

template <class Value>
struct Point {
    Value value;
    Origin origin;
};

enum class Overflow {
    kDrop,   // for planning: compare only the components that matter most, drop surplus points
    kMerge,  // for bounds: compare all components, replace two points by their minimum
};

// Better or equal in the three components that matter most.
inline bool mostly_dominates(const Suffix& a, const Suffix& b) {
    return a.last_reduce <= b.last_reduce && a.last_backward <= b.last_backward &&
           a.round_trip <= b.round_trip;
}
inline bool mostly_dominates(const Beyond& a, const Beyond& b) {
    return a.last_reduce <= b.last_reduce && a.busy <= b.busy && a.round_trip <= b.round_trip;
}

inline bool dominates(const Suffix& a, const Suffix& b) {
    return mostly_dominates(a, b) && a.forward <= b.forward && a.backward <= b.backward &&
           a.behind <= b.behind && a.lead <= b.lead;
}
inline bool dominates(const Beyond& a, const Beyond& b) {
    return mostly_dominates(a, b) && a.forward <= b.forward && a.backward <= b.backward &&
           a.behind <= b.behind && a.lead <= b.lead;
}

inline Suffix least(const Suffix& a, const Suffix& b) {
    return {std::min(a.round_trip, b.round_trip),   std::min(a.last_backward, b.last_backward),
            std::min(a.last_reduce, b.last_reduce), std::min(a.forward, b.forward),
            std::min(a.backward, b.backward),       std::min(a.behind, b.behind),
            std::min(a.lead, b.lead)};
}
inline Beyond least(const Beyond& a, const Beyond& b) {
    return {std::min(a.round_trip, b.round_trip),   std::min(a.busy, b.busy),
            std::min(a.last_reduce, b.last_reduce), std::min(a.forward, b.forward),
            std::min(a.backward, b.backward),       std::min(a.behind, b.behind),
            std::min(a.lead, b.lead)};
}

// The sum over all components of how much a value falls if it is replaced by a merged one.
inline double fall(const Suffix& from, const Suffix& to) {
    return 2 * (from.last_backward - to.last_backward + from.last_reduce - to.last_reduce) +
           from.round_trip - to.round_trip + from.forward - to.forward + from.backward -
           to.backward + from.behind - to.behind + from.lead - to.lead;
}
inline double fall(const Beyond& from, const Beyond& to) {
    return 2 * (from.busy - to.busy + from.last_reduce - to.last_reduce) + from.round_trip -
           to.round_trip + from.forward - to.forward + from.backward - to.backward + from.behind -
           to.behind + from.lead - to.lead;
}

template <class Value>
class Front {
  public:
    static constexpr int kMaxCapacity = 16;

    void clear() { size_ = 0; }
    int size() const { return size_; }
    const Point<Value>& operator[](int i) const { return points_[i]; }

    void insert(const Value& value, const Origin& origin, int capacity, Overflow overflow) {
        int kept = 0;
        for (int i = 0; i < size_; ++i) {
            if (better(points_[i].value, value, overflow)) return;  // nothing was removed
            if (!better(value, points_[i].value, overflow)) points_[kept++] = points_[i];
        }
        size_ = kept;
        points_[size_++] = {value, origin};
        if (size_ > capacity) shrink(overflow);
    }

  private:
    static bool better(const Value& a, const Value& b, Overflow overflow) {
        return overflow == Overflow::kDrop ? mostly_dominates(a, b) : dominates(a, b);
    }

    // Finds the pair whose point with the earlier last_reduce falls least if the two are merged.
    // Merges the pair, or drops its other point.
    void shrink(Overflow overflow) {
        int early = 0, late = 1;
        double least_fall = 1e300;
        for (int i = 0; i < size_; ++i) {
            for (int j = i + 1; j < size_; ++j) {
                const bool in_order = points_[i].value.last_reduce <= points_[j].value.last_reduce;
                const Value &a = points_[in_order ? i : j].value, &b = points_[in_order ? j : i].value;
                const double lost = fall(a, least(a, b));
                if (lost < least_fall) least_fall = lost, early = in_order ? i : j, late = in_order ? j : i;
            }
        }
        if (overflow == Overflow::kMerge)
            points_[early].value = least(points_[early].value, points_[late].value);
        points_[late] = points_[--size_];
        if (overflow == Overflow::kMerge) drop_dominated_by(early == size_ ? late : early);
    }
    // After a merge the new point may be better than others in every component.
    void drop_dominated_by(int merged) {
        const Point<Value> point = points_[merged];
        int kept = 0;
        for (int i = 0; i < size_; ++i)
            if (i == merged || !dominates(point.value, points_[i].value)) points_[kept++] = points_[i];
        size_ = kept;
    }

    int size_ = 0;
    Point<Value> points_[kMaxCapacity + 1];
};

}  // namespace pipeplan
