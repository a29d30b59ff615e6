// What the relaxed bound knows of a cluster: for each size of sets the ways to staff a stage, the
// links between sizes, and which devices each way uses up.
#pragma once
#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

#include "best_links.hpp"
#include "bound.hpp"
#include "device_budget.hpp"
#include "links.hpp"
#include "memory.hpp"
#include "shared_best.hpp"

namespace pipeplan {

// What one size of sets, or a group of neighbouring sizes, has at best.
struct SizeGroup {
    int smallest, largest;
    Shares shares;  // the least of all sizes; the compute rate is the choice's
};

// A way to staff a stage.
struct Choice {
    int group;
    Demand first, second;  // devices with fewer and with more samples
    double rate;           // no such stage computes in less than its work times this
    Ring ring;
    Room room;             // no such stage has more
    DeviceBudget::Crew crew = {};  // where shares may be any: instead of demands
};

struct Step {
    int from;
    int choice;
};

// The tables that all runs share.
class RelaxedTables {
  public:
    // `every_size`: whether each size of a group has choices of its own, which takes longer.
    RelaxedTables(const Instance& in, const std::vector<int>& buckets, const BestLinks& best,
                  const SharedBest& shared, const DeviceBudget& budget, bool every_size)
        : in_(in), shared_(shared), budget_(budget), samples_(in.microbatch_size),
          latency_ms_(least_latency_ms(in)) {
        for (std::size_t k = 0; k < buckets.size(); ++k) {
            const int smallest = k ? buckets[k - 1] + 1 : 1;
            if (in.limits.any_shares) groups_.push_back({smallest, buckets[k], group_shares(buckets[k])});
            else add_group(smallest, buckets[k], best, every_size);
        }
        if (in.limits.any_shares) add_crews(best);
        tabulate_links(best);
        tabulate_channels();
        tabulate_steps();
    }

    int num_groups() const { return static_cast<int>(groups_.size()); }
    int num_nodes() const { return budget_.num_nodes(); }
    const std::vector<Choice>& choices() const { return choices_; }
    // All ways to get to a node by a stage of this group.
    const std::vector<Step>& steps(int node, int group) const {
        return steps_[static_cast<std::size_t>(node) * num_groups() + group];
    }
    bool connected(int group, int next) const {
        return link(group, next).connected() && link(next, group).connected();
    }
    ChannelCosts channel(int group, int next, int cut) const {
        const Shares &mine = groups_[group].shares, &theirs = groups_[next].shares;
        const double least = mine.least * theirs.least, even = mine.even * theirs.even;
        const double output = in_.output_bytes[cut - 1], gradient = in_.gradient_bytes[cut - 1];
        return {link(group, next).transfer_ms(least * output, even * output, output),
                link(next, group).transfer_ms(least * gradient, even * gradient, gradient)};
    }
    // No channel at this cut takes less in either direction; nothing in front of the first layer.
    const ChannelCosts& least_channel(int cut) const { return least_channel_[cut]; }

  private:
    static double least_latency_ms(const Instance& in) {
        double least = kInfinity;
        for (int u = 0; u < in.num_devices; ++u)
            for (int v = 0; v < in.num_devices; ++v)
                if (u != v) least = std::min(least, in.latency_ms[in.at(u, v)]);
        return least;
    }

    Ring best_ring(int size, const BestLinks& best) const {
        return make_ring(in_, size, std::min(best.ring_rate(size), shared_.ring_rate(size)), latency_ms_);
    }

    void add_group(int smallest, int largest, const BestLinks& best, bool every_size) {
        const int group = num_groups(), num_classes = static_cast<int>(budget_.classes().size());
        Shares shares = even_shares(largest, 1.0);
        for (int size = smallest; size <= largest; ++size) {
            const Ring ring = best_ring(size, best);
            if (!ring.connected) continue;
            if (num_with_more_samples(in_, size) > 0)
                shares.least = std::min(shares.least, fewest_samples(size) / samples_);
            for (int c = 0; c < num_classes && (every_size || smallest == largest); ++c)
                add_choices(group, size, c, ring);
        }
        groups_.push_back({smallest, largest, shares});
        if (every_size || smallest == largest) return;
        // As few devices as the smallest size, as fast as the largest.
        const Ring ring = best_ring(smallest, best);
        for (int c = 0; c < num_classes && ring.connected; ++c)
            add_choice({group, {c, smallest}, {0, 0}, shares.least / budget_.classes()[c].fastest, ring,
                        room(shares.least, shares.least)});
    }

    // The slowest device is of class c. Exactly even shares, or whole samples: then those with a
    // sample more may be of a faster class.
    void add_choices(int group, int size, int c, const Ring& ring) {
        const std::vector<SpeedClass>& classes = budget_.classes();
        const int fewer = fewest_samples(size), more = num_with_more_samples(in_, size);
        const bool splits = !in_.limits.whole_samples || more == 0;
        double best = splits ? even_shares(size, classes[c].fastest).compute_rate
                             : (fewer + 1) / samples_ / classes[c].fastest;
        // Exactly even shares count for whole samples too, unless samples may not be split.
        const double least = more ? fewer / samples_ : 1.0 / size;
        const Room most = room(splits ? 1.0 / size : (fewer + 1) / samples_, least);
        add_choice({group, {c, size}, {0, 0}, best, ring, most});
        for (int d = c - 1; d >= 0 && more > 0; --d) {
            const double rate = std::max(fewer / samples_ / classes[c].fastest,
                                         (fewer + 1) / samples_ / classes[d].fastest);
            if (!(rate < best)) continue;
            best = rate;
            add_choice({group, {c, size - more}, {d, more}, rate, ring, most});
        }
    }

    // Every device counts as if it had the most memory of all.
    Room room(double more_share, double fewer_share) const {
        if (!in_.has_memory()) return {};
        const std::vector<double>& bytes = in_.limits.memory_bytes;
        const double most = *std::max_element(bytes.begin(), bytes.end());
        return {{more_share, most}, {fewer_share, most}};
    }

    // With any shares, for sets of up to this size.
    Shares group_shares(int largest) const {
        Shares shares = any_shares(in_, std::vector<double>(largest, 1.0));
        if (!in_.limits.whole_samples) return shares;
        shares.least = largest > 1 ? (1 - kShareRounding) / samples_ : 1.0;
        return shares;
    }

    // With any shares, every crew that the devices could form.
    void add_crews(const BestLinks& best) {
        const int most = std::min(in_.num_devices, in_.max_replicas);
        const double fastest = *std::max_element(in_.speed.begin(), in_.speed.end());
        for (const DeviceBudget::Crew& crew : budget_.crews(most)) {
            const Ring ring = best_ring(crew.size, best);
            if (!ring.connected) continue;
            int group = 0;
            while (groups_[group].largest < crew.size) ++group;
            const Shares some = crew.speeds.empty() ? group_shares(crew.size) : any_shares(in_, crew.speeds);
            const double rate = std::max({(1 - kShareRounding) / crew.speed, some.even / fastest,
                                          crew.speeds.empty() ? 0.0 : some.compute_rate});
            add_choice({group, {0, 0}, {0, 0}, rate, ring, pooled_room(crew.size, some.least), crew});
        }
    }

    // As many devices with the most memory.
    Room pooled_room(int size, double least_share) const {
        if (!in_.has_memory()) return {};
        std::vector<double> bytes = in_.limits.memory_bytes;
        std::sort(bytes.begin(), bytes.end(), std::greater<double>());
        const double all = std::accumulate(bytes.begin(), bytes.begin() + size, 0.0);
        return {{1.0, all, size}, {least_share, bytes[0]}};
    }

    int fewest_samples(int size) const { return in_.microbatch_size / size; }

    void add_choice(const Choice& choice) {
        if (use(0, choice) >= 0) choices_.push_back(choice);
    }

    int use(int node, const Choice& choice) const {
        if (choice.crew.size > 0) return budget_.take(node, choice.crew);
        // The pickier demand goes first; it leaves the slower devices.
        if (choice.second.count > 0) node = budget_.use(node, choice.second);
        return node < 0 ? -1 : budget_.use(node, choice.first);
    }

    const LinkSet& link(int group, int next) const {
        return links_[static_cast<std::size_t>(group) * num_groups() + next];
    }

    void tabulate_links(const BestLinks& best) {
        for (const SizeGroup& senders : groups_) {
            for (const SizeGroup& receivers : groups_) {
                const double rate = best.transfer_rate(senders.smallest, receivers.smallest);
                LinkSet set;
                set.insert(rate > 0 ? Link{latency_ms_, 1.0 / rate} : Link{kInfinity, 0.0});
                if (best.best_rate() > 0) set.insert_best({latency_ms_, 1.0 / best.best_rate()});
                const double crossing = least_crossing(senders, receivers);
                if (crossing > 0) set.insert_shared({shared_.latency_ms(), crossing});
                links_.push_back(set);
            }
        }
        if (in_.limits.any_shares) insert_whole_links(best);
    }

    // With any shares: all links between two groups of sizes together.
    void insert_whole_links(const BestLinks& best) {
        std::vector<std::vector<double>> sending, receiving;  // by the number of others
        for (const SizeGroup& others : groups_) {
            sending.push_back(best.summed_rates(others.largest, true));
            receiving.push_back(best.summed_rates(others.largest, false));
        }
        for (int group = 0; group < num_groups(); ++group) {
            for (int next = 0; next < num_groups(); ++next) {
                const double rate = std::min(sending[next][groups_[group].largest],
                                             receiving[group][groups_[next].largest]);
                SummedLinks together;
                if (rate > 0) together.insert({latency_ms_, 1.0 / rate});
                links_[static_cast<std::size_t>(group) * num_groups() + next].insert_whole(together.link());
            }
        }
    }

    // What shared links cost each pair at least, if each carries the least share of its group.
    double least_crossing(const SizeGroup& senders, const SizeGroup& receivers) const {
        if (in_.limits.any_shares) return 0.0;  // a pair may carry next to nothing
        double least = kInfinity;
        for (int a = senders.smallest; a <= senders.largest; ++a) {
            for (int b = receivers.smallest; b <= receivers.largest && a + b <= in_.num_devices; ++b) {
                const double parts = least_share(a) / senders.shares.least * least_share(b) /
                                     receivers.shares.least;
                least = std::min(least, shared_.crossing(a, b) * parts);
            }
        }
        return least < kInfinity ? least : 0.0;
    }

    double least_share(int size) const {
        return num_with_more_samples(in_, size) > 0 ? fewest_samples(size) / samples_ : 1.0 / size;
    }

    void tabulate_channels() {
        least_channel_.assign(in_.num_layers, {kInfinity, kInfinity});
        least_channel_[0] = {0.0, 0.0};
        for (int cut = 1; cut < in_.num_layers; ++cut) {
            ChannelCosts& least = least_channel_[cut];
            for (int group = 0; group < num_groups(); ++group) {
                for (int next = 0; next < num_groups(); ++next) {
                    if (!connected(group, next)) continue;
                    const ChannelCosts one = channel(group, next, cut);
                    least.there = std::min(least.there, one.there);
                    least.back = std::min(least.back, one.back);
                }
            }
        }
    }

    void tabulate_steps() {
        steps_.resize(static_cast<std::size_t>(num_nodes()) * num_groups());
        for (int node = 0; node < num_nodes(); ++node) {
            for (int k = 0; k < static_cast<int>(choices_.size()); ++k) {
                const int after = use(node, choices_[k]);
                if (after < 0) continue;
                steps_[static_cast<std::size_t>(after) * num_groups() + choices_[k].group].push_back(
                    {node, k});
            }
        }
    }

    const Instance& in_;
    const SharedBest& shared_;
    const DeviceBudget& budget_;
    const double samples_;     // of a microbatch
    const double latency_ms_;  // the least of all links
    std::vector<SizeGroup> groups_;
    std::vector<Choice> choices_;
    std::vector<LinkSet> links_;               // [group][group]
    std::vector<ChannelCosts> least_channel_;  // [cut]
    std::vector<std::vector<Step>> steps_;     // [node][group]
};

}  // namespace pipeplan
