// The flows of a placed plan: two transfers for each channel, one all-reduce for each stage.
#pragma once
#include <memory>
#include <vector>

#include "flow_table.hpp"

namespace pipeplan {

// The devices of each stage, and the part of a microbatch that each of them takes.
struct StageShares {
    std::vector<std::vector<int>> devices;
    std::vector<std::vector<double>> shares;
};

class PlanFlows {
  public:
    // Throws std::invalid_argument unless the stages cover the instance's layers, every device has a
    // share, and devices that talk have paths. The instance has to have shared links.
    PlanFlows(const Instance& instance, const std::vector<int>& end_layer, const StageShares& stages);

    int num_stages() const { return num_stages_; }
    // Channel c sends forward in transfer 2c, backward in 2c + 1. The all-reduce of stage n is
    // transfer 2 * (stages - 1) + n.
    const FlowTable& table() const { return table_; }
    // The same for a simulation: flows that are equal by symmetry are one.
    const FlowTable& merged() const { return merged_ ? *merged_ : table_; }
    // For each transfer and all-reduce the time that it can take at most (rule 13): each flow counts
    // with the rate that it has where all flows that could be under way share its links.
    std::vector<double> longest_ms(bool half_duplex) const;

  private:
    int num_stages_;
    FlowTable table_;
    std::unique_ptr<const FlowTable> merged_;  // null where nothing is equal
};

}  // namespace pipeplan
