// The best cuts for the devices of a plan, nearly: local search asks for this where many cuts have to
// move at once, as where a stage vanishes.
//
// Costs are taken in proportion: a stage's work, its all-reduce and its transfers keep their time a
// unit of work or a byte. For some time T stages are filled one after the other, from the first on:
// each takes as many layers as it can do until T, behind the heads of section 4 of theory.md. The
// least T for which this reaches the last layer is found by halving.
#pragma once
#include <algorithm>
#include <vector>

#include "instance.hpp"
#include "search_plan.hpp"

namespace pipeplan {

class BalancedCuts {
  public:
    explicit BalancedCuts(const Instance& in)
        : in_(in), forward_(in.num_layers + 1), work_(in.num_layers + 1), bytes_(in.num_layers + 1) {
        double bytes = 0.0;
        for (int l = 0; l <= in.num_layers; ++l) {
            forward_[l] = in.forward_sum[l];
            work_[l] = in.forward_sum[l] + in.backward_sum[l];
            bytes_[l] = bytes;
            if (l < in.num_layers) bytes += in.parameter_bytes.value(l);
        }
    }

    // The ends of all stages but the last one; empty where there is no way below `most_ms`. All costs
    // of the plan have to be known.
    const std::vector<int>& find(const SearchPlan& plan, double most_ms) {
        measure(plan);
        cuts_.clear();
        double least_ms = 0.0;
        for (int step = 0; step < kSteps; ++step) {
            const double ms = step == 0 ? most_ms : 0.5 * (least_ms + most_ms);
            if (fill_until(ms)) most_ms = ms, cuts_.swap(filled_);
            else if (step == 0) break;
            else least_ms = ms;
            if (step == 0) least_ms = kLeast * most_ms;
        }
        return cuts_;
    }

  private:
    static constexpr int kSteps = 9;
    static constexpr double kLeast = 0.75;  // below this part of what is asked for nothing is looked for

    struct Rates {
        double work, reduce, there, back;
    };
    void measure(const SearchPlan& plan) {
        rates_.clear();
        for (const SearchStage& stage : plan) {
            const int first = stage.first_layer, end = stage.end_layer;
            const double work = work_[end] - work_[first], bytes = bytes_[end] - bytes_[first];
            const double output = in_.output_bytes[end - 1], gradient = in_.gradient_bytes[end - 1];
            rates_.push_back({part(stage.costs.forward + stage.costs.backward, work),
                              part(stage.costs.all_reduce, bytes), part(stage.channel.there, output),
                              part(stage.channel.back, gradient)});
            if (!(work > 0)) rates_.back().work = 1.0 / joint_speed(in_, stage);
        }
    }
    static double part(double ms, double of) { return of > 0 ? ms / of : 0.0; }

    bool fill_until(double ms) {
        const int S = static_cast<int>(rates_.size()), L = in_.num_layers;
        const double M = in_.num_microbatches;
        filled_.clear();
        double there = 0.0, both = 0.0;
        for (int n = 0, first = 0; n < S; ++n) {
            const Rates& rate = rates_[n];
            const auto fits = [&](int end) {
                const double reduce = rate.reduce * (bytes_[end] - bytes_[first]);
                return M * rate.work * (work_[end] - work_[first]) + std::max(both, there + reduce) <= ms;
            };
            if (n + 1 == S) return fits(L);
            if (!fits(first + 1)) return false;
            int end = first + 1;
            for (int step = 1, most = L - (S - 1 - n); end < most;) {  // gallop, then one by one
                if (end + step <= most && fits(end + step)) end += step, step *= 2;
                else if (step > 1) step = 1;
                else break;
            }
            const double sent = rate.there * in_.output_bytes[end - 1];
            const double returned = rate.back * in_.gradient_bytes[end - 1];
            there += rate.work * (forward_[end] - forward_[first]) + sent;
            both += rate.work * (work_[end] - work_[first]) + sent + returned;
            if (both + (M - 1) * std::max(sent, returned) > ms) return false;
            filled_.push_back(first = end);
        }
        return false;
    }

    const Instance& in_;
    std::vector<double> forward_, work_, bytes_;  // [layers + 1], of the layers in front
    std::vector<Rates> rates_;                    // [stages]
    std::vector<int> cuts_, filled_;
};

}  // namespace pipeplan
