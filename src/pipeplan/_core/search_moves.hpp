// The moves of local search: small changes of a plan's cuts and device sets.
//
// Which stages and devices they look at is said in search_choices.hpp.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "instance.hpp"
#include "random.hpp"
#include "search_choices.hpp"
#include "search_groups.hpp"
#include "search_plan.hpp"

namespace pipeplan {

class Moves : public MoveChoices {
  public:
    Moves(const Instance& in, Random& random, bool makes_large_moves)
        : MoveChoices(in, random), makes_large_moves_(makes_large_moves),
          alike_(in, makes_large_moves), moves_groups_(alike_.are_worth_it()) {
        are_alike_ = moves_groups_;
    }

    // Whether devices that are alike move together.
    bool moves_groups() const { return moves_groups_; }

    // Makes one random move. False where it was not possible. The plan may be changed then too, but
    // not where another move was made before.
    bool make(SearchPlan& plan, Changes& changes) {
        edit(plan, changes);
        if (in_.has_memory() && in_.limits.may_recompute && random_.below(10) == 0) return flip_mode();
        if (in_.limits.any_shares && random_.below(10) == 0) return flip_split();
        if (moves_groups_ && random_.below(kOneInGroups) == 0) return move_group();
        if (!makes_large_moves_) return make_one_of(kMovesOfMany);
        return moves_groups_ ? make_one_of(kMovesOfAlike) : make_one_of(kMoves);
    }

    // A move that changes how many stages there are, or how many devices they have. The cuts are no
    // longer right then.
    bool make_large(SearchPlan& plan, Changes& changes) {
        edit(plan, changes);
        switch (random_.below(8)) {
            case 0: return split();
            case 1: case 2: case 3: return dissolve();
            case 4: case 5: return join();
            case 6: return use_unused();
            default: return move_device();
        }
    }
    // Puts all cuts but the last where they are said to be.
    void cut_all_at(SearchPlan& plan, Changes& changes, const std::vector<int>& cuts) {
        edit(plan, changes);
        for (int n = 0; n + 1 < num_stages(); ++n)
            if (stage(n).end_layer != cuts[n] || stage(n + 1).first_layer != cuts[n]) cut_at(n, cuts[n]);
    }
    // A move that mends a plan: mostly another device in the place of one.
    bool make_small(SearchPlan& plan, Changes& changes) {
        edit(plan, changes);
        switch (random_.below(8)) {
            case 0: return shift_cut();
            case 1: return swap_devices();
            default: return trade();
        }
    }

  private:
    // ------------------------------------------------------------ moves

    struct Weighted {
        bool (Moves::*move)();
        int weight;
    };
    template <int N>
    bool make_one_of(const Weighted (&moves)[N]) {
        int left = 0;
        for (const Weighted& one : moves) left += one.weight;
        left = random_.below(left);
        const Weighted* chosen = moves;
        while (left >= chosen->weight) left -= (chosen++)->weight;
        return (this->*chosen->move)();
    }

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

    // ------------------------------------------------------------ devices that are alike

    // The devices of one group in a stage, or all of them, take another place together.
    bool move_group() {
        if (is_changed()) return false;
        switch (random_.below(4)) {
            case 0: return exchange_groups();
            case 1: case 2: return trade_blocks();
            default: return move_block();
        }
    }

    // Two groups take each other's place in the whole plan, as far as both have devices.
    bool exchange_groups() {
        const int a = random_.below(alike_.num_groups()), b = random_.below(alike_.num_groups());
        if (a == b) return false;
        const std::vector<int>&one = alike_.group(a), &other = alike_.group(b);
        const std::size_t count = std::min(one.size(), other.size());
        return change_devices(0, num_stages() - 1, [&] {
            for (std::size_t k = 0; k < count; ++k) {
                const int from = stage_of_[one[k]], to = stage_of_[other[k]];
                if (from == to) continue;
                if (from >= 0) put_in_place(from, one[k], other[k]);
                if (to >= 0) put_in_place(to, other[k], one[k]);
            }
            return is_changed();
        });
    }

    // What a stage has of a group, and what another one has of another, take each other's place.
    bool trade_blocks() {
        const int n = any_stage(), u = stage(n).devices[random_.below(num_devices(n))];
        const int v = random_.below(in_.num_devices), m = stage_of_[v];
        if (m == n || alike_.group_of(u) == alike_.group_of(v)) return false;
        const std::vector<int> mine = block(alike_.group_of(u), n), theirs = block(alike_.group_of(v), m);
        return change_devices(m < 0 ? 0 : std::min(n, m), m < 0 ? num_stages() - 1 : std::max(n, m), [&] {
            for (int device : mine) remove(n, device);
            for (int device : theirs) {
                if (m >= 0) remove(m, device);
                add(n, device);
            }
            if (m >= 0) for (int device : mine) add(m, device);
            return true;
        });
    }

    // Some or all devices of a group leave a stage for another one.
    bool move_block() {
        const int u = random_.below(in_.num_devices), n = any_stage(), m = stage_of_[u];
        if (m == n) return false;
        std::vector<int> moved = block(alike_.group_of(u), m);
        if (random_.below(2)) moved.resize(1 + random_.below(static_cast<int>(moved.size())));
        if (m >= 0 && static_cast<int>(moved.size()) >= num_devices(m)) return false;
        return change_devices(m < 0 ? 0 : std::min(n, m), m < 0 ? num_stages() - 1 : std::max(n, m), [&] {
            for (int device : moved) {
                if (m >= 0) remove(m, device);
                add(n, device);
            }
            return true;
        });
    }

    // The devices of a group that a stage has; -1: those that no stage has.
    std::vector<int> block(int group, int n) const {
        std::vector<int> result;
        for (int u : alike_.group(group))
            if (stage_of_[u] == n) result.push_back(u);
        return result;
    }
    void put_in_place(int n, int old, int device) {
        remove(n, old);
        add(n, device);
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

    // A stage vanishes. Each of its devices goes to the stage that it suits best.
    bool dissolve() {
        if (num_stages() < 2) return false;
        const int n = random_.below(num_stages());
        const std::vector<int> devices = stage(n).devices;
        std::vector<int> goes_to;
        for (int device : devices) goes_to.push_back(best_stage(device, n));
        if (n > 0) stage(n - 1).end_layer = stage(n).end_layer;
        else stage(1).first_layer = 0;
        plan_->erase(plan_->begin() + n);
        changes_->is_resized = true;
        for (std::size_t k = 0; k < devices.size(); ++k)
            add(goes_to[k] < n ? goes_to[k] : goes_to[k] - 1, devices[k]);
        if (n > 0) forget_links_around(n - 1);
        else forget_around(0);
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

    // How often which move is made. Trades give most of what a search gains: with a fifth instead of
    // two fifths of them, plans on irregular clusters of 64 devices were 0.4 % slower.
    static constexpr Weighted kMoves[] = {
        {&Moves::shift_cut, 4},    {&Moves::move_device, 1}, {&Moves::swap_devices, 2},
        {&Moves::swap_sets, 4},    {&Moves::split, 1},       {&Moves::merge, 1},
        {&Moves::reverse_sets, 4}, {&Moves::use_unused, 2},  {&Moves::drop_device, 1},
        {&Moves::join, 6},         {&Moves::trade, 20},      {&Moves::move_device_and_cut, 3},
        {&Moves::divide_anew, 1}};
    // Where groups of devices move together: single ones that trade lead away from that.
    static constexpr Weighted kMovesOfAlike[] = {
        {&Moves::shift_cut, 3},    {&Moves::move_device, 2}, {&Moves::swap_devices, 1},
        {&Moves::swap_sets, 1},    {&Moves::split, 1},       {&Moves::merge, 1},
        {&Moves::reverse_sets, 1}, {&Moves::use_unused, 1},  {&Moves::drop_device, 1},
        {&Moves::join, 5},         {&Moves::trade, 5},       {&Moves::move_device_and_cut, 2},
        {&Moves::divide_anew, 1}};
    // On more than 64 devices.
    static constexpr Weighted kMovesOfMany[] = {
        {&Moves::shift_cut, 3},    {&Moves::move_device, 2}, {&Moves::swap_devices, 1},
        {&Moves::swap_sets, 1},    {&Moves::split, 1},       {&Moves::merge, 1},
        {&Moves::reverse_sets, 1}, {&Moves::use_unused, 1},  {&Moves::drop_device, 1},
        {&Moves::join, 4},         {&Moves::trade, 4}};
    static constexpr int kOneInGroups = 6;
    const bool makes_large_moves_;
    const AlikeDevices alike_;
    const bool moves_groups_;
    std::vector<std::uint8_t> used_;  // [devices]
};

}  // namespace pipeplan
