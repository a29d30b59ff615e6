// The closed form of shared links for sets of devices that share microbatches evenly.
//
// Of k senders n are members of a link, of m receivers l are. n * (m - l) pairs leave the members and
// l * (k - n) enter them, all over the same link. A link that carries p pairs is like a link of each
// pair with 1/p of the capacity. If each pair carries at least some bytes, the transfer takes at least
// as long as this link takes for these bytes: so bounds hold where shares differ, too.
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

// Adds what shared links are for each pair of senders and receivers, times `unit`. Where all senders
// are members and no receiver is, or the other way round, all bytes cross the link, whatever the shares.
inline void insert_crossings(const SharedLinks& links, const MemberCounts& senders,
                             const MemberCounts& receivers, LinkSet& set, double unit = 1.0) {
    const auto insert = [&](int link) {
        const double leaving = static_cast<double>(senders[link]) * (receivers.size() - receivers[link]);
        const double entering = static_cast<double>(receivers[link]) * (senders.size() - senders[link]);
        const double all = static_cast<double>(senders.size()) * receivers.size();
        const auto insert_side = [&](int side, double pairs) {
            const double ms_per_byte = 1.0 / links.capacity(side);
            if (pairs > 0) set.insert_shared({links.latency_ms(side), unit * pairs * ms_per_byte});
            if (pairs == all)
                set.raise_whole({links.latency_ms(side), (1 - 2 * kShareRounding) * ms_per_byte});
        };
        insert_side(2 * link, leaving);
        insert_side(2 * link + 1, entering);
    };
    for (int link : senders.touched()) insert(link);
    for (int link : receivers.touched())
        if (senders[link] == 0) insert(link);
}

// The members of shared links in all sizes (rising, in units) before and behind a boundary. Unit k
// holds the devices [start[k], start[k + 1]).
class Crossings {
  public:
    Crossings(const SharedLinks& links, const std::vector<int>& start, int boundary,
              const std::vector<int>& sizes) {
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

    const MemberCounts& before(int a) const { return before_[a]; }
    const MemberCounts& behind(int b) const { return behind_[b]; }

  private:
    static void grow(MemberCounts& counts, int first, int end) {
        for (int u = first; u < end; ++u) counts.add(u);
    }
    std::vector<MemberCounts> before_, behind_;  // by size
    int last_ = 0;
};

}  // namespace pipeplan
