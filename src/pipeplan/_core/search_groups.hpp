// Devices that look alike, for the moves of local search: those of one host, as a rule.
//
// Two devices look alike if both have the same speed and the same links to every other one. A host of
// eight such devices is rarely improved device by device: the first one that leaves takes a slow
// link with it. So some moves take all of them at once.
#pragma once
#include <vector>

#include "instance.hpp"

namespace pipeplan {

class AlikeDevices {
  public:
    // Without groups where `is_wanted` is false: with thousands of devices that would take long.
    AlikeDevices(const Instance& in, bool is_wanted) : group_of_(in.num_devices) {
        for (int u = 0; is_wanted && u < in.num_devices; ++u) {
            std::size_t g = 0;
            while (g < groups_.size() && !are_alike(in, groups_[g][0], u)) ++g;
            if (g == groups_.size()) groups_.emplace_back();
            groups_[g].push_back(u);
            group_of_[u] = static_cast<int>(g);
        }
    }
    int num_groups() const { return static_cast<int>(groups_.size()); }
    const std::vector<int>& group(int g) const { return groups_[g]; }
    int group_of(int device) const { return group_of_[device]; }
    // Whether there are several groups, and on average two devices in each.
    bool are_worth_it() const { return num_groups() > 1 && 2 * groups_.size() <= group_of_.size(); }

  private:
    static bool are_alike(const Instance& in, int u, int v) {
        const auto& rate = in.bytes_per_ms;
        const auto& latency = in.latency_ms;
        if (in.speed[u] != in.speed[v] || rate(u, v) != rate(v, u)) return false;
        for (int w = 0; w < in.num_devices; ++w) {
            if (w == u || w == v) continue;
            if (rate(u, w) != rate(v, w) || rate(w, u) != rate(w, v)) return false;
            if (latency(u, w) != latency(v, w) || latency(w, u) != latency(w, v)) return false;
        }
        return true;
    }

    std::vector<std::vector<int>> groups_;
    std::vector<int> group_of_;
};

}  // namespace pipeplan
