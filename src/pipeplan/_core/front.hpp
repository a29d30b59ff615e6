// A small set of suffixes of which none is better than another in every component.
#pragma once
#include <cstdint>

#include "bound.hpp"

namespace pipeplan {

// Where a suffix came from: the cut behind its first stage, and which of the suffixes there.
struct Origin {
    std::int16_t cut;
    std::int16_t option;   // the device set of the next stage
    std::int16_t index;    // in that set's front
};

struct Point {
    Suffix value;
    Origin origin;
};

enum class Overflow {
    kDrop,   // forget the later of the two nearest points: a heuristic for planning
    kMerge,  // replace them by their componentwise minimum: the front stays a lower bound
};

inline bool dominates(const Suffix& a, const Suffix& b) {
    return a.round_trip <= b.round_trip && a.last_backward <= b.last_backward &&
           a.last_reduce <= b.last_reduce;
}

class Front {
  public:
    static constexpr int kMaxCapacity = 16;

    void clear() { size_ = 0; }
    int size() const { return size_; }
    const Point& operator[](int i) const { return points_[i]; }

    void insert(const Suffix& value, const Origin& origin, int capacity, Overflow overflow) {
        int kept = 0;
        for (int i = 0; i < size_; ++i) {
            if (dominates(points_[i].value, value)) return;  // then it removed nothing before
            if (!dominates(value, points_[i].value)) points_[kept++] = points_[i];
        }
        size_ = kept;
        points_[size_++] = {value, origin};
        if (size_ > capacity) shrink(overflow);
    }

  private:
    static double relative(double a, double b) {
        const double larger = std::max(a, b);
        return larger > 0 ? std::fabs(a - b) / larger : 0.0;
    }
    void shrink(Overflow overflow) {
        int first = 0, second = 1;
        double nearest = 1e300;
        for (int i = 0; i < size_; ++i) {
            for (int j = i + 1; j < size_; ++j) {
                const Suffix &a = points_[i].value, &b = points_[j].value;
                const double distance = relative(a.round_trip, b.round_trip) +
                                        relative(a.last_backward, b.last_backward) +
                                        relative(a.last_reduce, b.last_reduce);
                if (distance < nearest) nearest = distance, first = i, second = j;
            }
        }
        Point &a = points_[first], &b = points_[second];
        const bool b_ends_earlier = b.value.last_reduce < a.value.last_reduce;
        if (overflow == Overflow::kMerge) {
            const Suffix least{std::min(a.value.round_trip, b.value.round_trip),
                               std::min(a.value.last_backward, b.value.last_backward),
                               std::min(a.value.last_reduce, b.value.last_reduce)};
            if (b_ends_earlier) a.origin = b.origin;
            a.value = least;
            b = points_[--size_];
            drop_dominated_by(first);
            return;
        }
        if (b_ends_earlier) a = b;
        b = points_[--size_];
    }
    // A merged point may now be better than others in every component.
    void drop_dominated_by(int merged) {
        const Point point = points_[merged];
        int kept = 0;
        for (int i = 0; i < size_; ++i)
            if (i == merged || !dominates(point.value, points_[i].value)) points_[kept++] = points_[i];
        size_ = kept;
    }

    int size_ = 0;
    Point points_[kMaxCapacity + 1];
};

}  // namespace pipeplan
