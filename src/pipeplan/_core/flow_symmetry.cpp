// Colours sides of shared links and groups of flows, until colours do not split any more.
//
// Colours are hashes. `merge` compares what they stand for, so should two of them collide, nothing is
// merged.
#include "flow_symmetry.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <unordered_map>

namespace pipeplan {
namespace {

using Colour = std::uint64_t;

// A bijection that spreads all bits (the finalizer of splitmix64).
Colour mix(Colour bits) {
    bits += 0x9e3779b97f4a7c15u;
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111ebu;
    return bits ^ bits >> 31;
}

Colour mix(Colour first, Colour second) { return mix(mix(first) + second); }

Colour colour_of(double number) {
    Colour bits;
    std::memcpy(&bits, &number, sizeof bits);
    return bits;
}

std::size_t count_different(std::vector<Colour> colours) {
    std::sort(colours.begin(), colours.end());
    return std::unique(colours.begin(), colours.end()) - colours.begin();
}

}  // namespace

class FlowMerger {
  public:
    explicit FlowMerger(const FlowTable& flows)
        : flows_(flows), transfer_of_(flows.groups_.size()), own_(flows.groups_.size()) {
        for (std::size_t t = 0; t < flows.transfers_.size(); ++t)
            for (int g = flows.transfers_[t].first_group; g < flows.transfers_[t].end_group; ++g)
                transfer_of_[g] = static_cast<int>(t);
        for (std::size_t g = 0; g < own_.size(); ++g) {
            const FlowGroup& group = flows.groups_[g];
            own_[g] = mix(mix(mix(transfer_of_[g], colour_of(group.latency_ms)), colour_of(group.bytes)),
                          colour_of(flows.classes_[group.flow_class].limit));
        }
    }

    // Whether some groups of a transfer differ in nothing but their sides.
    bool may_merge() const { return count_different(own_) < own_.size(); }

    // Colours all sides and groups; false if no two groups have the same.
    bool colour() {
        for (double capacity : flows_.capacity_) side_.push_back(mix(colour_of(capacity)));
        std::size_t num_before = 0, num = count_different(side_);
        while (num > num_before) {
            colour_groups();
            if (num == side_.size()) break;
            colour_sides();
            num_before = num, num = count_different(side_);
        }
        return count_different(group_) < group_.size();
    }

    // One side and one group of each colour; null where colours collide.
    std::unique_ptr<FlowTable> merge() {
        std::unique_ptr<FlowTable> merged(new FlowTable);
        number_sides(*merged);
        for (const FlowTransfer& transfer : flows_.transfers_) {
            merged->transfers_.push_back(transfer);
            merged->transfers_.back().first_group = static_cast<int>(merged->groups_.size());
            for (std::vector<int>& members : members_by_colour(transfer)) {
                add_group(members, *merged);
                merged->members_.push_back(std::move(members));
            }
            merged->transfers_.back().end_group = static_cast<int>(merged->groups_.size());
        }
        return is_exact_ ? std::move(merged) : nullptr;
    }

  private:
    void colour_groups() {
        std::vector<Colour> of_class;
        for (const FlowClass& kind : flows_.classes_) {
            Colour sum = 0;
            for (int k = kind.first_side; k < kind.end_side; ++k) sum += mix(side_[flows_.sides_[k]]);
            of_class.push_back(mix(sum));
        }
        group_.resize(own_.size());
        for (std::size_t g = 0; g < own_.size(); ++g)
            group_[g] = mix(own_[g], of_class[flows_.groups_[g].flow_class]);
    }

    void colour_sides() {
        std::vector<Colour> sum(side_.size(), 0);
        for (std::size_t g = 0; g < group_.size(); ++g) {
            const FlowClass& kind = flows_.classes_[flows_.groups_[g].flow_class];
            const Colour part = flows_.groups_[g].count * mix(group_[g]);
            for (int k = kind.first_side; k < kind.end_side; ++k) sum[flows_.sides_[k]] += part;
        }
        for (std::size_t side = 0; side < side_.size(); ++side) side_[side] = mix(side_[side], sum[side]);
    }

    // The sides of a colour become one.
    void number_sides(FlowTable& merged) {
        std::unordered_map<Colour, int> number_of;
        for (std::size_t side = 0; side < side_.size(); ++side) {
            const auto found = number_of.emplace(side_[side], static_cast<int>(number_of.size()));
            if (found.second) {
                merged.capacity_.push_back(flows_.capacity_[side]);
                num_alike_.push_back(0);
            }
            number_.push_back(found.first->second);
            ++num_alike_[number_.back()];
            is_exact_ = is_exact_ && flows_.capacity_[side] == merged.capacity_[number_.back()];
        }
        num_flows_.assign(side_.size(), 0);
    }

    // Groups of one transfer by their colours, in the order of their first ones.
    std::vector<std::vector<int>> members_by_colour(const FlowTransfer& transfer) const {
        std::unordered_map<Colour, std::size_t> place_of;
        std::vector<std::vector<int>> result;
        for (int g = transfer.first_group; g < transfer.end_group; ++g) {
            const auto found = place_of.emplace(group_[g], result.size());
            if (found.second) result.emplace_back();
            result[found.first->second].push_back(g);
        }
        return result;
    }

    // The merged sides that a group uses.
    std::vector<int> numbers_of(const FlowGroup& group) const {
        const FlowClass& kind = flows_.classes_[group.flow_class];
        std::vector<int> numbers;
        for (int k = kind.first_side; k < kind.end_side; ++k) numbers.push_back(number_[flows_.sides_[k]]);
        std::sort(numbers.begin(), numbers.end());
        return numbers;
    }

    bool are_alike(const FlowGroup& a, const FlowGroup& b) const {
        return a.latency_ms == b.latency_ms && a.bytes == b.bytes &&
               flows_.classes_[a.flow_class].limit == flows_.classes_[b.flow_class].limit &&
               numbers_of(a) == numbers_of(b);
    }

    // How many flows of these groups use a side of each number: any of them, for it is the same.
    std::map<int, int> count_flows(const std::vector<int>& members) {
        std::vector<int> used;
        for (int g : members) {
            const FlowClass& kind = flows_.classes_[flows_.groups_[g].flow_class];
            for (int k = kind.first_side; k < kind.end_side; ++k) {
                if (num_flows_[flows_.sides_[k]] == 0) used.push_back(flows_.sides_[k]);
                num_flows_[flows_.sides_[k]] += flows_.groups_[g].count;
            }
        }
        std::map<int, int> flows_on, num_used;
        for (int side : used) {
            const int most = flows_on.emplace(number_[side], num_flows_[side]).first->second;
            is_exact_ = is_exact_ && most == num_flows_[side];
            ++num_used[number_[side]];
            num_flows_[side] = 0;
        }
        for (const auto& [number, count] : num_used)
            is_exact_ = is_exact_ && count == num_alike_[number];
        return flows_on;
    }

    // Adds one group for all these.
    void add_group(const std::vector<int>& members, FlowTable& merged) {
        FlowGroup group = flows_.groups_[members.front()];
        for (int g : members) is_exact_ = is_exact_ && are_alike(group, flows_.groups_[g]);
        std::map<int, int> flows_on = count_flows(members);
        group.count = 0;
        for (const auto& [number, count] : flows_on) group.count = std::gcd(group.count, count);
        group.flow_class = class_of(flows_.classes_[group.flow_class].limit, flows_on, group.count, merged);
        merged.groups_.push_back(group);
    }

    // A class counts flows in units: so many use a side for each that a group counts.
    int class_of(double limit, std::map<int, int>& flows_on, int unit, FlowTable& merged) {
        for (auto& [number, count] : flows_on) count /= unit;
        const auto found = class_of_.emplace(std::make_pair(limit, flows_on),
                                             static_cast<int>(merged.classes_.size()));
        if (found.second) {
            const int first_side = static_cast<int>(merged.sides_.size());
            for (const auto& [number, count] : flows_on)
                merged.sides_.push_back(number), merged.flows_on_.push_back(count);
            merged.classes_.push_back({limit, first_side, static_cast<int>(merged.sides_.size())});
        }
        return found.first->second;
    }

    const FlowTable& flows_;
    std::vector<int> transfer_of_;     // [groups]
    std::vector<Colour> own_, group_;  // [groups], without their sides and with them
    std::vector<Colour> side_;         // [sides]
    std::vector<int> number_;          // [sides], of the merged table
    std::vector<int> num_alike_;       // [merged sides]
    std::vector<int> num_flows_;       // [sides], of one merged group
    std::map<std::pair<double, std::map<int, int>>, int> class_of_;
    bool is_exact_ = true;             // whether no colours have collided
};

std::unique_ptr<const FlowTable> merge_alike(const FlowTable& flows) {
    FlowMerger merger(flows);
    if (!merger.may_merge() || !merger.colour()) return nullptr;
    return merger.merge();
}

}  // namespace pipeplan
