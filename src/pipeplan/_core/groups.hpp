// One iteration of any plan (docs/formats.md, rules 14-20): several stages a group of devices, backwards
// whole or cut in two, all-reduces in parts. Plans with one stage a group and whole backwards have the
// event loop of event_loop.hpp.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "control.hpp"
#include "flow_rates.hpp"
#include "group_flows.hpp"

namespace pipeplan {

// A block of any stage: stage * 2^32 + kind * 2^30 + microbatch.
using GroupCode = std::int64_t;

enum BlockKind : int { kForward = 0, kBackward = 1, kInputGradient = 2, kWeightGradient = 3 };
constexpr int kNumBlockKinds = 4;

constexpr GroupCode group_code(int stage, int kind, int microbatch) {
    return (static_cast<GroupCode>(stage) << 32) | (static_cast<GroupCode>(kind) << 30) | microbatch;
}
constexpr int stage_of(GroupCode code) { return static_cast<int>(code >> 32); }
constexpr int kind_of(GroupCode code) { return static_cast<int>(code >> 30) & 3; }
constexpr int microbatch_of(GroupCode code) { return static_cast<int>(code & ((1 << 30) - 1)); }

// The times of everything, as the loops read them. What is sent has a number: forward over the cut
// behind stage c 2c, backward 2c + 1, a part of the all-reduce of stage n 2 * (stages - 1) + n.
struct GroupCostsView {
    int num_groups;
    int num_stages;
    int num_microbatches;
    const int* group_of;         // [stages]
    const double* length_ms;     // [stages][kinds]; NaN where a backward cannot be cut in two
    const double* recompute_ms;  // [stages]; the part of a whole backward before gradients come
    const double* send_ms;       // [2 * (stages - 1) + stages], as numbered above
    const int* num_parts;        // [stages]; 0 on one device
    int num_channels;
    const int* channel_of;       // [2 * (stages - 1)]: which channel carries it; -1 inside a group
    bool half_duplex;
    const GroupFlows* flows = nullptr;  // where the cluster has shared links, instead of send_ms
    std::vector<RateChange>* rate_changes = nullptr;  // where changes of rates are recorded, if they are
};

// The same as an object that validates itself, made from a pipeplan.cost.GroupCosts.
class GroupCosts {
  public:
    // Throws std::invalid_argument if sizes differ, groups are not numbered by their first stages, or a
    // time is not finite and >= 0; NaN stands for an unknown I or W.
    GroupCosts(std::vector<int> group_of, std::vector<double> length_ms,
               std::vector<double> recompute_ms, std::vector<double> send_ms,
               std::vector<int> num_parts, bool half_duplex,
               std::shared_ptr<const GroupFlows> flows = nullptr);
    int num_groups() const { return num_groups_; }
    int num_stages() const { return static_cast<int>(group_of_.size()); }
    // Throws std::invalid_argument if the number of microbatches is out of range.
    GroupCostsView view(long num_microbatches) const;

  private:
    int num_groups_ = 0;
    std::vector<int> group_of_;
    std::vector<double> length_ms_, recompute_ms_, send_ms_;
    std::vector<int> num_parts_, channel_of_;
    int num_channels_ = 0;
    bool half_duplex_;
    std::shared_ptr<const GroupFlows> flows_;
};

// Numbers the channels of groups (rule 17): for each cut and direction, 2c and 2c + 1, its channel, or -1
// where both stages are of one group. With half duplex two groups have one channel, else one a direction.
struct Channels {
    int count;
    std::vector<int> channel_of;
};
Channels number_channels(const std::vector<int>& group_of, bool half_duplex);

// For each group its blocks: those of group g are codes[first[g]] up to codes[first[g + 1]].
struct GroupOrders {
    const GroupCode* codes;
    const std::size_t* first;  // [groups + 1]
};

// Throws std::invalid_argument unless each group has, for each of its stages and microbatches, F and B
// or F, I and W, in this order, and nothing else.
void require_complete(const GroupCostsView& costs, const GroupOrders& orders);

struct GroupTrace {
    std::vector<double> block_start_ms, block_end_ms;  // as the orders list the blocks
    std::vector<GroupCode> sent;  // the blocks whose results are sent: by number, as they are sent
    std::vector<double> transfer_start_ms, transfer_end_ms;
    std::vector<int> part_stage, part_number;  // by stage and number; parts count from 1
    std::vector<double> part_start_ms, part_end_ms;
    std::vector<int> blocks_done;  // [groups]; fewer than the group has: deadlock
    double iteration_ms = 0.0;     // the latest end
};

// Runs complete orders.
GroupTrace run_groups(const GroupCostsView& costs, const GroupOrders& orders, Control& control);

// The iteration time of complete orders; infinite if they deadlock. Where nothing but its order decides
// when something is sent, that is with full duplex and no shared links, this is one pass without events,
// about ten times as fast; it takes times as they are where rule 20 calls those within 1e-9 ms equal.
// Keep one of these to time many orders.
class GroupTimer {
  public:
    double operator()(const GroupCostsView& costs, const GroupOrders& orders, Control& control);

  private:
    double pass(const GroupCostsView& costs, const GroupOrders& orders);
    void begin(const GroupCostsView& costs, const GroupOrders& orders);
    std::size_t run_group(const GroupCostsView& costs, const GroupOrders& orders, int g);
    double deliver(const GroupCostsView& costs, int sent, int stage, double now_ms);
    std::vector<double> input_ms_, gradient_ms_;  // [stages][microbatches], when they are there; < 0: not
    std::vector<double> free_ms_, ring_free_ms_;  // [groups]
    std::vector<double> channel_free_ms_;
    std::vector<std::size_t> next_;               // [groups]
    std::vector<int> num_closed_;                 // [stages], microbatches that have left the stage
    std::vector<int> groups_to_go_;
    std::vector<char> is_listed_;                 // [groups], among these
};

}  // namespace pipeplan
