// Which device suits a stage, by all the links that it would use there: local search asks for this.
//
// On random links a device that suits the ring of a stage rarely suits its two neighbours, too. So
// all three count at once, in milliseconds: the all-reduce and the two transfers that the stage would
// have with this device. A device that comes from another stage leaves its place to the one that
// goes, and what this costs there counts as well. All this is an estimate to choose by; the search
// then evaluates the plan.
#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>

#include "instance.hpp"
#include "search_plan.hpp"

namespace pipeplan {

class FittingDevices {
  public:
    static constexpr int kMostDevices = 256;

    explicit FittingDevices(const Instance& in)
        : in_(in), width_((in.num_devices + kLanes - 1) / kLanes * kLanes) {
        if (!is_known()) return;
        tabulate_links();
        parameter_sum_.assign(in.num_layers + 1, 0.0f);
        double sum = 0.0;
        for (int l = 0; l < in.num_layers; ++l)
            parameter_sum_[l + 1] = static_cast<float>(sum += in.parameter_bytes.value(l));
        for (auto* one : {&own_, &before_, &behind_, &cost_}) one->resize(width_);
    }
    bool is_known() const { return in_.num_devices <= kMostDevices; }

    // The plan that is changed, and how long the all-reduce of each stage may take without harm.
    void start_from(const SearchPlan& plan, const std::vector<double>& allowed_ms) {
        const int S = static_cast<int>(plan.size());
        stages_.resize(S), of_device_.resize(S + 2);
        for (int n = 0; n < S; ++n) {
            const SearchStage& stage = plan[n];
            Present& one = stages_[n];
            one.ring_bytes = ring_bytes(stage, static_cast<int>(stage.devices.size()));
            one.allowed_ms = static_cast<float>(allowed_ms[n]);
            one.channel_bytes = n + 1 < S ? channel_bytes(stage, plan[n + 1]) : 0.0f;
            one.channel_ms =
                n + 1 < S ? static_cast<float>(stage.channel.there + stage.channel.back) : 0.0f;
            one.ring_ms = static_cast<float>(stage.costs.all_reduce);
        }
    }

    // What stage n of `plan` would take for its all-reduce and its transfers with each of the devices.
    // The result is valid until the next call.
    const std::vector<float>& costs_of_joining(const SearchPlan& plan, int n) {
        const int S = static_cast<int>(plan.size());
        const SearchStage& stage = plan[n];
        const int k = static_cast<int>(stage.devices.size()) + 1;
        worst_links(stage.devices, own_);
        std::fill(cost_.begin(), cost_.end(), 0.0f);
        const Present& present = stages_[n];
        const bool is_hidden = present.allowed_ms > kHidden * present.ring_ms;
        add_costs(own_, ring_bytes(stage, k), is_hidden ? present.allowed_ms : 0.0f);
        if (n > 0) {
            worst_links(plan[n - 1].devices, before_);
            add_costs(before_, stages_[n - 1].channel_bytes, 0.0f);
        }
        if (n + 1 < S) {
            worst_links(plan[n + 1].devices, behind_);
            add_costs(behind_, present.channel_bytes, 0.0f);
        }
        return cost_;
    }

    // What each stage loses if a device takes the place of one of its own. [stages]
    const std::vector<float>& losses_by(int device, const std::vector<int>& stage_of) {
        const int S = static_cast<int>(stages_.size());
        const float* slowness = row(device);
        std::fill(of_device_.begin(), of_device_.end(), 0.0f);
        float* worst = of_device_.data() + 1;
        for (int v = 0; v < in_.num_devices; ++v)
            if (stage_of[v] >= 0) worst[stage_of[v]] = std::max(worst[stage_of[v]], slowness[v]);
        losses_.resize(S);
        for (int n = 0; n < S; ++n) {
            const Present& one = stages_[n];
            float loss = more(one.ring_bytes * worst[n], one.allowed_ms);
            loss += more(one.channel_bytes * worst[n + 1], one.channel_ms);
            if (n > 0) loss += more(stages_[n - 1].channel_bytes * worst[n - 1], stages_[n - 1].channel_ms);
            losses_[n] = loss;
        }
        return losses_;
    }

    // Rows of the table that a call of costs_of_joining looks at.
    int num_pairs(const SearchPlan& plan, int n) const {
        std::size_t rows = plan[n].devices.size();
        if (n > 0) rows += plan[n - 1].devices.size();
        if (n + 1 < static_cast<int>(plan.size())) rows += plan[n + 1].devices.size();
        return static_cast<int>(rows) * width_ / kPairsAtOnce;
    }

  private:
    static constexpr int kLanes = 16, kPairsAtOnce = 12;
    static constexpr float kNoPath = 1e20f;  // finite: nothing times it is nothing
    static constexpr float kHidden = 1.05f;  // an all-reduce with so much room does not count

    struct Present {
        float ring_bytes, ring_ms, allowed_ms, channel_bytes, channel_ms;
    };

    static float more(float ms, float than_ms) { return std::max(0.0f, ms - than_ms); }
    const float* row(int u) const { return slowness_.data() + static_cast<std::size_t>(u) * width_; }

    // Of a ring of so many devices, what its slowest link carries.
    float ring_bytes(const SearchStage& stage, int num_devices) const {
        const float bytes = parameter_sum_[stage.end_layer] - parameter_sum_[stage.first_layer];
        return 2.0f * (num_devices - 1) / num_devices * bytes;
    }
    float channel_bytes(const SearchStage& here, const SearchStage& there) const {
        const double bytes = in_.output_bytes[here.end_layer - 1] + in_.gradient_bytes[here.end_layer - 1];
        return static_cast<float>(bytes / (static_cast<double>(here.devices.size()) * there.devices.size()));
    }

    // For each device the slowest of its links to a set, in ms a byte.
    void worst_links(const std::vector<int>& devices, std::vector<float>& worst) const {
        std::fill(worst.begin(), worst.end(), 0.0f);
        float* into = worst.data();
        for (int v : devices) {
            const float* slowness = row(v);
            for (int u = 0; u < width_; ++u) into[u] = into[u] < slowness[u] ? slowness[u] : into[u];
        }
    }
    void add_costs(const std::vector<float>& worst, float bytes, float least_ms) {
        const float* from = worst.data();
        float* into = cost_.data();
        for (int u = 0; u < width_; ++u) {
            const float ms = bytes * from[u];
            into[u] += ms < least_ms ? least_ms : ms;
        }
    }

    // The slower way of each link; small enough to stay near the processor.
    void tabulate_links() {
        const int V = in_.num_devices;
        slowness_.assign(static_cast<std::size_t>(V) * width_, 0.0f);
        for (int u = 0; u < V; ++u)
            for (int v = 0; v < V; ++v) {
                if (u == v) continue;
                const double rate = std::min(in_.bytes_per_ms(u, v), in_.bytes_per_ms(v, u));
                slowness_[static_cast<std::size_t>(u) * width_ + v] =
                    rate > 0 ? static_cast<float>(1 / rate) : kNoPath;
            }
    }

    const Instance& in_;
    const int width_;                        // devices, rounded up
    std::vector<float> slowness_;            // [devices][width], ms a byte
    std::vector<float> parameter_sum_;       // [layers + 1]
    std::vector<Present> stages_;            // of the plan that is changed
    std::vector<float> own_, before_, behind_, cost_;  // [width]
    std::vector<float> of_device_, losses_;  // [stages + 2], [stages]
};

}  // namespace pipeplan
