// Transfer times between two neighbouring device intervals of an order.
//
// A transfer of q bytes a pair takes the max over pairs of latency + q / bandwidth. Where
// all pairs have one latency the slowest pair decides; in general the pairs that no other
// pair dominates (longer latency and slower link) do. Real clusters have one or two of these.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "instance.hpp"

namespace pipeplan {

struct Link {
    double latency_ms;
    double ms_per_byte;  // infinite latency and 0 here: no path
};

inline Link link_between(const Instance& in, int u, int v) {
    const double rate = in.bytes_per_ms(u, v);
    if (!(rate > 0 && in.bytes_per_ms(v, u) > 0)) return {kInfinity, 0.0};
    return {in.latency_ms(u, v), 1.0 / rate};
}

// The parts of a microbatch that the devices of a stage take.
//
// Planning gives every device the same part, or parts in proportion to speed. A lower bound speaks
// also of plans in which devices take whole samples, as evenly as can be: where k devices do not
// divide the samples, some have one sample more, and these may be the faster ones. Or it speaks of
// all shares.
struct Shares {
    double even;          // 1 / k; some device takes at least this
    double least;         // no device takes less
    double compute_rate;  // no stage computes in less than its work times this
};

inline Shares even_shares(int num_devices, double slowest_speed) {
    const double even = 1.0 / num_devices;
    return {even, even, even / slowest_speed};
}

// The devices of a stage that have a sample more than the others, if all take whole samples as
// evenly as can be. 0: then all have equally many, or there are fewer samples than devices.
inline int num_with_more_samples(const Instance& in, int num_devices) {
    return in.microbatch_size < num_devices ? 0 : in.microbatch_size % num_devices;
}

// For lower bounds. At best the fastest devices have a sample more; `slowest_of_more` is the slowest
// of these. The compute rate of such a stage.
inline double whole_rate(const Instance& in, int num_devices, double slowest_speed,
                         double slowest_of_more) {
    const double samples = in.microbatch_size;
    const int fewer = in.microbatch_size / num_devices;
    return std::max(fewer / samples / slowest_speed, (fewer + 1) / samples / slowest_of_more);
}

inline double least_whole_share(const Instance& in, int num_devices) {
    return in.microbatch_size / num_devices / static_cast<double>(in.microbatch_size);
}

// Exactly even shares or whole samples, whichever is less.
inline Shares whole_or_even_shares(const Instance& in, int num_devices, double slowest_speed,
                                   double slowest_of_more) {
    const Shares even = even_shares(num_devices, slowest_speed);
    if (num_with_more_samples(in, num_devices) == 0) return even;
    const double rate = whole_rate(in, num_devices, slowest_speed, slowest_of_more);
    const double least = least_whole_share(in, num_devices);
    // Some device has a sample more, if samples are not split.
    if (in.limits.whole_samples) return {in.largest_share(num_devices), least, rate};
    return {even.even, least, std::min(rate, even.compute_rate)};
}

// For lower bounds on plans with any shares: k devices of these speeds.
//
// With shares x(u) that add up to 1, some x(u) / speed(u) is at least 1 / (sum of speeds): else
// the shares would add up to less. Of whole samples, each device takes at least one, some device takes
// the average or more, and no division is better than `samples_by_speed`.
inline Shares any_shares(const Instance& in, const std::vector<double>& speeds) {
    const int k = static_cast<int>(speeds.size());
    if (k == 1) return even_shares(1, speeds[0]);
    double sum = 0.0;
    for (double speed : speeds) sum += speed;
    const double rounding = 1 - kShareRounding;
    const int B = in.microbatch_size;
    if (!in.limits.whole_samples || k > B) return {rounding / k, 0.0, rounding / sum};
    const double samples = B;
    return {rounding * ((B + k - 1) / k / samples), rounding / samples,
            rounding * rate_of_samples(speeds, samples_by_speed(speeds, B), B)};
}

// Adds up the links from a set of devices to another: how fast they are together.
class SummedLinks {
  public:
    void insert(Link link, int num_pairs = 1) {
        if (!(link.ms_per_byte > 0)) return;
        rate_ += num_pairs / link.ms_per_byte;
        waiting_ += num_pairs / link.ms_per_byte * link.latency_ms;
    }
    // Within a time T each pair carries at most (T - latency) * rate, and all pairs together carry
    // everything, however it is shared. So T is no less than this link takes for all bytes.
    Link link() const {
        if (!(rate_ > 0)) return {0.0, 0.0};
        const double rounding = 1 - 2 * kShareRounding;
        return {rounding * waiting_ / rate_, rounding / rate_};
    }

  private:
    double rate_ = 0.0, waiting_ = 0.0;
};

// The undominated links of a set. The first few live inside, so that most sets need no heap.
class LinkSet {
  public:
    LinkSet() = default;
    explicit LinkSet(Link link) { insert(link); }
    void insert(Link link) {
        if (link.latency_ms == kInfinity) connected_ = false;
        insert_best(link);
        insert_shared(link);
    }
    // A link that several pairs share, as slow as it is for one of them. It is no pair's own.
    void insert_shared(Link link) {
        for (int i = 0; i < size_; ++i) {
            const Link& kept = at(i);
            if (kept.latency_ms >= link.latency_ms && kept.ms_per_byte >= link.ms_per_byte) return;
        }
        int kept = 0;
        for (int i = 0; i < size_; ++i)
            if (at(i).latency_ms > link.latency_ms || at(i).ms_per_byte > link.ms_per_byte)
                at(kept++) = at(i);
        size_ = kept + 1;
        if (size_ > kInside && static_cast<int>(more_.size()) < size_ - kInside)
            more_.resize(size_ - kInside);
        at(kept) = link;
    }
    void insert(const LinkSet& other) {
        connected_ = connected_ && other.connected_;
        for (int i = 0; i < other.size_; ++i) insert(other.at(i));
        insert_best(other.best_);
    }
    double transfer_ms(double bytes_per_pair) const {
        double longest = 0.0;
        for (int i = 0; i < size_; ++i)
            longest = std::max(longest, at(i).latency_ms + bytes_per_pair * at(i).ms_per_byte);
        return longest;
    }
    // The same where each pair carries at least `least` bytes and some pair at least `even`, which
    // may be the best pair of all.
    double transfer_ms(double least, double even) const {
        const double slowest = transfer_ms(least);
        if (least == even) return slowest;
        return std::max(slowest, best_.latency_ms + even * best_.ms_per_byte);
    }
    // The same, and all pairs together are no faster than `insert_whole` says for all bytes.
    double transfer_ms(double least, double even, double all) const {
        return std::max(transfer_ms(least, even), whole_.latency_ms + all * whole_.ms_per_byte);
    }
    // For plans with any shares (SummedLinks).
    void insert_whole(Link link) { whole_ = link; }
    // All pairs together are no faster than this link either.
    void raise_whole(Link link) {
        const bool is_first = whole_.latency_ms == 0 && whole_.ms_per_byte == 0;
        whole_ = {is_first ? link.latency_ms : std::min(whole_.latency_ms, link.latency_ms),
                  std::max(whole_.ms_per_byte, link.ms_per_byte)};
    }
    // Some pair may be as good as this one.
    void insert_best(Link link) {
        best_.latency_ms = std::min(best_.latency_ms, link.latency_ms);
        best_.ms_per_byte = std::min(best_.ms_per_byte, link.ms_per_byte);
    }
    bool connected() const { return connected_; }
    // Whether one link dominates all others, and which one.
    bool is_single() const { return size_ == 1; }
    Link single() const { return at(0); }

  private:
    static constexpr int kInside = 2;
    Link& at(int i) { return i < kInside ? inside_[i] : more_[i - kInside]; }
    const Link& at(int i) const { return i < kInside ? inside_[i] : more_[i - kInside]; }
    Link inside_[kInside];
    std::vector<Link> more_;
    int size_ = 0;
    bool connected_ = true;
    Link best_{kInfinity, kInfinity};  // the least latency and the fastest rate of any pair
    Link whole_{0.0, 0.0};             // for all bytes of a transfer; nothing where shares are even
};

struct Range {
    int first, end;
};

// What a pair of devices carries, in some unit: the product of two weights. Where devices share by
// speed, the weight is the speed; else it is 1.
struct Weights {
    bool senders_by_speed = false, receivers_by_speed = false;

    bool are_even() const { return !senders_by_speed && !receivers_by_speed; }
    double of(const Instance& in, int sender, int receiver) const {
        return (senders_by_speed ? in.speed[sender] : 1.0) *
               (receivers_by_speed ? in.speed[receiver] : 1.0);
    }
    Weights turned() const { return {receivers_by_speed, senders_by_speed}; }
};

// Inserts all links from one range of devices to another. Where all latencies
// are alike, which is the rule, the slowest link alone is inserted: one pass over plain numbers.
inline void insert_all(const Instance& in, Range senders, Range receivers, LinkSet& links,
                       const Weights& weights = {}) {
    double slowest = kInfinity, shortest = kInfinity, longest = 0.0;
    for (int u = senders.first; u < senders.end; ++u) {
        for (int v = receivers.first; v < receivers.end; ++v) {
            const double latency_ms = in.latency_ms(u, v);
            slowest = std::min(slowest, in.bytes_per_ms(u, v) / weights.of(in, u, v));
            shortest = std::min(shortest, latency_ms);
            longest = std::max(longest, latency_ms);
        }
    }
    if (slowest > 0 && shortest == longest) {
        links.insert({longest, 1.0 / slowest});
        return;
    }
    for (int u = senders.first; u < senders.end; ++u) {
        for (int v = receivers.first; v < receivers.end; ++v) {
            const Link link = link_between(in, u, v);
            links.insert({link.latency_ms, link.ms_per_byte * weights.of(in, u, v)});
        }
    }
}

// Both directions of the channel between the last a devices before a boundary and the first
// b devices behind it, for all a and b of `sizes` (rising), by adding devices at the corner.
class ChannelTable {
  public:
    ChannelTable(const Instance& in, int boundary, const std::vector<int>& sizes,
                 const Weights& weights = {})
        : num_before_(count_upto(sizes, boundary)),
          num_behind_(count_upto(sizes, in.num_devices - boundary)),
          forward_(static_cast<std::size_t>(num_before_) * num_behind_), backward_(forward_.size()) {
        for (int a = 0; a < num_before_; ++a) {
            for (int b = 0; b < num_behind_; ++b) {
                LinkSet &forward = forward_[index(a, b)], &backward = backward_[index(a, b)];
                if (a > 0) forward = forward_[index(a - 1, b)], backward = backward_[index(a - 1, b)];
                if (b > 0) {
                    forward.insert(forward_[index(a, b - 1)]);
                    backward.insert(backward_[index(a, b - 1)]);
                }
                const Range senders{boundary - sizes[a], boundary - (a ? sizes[a - 1] : 0)};
                const Range receivers{boundary + (b ? sizes[b - 1] : 0), boundary + sizes[b]};
                insert_all(in, senders, receivers, forward, weights);
                insert_all(in, receivers, senders, backward, weights.turned());
                // Whatever has no way back is of no use.
                if (!forward.connected() || !backward.connected())
                    forward.insert(Link{kInfinity, 0.0}), backward.insert(Link{kInfinity, 0.0});
            }
        }
    }
    // By the indices of the sizes.
    const LinkSet& forward(int a, int b) const { return forward_[index(a, b)]; }
    const LinkSet& backward(int a, int b) const { return backward_[index(a, b)]; }
    LinkSet& forward(int a, int b) { return forward_[index(a, b)]; }
    LinkSet& backward(int a, int b) { return backward_[index(a, b)]; }

  private:
    static int count_upto(const std::vector<int>& sizes, int most) {
        return static_cast<int>(std::upper_bound(sizes.begin(), sizes.end(), most) - sizes.begin());
    }
    std::size_t index(int a, int b) const {
        return static_cast<std::size_t>(a) * num_behind_ + b;
    }
    int num_before_, num_behind_;
    std::vector<LinkSet> forward_, backward_;
};

// Ring all-reduce over r consecutive devices that start at i: time = fixed + bytes * per_byte.
struct Ring {
    double fixed_ms;
    double ms_per_byte;
    bool connected;
};

// Not connected where a path is missing, or where there are more devices than a stage may have.
inline Ring make_ring(const Instance& in, int num_devices, double slowest_bytes_per_ms,
                      double latency_ms) {
    const double k = num_devices;
    if (num_devices > in.max_replicas) return {0.0, 0.0, false};
    if (num_devices == 1) return {0.0, 0.0, true};
    if (!(slowest_bytes_per_ms > 0)) return {0.0, 0.0, false};
    return {2.0 * (k - 1) * latency_ms, 2.0 * (k - 1) / k / slowest_bytes_per_ms, true};
}

// Rings and slowest speeds of all intervals of an order. The links inside an interval are those
// inside the two that are one shorter, and the one between its ends: O(V^2).
class IntervalTable {
  public:
    explicit IntervalTable(const Instance& in)
        : V_(in.num_devices), rings_(static_cast<std::size_t>(V_) * V_), speed_(rings_.size()) {
        std::vector<double> slowest(V_, kInfinity), latency_ms(V_, 0.0);  // by the first device
        std::vector<double> speed = in.speed;
        for (int r = 1; r <= V_; ++r) {
            for (int i = 0; i + r <= V_; ++i) {
                const int last = i + r - 1;
                if (r > 1) {
                    slowest[i] = std::min({slowest[i], slowest[i + 1], in.bytes_per_ms(i, last),
                                           in.bytes_per_ms(last, i)});
                    latency_ms[i] = std::max({latency_ms[i], latency_ms[i + 1],
                                              in.latency_ms(i, last), in.latency_ms(last, i)});
                    speed[i] = std::min(speed[i], speed[i + 1]);
                }
                rings_[index(i, r)] = make_ring(in, r, slowest[i], latency_ms[i]);
                speed_[index(i, r)] = speed[i];
            }
        }
    }
    const Ring& ring(int i, int r) const { return rings_[index(i, r)]; }
    double slowest_speed(int i, int r) const { return speed_[index(i, r)]; }

  private:
    std::size_t index(int i, int r) const { return static_cast<std::size_t>(i) * V_ + (r - 1); }
    int V_;
    std::vector<Ring> rings_;
    std::vector<double> speed_;
};

}  // namespace pipeplan
