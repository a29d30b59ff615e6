// Cuts the layers into stages with the least bottleneck, each on whole groups of devices.
//
// Fan et al. 2021 (DAPPLE), arXiv:2007.01045, section 4: the recursion over layers, groups and the
// occupation of hosts.
//
//     A(j, state) = min over i < j, placements p of  max( A(i, state before p),
//                                                         transfer of 2 o(i) to p,
//                                                         work of layers i..j-1 / devices of p )
//
// A state is the number of free devices on each host, sorted: equally full hosts are equal. A stage is
// placed on fresh hosts first, on partly used hosts first, or scattered over all hosts.
// O(L^2) for each state, number of groups and placement. Ties go to what was found first.
#include <algorithm>
#include <cstddef>
#include <map>
#include <numeric>
#include <vector>

#include "kernels.hpp"

namespace pipeplan {
namespace {

using Counts = std::vector<int>;  // a number of devices for each host

// Takes all free devices of one host before those of the next.
Counts filled(const Counts& free, const std::vector<int>& hosts, int wanted) {
    Counts added(free.size(), 0);
    for (const int host : hosts) {
        added[host] = std::min(free[host], wanted);
        wanted -= added[host];
    }
    return added;
}

// Takes one device of every host in turn. At least `wanted` are free.
Counts scattered(const Counts& free, int wanted) {
    Counts added(free.size(), 0);
    while (wanted > 0)
        for (std::size_t host = 0; host < free.size() && wanted > 0; ++host)
            if (added[host] < free[host]) ++added[host], --wanted;
    return added;
}

// How the last stage of a state was placed. Hosts are numbered as in the state, or as in the one before.
struct Arrival {
    int before;              // the state that the stage was added to
    Counts added;            // by the hosts of the new state
    std::vector<int> order;  // for each host of the new state its index in the one before
};

// The stages so far, for each end of their layers. Of each the bottleneck, the arrival of its last
// stage, and where this stage begins.
struct State {
    Counts free;
    std::vector<double> best_ms;
    std::vector<int> arrival_of;
    std::vector<int> cut;
    std::vector<Arrival> arrivals;
};

class Placements {
  public:
    Placements(const PlacementCosts& costs, const std::vector<std::vector<int>>& hosts, int group_size,
               int max_groups, Control& control)
        : costs_(costs), hosts_(hosts), group_size_(group_size), max_groups_(max_groups),
          control_(control), width_(static_cast<std::size_t>(costs.num_layers) + 1),
          work_ms_(max_groups + 1), with_(max_groups + 1) {
        for (const std::vector<int>& host : hosts) capacity_.push_back(static_cast<int>(host.size()));
        State& start = states_[state_at(capacity_, 0)];
        start.best_ms[0] = 0.0;
    }

    std::vector<PlacedGroups> solve() {
        for (int used = 0; used < max_groups_; ++used)
            for (const int index : with_[used]) extend(index, used);
        std::vector<PlacedGroups> found;
        for (int used = 2; used <= max_groups_; ++used) {
            const int best = best_of(with_[used]);
            if (best >= 0) found.push_back(plan_of(best, used));
        }
        return found;
    }

  private:
    // The index of a state, which is new if it is not known.
    int state_at(const Counts& free, int used) {
        const auto [at, is_new] = index_of_.try_emplace(free, static_cast<int>(states_.size()));
        if (is_new) {
            states_.push_back({free, std::vector<double>(width_, kInfinity),
                               std::vector<int>(width_, 0), std::vector<int>(width_, 0), {}});
            with_[used].push_back(at->second);
        }
        return at->second;
    }

    // Appends one stage to everything that ends in the state.
    void extend(int index, int used) {
        control_.check();
        const std::vector<double>& best_ms = states_[index].best_ms;
        const auto is_finite = [](double ms) { return ms < kInfinity; };
        if (std::none_of(best_ms.begin(), best_ms.end(), is_finite)) return;  // more stages than layers
        const Counts free = states_[index].free;  // a copy: new states move the old ones
        const int num_free = std::accumulate(free.begin(), free.end(), 0);
        for (int groups = 1; groups <= max_groups_ - used; ++groups) {
            if (groups * group_size_ > num_free) return;
            for (const Counts& receivers : placements(free, groups * group_size_))
                append(index, used, groups, receivers);
        }
    }

    std::vector<Counts> placements(const Counts& free, int wanted) const {
        std::vector<int> fresh, partly;
        for (int host = 0; host < num_hosts(); ++host) {
            if (free[host] == capacity_[host]) fresh.push_back(host);
            else if (free[host] > 0) partly.push_back(host);
        }
        std::vector<int> fresh_first = fresh, partly_first = partly;
        fresh_first.insert(fresh_first.end(), partly.begin(), partly.end());
        partly_first.insert(partly_first.end(), fresh.begin(), fresh.end());
        std::vector<Counts> different;
        for (Counts added : {filled(free, fresh_first, wanted), filled(free, partly_first, wanted),
                             scattered(free, wanted)})
            if (std::find(different.begin(), different.end(), added) == different.end())
                different.push_back(std::move(added));
        return different;
    }

    // One stage on these devices, by the hosts of the state.
    void append(int index, int used, int groups, const Counts& receivers) {
        const std::vector<double> front_ms = front(states_[index], receivers);
        const Arrival arrival = arrival_on(index, receivers);
        Counts left(receivers.size());
        for (std::size_t k = 0; k < left.size(); ++k)
            left[k] = states_[index].free[arrival.order[k]] - arrival.added[k];
        std::vector<double> value(width_, kInfinity);
        std::vector<int> cut(width_, 0);
        const std::vector<double>& work_ms = work_on(groups);
        for (std::size_t first = 0; first + 1 < width_; ++first) {
            if (front_ms[first] == kInfinity) continue;
            const double before_ms = front_ms[first], *stage_ms = &work_ms[first * width_];
            for (std::size_t end = first + 1; end < width_; ++end) {
                const double total_ms = std::max(before_ms, stage_ms[end]);
                const bool better = total_ms < value[end];
                value[end] = better ? total_ms : value[end];
                cut[end] = better ? static_cast<int>(first) : cut[end];
            }
        }
        take(states_[state_at(left, used + groups)], arrival, value, cut);
    }

    // For each end of the front its bottleneck, with the transfer to the stage behind it.
    std::vector<double> front(const State& state, const Counts& receivers) const {
        std::vector<double> front_ms = state.best_ms, ms_per_byte;
        if (state.free == capacity_) return front_ms;
        for (const Arrival& last : state.arrivals)
            ms_per_byte.push_back(transfer_ms_per_byte(last.added, receivers));
        for (std::size_t end = 0; end < width_; ++end)
            if (front_ms[end] < kInfinity)
                front_ms[end] = std::max(front_ms[end], costs_.round_trip_bytes[end] *
                                                            ms_per_byte[state.arrival_of[end]]);
        return front_ms;
    }

    // A stage on several hosts gets all bytes over the slower links, one on a single host only those
    // of other hosts.
    double transfer_ms_per_byte(const Counts& senders, const Counts& receivers) const {
        const auto uses = [](int count) { return count > 0; };
        if (std::count_if(receivers.begin(), receivers.end(), uses) > 1)
            return 1 / costs_.between_bytes_per_ms;
        const auto home = std::find_if(receivers.begin(), receivers.end(), uses) - receivers.begin();
        const double all = std::accumulate(senders.begin(), senders.end(), 0);
        const double outside = 1 - senders[home] / all;
        return std::max(outside / costs_.between_bytes_per_ms, (1 - outside) / costs_.inside_bytes_per_ms);
    }

    // Hosts are sorted by capacity first, so the list of capacities never changes.
    Arrival arrival_on(int index, const Counts& receivers) const {
        const Counts& free = states_[index].free;
        Arrival arrival{index, {}, std::vector<int>(free.size())};
        std::iota(arrival.order.begin(), arrival.order.end(), 0);
        const auto left = [&](int host) { return free[host] - receivers[host]; };
        std::stable_sort(arrival.order.begin(), arrival.order.end(), [&](int a, int b) {
            if (capacity_[a] != capacity_[b]) return capacity_[a] < capacity_[b];
            return left(a) < left(b);
        });
        for (const int host : arrival.order) arrival.added.push_back(receivers[host]);
        return arrival;
    }

    // [first layer][end]: the work of a stage on so many groups.
    const std::vector<double>& work_on(int groups) {
        std::vector<double>& work_ms = work_ms_[groups];
        if (work_ms.empty())
            for (std::size_t k = 0; k < width_ * width_; ++k)
                work_ms.push_back(costs_.work_ms[k] / (groups * group_size_));
        return work_ms;
    }

    // Keeps what is better than all that is known in the state.
    void take(State& state, const Arrival& arrival, const std::vector<double>& value,
              const std::vector<int>& cut) {
        const int index = static_cast<int>(state.arrivals.size());
        bool is_kept = false;
        for (std::size_t end = 0; end < width_; ++end) {
            if (!(value[end] < state.best_ms[end])) continue;
            state.best_ms[end] = value[end];
            state.arrival_of[end] = index;
            state.cut[end] = cut[end];
            is_kept = true;
        }
        if (is_kept) state.arrivals.push_back(arrival);
    }

    // The state with the least bottleneck of all layers, of equal ones the first by its numbers; or -1.
    int best_of(const std::vector<int>& indices) const {
        int best = -1;
        for (const int index : indices) {
            const State& state = states_[index];
            const double ms = state.best_ms.back();
            if (!(ms < kInfinity)) continue;
            const double best_ms = best < 0 ? kInfinity : states_[best].best_ms.back();
            if (ms < best_ms || (ms == best_ms && state.free < states_[best].free)) best = index;
        }
        return best;
    }

    // Back through the arrivals, then devices for stage after stage.
    PlacedGroups plan_of(int index, int used) const {
        PlacedGroups plan{used, {}, {}};
        std::vector<const Arrival*> arrivals;
        for (int end = costs_.num_layers; end > 0;) {
            const State& state = states_[index];
            arrivals.push_back(&state.arrivals[state.arrival_of[end]]);
            plan.end_layer.push_back(end);
            end = state.cut[end];
            index = arrivals.back()->before;
        }
        std::reverse(plan.end_layer.begin(), plan.end_layer.end());
        std::vector<std::vector<int>> hosts = hosts_;
        for (auto last = arrivals.rbegin(); last != arrivals.rend(); ++last) {
            std::vector<std::vector<int>> sorted;
            for (const int host : (*last)->order) sorted.push_back(std::move(hosts[host]));
            hosts = std::move(sorted);
            plan.devices.push_back(taken_from(hosts, (*last)->added));
        }
        return plan;
    }

    // The first devices of each host, which are no longer free.
    static std::vector<int> taken_from(std::vector<std::vector<int>>& hosts, const Counts& added) {
        std::vector<int> devices;
        for (std::size_t host = 0; host < hosts.size(); ++host) {
            const auto first = hosts[host].begin(), last = first + added[host];
            devices.insert(devices.end(), first, last);
            hosts[host].erase(first, last);
        }
        return devices;
    }

    int num_hosts() const { return static_cast<int>(capacity_.size()); }

    const PlacementCosts& costs_;
    const std::vector<std::vector<int>>& hosts_;
    const int group_size_, max_groups_;
    Control& control_;
    const std::size_t width_;                   // layers + 1
    Counts capacity_;
    std::vector<State> states_;
    std::map<Counts, int> index_of_;
    std::vector<std::vector<double>> work_ms_;  // by groups
    std::vector<std::vector<int>> with_;        // for each number of groups used its states
};

}  // namespace

std::vector<PlacedGroups> place_groups(const PlacementCosts& costs,
                                       const std::vector<std::vector<int>>& hosts, int group_size,
                                       int max_groups, Control& control) {
    return Placements(costs, hosts, group_size, max_groups, control).solve();
}

}  // namespace pipeplan
