// The moves of local search: small changes of a plan's cuts and device sets.
//
// Only a change near the stage that decides the time can make a plan faster. So most moves look at
// a critical stage. Most devices do not fit into a set: one slow link slows all of it. So a device
// that is to join a set is chosen among several, by its links. On irregular clusters of 64 devices
// both together made plans 5 % faster in the mean, within the same time.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "instance.hpp"
#include "random.hpp"
#include "search_plan.hpp"

namespace pipeplan {

// Which part of a plan a move has touched.
struct Changes {
    int num_front, num_back;   // stages in front and at the back whose costs and channels stayed
    bool is_resized;           // stages were added or removed
    std::vector<int> stages;   // the touched ones, unless resized
    int num_pairs;             // of devices that were looked at

    void reset(const SearchPlan& plan) {
        num_front = num_back = static_cast<int>(plan.size());
        is_resized = false;
        num_pairs = 0;
        stages.clear();
    }
    void touch(const SearchPlan& plan, int n) {
        num_front = std::min(num_front, n);
        num_back = std::min(num_back, static_cast<int>(plan.size()) - 1 - n);
        stages.push_back(n);
    }
};

class Moves {
    static constexpr int kMostTries = 12;

  public:
    Moves(const Instance& in, Random& random, bool makes_large_moves)
        : in_(in), random_(random), makes_large_moves_(makes_large_moves),
          num_tries_(std::clamp(in.num_devices / 6, 2, kMostTries)) {}

    // Makes one random move. False where it was not possible. The plan may be changed then too, but
    // not where another move was made before.
    bool make(SearchPlan& plan, Changes& changes) {
        plan_ = &plan, changes_ = &changes;
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
    int num_devices(int n) { return static_cast<int>(stage(n).devices.size()); }
    int num_stages() const { return static_cast<int>(plan_->size()); }
    SearchStage& stage(int n) { return (*plan_)[n]; }
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

    // ------------------------------------------------------------ what is no longer known

    void forget_costs(int n) {
        stage(n).costs_known = false;
        changes_->touch(*plan_, n);
    }
    void forget_channel(int n) {
        stage(n).channel_known = false;
        changes_->touch(*plan_, n);
    }
    void forget_around(int n) {
        stage(n).costs_known = false;
        forget_channel(n);
        if (n > 0) forget_channel(n - 1);
    }
    void forget_links_around(int n) {
        stage(n).next = {};
        if (n > 0) stage(n - 1).next = {};
        forget_around(n);
    }

    // ------------------------------------------------------------ devices

    void add(int n, int device) {
        stage(n).devices.push_back(device);
        forget_around(n);
    }
    // Takes out one of the devices of a stage; what is known of the links of the others stays.
    int take(int n) { return take_at(n, random_.below(num_devices(n))); }
    int take_at(int n, int index) {
        SearchStage& here = stage(n);
        const int device = here.devices[index], size = static_cast<int>(here.devices.size());
        here.devices[index] = here.devices.back();
        here.devices.pop_back();
        SlowestInside& inside = here.inside;
        if (inside.count < size || inside.one == device || inside.other == device) inside = {};
        else --inside.count;
        SlowestBetween& next = here.next;
        if (next.count_here < size || next.forth.here == device || next.back.here == device)
            next = {};
        else --next.count_here;
        if (n > 0) {
            SlowestBetween& last = stage(n - 1).next;
            if (last.count_there < size || last.forth.there == device || last.back.there == device)
                last = {};
            else --last.count_there;
        }
        forget_around(n);
        return device;
    }

    // ------------------------------------------------------------ moves

    bool shift_cut() {
        if (num_stages() < 2) return false;
        const int n = any_pair();
        const int by = (1 + random_.below(3)) * (random_.below(2) ? 1 : -1);
        const int cut = stage(n).end_layer + by;
        if (cut <= stage(n).first_layer || cut >= stage(n + 1).end_layer) return false;
        cut_at(n, cut);
        return true;
    }
    void cut_at(int n, int cut) {
        stage(n).end_layer = stage(n + 1).first_layer = cut;
        stage(n).costs_known = false;
        forget_channel(n);
        forget_costs(n + 1);
    }

    bool move_device() {
        const int from = any_stage(), to = any_stage();
        if (from == to || stage(from).devices.size() < 2) return false;
        add(to, take(from));
        return true;
    }

    // A device from anywhere goes to a stage that it fits.
    bool join() {
        if (is_changed()) return false;
        const int n = any_stage();
        const int device = fitting_device(n, -1);
        if (device < 0 || !fetch(device)) return false;
        add(n, device);
        return true;
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
        int best = -1;
        double best_rate = -1.0;
        for (int k = 0; k < num_tries_; ++k) {
            const int u = random_.below(in_.num_devices);
            if (stage_of_[u] == n) continue;
            const double rate = slowest_link(u, stage(beside).devices, leaving);
            if (rate > best_rate) best_rate = rate, best = u;
        }
        changes_->num_pairs += num_tries_ * num_devices(beside);
        return best;
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
        exchange(a, b);
        forget_links_around(a), forget_links_around(b);
        return true;
    }
    void exchange(int a, int b) {
        std::swap(stage(a).devices, stage(b).devices);
        std::swap(stage(a).inside, stage(b).inside);
    }

    bool split() {
        const int n = any_stage();
        const int layers = stage(n).end_layer - stage(n).first_layer;
        const int devices = static_cast<int>(stage(n).devices.size());
        if (layers < 2 || devices < 2) return false;
        SearchStage behind;
        const int cut = stage(n).first_layer + 1 + random_.below(layers - 1);
        const int moved = 1 + random_.below(devices - 1);
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
        for (int low = std::min(a, b), high = std::max(a, b); low < high; ++low, --high)
            exchange(low, high);
        for (int n = std::min(a, b); n <= std::max(a, b); ++n) forget_links_around(n);
        return a != b;
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
        const auto work = [&](int layer) { return in_.forward_sum[layer] + in_.backward_sum[layer]; };
        const int first = stage(n).first_layer, end = stage(n + 1).end_layer;
        const double before = joint_speed(in_, stage(n)), behind = joint_speed(in_, stage(n + 1));
        const double target = work(first) + (work(end) - work(first)) * before / (before + behind);
        int cut = first + 1;
        while (cut < end - 1 && work(cut) < target) ++cut;
        if (cut > first + 1 && random_.below(2)) --cut;
        cut_at(n, cut);
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
        if (random_.below(2)) take(n);
        add(n, device);
        return true;
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
        take(n);
        return true;
    }

    const Instance& in_;
    Random& random_;
    const bool makes_large_moves_;
    const int num_tries_;
    SearchPlan* plan_ = nullptr;
    Changes* changes_ = nullptr;
    int critical_[2] = {0, 0};
    std::vector<int> stage_of_;       // [devices], of the plan that moves start from; -1: unused
    std::vector<std::uint8_t> used_;  // [devices]
};

}  // namespace pipeplan
