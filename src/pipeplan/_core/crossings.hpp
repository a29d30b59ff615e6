// The closed form of shared links for neighbouring intervals of an order.
//
// Of the k devices before a boundary n are members of a link, of the m behind it l are. With equal
// shares n * (m - l) pairs leave the members and l * (k - n) enter them, all over the same link. A link
// that carries p pairs is like a link of each pair with 1/p of the capacity. Where shares differ a
// little, this is near enough: whatever is kept is judged anew.
#pragma once
#include <algorithm>
#include <vector>

#include "instance.hpp"
#include "links.hpp"

namespace pipeplan {

// Counts the members of every link in a growing set of devices.
class MemberCounts {
  public:
    explicit MemberCounts(const SharedLinks& links) : links_(links), count_(links.num_links(), 0) {}
    void add(int device) {
        ++size_;
        for (int link : links_.links_of(device))
            if (count_[link]++ == 0) touched_.push_back(link);
    }
    void clear() {
        for (int link : touched_) count_[link] = 0;
        touched_.clear();
        size_ = 0;
    }
    int size() const { return size_; }
    int operator[](int link) const { return count_[link]; }
    const std::vector<int>& touched() const { return touched_; }
    // A ring over these devices leaves and enters the members of each link that has some of them and
    // not all: no flow of it is faster than this.
    double ring_rate() const {
        double rate = kInfinity;
        for (int link : touched_)
            if (count_[link] < size_) rate = std::min({rate, links_.out(link), links_.in(link)});
        return rate;
    }

  private:
    const SharedLinks& links_;
    std::vector<int> count_, touched_;
    int size_ = 0;
};

// For all sizes (rising, in units) before and behind a boundary, the link that stands for all shared
// ones. Unit k holds the devices [start[k], start[k + 1]).
class Crossings {
  public:
    Crossings(const SharedLinks& links, const std::vector<int>& start, int boundary,
              const std::vector<int>& sizes)
        : links_(links) {
        const int num_units = static_cast<int>(start.size()) - 1;
        MemberCounts counts(links);
        for (int size : sizes) {
            if (size > boundary) break;
            grow(counts, start[boundary - size], start[boundary - (before_.empty() ? 0 : last_)]);
            last_ = size;
            before_.push_back(counts);
        }
        counts.clear();
        for (int size : sizes) {
            if (boundary + size > num_units) break;
            grow(counts, start[boundary + (behind_.empty() ? 0 : last_)], start[boundary + size]);
            last_ = size;
            behind_.push_back(counts);
        }
    }

    // The links for both directions of the channel between sizes[a] units and sizes[b] units.
    struct Both {
        Link forward, backward;
    };
    Both between(int a, int b) const {
        const MemberCounts &before = before_[a], &behind = behind_[b];
        Both both{{0.0, 0.0}, {0.0, 0.0}};
        const auto count = [&](int link) {
            const double leaving = static_cast<double>(before[link]) * (behind.size() - behind[link]);
            const double entering = static_cast<double>(behind[link]) * (before.size() - before[link]);
            const double out = links_.out(link), in = links_.in(link);
            both.forward.ms_per_byte = std::max({both.forward.ms_per_byte, leaving / out, entering / in});
            both.backward.ms_per_byte =
                std::max({both.backward.ms_per_byte, entering / out, leaving / in});
        };
        for (int link : before.touched()) count(link);
        for (int link : behind.touched()) count(link);
        return both;
    }

  private:
    static void grow(MemberCounts& counts, int first, int end) {
        for (int u = first; u < end; ++u) counts.add(u);
    }
    const SharedLinks& links_;
    std::vector<MemberCounts> before_, behind_;  // by size
    int last_ = 0;
};

}  // namespace pipeplan
