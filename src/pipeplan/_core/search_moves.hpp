// The moves of local search: small changes of a plan's cuts and device sets.
//
// Only a change near the stage that decides the time can make a plan faster. So most moves look at
// a critical stage. Most devices do not fit into a set: one slow link slows all of it. So a device
// that is to join a set is chosen among several, by its links. On irregular clusters of 64 devices
// both together made plans 5 % faster in the mean, within the same time. Every second time the cuts
// follow the devices (search_cuts.hpp).
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "instance.hpp"
#include "random.hpp"
#include "search_cuts.hpp"
#include "search_edits.hpp"
#include "search_plan.hpp"

namespace pipeplan {

class Moves : private PlanEdits {
    static constexpr int kMostTries = 12, kPairsPerCut = 8;

  public:
    Moves(const Instance& in, Random& random, bool makes_large_moves)
        : in_(in), random_(random), makes_large_moves_(makes_large_moves),
          num_tries_(std::clamp(in.num_devices / 6, 2, kMostTries)), cuts_(in) {}

    // Makes one random move. False where it was not possible. The plan may be changed then too, but
    // not where another move was made before.
    bool make(SearchPlan& plan, Changes& changes) {
        edit(plan, changes);
        if (in_.has_memory() && in_.limits.may_recompute && random_.below(10) == 0) return flip_mode();
        if (in_.limits.any_shares && random_.below(10) == 0) return flip_split();
        switch (random_.below(makes_large_moves_ ? 25 : 20)) {
            case 0: case 1: case 2: return shift_cut();
            case 3: case 4: return move_device();
            case 5: return swap_devices();
            case 6: return swap_sets();
            case 7: return split();
            case 8: return merge();
            case 9: return reverse_sets();
            case 10: return use_unused();
            case 11: return drop_device();
            case 12: case 13: case 14: case 15: return join();
            case 16: case 17: case 18: case 19: return trade();
            case 20: case 21: return move_device_and_cut();
            case 22: return divide_anew();
            case 23: return join();
            default: return trade();
        }
    }

    // The plan that the next moves change, and the stages that decide its time.
    void start_from(const SearchPlan& plan, int critical, int other_critical) {
        critical_[0] = critical, critical_[1] = other_critical;
        stage_of_.assign(in_.num_devices, -1);
        for (int n = 0; n < static_cast<int>(plan.size()); ++n)
            for (int u : plan[n].devices) stage_of_[u] = n;
    }

  private:
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

    // ------------------------------------------------------------ moves

    bool shift_cut() {
        if (num_stages() < 2) return false;
        const int n = any_pair();
        // With many layers a stage, steps of a few of them lead nowhere.
        const int far = random_.below(2) ? in_.num_layers / (4 * num_stages()) : 0;
        const int by = (1 + random_.below(std::max(3, far))) * (random_.below(2) ? 1 : -1);
        const int cut = stage(n).end_layer + by;
        if (cut <= stage(n).first_layer || cut >= stage(n + 1).end_layer) return false;
        cut_at(n, cut);
        return true;
    }

    bool move_device() {
        const int from = any_stage(), to = any_stage();
        if (from == to || stage(from).devices.size() < 2) return false;
        return change_devices(from, to, [&] {
            add(to, take(from));
            return true;
        });
    }

    // A device from anywhere goes to a stage that it fits.
    bool join() {
        if (is_changed()) return false;
        const int n = any_stage();
        const int device = fitting_device(n, -1);
        if (device < 0) return false;
        const int from = stage_of_[device];
        return change_devices(from < 0 ? 0 : from, from < 0 ? num_stages() - 1 : n, [&] {
            if (!fetch(device)) return false;
            add(n, device);
            return true;
        });
    }

    // A device of a stage and a better one from anywhere take each other's place.
    bool trade() {
        if (is_changed()) return false;
        const int n = any_stage();
        const int old = take(n), device = fitting_device(n, old);
        if (device < 0) return false;
        const int from = stage_of_[device];
        if (from >= 0) {
            add(from, old);
            if (!fetch(device)) return false;
        }
        add(n, device);
        return true;
    }

    // Of some devices outside of a stage, the one with the best links to it or to one beside it.
    int fitting_device(int n, int leaving) {
        int beside = n;
        if (num_devices(n) < 2 || random_.below(2)) {
            beside = random_.below(2) ? n + 1 : n - 1;
            if (beside < 0 || beside >= num_stages()) beside = n;
        }
        const double least_speed = leaves_slow_out(n) ? slowest_speed(n, leaving) : 0.0;
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
    // Between a device and the others of a set.
    double slowest_link(int u, const std::vector<int>& devices, int leaving) const {
        double slowest = kInfinity;
        for (int v : devices)
            if (v != leaving && v != u)
                slowest = std::min({slowest, in_.bytes_per_ms(u, v), in_.bytes_per_ms(v, u)});
        return slowest;
    }
    // Takes a device out of the stage that has it, if any; false where it is the only one there.
    bool fetch(int device) {
        const int from = stage_of_[device];
        if (from < 0) return true;
        if (num_devices(from) < 2) return false;
        int index = 0;
        while (stage(from).devices[index] != device) ++index;
        take_at(from, index);
        return true;
    }
    // Whether another move was made before: then `stage_of_` is no longer right.
    bool is_changed() const { return changes_->is_resized || !changes_->stages.empty(); }

    bool swap_devices() {
        const int a = any_stage(), b = any_stage();
        if (a == b) return false;
        const int one = take(a), other = take(b);
        add(a, other), add(b, one);
        return true;
    }

    bool swap_sets() {
        const int a = any_stage(), b = any_stage();
        if (a == b) return false;
        return change_devices(a, b, [&] {
            exchange(a, b);
            forget_links_around(a), forget_links_around(b);
            return true;
        });
    }

    bool split() {
        const int n = any_stage();
        const int layers = stage(n).end_layer - stage(n).first_layer;
        const int devices = static_cast<int>(stage(n).devices.size());
        if (layers < 2 || devices < 2) return false;
        SearchStage behind;
        const int moved = 1 + random_.below(devices - 1);
        int cut = stage(n).first_layer + 1 + random_.below(layers - 1);
        if (random_.below(2)) cut = cut_by(n, stage(n).end_layer, devices - moved, moved);
        behind.first_layer = cut;
        behind.end_layer = stage(n).end_layer;
        behind.mode = stage(n).mode & kBySpeed;
        stage(n).end_layer = cut;
        for (int k = 0; k < moved; ++k) behind.devices.push_back(take(n));
        plan_->insert(plan_->begin() + n + 1, std::move(behind));
        changes_->is_resized = true;
        stage(n).next = {};
        forget_around(n), forget_links_around(n + 1);
        return true;
    }

    bool merge() {
        if (num_stages() < 2) return false;
        const int n = any_pair();
        SearchStage& behind = stage(n + 1);
        stage(n).end_layer = behind.end_layer;
        stage(n).devices.insert(stage(n).devices.end(), behind.devices.begin(),
                                behind.devices.end());
        plan_->erase(plan_->begin() + n + 1);
        changes_->is_resized = true;
        stage(n).next = {};
        forget_around(n);
        return true;
    }

    bool reverse_sets() {
        if (num_stages() < 3) return false;
        const int a = any_stage(), b = any_stage();
        if (a == b) return false;
        return change_devices(a, b, [&] {
            for (int low = std::min(a, b), high = std::max(a, b); low < high; ++low, --high)
                exchange(low, high);
            for (int n = std::min(a, b); n <= std::max(a, b); ++n) forget_links_around(n);
            return true;
        });
    }

    // A device goes to a neighbouring stage, and with it the layers that keep the two in balance.
    bool move_device_and_cut() {
        if (num_stages() < 2) return false;
        const int n = any_pair();
        const bool forth = random_.below(2);
        const int from = forth ? n : n + 1, to = forth ? n + 1 : n;
        if (stage(from).devices.size() < 2) return false;
        add(to, take(from));
        balance(n);
        return true;
    }

    // The devices of two neighbouring stages, mixed and divided in another ratio.
    bool divide_anew() {
        if (num_stages() < 2) return false;
        const int n = any_pair();
        const std::vector<int>&first = stage(n).devices, &second = stage(n + 1).devices;
        const int wanted = 1 + random_.below(static_cast<int>(first.size() + second.size()) - 1);
        while (static_cast<int>(first.size()) > wanted) add(n + 1, take(n));
        while (static_cast<int>(first.size()) < wanted) add(n, take(n + 1));
        balance(n);
        return true;
    }

    // Puts the cut behind stage n where the work of both stages fits their devices' speed.
    void balance(int n) {
        const double before = joint_speed(in_, stage(n)), behind = joint_speed(in_, stage(n + 1));
        int cut = cut_by(n, stage(n + 1).end_layer, before, behind);
        if (cut > stage(n).first_layer + 1 && random_.below(2)) --cut;
        cut_at(n, cut);
    }
    // The cut between the first layer of a stage and `end` that divides the work in this ratio.
    int cut_by(int n, int end, double before, double behind) {
        const int first = stage(n).first_layer;
        const double from = cuts_.work_before(first), work = cuts_.work_before(end) - from;
        return cuts_.nearest_cut(from + work * before / (before + behind), first + 1, end - 1);
    }

    // Gives a device that no stage has to a stage: as one more, or in place of one of its own.
    bool use_unused() {
        used_.assign(in_.num_devices, 0);
        int num_used = 0;
        for (const SearchStage& one : *plan_)
            for (int u : one.devices) used_[u] = 1, ++num_used;
        if (num_used == in_.num_devices) return false;
        int skip = random_.below(in_.num_devices - num_used), device = 0;
        while (used_[device] || skip-- > 0) ++device;
        const int n = any_stage();
        return change_devices(0, num_stages() - 1, [&] {
            if (random_.below(2)) take(n);
            add(n, device);
            return true;
        });
    }

    // Activations are computed again instead of being kept, or the other way round.
    bool flip_mode() {
        const int n = any_stage();
        stage(n).mode ^= kRecomputes;
        forget_costs(n);
        return true;
    }

    // The devices share microbatches by their speed instead of evenly, or the other way round.
    bool flip_split() {
        const int n = any_stage();
        if (!in_.has_many_speeds(stage(n).devices)) return false;
        stage(n).mode ^= kBySpeed;
        forget_around(n);
        return true;
    }

    bool drop_device() {
        const int n = any_stage();
        if (stage(n).devices.size() < 2) return false;
        return change_devices(0, num_stages() - 1, [&] {
            take(n);
            return true;
        });
    }

    const Instance& in_;
    Random& random_;
    const bool makes_large_moves_;
    const int num_tries_;
    FollowingCuts cuts_;
    int critical_[2] = {0, 0};
    std::vector<int> stage_of_;       // [devices], of the plan that moves start from; -1: unused
    std::vector<std::uint8_t> used_;  // [devices]
};

}  // namespace pipeplan
