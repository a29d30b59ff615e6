// A lower bound on every plan by prices of devices (price_cover.hpp has the recursion).
//
// Any prices give a bound. They start in proportion to speed, which is the work bound. Devices that the
// cheapest plans use more than once become dearer, all others cheaper (multiplicative weights, as in
// Arora, Hazan, Kale 2012). Once even the cheapest plan costs more than all devices, the time
// rises. Many layers take long, so prices are found on some cuts; what they prove is then shown on all.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels.hpp"
#include "price_cover.hpp"

namespace pipeplan {
namespace {

constexpr int kMostRounds = 40, kMostCuts = 128, kSearchSteps = 60, kProofSteps = 400, kProofRuns = 8;
constexpr std::size_t kMostRates = 1024;
// The proof lists ways for each pair of cuts: with 400 rates and 921 layers these were 3 GB. So with
// many cuts it looks at fewer rates, and with very many the bound stays as it was.
constexpr double kMostWays = 1e7;
constexpr int kMostProofCuts = 2000, kFewestProofSteps = 20;
constexpr double kRise = 1.01, kCloseEnough = 1.001, kFirstStep = 0.1, kSmallerSteps = 0.03, kMostUses = 4.0;

int proof_steps(const Instance& in) {
    const double pairs = 0.5 * in.num_layers * in.num_layers;
    return static_cast<int>(std::clamp<double>(kMostWays / pairs, kFewestProofSteps, kProofSteps));
}

std::vector<int> all_cuts(const Instance& in) {
    std::vector<int> cuts(in.num_layers + 1);
    std::iota(cuts.begin(), cuts.end(), 0);
    return cuts;
}

// Those after about equal parts of the work; all if there are few.
std::vector<int> some_cuts(const Instance& in) {
    if (in.num_layers <= kMostCuts) return all_cuts(in);
    const double part = (in.forward_sum.back() + in.backward_sum.back()) / kMostCuts;
    std::vector<int> cuts{0};
    double work_ms = 0.0;
    for (int l = 1; l <= in.num_layers; ++l) {
        work_ms += in.forward_ms.value(l - 1) + in.backward_ms.value(l - 1);
        if (work_ms >= part || l == in.num_layers) cuts.push_back(l), work_ms = 0.0;
    }
    return cuts;
}

class PriceSearch {
  public:
    PriceSearch(const Instance& in, const PricedSets& sets, Control& control)
        : in_(in), sets_(sets), cover_(in, sets, some_cuts(in), control), price_(in.speed) {
        const double sum = std::accumulate(price_.begin(), price_.end(), 0.0);
        for (double& one : price_) one /= sum;
    }

    // Prices that sum to 1 and show that no plan on these cuts takes `time_ms()` or less.
    std::vector<double> run(double proved_ms, double limit_ms, double steps) {
        std::vector<double> best = price_;
        double next_ms = proved_ms * kRise;
        time_ms_ = proved_ms;
        for (int round = 0; round < kMostRounds && time_ms_ < limit_ms && cover_.steps() < steps; ++round) {
            const std::vector<PricedOption> options = sets_.options(price_, kSearchSteps);
            bool is_dear = false;
            while (time_ms_ < limit_ms && !(cover_.least_price(options, next_ms) < kInfinity)) {
                time_ms_ = std::min(next_ms, limit_ms), next_ms = time_ms_ * kRise;
                is_dear = true;
            }
            if (is_dear) best = price_;
            make_dearer(options, kFirstStep / (1.0 + round * kSmallerSteps));
        }
        return best;
    }

    double time_ms() const { return time_ms_; }

  private:
    void make_dearer(const std::vector<PricedOption>& options, double step) {
        std::vector<double> used(price_.size(), 0.0);
        for (int k : cover_.chosen())
            sets_.use(options[k], price_, sets_.next_rate(options[k], kSearchSteps), used);
        double sum = 0.0;
        for (std::size_t u = 0; u < price_.size(); ++u) {
            price_[u] *= std::exp(step * (std::min(used[u], kMostUses) - 1.0));
            sum += price_[u];
        }
        for (double& one : price_) one /= sum;
    }

    const Instance& in_;
    const PricedSets& sets_;
    PriceCover cover_;
    std::vector<double> price_;
    double time_ms_ = 0.0;
};

}  // namespace

double price_bound(const Instance& in, double proved_ms, double limit_ms, double steps, Control& control) {
    in.require_proportional();
    if (!(proved_ms > 0) || !(limit_ms < kInfinity) || !(proved_ms < limit_ms)) return proved_ms;
    if (in.num_layers > kMostProofCuts) return proved_ms;
    const BestLinks best(in, kMostRates, control);
    const PricedSets sets(in, best);
    PriceSearch search(in, sets, control);
    const std::vector<double> price = search.run(proved_ms, limit_ms, steps);
    const std::vector<PricedOption> options = sets.options(price, proof_steps(in));
    PriceCover cover(in, sets, all_cuts(in), control);
    double within_ms = search.time_ms(), open_ms = limit_ms * (1 + 1e-9);
    for (int run = 0; run < kProofRuns && cover.steps() < steps; ++run) {
        if (cover.least_price(options, within_ms) < kInfinity) open_ms = within_ms;
        else proved_ms = std::max(proved_ms, within_ms);
        if (open_ms <= proved_ms * kCloseEnough) break;
        within_ms = open_ms <= limit_ms ? std::sqrt(proved_ms * open_ms)
                                        : std::min(limit_ms, proved_ms * kRise);
    }
    return std::min(proved_ms, limit_ms);
}

}  // namespace pipeplan
