// Makes the flows of a plan. O(pairs of devices of neighbouring stages).
#include "flows.hpp"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <tuple>

namespace pipeplan {

// Collects the flows of one transfer after the other.
class PlanFlows::Builder {
  public:
    Builder(const Instance& in, PlanFlows& flows) : in_(in), links_(*in.shared), flows_(flows) {}

    void begin_transfer() {
        transfer_ = {static_cast<int>(flows_.groups_.size()), 0, -1.0};
        group_of_.clear();
    }

    void add(int u, int v, double latency_ms, double bytes, double limit) {
        const int from = links_.class_of(u), to = links_.class_of(v);
        if (from == to || !(bytes > 0)) {
            transfer_.timer_ms = std::max(transfer_.timer_ms, latency_ms + bytes / limit);
            return;
        }
        const auto key = std::make_tuple(latency_ms, bytes, limit, from, to);
        const int next = static_cast<int>(flows_.groups_.size());
        const auto found = group_of_.emplace(key, next);
        if (!found.second) {
            ++flows_.groups_[found.first->second].count;
            return;
        }
        const int first_side = static_cast<int>(flows_.sides_.size());
        for (int side : links_.sides_between(from, to)) flows_.sides_.push_back(side);
        const int end_side = static_cast<int>(flows_.sides_.size());
        flows_.groups_.push_back({latency_ms, bytes, limit, 1, first_side, end_side});
    }

    void end_transfer() {
        transfer_.end_group = static_cast<int>(flows_.groups_.size());
        flows_.transfers_.push_back(transfer_);
    }

    void add_transfer(const StageShares& stages, int sender, int receiver, double bytes) {
        begin_transfer();
        for (std::size_t a = 0; a < stages.devices[sender].size(); ++a) {
            for (std::size_t b = 0; b < stages.devices[receiver].size(); ++b) {
                const int u = stages.devices[sender][a], v = stages.devices[receiver][b];
                const double part = stages.shares[sender][a] * stages.shares[receiver][b];
                add(u, v, in_.latency_ms(u, v), part * bytes, require_path(u, v));
            }
        }
        end_transfer();
    }

    void add_all_reduce(const std::vector<int>& devices, double parameter_bytes) {
        begin_transfer();
        const double k = static_cast<double>(devices.size());
        if (devices.size() > 1) {
            double limit = kInfinity, latency_ms = 0.0;
            for (int u : devices) {
                for (int v : devices) {
                    if (u == v) continue;
                    limit = std::min(limit, require_path(u, v));
                    latency_ms = std::max(latency_ms, in_.latency_ms(u, v));
                }
            }
            const std::vector<int> ring = links_.ring(devices);
            const double bytes = 2.0 * (k - 1) / k * parameter_bytes;
            for (std::size_t i = 0; i < ring.size(); ++i)
                add(ring[i], ring[(i + 1) % ring.size()], 2.0 * (k - 1) * latency_ms, bytes, limit);
        }
        end_transfer();
    }

  private:
    double require_path(int u, int v) const {
        const double rate = in_.bytes_per_ms(u, v);
        if (!(rate > 0)) throw std::invalid_argument("flows: two devices that talk have no path");
        return rate;
    }

    const Instance& in_;
    const SharedLinks& links_;
    PlanFlows& flows_;
    FlowTransfer transfer_{};
    std::map<std::tuple<double, double, double, int, int>, int> group_of_;
};

PlanFlows::PlanFlows(const Instance& instance, const std::vector<int>& end_layer,
                     const StageShares& stages)
    : num_stages_(static_cast<int>(end_layer.size())) {
    if (!instance.shared) throw std::invalid_argument("flows: the instance has no shared links");
    const PlacedPlan plan(instance, end_layer, stages.devices);  // validates
    if (stages.shares.size() != end_layer.size())
        throw std::invalid_argument("shares: one list for each stage");
    for (std::size_t n = 0; n < stages.shares.size(); ++n) {
        if (stages.shares[n].size() != stages.devices[n].size())
            throw std::invalid_argument("shares: one for each device");
        for (double share : stages.shares[n])
            if (!(share > 0 && share <= 1)) throw std::invalid_argument("shares: above 0, at most 1");
    }
    for (int side = 0; side < instance.shared->num_sides(); ++side)
        capacity_.push_back(instance.shared->capacity(side));
    Builder builder(instance, *this);
    for (int c = 0; c + 1 < num_stages_; ++c) {
        builder.add_transfer(stages, c, c + 1, instance.output_bytes[end_layer[c] - 1]);
        builder.add_transfer(stages, c + 1, c, instance.gradient_bytes[end_layer[c] - 1]);
    }
    for (int n = 0; n < num_stages_; ++n) {
        const int first = n ? end_layer[n - 1] : 0;
        builder.add_all_reduce(stages.devices[n], instance.parameter_bytes(first, end_layer[n]));
    }
}

std::vector<double> PlanFlows::longest_ms(bool half_duplex) const {
    const auto count_flows = [&](int transfer, std::vector<int>& count) {
        for (int g = transfers_[transfer].first_group; g < transfers_[transfer].end_group; ++g)
            for (int k = groups_[g].first_side; k < groups_[g].end_side; ++k)
                count[sides_[k]] += groups_[g].count;
    };
    const int num_lanes = 2 * (num_stages_ - 1);
    std::vector<int> most(capacity_.size(), 0);
    for (int c = 0; c + 1 < num_stages_; ++c) {
        std::vector<int> there(capacity_.size(), 0), back(capacity_.size(), 0);
        count_flows(2 * c, there);
        count_flows(2 * c + 1, back);
        for (std::size_t side = 0; side < most.size(); ++side)
            most[side] += half_duplex ? std::max(there[side], back[side]) : there[side] + back[side];
    }
    for (int n = 0; n < num_stages_; ++n) count_flows(num_lanes + n, most);
    std::vector<double> longest;
    for (const FlowTransfer& transfer : transfers_) {
        double ms = std::max(transfer.timer_ms, 0.0);
        for (int g = transfer.first_group; g < transfer.end_group; ++g) {
            double rate = groups_[g].limit;
            for (int k = groups_[g].first_side; k < groups_[g].end_side; ++k)
                rate = std::min(rate, capacity_[sides_[k]] / most[sides_[k]]);
            ms = std::max(ms, groups_[g].latency_ms + groups_[g].bytes / rate);
        }
        longest.push_back(ms);
    }
    return longest;
}

}  // namespace pipeplan
