// Cuts that follow the devices of a plan that local search changes.
//
// A device that leaves a stage leaves its work to the others there. Where a stage has four devices,
// each of them then has a third more to do, and nearly every such move is rejected. So the cuts move
// with the device: every stage between keeps its work for a device, in other layers. On irregular
// clusters of 64 devices this halved what plans lose against long searches.
#pragma once
#include <algorithm>
#include <vector>

#include "instance.hpp"
#include "search_plan.hpp"

namespace pipeplan {

class FollowingCuts {
  public:
    explicit FollowingCuts(const Instance& in) : in_(in), work_(in.num_layers + 1) {
        for (int l = 0; l <= in.num_layers; ++l) work_[l] = in.forward_sum[l] + in.backward_sum[l];
    }

    // Before devices of the stages from `low` to `high` change.
    void remember(const SearchPlan& plan, int low, int high) {
        low_ = low;
        want_.clear();
        for (int n = low; n <= high; ++n) want_.push_back(joint_speed(in_, plan[n]));
    }
    int num_remembered() const { return static_cast<int>(want_.size()); }

    // After that: calls `cut_at(n, layer)` for each cut between these stages that moves. The work of
    // a stage changes as the speed of its devices has, up to a factor that is the same for all.
    template <class CutAt>
    void follow(const SearchPlan& plan, const CutAt& cut_at) {
        const int high = low_ + num_remembered() - 1;
        const int first = plan[low_].first_layer, end = plan[high].end_layer;
        double wanted = 0.0;
        for (int n = low_; n <= high; ++n) {
            double& want = want_[n - low_];
            want = work_between(plan[n].first_layer, plan[n].end_layer) * joint_speed(in_, plan[n]) / want;
            wanted += want;
        }
        if (!(wanted > 0)) return;
        const double scale = work_between(first, end) / wanted;
        double work = work_[first];
        for (int n = low_, layer = first; n < high; ++n) {
            work += want_[n - low_] * scale;
            layer = nearest_cut(work, layer + 1, end - (high - n));
            if (layer != plan[n].end_layer || layer != plan[n + 1].first_layer) cut_at(n, layer);
        }
    }

    // The cut from `least` to `most` before which there is about so much work.
    int nearest_cut(double work, int least, int most) const {
        const auto begin = work_.begin();
        const int cut = static_cast<int>(
            std::lower_bound(begin + least, begin + most, work) - begin);
        return cut > least && work - work_[cut - 1] < work_[cut] - work ? cut - 1 : cut;
    }
    // All the work before a layer.
    double work_before(int layer) const { return work_[layer]; }

  private:
    double work_between(int first, int end) const { return work_[end] - work_[first]; }

    const Instance& in_;
    std::vector<double> work_;  // [layers + 1], of the layers before
    int low_ = 0;
    std::vector<double> want_;  // [stages that are remembered]: their speed, then the work they want
};

}  // namespace pipeplan
