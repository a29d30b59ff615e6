// The flows of a placed plan (docs/formats.md, rules 8-9): what every transfer and every all-reduce
// sends between which devices.
//
// Flows of a transfer that are alike (latency, limit, bytes, shared links) form a group. They always
// have the same rate, so a group is one thing with a count. Flows that use no shared link always have
// their limit as their rate: all of them together are a timer.
#pragma once
#include <vector>

#include "instance.hpp"

namespace pipeplan {

struct FlowGroup {
    double latency_ms;  // from the beginning of its transfer until its flows start
    double bytes;       // of each flow; above 0
    double limit;       // bytes per ms of each flow
    int count;          // flows
    int first_side, end_side;  // in PlanFlows::sides
};

// One transfer, or one all-reduce: its groups, and how long its other flows take.
struct FlowTransfer {
    int first_group, end_group;
    double timer_ms;  // below 0: no other flows
};

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
    // For each transfer and all-reduce the time that it can take at most (rule 13): each flow counts
    // with the rate that it has where all flows that could be under way share its links.
    std::vector<double> longest_ms(bool half_duplex) const;
    const std::vector<FlowTransfer>& transfers() const { return transfers_; }
    const std::vector<FlowGroup>& groups() const { return groups_; }
    const std::vector<int>& sides() const { return sides_; }
    const std::vector<double>& capacity() const { return capacity_; }

  private:
    class Builder;
    int num_stages_;
    std::vector<FlowTransfer> transfers_;
    std::vector<FlowGroup> groups_;
    std::vector<int> sides_;        // of all groups, one after the other
    std::vector<double> capacity_;  // [sides of all shared links]
};

}  // namespace pipeplan
