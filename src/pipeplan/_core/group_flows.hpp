// The flows of a plan with groups: two transfers for each cut between groups, the rings of parts of
// all-reduces (docs/formats.md, rules 8-12 and 18).
#pragma once
#include <memory>
#include <vector>

#include "flows.hpp"

namespace pipeplan {

class GroupFlows {
  public:
    // `num_parts` has the parts of each stage's all-reduce. Throws std::invalid_argument unless the
    // stages cover the instance's layers, every device has a share, and devices that talk have paths. The
    // instance has to have shared links.
    GroupFlows(const Instance& instance, const std::vector<int>& end_layer, const StageShares& stages,
               const std::vector<int>& group_of, const std::vector<int>& num_parts);

    int num_stages() const { return num_stages_; }
    // Forward over the cut behind stage c is transfer 2c, backward 2c + 1; inside a group they have no
    // flows. A part of the all-reduce of stage n is 2 * (stages - 1) + n.
    const FlowTable& table() const { return table_; }
    // The same for a simulation: flows that are equal by symmetry are one.
    const FlowTable& merged() const { return merged_ ? *merged_ : table_; }

  private:
    int num_stages_;
    FlowTable table_;
    std::unique_ptr<const FlowTable> merged_;  // null where nothing is equal
};

}  // namespace pipeplan
