// What the moves of local search choose from: stages that matter, and devices that fit.
//
// Only a change near the stage that decides the time can make a plan faster. So most moves look at
// a critical stage. Most devices do not fit into a set: one slow link slows all of it. So a device
// that is to join a set is chosen among several, by its links (search_fits.hpp). On irregular
// clusters of 64 devices both together made plans 5 % faster in the mean, within the same time. Every
// second time the cuts follow the devices (search_cuts.hpp).
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "instance.hpp"
#include "random.hpp"
#include "search_cuts.hpp"
#include "search_edits.hpp"
#include "search_fits.hpp"
#include "search_plan.hpp"

namespace pipeplan {

class MoveChoices : protected PlanEdits {
  public:
    MoveChoices(const Instance& in, Random& random)
        : in_(in), random_(random), cuts_(in), fits_(in),
          num_tries_(std::clamp(in.num_devices / 6, 2, kMostTries)) {}

    // The plan that the next moves change, the stages that decide its time, and how long the
    // all-reduce of each may take without harm.
    void start_from(const SearchPlan& plan, int critical, int other_critical,
                    const std::vector<double>& allowed_ms) {
        if (fits_.is_known()) fits_.start_from(plan, allowed_ms);
        critical_[0] = critical, critical_[1] = other_critical;
        stage_of_.assign(in_.num_devices, -1);
        for (int n = 0; n < static_cast<int>(plan.size()); ++n)
            for (int u : plan[n].devices) stage_of_[u] = n;
    }

  protected:
    // ------------------------------------------------------------ stages

    // Three times in five a critical one.
    int any_stage() {
        if (random_.below(5) >= 3) return random_.below(num_stages());
        return std::min(critical_[random_.below(2)], num_stages() - 1);
    }
    // A stage with another one behind it.
    int any_pair() {
        const int n = any_stage();
        return n + 1 == num_stages() || (n > 0 && random_.below(2)) ? n - 1 : n;
    }

    int take(int n) { return take_at(n, random_.below(num_devices(n))); }

    // ------------------------------------------------------------ cuts

    // Every second time the cuts between two stages will follow what `change` does to their devices.
    template <class Change>
    bool change_devices(int a, int b, const Change& change) {
        if (random_.below(2)) return change();
        cuts_.remember(*plan_, std::min(a, b), std::max(a, b));
        if (!change()) return false;
        cuts_.follow(*plan_, [&](int n, int layer) { cut_at(n, layer); });
        changes_->num_pairs += kPairsPerCut * cuts_.num_remembered();
        return true;
    }

    // ------------------------------------------------------------ devices

    // Whether another move was made before: then `stage_of_` is no longer right.
    bool is_changed() const { return changes_->is_resized || !changes_->stages.empty(); }
    void remove(int n, int device) {
        int index = 0;
        while (stage(n).devices[index] != device) ++index;
        take_at(n, index);
    }
    // Takes a device out of the stage that has it, if any; false where it is the only one there.
    bool fetch(int device) {
        const int from = stage_of_[device];
        if (from < 0) return true;
        if (num_devices(from) < 2) return false;
        remove(from, device);
        return true;
    }

    // Of some devices outside of a stage, the one that suits it best; -1 where there is none. Where one
    // leaves for it, it takes the other's place.
    int fitting_device(int n, int leaving) {
        const double least_speed = leaves_slow_out(n) ? slowest_speed(n, leaving) : 0.0;
        if (!fits_.is_known() || are_alike_) return best_linked_device(n, leaving, least_speed);
        const std::vector<float>& cost = fits_.costs_of_joining(*plan_, n);
        changes_->num_pairs += fits_.num_pairs(*plan_, n);
        const float* loss = nullptr;
        if (leaving >= 0) loss = fits_.losses_by(leaving, stage_of_).data();
        int best = -1;
        float best_ms = std::numeric_limits<float>::infinity();
        for (int k = kFewestTries << random_.below(4); k > 0; --k) {
            const int u = random_.below(in_.num_devices), m = stage_of_[u];
            if (m == n || in_.speed[u] < least_speed) continue;
            const float ms = cost[u] + (loss && m >= 0 ? loss[m] : 0.0f);
            if (ms < best_ms) best_ms = ms, best = u;
        }
        return best;
    }
    // Of all stages but one, that which loses the least if a device joins it; nearly: each counts
    // with up to twice its loss.
    int best_stage(int device, int but) {
        if (!fits_.is_known() || is_changed()) return but > 0 ? but - 1 : but + 1;
        const std::vector<float>& loss = fits_.losses_by(device, stage_of_);
        int best = -1;
        float best_ms = std::numeric_limits<float>::infinity();
        for (int n = 0; n < num_stages(); ++n) {
            if (n == but) continue;
            const float ms = (loss[n] + 1e-6f) * (1.0f + static_cast<float>(random_.unit()));
            if (best < 0 || ms < best_ms) best_ms = ms, best = n;
        }
        return best;
    }
    // The same by the links to the stage or to one beside it.
    int best_linked_device(int n, int leaving, double least_speed) {
        int beside = n;
        if (num_devices(n) < 2 || random_.below(2)) {
            beside = random_.below(2) ? n + 1 : n - 1;
            if (beside < 0 || beside >= num_stages()) beside = n;
        }
        int best = -1;
        double best_rate = -1.0;
        for (int k = 0; k < num_tries_; ++k) {
            const int u = random_.below(in_.num_devices);
            if (stage_of_[u] == n || in_.speed[u] < least_speed) continue;
            const double rate = slowest_link(u, stage(beside).devices, leaving);
            if (rate > best_rate) best_rate = rate, best = u;
        }
        changes_->num_pairs += num_tries_ * num_devices(beside);
        return best;
    }
    // Where shares are even, a device that is slower than the others slows all of them.
    bool leaves_slow_out(int n) { return random_.below(3) > 0 && !(stage(n).mode & kBySpeed); }
    double slowest_speed(int n, int leaving) {
        double slowest = num_devices(n) ? kInfinity : in_.speed[leaving];
        for (int u : stage(n).devices) slowest = std::min(slowest, in_.speed[u]);
        return slowest;
    }

    bool are_alike_ = false;  // most devices: then one link tells all
    const Instance& in_;
    Random& random_;
    FollowingCuts cuts_;
    std::vector<int> stage_of_;  // [devices], of the plan that moves start from; -1: unused

  private:
    static constexpr int kMostTries = 12, kFewestTries = 4, kPairsPerCut = 8;

    // Between a device and the others of a set.
    double slowest_link(int u, const std::vector<int>& devices, int leaving) const {
        double slowest = kInfinity;
        for (int v : devices)
            if (v != leaving && v != u)
                slowest = std::min({slowest, in_.bytes_per_ms(u, v), in_.bytes_per_ms(v, u)});
        return slowest;
    }

    int critical_[2] = {0, 0};
    FittingDevices fits_;
    const int num_tries_;
};

}  // namespace pipeplan
