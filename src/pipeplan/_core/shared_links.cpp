// Validation of shared links, and the sides that a flow uses.
#include "shared_links.hpp"

#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

namespace pipeplan {

SharedLinks::SharedLinks(std::vector<std::vector<int>> members,
                         const std::vector<double>& out_bytes_per_ms,
                         const std::vector<double>& in_bytes_per_ms, std::vector<int> host_of,
                         const std::vector<double>& out_latency_ms,
                         const std::vector<double>& in_latency_ms)
    : host_of_(std::move(host_of)), position_(host_of_.size()) {
    const auto refuse = [](const std::string& message) { throw std::invalid_argument(message); };
    if (out_bytes_per_ms.size() != members.size() || in_bytes_per_ms.size() != members.size())
        refuse("shared links: one capacity in each direction for each link");
    for (const std::vector<double>* latencies : {&out_latency_ms, &in_latency_ms})
        if (!latencies->empty() && latencies->size() != members.size())
            refuse("shared links: one latency in each direction for each link");
    std::vector<std::vector<int>> links_of(host_of_.size());
    for (std::size_t l = 0; l < members.size(); ++l) {
        for (double capacity : {out_bytes_per_ms[l], in_bytes_per_ms[l]}) {
            if (!(capacity > 1e-60 && capacity <= 1e60))
                refuse("shared links: a capacity is not above zero, or not finite");
            capacity_.push_back(capacity);
        }
        for (const std::vector<double>* latencies : {&out_latency_ms, &in_latency_ms}) {
            latency_ms_.push_back(latencies->empty() ? 0.0 : (*latencies)[l]);
            if (!(latency_ms_.back() >= 0 && latency_ms_.back() <= 1e60))
                refuse("shared links: a latency is below zero, or not finite");
        }
        for (int u : members[l]) {
            if (u < 0 || u >= num_devices()) refuse("shared links: a member is no device");
            if (links_of[u].empty() || links_of[u].back() != static_cast<int>(l))
                links_of[u].push_back(static_cast<int>(l));
        }
    }
    std::iota(position_.begin(), position_.end(), 0);
    std::map<int, int> size_of_host;
    for (int host : host_of_) ++size_of_host[host];
    for (std::vector<int>& mine : members) {
        std::sort(mine.begin(), mine.end());
        mine.erase(std::unique(mine.begin(), mine.end()), mine.end());
        const bool is_on_one = std::all_of(mine.begin(), mine.end(), [&](int u) {
            return host_of_[u] == host_of_[mine[0]];
        });
        are_whole_hosts_ = are_whole_hosts_ && !mine.empty() && is_on_one &&
                           static_cast<int>(mine.size()) == size_of_host[host_of_[mine[0]]];
    }
    std::map<std::vector<int>, int> class_of_links;
    for (const std::vector<int>& links : links_of) {
        const auto found = class_of_links.emplace(links, static_cast<int>(links_of_class_.size()));
        if (found.second) links_of_class_.push_back(links);
        class_of_.push_back(found.first->second);
    }
}

SharedLinks SharedLinks::on_devices(const std::vector<int>& order) const {
    SharedLinks result;
    result.capacity_ = capacity_;
    result.latency_ms_ = latency_ms_;
    result.are_whole_hosts_ = are_whole_hosts_;
    result.links_of_class_ = links_of_class_;
    for (int u : order) {
        result.class_of_.push_back(class_of_.at(u));
        result.host_of_.push_back(host_of_.at(u));
        result.position_.push_back(position_.at(u));
    }
    return result;
}

std::vector<int> SharedLinks::sides_between(int class_from, int class_to) const {
    const std::vector<int>& from = links_of_class_[class_from];
    const std::vector<int>& to = links_of_class_[class_to];
    std::vector<int> only_from, only_to;
    std::set_difference(from.begin(), from.end(), to.begin(), to.end(), std::back_inserter(only_from));
    std::set_difference(to.begin(), to.end(), from.begin(), from.end(), std::back_inserter(only_to));
    std::vector<int> sides;
    for (int l : only_from) sides.push_back(2 * l);
    for (int l : only_to) sides.push_back(2 * l + 1);
    return sides;
}

std::vector<int> SharedLinks::ring(std::vector<int> devices) const {
    const auto is_before = [&](int u, int v) { return position_[u] < position_[v]; };
    std::sort(devices.begin(), devices.end(), is_before);
    std::map<int, int> first_of_host;  // the position of its first device
    for (int u : devices) first_of_host.emplace(host_of_[u], position_[u]);
    std::stable_sort(devices.begin(), devices.end(), [&](int u, int v) {
        return first_of_host[host_of_[u]] < first_of_host[host_of_[v]];
    });
    return devices;
}

SharedLinks::LeastTimes SharedLinks::least_times(const std::vector<int>& devices,
                                                 const std::vector<double>& shares,
                                                 const std::vector<int>& next_devices,
                                                 const std::vector<double>& next_shares,
                                                 double there_bytes, double back_bytes) const {
    struct Part {  // of a microbatch, that the link's members have in a stage
        double share = 0.0;
        std::size_t num_devices = 0;
    };
    struct Parts {
        int link;
        Part before, behind;
    };
    std::vector<Parts> parts;
    const auto add = [&](int link, double share, Part Parts::*side) {
        auto found = std::find_if(parts.begin(), parts.end(),
                                  [&](const Parts& each) { return each.link == link; });
        if (found == parts.end()) found = parts.insert(parts.end(), Parts{link, {}, {}});
        Part& part = (*found).*side;
        part.share += share, ++part.num_devices;
    };
    for (std::size_t i = 0; i < devices.size(); ++i)
        for (int link : links_of(devices[i])) add(link, shares[i], &Parts::before);
    for (std::size_t i = 0; i < next_devices.size(); ++i)
        for (int link : links_of(next_devices[i])) add(link, next_shares[i], &Parts::behind);
    // What is not the members'. Counted, because all shares together may be a little less than 1.
    const auto rest = [](const Part& part, std::size_t num_devices) {
        return part.num_devices < num_devices ? std::max(0.0, 1.0 - part.share) : 0.0;
    };
    LeastTimes least{0.0, 0.0};
    for (const Parts& each : parts) {
        const double leaves = each.before.share * rest(each.behind, next_devices.size());
        const double enters = each.behind.share * rest(each.before, devices.size());
        count(least, each.link, leaves * there_bytes, enters * there_bytes, enters * back_bytes,
              leaves * back_bytes);
    }
    return least;
}

SharedLinks::LeastTimes SharedLinks::least_times(const std::vector<int>& devices,
                                                 const std::vector<int>& next_devices,
                                                 double there_bytes, double back_bytes) const {
    // Kept between calls: searches ask millions of times.
    struct Members {
        int before = 0, behind = 0;
    };
    thread_local std::vector<Members> members;
    thread_local std::vector<int> touched;
    if (static_cast<int>(members.size()) < num_links()) members.resize(num_links());
    touched.clear();
    const auto add = [&](int device, int Members::*side) {
        for (int link : links_of(device)) {
            Members& its = members[link];
            if (its.before == 0 && its.behind == 0) touched.push_back(link);
            ++(its.*side);
        }
    };
    for (int u : devices) add(u, &Members::before);
    for (int u : next_devices) add(u, &Members::behind);
    const double k = static_cast<double>(devices.size()), m = static_cast<double>(next_devices.size());
    const double there = there_bytes / (k * m), back = back_bytes / (k * m);
    LeastTimes least{0.0, 0.0};
    for (int link : touched) {
        const double leaves = members[link].before * (m - members[link].behind);
        const double enters = members[link].behind * (k - members[link].before);
        count(least, link, leaves * there, enters * there, enters * back, leaves * back);
        members[link] = {};
    }
    return least;
}

// What leaves the members of a link and enters them, on the way there and on the way back, in bytes.
void SharedLinks::count(LeastTimes& least, int link, double leaves_there, double enters_there,
                        double leaves_back, double enters_back) const {
    const auto raise = [&](double& least_ms, int side, double bytes) {
        if (bytes > 0) least_ms = std::max(least_ms, latency_ms_[side] + bytes / capacity_[side]);
    };
    raise(least.there_ms, 2 * link, leaves_there);
    raise(least.there_ms, 2 * link + 1, enters_there);
    raise(least.back_ms, 2 * link, leaves_back);
    raise(least.back_ms, 2 * link + 1, enters_back);
}

double SharedLinks::ring_rate(const std::vector<int>& devices) const {
    double rate = std::numeric_limits<double>::infinity();
    const bool is_one_class = std::all_of(devices.begin(), devices.end(), [&](int u) {
        return class_of_[u] == class_of_[devices[0]];
    });
    if (is_one_class) return rate;
    if (are_whole_hosts_) {  // a ring leaves and enters each of its hosts once
        for (int u : devices)
            for (int link : links_of(u)) rate = std::min({rate, out(link), in(link)});
        return rate;
    }
    const std::vector<int> order = ring(devices);
    std::map<int, int> leaving;  // how many flows use a side
    for (std::size_t i = 0; i < order.size(); ++i) {
        const int from = class_of_[order[i]], to = class_of_[order[(i + 1) % order.size()]];
        if (from == to) continue;
        for (int side : sides_between(from, to)) ++leaving[side];
    }
    for (const auto& [side, count] : leaving) rate = std::min(rate, capacity_[side] / count);
    return rate;
}

}  // namespace pipeplan
