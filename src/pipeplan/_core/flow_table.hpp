// What transfers and all-reduces send between which devices (docs/formats.md, rules 8-9), whatever
// pipeline they belong to.
//
// Flows of a transfer that are alike (latency, limit, bytes, shared links) form a group: one thing with
// a count. Flows that use no shared link always have their limit as their rate: all of them together
// are a timer.
#pragma once
#include <map>
#include <tuple>
#include <vector>

#include "instance.hpp"

namespace pipeplan {

struct FlowGroup {
    double latency_ms;  // from the beginning of its transfer until its flows start
    double bytes;       // of each flow; above 0
    int count;          // flows
    int flow_class;     // in FlowTable::classes
};

// Flows with the same limit on the same sides always have the same rate, whatever they belong to.
struct FlowClass {
    double limit;              // bytes per ms of each flow
    int first_side, end_side;  // in FlowTable::sides
};

// One transfer, or one all-reduce: its groups, by latency, and how long its other flows take.
struct FlowTransfer {
    int first_group, end_group;
    double timer_ms;  // below 0: no other flows
};

// The devices of a stage, and the part of a microbatch that each of them takes.
struct SharedOut {
    const std::vector<int>& devices;
    const std::vector<double>& shares;
};

class FlowTable {
  public:
    // The instance has to have shared links; else throws std::invalid_argument.
    explicit FlowTable(const Instance& instance);

    // Adds what carries `bytes` of a microbatch from one stage to another. Transfers are numbered from 0.
    // Throws std::invalid_argument where two devices that talk have no path.
    void add_transfer(const Instance& instance, const SharedOut& sender, const SharedOut& receiver,
                      double bytes);
    // Adds an all-reduce over a ring of these devices; of one device it takes no time.
    void add_all_reduce(const Instance& instance, const std::vector<int>& devices,
                        double parameter_bytes);

    const std::vector<FlowTransfer>& transfers() const { return transfers_; }
    const std::vector<FlowGroup>& groups() const { return groups_; }
    const std::vector<FlowClass>& classes() const { return classes_; }
    const std::vector<int>& sides() const { return sides_; }
    // For each of these how many flows use it where a group counts one: 1, unless groups were merged.
    const std::vector<int>& flows_on() const { return flows_on_; }
    // Where groups were merged (flow_symmetry.hpp): those of the first table that each one stands for.
    const std::vector<std::vector<int>>& members() const { return members_; }
    const std::vector<double>& capacity() const { return capacity_; }

  private:
    friend class FlowMerger;
    FlowTable() = default;
    // Flows of a transfer with the same latency, bytes and class are a group.
    using GroupOf = std::map<std::tuple<double, double, int>, int>;
    struct Flow {
        int from, to;
        double latency_ms, bytes, limit;
    };
    void add_flow(const SharedLinks& links, const Flow& flow, FlowTransfer& transfer, GroupOf& group_of);
    void end_transfer(FlowTransfer& transfer);
    int class_of(const SharedLinks& links, double limit, int from, int to);

    std::vector<FlowTransfer> transfers_;
    std::vector<FlowGroup> groups_;
    std::vector<FlowClass> classes_;
    std::map<std::tuple<double, int, int>, int> class_of_;  // by limit, and the devices' classes
    std::vector<int> sides_;        // of all classes, one after the other
    std::vector<int> flows_on_;     // [sides of all classes]
    std::vector<std::vector<int>> members_;  // [groups], or empty
    std::vector<double> capacity_;  // [sides of all shared links]
};

}  // namespace pipeplan
