// A chain of stages on groups of devices, as schedulers and bounds read it.
//
// A group is a set of devices that computes one block at a time. It may serve several stages. A
// backward is one block, or two: the input gradient, which others wait for, and the weight gradient,
// which only the group's own all-reduce waits for.
#pragma once
#include <cstdint>
#include <vector>

#include "instance.hpp"

namespace pipeplan {

enum ChainKind : int { kChainForward = 0, kChainBackward = 1, kChainWeight = 2 };
constexpr int kNumChainKinds = 3;
constexpr int kMostPositions = 64;  // stages of a group
// Room and limits may be exceeded by these parts of themselves.
constexpr double kRoomRounding = 1e-9, kLimitRounding = 1e-9;

// Costs of one microbatch; P stages in the order of the chain, G groups, M microbatches.
struct Chain {
    int num_stages = 0, num_groups = 0, num_microbatches = 0;
    bool half_duplex = false;
    std::vector<int> group;           // [P]
    std::vector<double> forward_ms;   // [P]
    std::vector<double> backward_ms;  // [P], the input gradient alone where the stage is split
    std::vector<double> weight_ms;    // [P], 0 where backwards are whole
    std::vector<double> there_ms;     // [P], to the next stage; 0 inside a group and at the end
    std::vector<double> back_ms;      // [P], from the next stage back to this one
    std::vector<double> reduce_ms;    // [P], the all-reduce, all its parts
    std::vector<double> early_ms;     // [P], so long before the end of the last block it may begin
    std::vector<double> last_part_ms; // [P], of the all-reduce, after that end
    std::vector<int> num_parts;       // [P], of the all-reduces; empty where nobody asks
    std::vector<std::uint8_t> is_split;  // [P]
    std::vector<double> held_bytes;   // [P], from a forward's start to its backward's end
    std::vector<double> kept_bytes;   // [P], from then to the end of the weight gradient
    std::vector<double> room_bytes;   // [G], what all of that may be at once; infinite without a limit

    // Throws std::invalid_argument where sizes differ or a number cannot be.
    void check() const;
    // What is left of the all-reduce when the stage's last block ends, at least.
    double left_ms(int p) const {
        const double left = reduce_ms[p] - early_ms[p];
        return left > last_part_ms[p] ? left : last_part_ms[p];
    }
    // What a scheduler reserves with a forward: keeping may need more than holding.
    double reserved_bytes(int p) const {
        return is_split[p] && kept_bytes[p] > held_bytes[p] ? kept_bytes[p] : held_bytes[p];
    }
};

// A block as one number.
inline int chain_block(const Chain& chain, int stage, int kind, int microbatch) {
    return (stage * kNumChainKinds + kind) * chain.num_microbatches + microbatch;
}

}  // namespace pipeplan
