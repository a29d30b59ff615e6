// The moves of local search: small changes of a plan's cuts and device sets.
#pragma once
#include <algorithm>
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

    void reset(const SearchPlan& plan) {
        num_front = num_back = static_cast<int>(plan.size());
        is_resized = false;
        stages.clear();
    }
    void touch(const SearchPlan& plan, int n) {
        num_front = std::min(num_front, n);
        num_back = std::min(num_back, static_cast<int>(plan.size()) - 1 - n);
        stages.push_back(n);
    }
};

class Moves {
  public:
    Moves(const Instance& in, Random& random, bool makes_large_moves)
        : in_(in), random_(random), makes_large_moves_(makes_large_moves) {}

    // Makes one random move. False where it was not possible; the plan may be changed then too.
    bool make(SearchPlan& plan, Changes& changes) {
        plan_ = &plan, changes_ = &changes;
        if (in_.has_memory() && in_.limits.may_recompute && random_.below(10) == 0) return flip_mode();
        switch (random_.below(makes_large_moves_ ? 15 : 12)) {
            case 0: case 1: case 2: return shift_cut();
            case 3: case 4: return move_device();
            case 5: return swap_devices();
            case 6: return swap_sets();
            case 7: return split();
            case 8: return merge();
            case 9: return reverse_sets();
            case 10: return use_unused();
            case 11: return drop_device();
            case 12: case 13: return move_device_and_cut();
            default: return divide_anew();
        }
    }

  private:
    int num_stages() const { return static_cast<int>(plan_->size()); }
    SearchStage& stage(int n) { return (*plan_)[n]; }
    int any_stage() { return random_.below(num_stages()); }

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
    int take(int n) { return take_at(n, random_.below(static_cast<int>(stage(n).devices.size()))); }
    int take_at(int n, int index) {
        SearchStage& here = stage(n);
        const int device = here.devices[index], size = static_cast<int>(here.devices.size());
        here.devices[index] = here.devices.back();
        here.devices.pop_back();
        SlowestInside& inside = here.inside;
        if (inside.count < size || inside.one == device || inside.other == device) inside = {};
        else --inside.count;
        SlowestBetween& next = here.next;
        if (next.count_here < size || next.forth.here == device || next.back.here == device) next = {};
        else --next.count_here;
        if (n > 0) {
            SlowestBetween& last = stage(n - 1).next;
            if (last.count_there < size || last.forth.there == device || last.back.there == device) last = {};
            else --last.count_there;
        }
        forget_around(n);
        return device;
    }

    // ------------------------------------------------------------ moves

    bool shift_cut() {
        if (num_stages() < 2) return false;
        const int n = random_.below(num_stages() - 1);
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
        const int n = random_.below(num_stages() - 1);
        SearchStage& behind = stage(n + 1);
        stage(n).end_layer = behind.end_layer;
        stage(n).devices.insert(stage(n).devices.end(), behind.devices.begin(), behind.devices.end());
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
        const int n = random_.below(num_stages() - 1);
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
        const int n = random_.below(num_stages() - 1);
        const std::vector<int>&first = stage(n).devices, &second = stage(n + 1).devices;
        const int wanted = 1 + random_.below(static_cast<int>(first.size() + second.size()) - 1);
        while (static_cast<int>(first.size()) > wanted) add(n + 1, take(n));
        while (static_cast<int>(first.size()) < wanted) add(n, take(n + 1));
        balance(n);
        return true;
    }

    // Puts the cut behind stage n where the work of both stages fits their devices' speed.
    void balance(int n) {
        const auto speed = [&](const SearchStage& stage) {
            double slowest = kInfinity;
            for (int u : stage.devices) slowest = std::min(slowest, in_.speed[u]);
            return slowest * static_cast<double>(stage.devices.size());
        };
        const auto work = [&](int layer) { return in_.forward_sum[layer] + in_.backward_sum[layer]; };
        const int first = stage(n).first_layer, end = stage(n + 1).end_layer;
        const double before = speed(stage(n)), behind = speed(stage(n + 1));
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

    bool drop_device() {
        const int n = any_stage();
        if (stage(n).devices.size() < 2) return false;
        take(n);
        return true;
    }

    const Instance& in_;
    Random& random_;
    const bool makes_large_moves_;
    SearchPlan* plan_ = nullptr;
    Changes* changes_ = nullptr;
    std::vector<std::uint8_t> used_;  // [devices]
};

}  // namespace pipeplan
