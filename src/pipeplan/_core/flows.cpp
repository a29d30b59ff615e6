// Makes the flows of a plan, and counts them for PE's guarantee.
#include "flows.hpp"

#include <algorithm>
#include <stdexcept>

#include "flow_symmetry.hpp"

namespace pipeplan {

PlanFlows::PlanFlows(const Instance& instance, const std::vector<int>& end_layer,
                     const StageShares& stages)
    : num_stages_(static_cast<int>(end_layer.size())), table_(instance) {
    const PlacedPlan plan(instance, end_layer, stages.devices);  // validates
    if (stages.shares.size() != end_layer.size())
        throw std::invalid_argument("shares: one list for each stage");
    for (std::size_t n = 0; n < stages.shares.size(); ++n) {
        if (stages.shares[n].size() != stages.devices[n].size())
            throw std::invalid_argument("shares: one for each device");
        for (double share : stages.shares[n])
            if (!(share > 0 && share <= 1)) throw std::invalid_argument("shares: above 0, at most 1");
    }
    const auto stage = [&](int n) { return SharedOut{stages.devices[n], stages.shares[n]}; };
    for (int c = 0; c + 1 < num_stages_; ++c) {
        table_.add_transfer(instance, stage(c), stage(c + 1),
                            instance.output_bytes[end_layer[c] - 1]);
        table_.add_transfer(instance, stage(c + 1), stage(c),
                            instance.gradient_bytes[end_layer[c] - 1]);
    }
    for (int n = 0; n < num_stages_; ++n) {
        const int first = n ? end_layer[n - 1] : 0;
        table_.add_all_reduce(instance, stages.devices[n],
                              instance.parameter_bytes(first, end_layer[n]));
    }
    merged_ = merge_alike(table_);
}

std::vector<double> PlanFlows::longest_ms(bool half_duplex) const {
    const std::vector<FlowTransfer>& transfers = table_.transfers();
    const std::vector<FlowGroup>& groups = table_.groups();
    const std::vector<FlowClass>& classes = table_.classes();
    const std::vector<int>& sides = table_.sides();
    const std::vector<double>& capacity = table_.capacity();
    const auto count_flows = [&](int transfer, std::vector<int>& count) {
        for (int g = transfers[transfer].first_group; g < transfers[transfer].end_group; ++g) {
            const FlowClass& its = classes[groups[g].flow_class];
            for (int k = its.first_side; k < its.end_side; ++k) count[sides[k]] += groups[g].count;
        }
    };
    const int num_lanes = 2 * (num_stages_ - 1);
    std::vector<int> most(capacity.size(), 0);
    for (int c = 0; c + 1 < num_stages_; ++c) {
        std::vector<int> there(capacity.size(), 0), back(capacity.size(), 0);
        count_flows(2 * c, there);
        count_flows(2 * c + 1, back);
        for (std::size_t side = 0; side < most.size(); ++side)
            most[side] += half_duplex ? std::max(there[side], back[side]) : there[side] + back[side];
    }
    for (int n = 0; n < num_stages_; ++n) count_flows(num_lanes + n, most);
    std::vector<double> longest;
    for (const FlowTransfer& transfer : transfers) {
        double ms = std::max(transfer.timer_ms, 0.0);
        for (int g = transfer.first_group; g < transfer.end_group; ++g) {
            const FlowClass& its = classes[groups[g].flow_class];
            double rate = its.limit;
            for (int k = its.first_side; k < its.end_side; ++k)
                rate = std::min(rate, capacity[sides[k]] / most[sides[k]]);
            ms = std::max(ms, groups[g].latency_ms + groups[g].bytes / rate);
        }
        longest.push_back(ms);
    }
    return longest;
}

}  // namespace pipeplan
