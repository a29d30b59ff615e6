// Transfer times between two neighbouring device intervals of an order.
//
// A transfer of q bytes a pair takes the max over pairs of latency + q / bandwidth. Where
// all pairs have one latency the slowest pair decides; in general the pairs that no other
// pair dominates (longer latency and slower link) do. Real clusters have one or two of these.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels.hpp"

namespace pipeplan {

struct Link {
    double latency_ms;
    double ms_per_byte;  // infinite latency and 0 here: no path
};

inline Link link_between(const PartitionInput& in, int u, int v) {
    const std::size_t at = static_cast<std::size_t>(u) * in.num_devices + v;
    const std::size_t back = static_cast<std::size_t>(v) * in.num_devices + u;
    if (!(in.bytes_per_ms[at] > 0 && in.bytes_per_ms[back] > 0)) return {kInfinity, 0.0};
    return {in.latency_ms[at], 1.0 / in.bytes_per_ms[at]};
}

// The undominated links of a set, slowest link first.
class LinkSet {
  public:
    void insert(Link link) {
        for (const Link& kept : links_)
            if (kept.latency_ms >= link.latency_ms && kept.ms_per_byte >= link.ms_per_byte) return;
        links_.erase(std::remove_if(links_.begin(), links_.end(),
                                    [&](const Link& kept) {
                                        return kept.latency_ms <= link.latency_ms &&
                                               kept.ms_per_byte <= link.ms_per_byte;
                                    }),
                     links_.end());
        links_.push_back(link);
    }
    void insert(const LinkSet& other) {
        for (const Link& link : other.links_) insert(link);
    }
    double transfer_ms(double bytes_per_pair) const {
        double longest = 0.0;
        for (const Link& link : links_)
            longest = std::max(longest, link.latency_ms + bytes_per_pair * link.ms_per_byte);
        return longest;
    }
    bool connected() const {
        for (const Link& link : links_)
            if (link.latency_ms == kInfinity) return false;
        return true;
    }

  private:
    std::vector<Link> links_;
};

// Both directions of the channel between the last a devices before a boundary and the first
// b devices behind it, for all (a, b), by adding one device at a time at the corner.
class ChannelTable {
  public:
    ChannelTable(const PartitionInput& in, int boundary)
        : before_(boundary), behind_(in.num_devices - boundary),
          forward_(static_cast<std::size_t>(before_) * behind_),
          backward_(static_cast<std::size_t>(before_) * behind_) {
        for (int a = 1; a <= before_; ++a) {
            for (int b = 1; b <= behind_; ++b) {
                const int u = boundary - a, v = boundary + b - 1;
                LinkSet &forward = forward_[index(a, b)], &backward = backward_[index(a, b)];
                if (a > 1) forward = forward_[index(a - 1, b)], backward = backward_[index(a - 1, b)];
                if (b > 1) {
                    forward.insert(forward_[index(a, b - 1)]);
                    backward.insert(backward_[index(a, b - 1)]);
                }
                forward.insert(link_between(in, u, v));
                backward.insert(link_between(in, v, u));
            }
        }
    }
    const LinkSet& forward(int a, int b) const { return forward_[index(a, b)]; }
    const LinkSet& backward(int a, int b) const { return backward_[index(a, b)]; }

  private:
    std::size_t index(int a, int b) const {
        return static_cast<std::size_t>(a - 1) * behind_ + (b - 1);
    }
    int before_, behind_;
    std::vector<LinkSet> forward_, backward_;
};

// Ring all-reduce over r consecutive devices that start at i: time = fixed + bytes * per_byte.
struct Ring {
    double fixed_ms;
    double ms_per_byte;
    bool connected;
};

// Rings and slowest speeds of all intervals of an order.
class IntervalTable {
  public:
    explicit IntervalTable(const PartitionInput& in)
        : V_(in.num_devices), rings_(static_cast<std::size_t>(V_) * V_), speed_(rings_.size()) {
        for (int i = 0; i < V_; ++i) {
            double slowest = kInfinity, latency_ms = 0.0, speed = kInfinity;
            for (int r = 1; i + r <= V_; ++r) {
                const int added = i + r - 1;
                speed = std::min(speed, in.speed[added]);
                for (int u = i; u < added; ++u) {
                    for (std::size_t at : {static_cast<std::size_t>(u) * V_ + added,
                                           static_cast<std::size_t>(added) * V_ + u}) {
                        slowest = std::min(slowest, in.bytes_per_ms[at]);
                        latency_ms = std::max(latency_ms, in.latency_ms[at]);
                    }
                }
                const bool connected = slowest > 0;
                rings_[index(i, r)] =
                    r == 1 ? Ring{0.0, 0.0, true}
                           : Ring{2.0 * (r - 1) * latency_ms,
                                  connected ? 2.0 * (r - 1) / r / slowest : 0.0, connected};
                speed_[index(i, r)] = speed;
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
