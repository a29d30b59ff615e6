// Changes of a plan that local search makes, and what is no longer known of it after each of them.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "search_plan.hpp"

namespace pipeplan {

// Which part of a plan a move has touched.
struct Changes {
    int num_front, num_back;   // stages in front and at the back whose costs and channels stayed
    bool is_resized;           // stages were added or removed
    std::vector<int> stages;   // the touched ones, once each, unless resized
    int num_pairs;             // of devices that were looked at

    void reset(const SearchPlan& plan) {
        num_front = num_back = static_cast<int>(plan.size());
        is_resized = false;
        num_pairs = 0;
        for (int n : stages) is_touched_[n] = false;
        stages.clear();
    }
    void touch(const SearchPlan& plan, int n) {
        num_front = std::min(num_front, n);
        num_back = std::min(num_back, static_cast<int>(plan.size()) - 1 - n);
        if (is_touched_.size() < plan.size()) is_touched_.resize(plan.size(), false);
        if (is_touched_[n]) return;
        is_touched_[n] = true;
        stages.push_back(n);
    }

  private:
    std::vector<char> is_touched_;  // [stages]
};

class PlanEdits {
  protected:
    // The plan that the next changes are made to, and where they are noted.
    void edit(SearchPlan& plan, Changes& changes) { plan_ = &plan, changes_ = &changes; }
    int num_devices(int n) { return static_cast<int>(stage(n).devices.size()); }
    int num_stages() const { return static_cast<int>(plan_->size()); }
    SearchStage& stage(int n) { return (*plan_)[n]; }

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

    // ------------------------------------------------------------ devices and cuts

    void add(int n, int device) {
        stage(n).devices.push_back(device);
        forget_around(n);
    }
    // Takes out a device of a stage; what is known of the links of the others stays.
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
    void exchange(int a, int b) {
        std::swap(stage(a).devices, stage(b).devices);
        std::swap(stage(a).inside, stage(b).inside);
    }
    void cut_at(int n, int cut) {
        stage(n).end_layer = stage(n + 1).first_layer = cut;
        stage(n).costs_known = false;
        forget_channel(n);
        forget_costs(n + 1);
    }

    SearchPlan* plan_ = nullptr;
    Changes* changes_ = nullptr;
};

}  // namespace pipeplan
