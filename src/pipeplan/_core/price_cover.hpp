// The least that the stages of a plan cost, if the plan takes no longer than a given time.
//
// Devices have prices (set_prices.hpp). A stage costs at least the price of its set. The recursion goes
// from the first layer to the last. It knows the price of the stages so far and their head: the time
// that a microbatch takes through them and back. The head decides how fast the next stage has to be.
// Plans are looked at apart by their round trip: a long one leaves little time for all the others.
// If all plans cost more than all devices together, none of them takes so little time.
//
// For each cut the heads form many ranges; each keeps the least price and the least head in it.
// Complexity: O(cuts^2 * (options + trips * ways * ranges)), with few ways of a stage.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "bound.hpp"
#include "set_prices.hpp"

namespace pipeplan {

// Sets that are alike for a stage, whatever their size.
struct CoverOption {
    double price, rate;
    double reduce_ms_per_byte;
    PricedSet set;  // one of them
};

// All sets of these sizes.
inline std::vector<CoverOption> cover_options(const Instance& in, const SetPrices& sets,
                                              const std::vector<double>& price,
                                              const std::vector<int>& sizes, bool finely) {
    std::vector<CoverOption> options;
    sets.for_sets(price, sizes, finely, [&](const PricedSet& set) {
        const Ring ring = make_ring(in, set.size, set.ring_rate, 0.0);
        options.push_back({set.price, set.rate, ring.ms_per_byte, set});
    });
    return options;
}

// Options as good as these, cheapest first; at most `most`. Where one is nearly as good as a cheaper one,
// that one stands for both, with the best of both.
inline std::vector<CoverOption> fewer_options(std::vector<CoverOption> options, std::size_t most) {
    std::sort(options.begin(), options.end(), [](const CoverOption& a, const CoverOption& b) {
        return a.price != b.price ? a.price < b.price : a.rate < b.rate;
    });
    // The cheaper ones that are not worse than others in both: rates rise, times a byte fall.
    struct Stair {
        double rate, reduce;
        std::size_t index;
    };
    std::vector<Stair> stairs;
    for (double slack = 1.0;; slack = 1.0 + 1.4 * (slack - 1.0) + 1e-3) {
        std::vector<CoverOption> kept;
        stairs.clear();
        for (const CoverOption& one : options) {
            const auto behind = std::upper_bound(
                stairs.begin(), stairs.end(), one.rate * slack,
                [](double rate, const Stair& stair) { return rate < stair.rate; });
            if (behind != stairs.begin() &&
                std::prev(behind)->reduce <= one.reduce_ms_per_byte * slack) {
                CoverOption& like = kept[std::prev(behind)->index];
                like.rate = std::min(like.rate, one.rate);
                like.reduce_ms_per_byte = std::min(like.reduce_ms_per_byte, one.reduce_ms_per_byte);
                continue;
            }
            const auto begin = std::lower_bound(
                stairs.begin(), stairs.end(), one.rate,
                [](const Stair& stair, double rate) { return stair.rate < rate; });
            auto end = begin;
            while (end != stairs.end() && end->reduce >= one.reduce_ms_per_byte) ++end;
            const auto place = stairs.erase(begin, end);
            stairs.insert(place, {one.rate, one.reduce_ms_per_byte, kept.size()});
            kept.push_back(one);
        }
        if (kept.size() <= most) return kept;
        if (slack == 1.0) options = std::move(kept);  // the others are never better
    }
}

class PriceCover {
  public:
    // `cuts` rise from 0 to the number of layers. No channel at a cut takes less than `channels` say.
    PriceCover(const Instance& in, std::vector<int> cuts, const std::vector<ChannelCosts>& channels,
               int num_trips, Control& control)
        : in_(in), cuts_(std::move(cuts)), num_(static_cast<int>(cuts_.size())),
          num_trips_(num_trips), M_(in.num_microbatches), control_(control) {
        for (int cut : cuts_) {
            const bool inside = cut > 0 && cut < in.num_layers;
            channel_ms_.push_back(inside ? channels[cut].there + channels[cut].back : 0.0);
        }
        find_forward_part(channels);
    }

    // The least price of a plan within the time; infinite if there is none. Only prices up to 1 count.
    double least_price(const std::vector<CoverOption>& options, double time_ms) {
        time_ms_ = time_ms * (1 + 1e-9);
        num_ranges_ = static_cast<int>(
            std::clamp<double>(kRangesTimesOptions / options.size(), kFewestRanges, kMostRanges));
        find_ways(options);
        chosen_.clear();
        double least = kInfinity;
        if (!(rest_[0] < time_ms_)) return least;
        const double first_ms = std::max(rest_[0], time_ms_ * kShortTrip);
        const double ratio = std::pow(time_ms_ / first_ms, 1.0 / num_trips_);
        for (int k = 0; k < num_trips_; ++k) {
            shortest_trip_ms_ = k ? longest_trip_ms_ : 0.0;
            longest_trip_ms_ = k + 1 == num_trips_ ? time_ms_ : first_ms * std::pow(ratio, k + 1);
            least = std::min(least, least_of_trips(least));
        }
        return least;
    }

    // The options of the plan that was the cheapest.
    const std::vector<int>& chosen() const { return chosen_; }
    double steps() const { return steps_; }

  private:
    static constexpr double kRangesTimesOptions = 4e4, kFewestRanges = 96, kMostRanges = 1000;
    static constexpr double kShortTrip = 0.02;

    struct Label {
        double price, head;
        int from, range, option;
    };

    // A stage between two cuts: how long it takes once and, in its slower direction, for all other
    // microbatches; and the longest head that it can have.
    struct Way {
        double price, once_ms, others_ms, longest;
        int option;
    };

    std::size_t at(int cut, int range) const {
        return static_cast<std::size_t>(cut) * num_ranges_ + range;
    }

    // Of every stage and channel at least this part is forwards, so this part of a head too.
    void find_forward_part(const std::vector<ChannelCosts>& channels) {
        forward_part_ = 1.0;
        for (int l = 0; l < in_.num_layers; ++l) {
            const double forward = in_.forward_ms.value(l), both = forward + in_.backward_ms.value(l);
            if (both > 0) forward_part_ = std::min(forward_part_, forward / both);
        }
        for (int cut = 1; cut < in_.num_layers; ++cut) {
            const double both = channels[cut].there + channels[cut].back;
            if (both > 0) forward_part_ = std::min(forward_part_, channels[cut].there / both);
        }
        forward_part_ *= 1 - 1e-9;
    }

    // All ways between all cuts, and the least time of a microbatch from each cut on and back.
    void find_ways(const std::vector<CoverOption>& options) {
        ways_.assign(static_cast<std::size_t>(num_) * num_, {});
        reach_.assign(num_, 0);
        rest_.assign(num_, kInfinity);
        rest_[num_ - 1] = 0.0;
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
                if (!list_ways(options, forward_ms, backward_ms, bytes, ways_[pair(from, to)])) break;
                reach_[from] = to;
                for (const Way& way : ways_[pair(from, to)])
                    rest_[from] =
                        std::min(rest_[from], way.once_ms + channel_ms_[to] + rest_[to]);
            }
        }
    }

    // False if no stage can do so much in time.
    bool list_ways(const std::vector<CoverOption>& options, double forward_ms, double backward_ms,
                   double bytes, std::vector<Way>& ways) {
        const double work_ms = forward_ms + backward_ms, slower_ms = std::max(forward_ms, backward_ms);
        bool any = false;
        for (std::size_t k = 0; k < options.size(); ++k) {
            const CoverOption& option = options[k];
            const double once_ms = option.rate * work_ms, left_ms = time_ms_ - M_ * once_ms;
            if (!(left_ms >= 0)) continue;
            any = true;
            const double to_reduce_ms = left_ms - option.reduce_ms_per_byte * bytes;
            if (!(to_reduce_ms >= 0)) continue;
            const double longest =
                forward_part_ > 0 ? std::min(left_ms, to_reduce_ms / forward_part_) : left_ms;
            // Cheaper ones come first.
            const bool is_worse = std::any_of(ways.begin(), ways.end(), [&](const Way& other) {
                return other.once_ms <= once_ms && other.longest >= longest;
            });
            if (!is_worse)
                ways.push_back({option.price, once_ms, (M_ - 1) * option.rate * slower_ms, longest,
                                static_cast<int>(k)});
        }
        return any;
    }

    // The least price of plans whose round trip lies between the shortest and the longest one. `known`
    // is a price that is reached already.
    double least_of_trips(double known) {
        labels_.assign(static_cast<std::size_t>(num_) * num_ranges_, {kInfinity, kInfinity, -1, -1, -1});
        labels_[0] = {0.0, 0.0, -1, -1, -1};
        for (int from = 0; from + 1 < num_; ++from) {
            control_.check();
            list_labels(from);
            if (occupied_.empty()) continue;
            for (int to = from + 1; to <= reach_[from]; ++to) {
                for (const Way& way : ways_[pair(from, to)]) {
                    if (shortest_trip_ms_ + way.others_ms > time_ms_) continue;
                    const double behind_ms = way.once_ms + channel_ms_[to];
                    put(from, to, way, std::min(way.longest, longest_trip_ms_ - behind_ms - rest_[to]));
                }
            }
        }
        const Label* best = nullptr;
        for (int k = 0; k < num_ranges_; ++k) {
            const Label& label = labels_[at(num_ - 1, k)];
            if (label.price < (best ? best->price : known)) best = &label;
        }
        if (!best) return kInfinity;
        chosen_.clear();
        for (const Label* label = best; label->option >= 0;
             label = &labels_[at(label->from, label->range)])
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

    void put(int from, int to, const Way& way, double longest_head) {
        const double more_ms = way.once_ms + channel_ms_[to];
        for (int k : occupied_) {
            const Label& label = labels_[at(from, k)];
            if (!(label.head <= longest_head)) break;  // those behind are longer
            const double cost = label.price + way.price, head = label.head + more_ms;
            steps_ += 1.0;
            if (cost > 1 + 1e-9) continue;
            const int range = std::min(
                num_ranges_ - 1, static_cast<int>(head / longest_trip_ms_ * num_ranges_));
            Label& known = labels_[at(to, range)];
            known.head = std::min(known.head, head);
            if (cost < known.price)
                known.price = cost, known.from = from, known.range = k, known.option = way.option;
        }
    }

    std::size_t pair(int from, int to) const { return static_cast<std::size_t>(from) * num_ + to; }

    const Instance& in_;
    const std::vector<int> cuts_;
    const int num_, num_trips_;
    const double M_;
    Control& control_;
    int num_ranges_ = 0;
    double time_ms_ = 0.0, forward_part_ = 0.0, steps_ = 0.0;
    double shortest_trip_ms_ = 0.0, longest_trip_ms_ = 0.0;
    std::vector<double> channel_ms_;       // [cut]
    std::vector<double> rest_;             // [cut]
    std::vector<int> reach_;               // [cut]: the last cut that a stage from here can reach
    std::vector<std::vector<Way>> ways_;   // [cut][cut]
    std::vector<Label> labels_;            // [cut][range]
    std::vector<int> occupied_;            // ranges of one cut
    std::vector<int> chosen_;
};

}  // namespace pipeplan
