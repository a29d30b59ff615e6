// Makes the flows of transfers and all-reduces. O(pairs of devices) for each transfer.
#include "flow_table.hpp"

#include <algorithm>
#include <stdexcept>

namespace pipeplan {

namespace {

double require_path(const Instance& in, int u, int v) {
    const double rate = in.bytes_per_ms(u, v);
    if (!(rate > 0)) throw std::invalid_argument("flows: two devices that talk have no path");
    return rate;
}

}  // namespace

FlowTable::FlowTable(const Instance& instance) {
    if (!instance.shared) throw std::invalid_argument("flows: the instance has no shared links");
    for (int side = 0; side < instance.shared->num_sides(); ++side)
        capacity_.push_back(instance.shared->capacity(side));
}

void FlowTable::add_transfer(const Instance& in, const SharedOut& sender, const SharedOut& receiver,
                             double bytes) {
    FlowTransfer transfer{static_cast<int>(groups_.size()), 0, -1.0};
    GroupOf group_of;
    for (std::size_t a = 0; a < sender.devices.size(); ++a) {
        for (std::size_t b = 0; b < receiver.devices.size(); ++b) {
            const int u = sender.devices[a], v = receiver.devices[b];
            const double part = sender.shares[a] * receiver.shares[b];
            add_flow(*in.shared, {u, v, in.latency_ms(u, v), part * bytes, require_path(in, u, v)},
                     transfer, group_of);
        }
    }
    end_transfer(transfer);
}

void FlowTable::add_all_reduce(const Instance& in, const std::vector<int>& devices,
                               double parameter_bytes) {
    FlowTransfer transfer{static_cast<int>(groups_.size()), 0, -1.0};
    GroupOf group_of;
    const double k = static_cast<double>(devices.size());
    double limit = kInfinity, latency_ms = 0.0;
    for (int u : devices) {
        for (int v : devices) {
            if (u == v) continue;
            limit = std::min(limit, require_path(in, u, v));
            latency_ms = std::max(latency_ms, in.latency_ms(u, v));
        }
    }
    const std::vector<int> ring = in.shared->ring(devices);
    const double bytes = 2.0 * (k - 1) / k * parameter_bytes;
    for (std::size_t i = 0; devices.size() > 1 && i < ring.size(); ++i)
        add_flow(*in.shared,
                 {ring[i], ring[(i + 1) % ring.size()], 2.0 * (k - 1) * latency_ms, bytes, limit},
                 transfer, group_of);
    end_transfer(transfer);
}

void FlowTable::add_flow(const SharedLinks& links, const Flow& flow, FlowTransfer& transfer,
                         GroupOf& group_of) {
    const int from = links.class_of(flow.from), to = links.class_of(flow.to);
    if (from == to || !(flow.bytes > 0)) {
        transfer.timer_ms = std::max(transfer.timer_ms, flow.latency_ms + flow.bytes / flow.limit);
        return;
    }
    const int flow_class = class_of(links, flow.limit, from, to);
    const auto key = std::make_tuple(flow.latency_ms, flow.bytes, flow_class);
    const auto found = group_of.emplace(key, static_cast<int>(groups_.size()));
    if (found.second) groups_.push_back({flow.latency_ms, flow.bytes, 1, flow_class});
    else ++groups_[found.first->second].count;
}

int FlowTable::class_of(const SharedLinks& links, double limit, int from, int to) {
    const auto found =
        class_of_.emplace(std::make_tuple(limit, from, to), static_cast<int>(classes_.size()));
    if (found.second) {
        const int first_side = static_cast<int>(sides_.size());
        for (int side : links.sides_between(from, to)) sides_.push_back(side), flows_on_.push_back(1);
        classes_.push_back({limit, first_side, static_cast<int>(sides_.size())});
    }
    return found.first->second;
}

void FlowTable::end_transfer(FlowTransfer& transfer) {
    transfer.end_group = static_cast<int>(groups_.size());
    std::stable_sort(groups_.begin() + transfer.first_group, groups_.end(),
                     [](const FlowGroup& a, const FlowGroup& b) { return a.latency_ms < b.latency_ms; });
    transfers_.push_back(transfer);
}

}  // namespace pipeplan
