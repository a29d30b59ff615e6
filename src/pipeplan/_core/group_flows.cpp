// Makes the flows of a plan with groups.
#include "group_flows.hpp"

#include <algorithm>
#include <stdexcept>

#include "flow_symmetry.hpp"

namespace pipeplan {
namespace {

void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

void require_stages(const Instance& instance, const std::vector<int>& end_layer,
                    const StageShares& stages) {
    const std::size_t S = end_layer.size();
    require(S >= 1 && stages.devices.size() == S && stages.shares.size() == S,
            "flows: devices and shares for each stage");
    int first = 0;
    for (std::size_t n = 0; n < S; ++n) {
        require(end_layer[n] > first && end_layer[n] <= instance.num_layers, "flows: a stage is empty");
        first = end_layer[n];
        require(!stages.devices[n].empty() && stages.shares[n].size() == stages.devices[n].size(),
                "flows: a share for each device");
        for (int u : stages.devices[n])
            require(u >= 0 && u < instance.num_devices, "flows: a device is unknown");
        for (double share : stages.shares[n])
            require(share > 0 && share <= 1, "flows: shares are above 0, at most 1");
    }
    require(first == instance.num_layers, "flows: the stages do not cover the layers");
}

}  // namespace

GroupFlows::GroupFlows(const Instance& instance, const std::vector<int>& end_layer,
                       const StageShares& stages, const std::vector<int>& group_of,
                       const std::vector<int>& num_parts)
    : num_stages_(static_cast<int>(end_layer.size())), table_(instance) {
    require_stages(instance, end_layer, stages);
    require(group_of.size() == end_layer.size() && num_parts.size() == end_layer.size(),
            "flows: a group and a number of parts for each stage");
    const std::vector<int> no_devices;
    const std::vector<double> no_shares;
    const SharedOut nobody{no_devices, no_shares};
    const auto stage = [&](int n) { return SharedOut{stages.devices[n], stages.shares[n]}; };
    for (int c = 0; c + 1 < num_stages_; ++c) {
        const double forward = instance.output_bytes[end_layer[c] - 1];
        const double backward = instance.gradient_bytes[end_layer[c] - 1];
        const bool is_inside = group_of[c] == group_of[c + 1];
        table_.add_transfer(instance, is_inside ? nobody : stage(c), is_inside ? nobody : stage(c + 1),
                            forward);
        table_.add_transfer(instance, is_inside ? nobody : stage(c + 1), is_inside ? nobody : stage(c),
                            backward);
    }
    for (int n = 0; n < num_stages_; ++n) {
        const double bytes = instance.parameter_bytes(n ? end_layer[n - 1] : 0, end_layer[n]);
        table_.add_all_reduce(instance, stages.devices[n], bytes / std::max(num_parts[n], 1));
    }
    merged_ = merge_alike(table_);
}

}  // namespace pipeplan
