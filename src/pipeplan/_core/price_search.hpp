// Prices of devices that make all plans within a time dear: devices that many stages want cost more.
//
// Any prices give a bound (price_cover.hpp), so nothing here has to be exact: only some cuts and sizes
// are looked at. The devices that the cheapest plans use more than once become dearer, all others
// cheaper (multiplicative weights). Once even the cheapest plan costs more than all devices together,
// the time rises.
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "price_cover.hpp"

namespace pipeplan {

class PriceSearch {
  public:
    PriceSearch(const Instance& in, const SetPrices& sets, const std::vector<ChannelCosts>& channels,
                Control& control)
        : in_(in), sets_(sets), V_(in.num_devices),
          cover_(in, some_cuts(in), channels, kTrips, control), weight_(in.speed), used_(V_, 1.0) {
        const double sum = std::accumulate(weight_.begin(), weight_.end(), 0.0);
        for (double& one : weight_) one /= sum;  // as in the work bound
        for (int size = 1; size <= std::min(V_, in.max_replicas); size += size < 8 ? 1 : size / 4)
            sizes_.push_back(size);
    }

    // Prices that add up to 1. No plan is known to take less than `proved_ms`.
    std::vector<double> run(double proved_ms, double limit_ms) {
        std::vector<double> best = weight_;
        time_ms_ = proved_ms;
        for (int round = 0; round < kRounds && time_ms_ < limit_ms && cover_.steps() < kSteps; ++round) {
            const std::vector<CoverOption> options =
                fewer_options(cover_options(in_, sets_, weight_, sizes_, false), kOptions);
            bool is_dear = false;
            while (time_ms_ < limit_ms && cover_.least_price(options, time_ms_) > 1.0)
                time_ms_ *= kRise, is_dear = true;
            if (is_dear) best = weight_;
            make_dearer(options, kFirstStep / (1.0 + round * kSmallerSteps));
        }
        return best;
    }

    // How far it got, without proof.
    double time_ms() const { return time_ms_; }

  private:
    static constexpr int kRounds = 40, kMostCuts = 64, kTrips = 4, kOptions = 100;
    static constexpr double kRise = 1.01, kSteps = 1e7;
    static constexpr double kFirstStep = 0.15, kSmallerSteps = 0.03, kNews = 0.1, kMostUses = 4.0;

    // All cuts, or those after about equal parts of the work.
    static std::vector<int> some_cuts(const Instance& in) {
        const double all = in.forward_sum.back() + in.backward_sum.back();
        std::vector<int> cuts{0};
        for (int l = 1; l <= in.num_layers; ++l) {
            const int last = cuts.back();
            const double part =
                in.forward_sum[l] + in.backward_sum[l] - in.forward_sum[last] - in.backward_sum[last];
            if (in.num_layers <= kMostCuts || part * kMostCuts >= all || l == in.num_layers)
                cuts.push_back(l);
        }
        return cuts;
    }

    // `used_` is an average over the last rounds.
    void make_dearer(const std::vector<CoverOption>& options, double step) {
        for (double& one : used_) one *= 1 - kNews;
        for (int option : cover_.chosen())
            for (int u : sets_.cheapest_devices(options[option].set, weight_)) used_[u] += kNews;
        double sum = 0.0;
        for (int u = 0; u < V_; ++u) {
            weight_[u] *= std::exp(step * (std::min(used_[u], kMostUses) - 1.0));
            sum += weight_[u];
        }
        for (double& one : weight_) one /= sum;
    }

    const Instance& in_;
    const SetPrices& sets_;
    const int V_;
    PriceCover cover_;
    std::vector<int> sizes_;
    std::vector<double> weight_;  // of the devices; they add up to 1
    std::vector<double> used_;    // how often each device served
    double time_ms_ = 0.0;
};

}  // namespace pipeplan
