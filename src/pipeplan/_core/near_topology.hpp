// Small sets of devices one by one, larger ones only by their size, for the recursion in
// suffix_dp.hpp.
//
// A node says how much of the devices is used: each device has a price, in proportion to its speed,
// and only the sum counts (device_budget.hpp). A small set has its own ring, and its own links to the
// small sets that share no device with it. A larger set has a class of speed, and the best links of
// its size. So a device may serve twice, but not in neighbouring stages. Whatever real plans do is
// possible here too, so the least bound is one for every plan. Where shares may be any, a larger set
// has a price, and is as fast as any devices of that price together.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "best_links.hpp"
#include "crossings.hpp"
#include "device_budget.hpp"
#include "shared_best.hpp"
#include "suffix_dp.hpp"

namespace pipeplan {

class NearTopology {
  public:
    static constexpr bool kKnowsFreeSets = true;
    static constexpr int kMostDevices = 64;

    // Sets of up to `largest_known` devices are looked at one by one.
    NearTopology(const Instance& in, const BestLinks& best, const SharedBest& shared,
                 const DeviceBudget& prices, int largest_known)
        : in_(in), best_(best), shared_(shared), prices_(prices), latency_ms_(least_latency_ms(in)) {
        options_.push_back({});  // no set
        for (int u = 0; u < in.num_devices; ++u) sorted_speed_.push_back(in.speed[u]);
        std::sort(sorted_speed_.begin(), sorted_speed_.end(), std::greater<double>());
        add_known({}, 0, largest_known);
        if (in.limits.any_shares) add_crews(largest_known);
        else for (int size = largest_known + 1; size <= in.num_devices; ++size) add_sizes(size);
        for (int size = 0; size <= in.num_devices && in.limits.any_shares; ++size) {
            sending_.push_back(best.summed_rates(size, true));
            receiving_.push_back(best.summed_rates(size, false));
        }
        links_.reserve(options_.size() * options_.size());
        for (const Option& one : options_)
            for (const Option& next : options_) links_.push_back(links_between(one, next));
    }

    int num_nodes() const { return prices_.num_nodes(); }
    int num_options() const { return static_cast<int>(options_.size()); }
    bool may_end(int node) const { return node == 0; }
    int attach(int node, int option) const {
        if (option == 0 || node + options_[option].price >= num_nodes()) return -1;
        return node + options_[option].price;
    }
    int detach(int node, int option) const { return node - options_[option].price; }
    const DeviceSet& set(int, int option) const { return options_[option].set; }
    void enter(int) {}
    LinkPair links(int, int option, int next) const { return {&link(option, next), &link(next, option)}; }
    double head_speed(int) const { return 0.0; }
    bool may_follow(int option, int next) const { return link(option, next).connected(); }

    // The devices of an option, one bit each; none if only its size is known.
    std::uint64_t bits(int option) const { return options_[option].bits; }
    bool is_known(int option) const { return options_[option].bits != 0; }
    // A set of which only the size is known may have any device.
    bool contains(int, int option, int device) const {
        return !is_known(option) || (options_[option].bits >> device & 1);
    }
    std::vector<std::vector<int>> devices(const std::vector<int>& options) const {
        std::vector<std::vector<int>> result;
        for (int option : options) result.push_back(options_[option].members);
        return result;
    }

  private:
    struct Option {
        DeviceSet set{0, {0.0, 0.0, 0.0}, {0.0, 0.0, false}, {}};
        std::uint64_t bits = 0;
        std::vector<int> members = {};  // in the order of the devices; none if only its size is known
        int price = 0;
    };

    static double least_latency_ms(const Instance& in) {
        double least = kInfinity;
        for (int u = 0; u < in.num_devices; ++u)
            for (int v = 0; v < in.num_devices; ++v)
                if (u != v) least = std::min(least, in.latency_ms(u, v));
        return least;
    }

    int price_of(double speed) const {
        for (std::size_t c = prices_.classes().size(); c-- > 0;)
            if (speed <= prices_.classes()[c].fastest) return prices_.classes()[c].price;
        return prices_.classes()[0].price;
    }

    // The set of `chosen` and of all larger sets with later devices.
    void add_known(std::vector<int> chosen, int first, int largest) {
        if (!chosen.empty()) add_set(chosen);
        if (static_cast<int>(chosen.size()) == largest) return;
        for (int u = first; u < in_.num_devices; ++u) {
            chosen.push_back(u);
            add_known(chosen, u + 1, largest);
            chosen.pop_back();
        }
    }

    void add_set(const std::vector<int>& devices) {
        Option option;
        option.members = devices;
        std::vector<double> speeds;
        double slowest = kInfinity, latency_ms = 0.0;
        for (int u : devices) {
            option.bits |= std::uint64_t{1} << u;
            option.price += price_of(in_.speed[u]);
            speeds.push_back(in_.speed[u]);
            for (int v : devices) {
                if (u == v) continue;
                slowest = std::min(slowest, in_.bytes_per_ms(u, v));
                latency_ms = std::max(latency_ms, in_.latency_ms(u, v));
            }
        }
        if (in_.shared) slowest = std::min(slowest, members_of_links(devices).ring_rate());
        std::sort(speeds.begin(), speeds.end(), std::greater<double>());
        const int size = static_cast<int>(devices.size());
        option.set = device_set(size, speeds, make_ring(in_, size, slowest, latency_ms), devices);
        if (option.set.ring.connected) options_.push_back(option);
    }

    // All sets of a size whose slowest device is of a class, for each class.
    void add_sizes(int size) {
        const double rate = std::min(best_.ring_rate(size), shared_.ring_rate(size));
        const Ring ring = make_ring(in_, size, rate, latency_ms_);
        if (!ring.connected) return;
        int num_faster = 0;  // devices in this class and in faster ones
        for (const SpeedClass& one : prices_.classes()) {
            num_faster += one.num_devices;
            if (num_faster < size) continue;
            // No device is faster than the fastest of all; `size` of them are at most this fast.
            std::vector<double> speeds(sorted_speed_.begin(), sorted_speed_.begin() + size);
            speeds.back() = std::min(speeds.back(), one.fastest);
            Option option;
            option.set = device_set(size, speeds, ring, {});
            option.price = size * one.price;
            options_.push_back(option);
        }
    }

    // With any shares: larger sets by size and price. Of one size, prices that are near each other form
    // one option: the least price, and the highest speed.
    void add_crews(int largest_known) {
        constexpr std::size_t kMostOptions = 6;  // of one size
        std::vector<std::vector<DeviceBudget::Crew>> by_size(in_.num_devices + 1);
        for (DeviceBudget::Crew& crew : prices_.crews(std::min(in_.num_devices, in_.max_replicas)))
            by_size[crew.size].push_back(std::move(crew));
        for (int size = largest_known + 1; size <= in_.num_devices; ++size) {
            const std::vector<DeviceBudget::Crew>& crews = by_size[size];  // both numbers rise
            const double ring_rate = std::min(best_.ring_rate(size), shared_.ring_rate(size));
            const Ring ring = make_ring(in_, size, ring_rate, latency_ms_);
            const std::size_t num = std::min(kMostOptions, crews.size());
            for (std::size_t k = 0; k < num && ring.connected; ++k) {
                Option option;
                option.set = any_set(size, std::vector<double>(size, sorted_speed_[0]), ring, {});
                double& rate = option.set.shares.compute_rate;
                const double speed = crews[(k + 1) * crews.size() / num - 1].speed;
                rate = std::max(rate, (1 - kShareRounding) / speed);
                option.price = crews[k * crews.size() / num].cost;
                options_.push_back(option);
            }
        }
    }

    // With any shares: all devices together hold a microbatch, and each the least share of it.
    DeviceSet any_set(int size, const std::vector<double>& speeds, const Ring& ring,
                      const std::vector<int>& devices) const {
        const Shares shares = any_shares(in_, speeds);
        DeviceSet set{size, shares, ring, {}};
        if (!in_.has_memory()) return set;
        std::vector<double> bytes = in_.limits.memory_bytes;
        std::sort(bytes.begin(), bytes.end(), std::greater<double>());
        bytes.resize(size);  // those with the most
        for (std::size_t k = 0; k < devices.size(); ++k) bytes[k] = in_.limits.memory_bytes[devices[k]];
        const double least = devices.empty() ? bytes[0] : *std::min_element(bytes.begin(), bytes.end());
        set.room = {{1.0, std::accumulate(bytes.begin(), bytes.end(), 0.0), size}, {shares.least, least}};
        return set;
    }

    // `speeds` fall. `devices` are empty if only the size is known.
    DeviceSet device_set(int size, const std::vector<double>& speeds, const Ring& ring,
                         const std::vector<int>& devices) const {
        if (in_.limits.any_shares) return any_set(size, speeds, ring, devices);
        const int more = num_with_more_samples(in_, size);
        const double slowest = speeds.back(), of_more = more ? speeds[more - 1] : slowest;
        const Shares shares = whole_or_even_shares(in_, size, slowest, of_more);
        return {size, shares, ring, room_of(devices, shares), even_shares(size, slowest).compute_rate,
                more ? whole_rate(in_, size, slowest, of_more) : 0.0};
    }

    // At best: the devices with a sample more may be those with the most memory.
    Room room_of(const std::vector<int>& devices, const Shares& shares) const {
        if (!in_.has_memory()) return {};
        const std::vector<double>& bytes = in_.limits.memory_bytes;
        double most = *std::max_element(bytes.begin(), bytes.end()), least = most;
        if (!devices.empty()) most = 0.0, least = kInfinity;
        for (int u : devices) most = std::max(most, bytes[u]), least = std::min(least, bytes[u]);
        if (shares.least == shares.even) return {{shares.even, least}};
        return {{shares.even, most}, {shares.least, least}};
    }

    LinkSet links_between(const Option& senders, const Option& receivers) const {
        LinkSet links;
        SummedLinks together;
        const int a = senders.set.num_devices, b = receivers.set.num_devices;
        if (a == 0 || b == 0 || a + b > in_.num_devices || (senders.bits & receivers.bits)) {
            links.insert(Link{kInfinity, 0.0});
        } else if (senders.bits && receivers.bits) {
            for (int u : senders.members) {
                for (int v : receivers.members) {
                    const Link link = link_between(in_, u, v);
                    links.insert(link);
                    if (in_.limits.any_shares) together.insert(link);
                }
            }
            if (in_.shared)
                insert_crossings(*in_.shared, members_of_links(senders.members),
                                 members_of_links(receivers.members), links);
        } else {
            const Rates rates = senders.bits     ? rates_to_others(senders, b, true)
                                : receivers.bits ? rates_to_others(receivers, a, false)
                                                 : Rates{best_.transfer_rate(a, b), summed_rate(a, b)};
            links.insert(rates.slowest > 0 ? Link{latency_ms_, 1.0 / rates.slowest} : Link{kInfinity, 0.0});
            links.insert_best({latency_ms_, 1.0 / best_.best_rate()});
            if (const double crossing = in_.limits.any_shares ? 0.0 : shared_.crossing(a, b))
                links.insert_shared({shared_.latency_ms(), crossing});
            if (rates.together > 0) together.insert({latency_ms_, 1.0 / rates.together});
        }
        if (in_.limits.any_shares) links.raise_whole(together.link());
        return links;
    }

    MemberCounts members_of_links(const std::vector<int>& devices) const {
        MemberCounts counts(*in_.shared);
        for (int u : devices) counts.add(u);
        return counts;
    }

    // No links from one set to another are faster: the slowest of them, and all together.
    struct Rates {
        double slowest, together;
    };

    // Between all devices of a set and so many others, at best.
    Rates rates_to_others(const Option& option, int num_others, bool sends) const {
        std::vector<double> slowest, sums;
        for (int v = 0; v < in_.num_devices; ++v) {
            if (option.bits >> v & 1) continue;
            double least = kInfinity, sum = 0.0;
            for (int u : option.members) {
                const double there = in_.bytes_per_ms(u, v), back = in_.bytes_per_ms(v, u);
                const double rate = there > 0 && back > 0 ? (sends ? there : back) : 0.0;
                least = std::min(least, rate), sum += rate;
            }
            slowest.push_back(least), sums.push_back(sum);
        }
        std::sort(slowest.begin(), slowest.end(), std::greater<double>());
        std::sort(sums.begin(), sums.end(), std::greater<double>());
        return {slowest[num_others - 1], std::accumulate(sums.begin(), sums.begin() + num_others, 0.0)};
    }

    // From so many devices to so many others, whichever they are.
    double summed_rate(int num_senders, int num_receivers) const {
        if (!in_.limits.any_shares) return 0.0;
        return std::min(sending_[num_receivers][num_senders], receiving_[num_senders][num_receivers]);
    }

    const LinkSet& link(int option, int next) const {
        return links_[static_cast<std::size_t>(option) * options_.size() + next];
    }

    const Instance& in_;
    const BestLinks& best_;
    const SharedBest& shared_;
    const DeviceBudget& prices_;
    const double latency_ms_;  // the least of all links
    std::vector<double> sorted_speed_;
    std::vector<Option> options_;
    std::vector<std::vector<double>> sending_, receiving_;  // [others][devices], rates together
    std::vector<LinkSet> links_;  // [option][option]
};

}  // namespace pipeplan
