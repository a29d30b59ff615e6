// The computing time of a stage.
//
// In general it is in proportion to the share of its devices. Where layers were measured at several
// microbatch sizes, the time of n samples is linear between two neighbouring sizes, and each device
// counts with its own samples.
#pragma once
#include <algorithm>
#include <vector>

#include "instance.hpp"

namespace pipeplan {

// Devices with the same share: the slowest of them counts.
struct Pace {
    double share, slowest_speed;
};

// One for each share; only where layers were measured at several sizes.
inline std::vector<Pace> paces_of(const Instance& in, const std::vector<int>& devices,
                                  const std::vector<double>& shares) {
    std::vector<Pace> paces;
    if (!in.has_measured()) return paces;
    for (std::size_t i = 0; i < devices.size(); ++i) {
        const double speed = in.speed[devices[i]];
        const auto same = std::find_if(paces.begin(), paces.end(),
                                       [&](const Pace& pace) { return pace.share == shares[i]; });
        if (same == paces.end()) paces.push_back({shares[i], speed});
        else same->slowest_speed = std::min(same->slowest_speed, speed);
    }
    return paces;
}

struct ForwardBackward {
    double forward, backward;
};

// The times of layers [first, end); with `recomputes` the backward runs the forward once more.
inline ForwardBackward measured_work(const Instance& in, const std::vector<Pace>& paces, int first,
                                     int end, bool recomputes) {
    ForwardBackward longest{0.0, 0.0};
    for (const Pace& pace : paces) {
        const SizeMix mix = in.size_mix(pace.share);
        const double forward = in.forward_at(mix, first, end);
        double backward = in.backward_at(mix, first, end);
        if (recomputes) backward += forward;
        longest.forward = std::max(longest.forward, forward / pace.slowest_speed);
        longest.backward = std::max(longest.backward, backward / pace.slowest_speed);
    }
    return longest;
}

// Adds up the layers of a stage one by one.
class StageWork {
  public:
    StageWork(const Instance& in, double rate, const std::vector<Pace>& paces)
        : in_(in), rate_(rate), paces_(paces), sums_(paces.size(), {0.0, 0.0}) {
        for (const Pace& pace : paces) mixes_.push_back(in.size_mix(pace.share));
    }
    void add(int layer) {
        if (paces_.empty()) {
            forward_ms_ += in_.forward_ms.value(layer);
            backward_ms_ += in_.backward_ms.value(layer);
            return;
        }
        for (std::size_t k = 0; k < paces_.size(); ++k) {
            sums_[k].forward += in_.forward_at(mixes_[k], layer, layer + 1);
            sums_[k].backward += in_.backward_at(mixes_[k], layer, layer + 1);
        }
    }
    double forward() const {
        double longest = rate_ * forward_ms_;
        for (std::size_t k = 0; k < paces_.size(); ++k)
            longest = std::max(longest, sums_[k].forward / paces_[k].slowest_speed);
        return longest;
    }
    double backward() const {
        double longest = rate_ * backward_ms_;
        for (std::size_t k = 0; k < paces_.size(); ++k)
            longest = std::max(longest, sums_[k].backward / paces_[k].slowest_speed);
        return longest;
    }

  private:
    const Instance& in_;
    const double rate_;
    const std::vector<Pace>& paces_;
    std::vector<SizeMix> mixes_;
    std::vector<ForwardBackward> sums_;
    double forward_ms_ = 0.0, backward_ms_ = 0.0;
};

}  // namespace pipeplan
