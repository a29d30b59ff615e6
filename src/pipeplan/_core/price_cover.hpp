// The least that the stages of a plan cost, if the plan takes no longer than a given time.
//
// Devices have prices (priced_sets.hpp). The recursion goes from the first layer to the last. It knows
// what the stages so far cost, and their head: the time that a microbatch takes through them and back. A
// long head leaves little time for the next stage, which then has to be fast, and dear. Plans are looked
// at apart by their round trip: a long one leaves little time for all other microbatches.
// If every plan costs more than all devices together, none takes so little time (docs/theory.md).
//
// For each cut the heads form ranges; each keeps the least price and the least head in it.
// Complexity: O(cuts^2 * (options + trips * ranges * ways)), with few ways of a stage.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "control.hpp"
#include "priced_sets.hpp"

namespace pipeplan {

class PriceCover {
  public:
    // `cuts` rise from 0 to the number of layers; only these are looked at.
    PriceCover(const Instance& in, const PricedSets& sets, std::vector<int> cuts, Control& control)
        : in_(in), cuts_(std::move(cuts)), num_(static_cast<int>(cuts_.size())),
          num_ranges_(std::clamp(kRangesTimesCuts / num_, kFewestRanges, kMostRanges)),
          num_trips_(num_ranges_ / 128), M_(in.num_microbatches), control_(control) {
        find_channels(sets);
    }

    // The least price of a plan within the time; infinite if none costs 1 or less.
    double least_price(const std::vector<PricedOption>& options, double time_ms) {
        time_ms_ = time_ms * (1 + 1e-9);
        chosen_.clear();
        find_ways(options);
        if (!(cheapest_[0] <= kAll)) return kInfinity;
        const double first_ms = std::max(shortest_[0], time_ms_ * kShortTrip);
        if (!(shortest_[0] <= time_ms_)) return kInfinity;
        const double ratio = std::pow(time_ms_ / first_ms, 1.0 / num_trips_);
        double least = kInfinity;
        longest_trip_ms_ = 0.0;
        for (int k = 0; k < num_trips_; ++k) {
            shortest_trip_ms_ = longest_trip_ms_;
            longest_trip_ms_ = k + 1 == num_trips_ ? time_ms_ : first_ms * std::pow(ratio, k + 1);
            least = std::min(least, least_of_trips(least));
        }
        return least;
    }

    // The options of the cheapest plan.
    const std::vector<int>& chosen() const { return chosen_; }
    double steps() const { return steps_; }

  private:
    static constexpr int kFewestRanges = 256, kMostRanges = 1024, kRangesTimesCuts = 50'000;
    static constexpr double kShortTrip = 0.05, kAll = 1 + 1e-9, kNextWay = 0.98;

    struct Label {
        double price = kInfinity, head = kInfinity;
        int from = -1, range = -1, option = -1;
    };

    // A stage between two cuts: how long it takes once, and the longest head that it can have.
    struct Way {
        double price, once_ms, longest;
        int option;
    };

    std::size_t at(int cut, int range) const { return static_cast<std::size_t>(cut) * num_ranges_ + range; }
    std::size_t pair(int from, int to) const { return static_cast<std::size_t>(from) * num_ + to; }

    // No transfer takes less: some pair of devices carries the product of their shares, at best over
    // the best link. And of every stage and channel at least a part is forwards, so of a head too.
    void find_channels(const PricedSets& sets) {
        const double k = sets.most_replicas();
        double share = 1.0 / k;
        if (in_.limits.whole_samples) share = std::ceil(in_.microbatch_size / k) / in_.microbatch_size;
        const double part = share * share * (1 - 1e-8);
        forward_part_ = 1.0;
        for (int cut : cuts_) {
            const bool inside = cut > 0 && cut < in_.num_layers && sets.best_rate() > 0;
            double there = 0.0, back = 0.0;
            if (inside) {
                there = sets.least_latency_ms() + part * in_.output_bytes[cut - 1] / sets.best_rate();
                back = sets.least_latency_ms() + part * in_.gradient_bytes[cut - 1] / sets.best_rate();
            }
            channel_ms_.push_back(there + back);
            if (there + back > 0) forward_part_ = std::min(forward_part_, there / (there + back));
        }
        for (int l = 0; l < in_.num_layers; ++l) {
            const double forward = in_.forward_ms.value(l), both = forward + in_.backward_ms.value(l);
            if (both > 0) forward_part_ = std::min(forward_part_, forward / both);
        }
        forward_part_ *= 1 - 1e-9;
    }

    // All ways between all cuts; from each cut on the least price, and the least time of a microbatch.
    void find_ways(const std::vector<PricedOption>& options) {
        ways_.resize(static_cast<std::size_t>(num_) * num_);
        slower_part_.resize(ways_.size());
        reach_.assign(num_, 0);
        cheapest_.assign(num_, kInfinity);
        shortest_.assign(num_, kInfinity);
        cheapest_[num_ - 1] = shortest_[num_ - 1] = 0.0;
        for (int from = num_ - 1; from-- > 0;) {
            control_.check();
            double forward_ms = 0.0, backward_ms = 0.0, bytes = 0.0;
            reach_[from] = from;
            for (int to = from + 1; to < num_; ++to) {
                for (int l = cuts_[to - 1]; l < cuts_[to]; ++l) {
                    forward_ms += in_.forward_ms.value(l);
                    backward_ms += in_.backward_ms.value(l);
                    bytes += in_.parameter_bytes.value(l);
                }
                const double work_ms = forward_ms + backward_ms;
                std::vector<Way>& ways = ways_[pair(from, to)];
                if (!list_ways(options, work_ms, bytes, ways)) break;
                reach_[from] = to;
                slower_part_[pair(from, to)] =
                    work_ms > 0 ? std::max(forward_ms, backward_ms) / work_ms : 0.0;
                if (ways.empty()) continue;
                double fastest = kInfinity;
                for (const Way& way : ways) fastest = std::min(fastest, way.once_ms);
                cheapest_[from] = std::min(cheapest_[from], ways[0].price + cheapest_[to]);
                shortest_[from] = std::min(shortest_[from], fastest + channel_ms_[to] + shortest_[to]);
            }
        }
    }

    // False if no stage can do so much in time, with whatever ring. Cheaper ones come first.
    bool list_ways(const std::vector<PricedOption>& options, double work_ms, double bytes,
                   std::vector<Way>& ways) {
        ways.clear();
        bool any = false;
        for (std::size_t k = 0; k < options.size(); ++k) {
            const PricedOption& option = options[k];
            const double once_ms = option.rate * work_ms, left_ms = time_ms_ - M_ * once_ms;
            if (!(left_ms >= 0)) continue;
            any = true;
            const double to_reduce_ms =
                left_ms - option.reduce_ms_per_byte * bytes - option.reduce_fixed_ms;
            if (!(to_reduce_ms >= 0)) continue;
            const double head =
                forward_part_ > 0 ? std::min(left_ms, to_reduce_ms / forward_part_) : left_ms;
            const bool is_worse = std::any_of(ways.rbegin(), ways.rend(), [&](const Way& other) {
                return other.once_ms <= once_ms && other.longest >= head;
            });
            if (!is_worse) ways.push_back({option.price, once_ms, head, static_cast<int>(k)});
        }
        steps_ += static_cast<double>(options.size());
        return any;
    }

    // The least price of plans whose round trip lies between the shortest and the longest one, if it
    // is below `known`.
    double least_of_trips(double known) {
        labels_.assign(static_cast<std::size_t>(num_) * num_ranges_, {});
        labels_[0].price = labels_[0].head = 0.0;
        for (int from = 0; from + 1 < num_; ++from) {
            control_.check();
            list_labels(from);
            for (int to = from + 1; to <= reach_[from] && !occupied_.empty(); ++to) extend(from, to);
        }
        const Label* best = nullptr;
        for (int k = 0; k < num_ranges_; ++k) {
            const Label& label = labels_[at(num_ - 1, k)];
            if (label.price < (best ? best->price : known)) best = &label;
        }
        if (!best) return kInfinity;
        chosen_.clear();
        for (const Label* label = best; label->option >= 0; label = &labels_[at(label->from, label->range)])
            chosen_.push_back(label->option);
        return best->price;
    }

    // The ranges of a cut with a label; heads rise, and those behind are cheaper.
    void list_labels(int cut) {
        occupied_.clear();
        double least = kInfinity;
        for (int k = 0; k < num_ranges_; ++k) {
            if (!(labels_[at(cut, k)].price < least)) continue;
            least = labels_[at(cut, k)].price;
            occupied_.push_back(k);
        }
    }

    // Puts one more stage behind all labels of a cut.
    void extend(int from, int to) {
        const std::vector<Way>& ways = ways_[pair(from, to)];
        const double slower = slower_part_[pair(from, to)] * (M_ - 1), behind_ms = shortest_[to];
        if (!(behind_ms < kInfinity)) return;
        std::size_t first = 0;
        for (int k : occupied_) {
            const Label label = labels_[at(from, k)];
            const auto is_possible = [&](const Way& way) {
                return way.longest >= label.head && shortest_trip_ms_ + slower * way.once_ms <= time_ms_;
            };
            while (first < ways.size() && !is_possible(ways[first])) ++first;  // nor with a longer head
            double fastest = kInfinity;
            for (std::size_t w = first; w < ways.size(); ++w) {
                const Way& way = ways[w];
                if (way.once_ms >= fastest) continue;
                const double price = label.price + way.price;
                steps_ += 1.0;
                if (price + cheapest_[to] > kAll) break;  // those behind are dearer
                // It stands for all that are a little faster, and costs less.
                fastest = kNextWay * way.once_ms;
                const double head = label.head + fastest + channel_ms_[to];
                if (head + behind_ms <= longest_trip_ms_) put(from, k, to, way.option, price, head);
            }
        }
    }

    void put(int from, int range, int to, int option, double price, double head) {
        const int k = std::min(num_ranges_ - 1, static_cast<int>(head / longest_trip_ms_ * num_ranges_));
        Label& known = labels_[at(to, k)];
        known.head = std::min(known.head, head);
        if (price < known.price) known = {price, known.head, from, range, option};
    }

    const Instance& in_;
    const std::vector<int> cuts_;
    const int num_, num_ranges_, num_trips_;
    const double M_;
    Control& control_;
    double time_ms_ = 0.0, forward_part_ = 0.0, steps_ = 0.0;
    double shortest_trip_ms_ = 0.0, longest_trip_ms_ = 0.0;
    std::vector<double> channel_ms_;          // [cut]
    std::vector<double> cheapest_, shortest_; // [cut], of what lies behind
    std::vector<int> reach_;                  // [cut]: the last cut that a stage from here can reach
    std::vector<std::vector<Way>> ways_;      // [cut][cut]
    std::vector<double> slower_part_;         // [cut][cut], of the work: the slower direction
    std::vector<Label> labels_;               // [cut][range]
    std::vector<int> occupied_;               // ranges of one cut
    std::vector<int> chosen_;
};

}  // namespace pipeplan
