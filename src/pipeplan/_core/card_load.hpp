// What a plan sends over each shared link in an iteration: no schedule is faster than the busiest of
// them. The closed form looks at one transfer at a time. This bound sees that many transfers use the
// same card, as they do where stages are spread over many hosts.
#pragma once
#include <algorithm>
#include <vector>

#include "flow_table.hpp"
#include "instance.hpp"

namespace pipeplan {

// All transfers but the last `num_rings` are sent once for each microbatch.
inline double card_load_ms(const FlowTable& flows, int num_rings, int num_microbatches) {
    std::vector<double> load_ms(flows.capacity().size(), 0.0);
    const int num_lanes = static_cast<int>(flows.transfers().size()) - num_rings;
    for (int t = 0; t < static_cast<int>(flows.transfers().size()); ++t) {
        const FlowTransfer& transfer = flows.transfers()[t];
        const double times = t < num_lanes ? num_microbatches : 1.0;
        for (int g = transfer.first_group; g < transfer.end_group; ++g) {
            const FlowGroup& group = flows.groups()[g];
            const FlowClass& its = flows.classes()[group.flow_class];
            for (int k = its.first_side; k < its.end_side; ++k)
                load_ms[flows.sides()[k]] +=
                    times * group.count * group.bytes / flows.capacity()[flows.sides()[k]];
        }
    }
    return load_ms.empty() ? 0.0 : *std::max_element(load_ms.begin(), load_ms.end());
}

// The same for stages whose devices share microbatches evenly, without a list of flows.
class CardLoad {
  public:
    explicit CardLoad(const Instance& in) : in_(in) {
        if (in.shared) load_ms_.assign(in.shared->num_sides(), 0.0), count_.assign(in.shared->num_links(), {});
    }

    // Stages have `end_layer` and `devices`.
    template <class Stages>
    double operator()(const Stages& stages) {
        std::fill(load_ms_.begin(), load_ms_.end(), 0.0);
        int first_layer = 0;
        for (std::size_t n = 0; n < stages.size(); ++n) {
            const std::vector<int>& devices = stages[n].devices;
            add_ring(devices, in_.parameter_bytes(first_layer, stages[n].end_layer));
            first_layer = stages[n].end_layer;
            if (n + 1 < stages.size()) add_channel(first_layer, devices, stages[n + 1].devices);
        }
        return load_ms_.empty() ? 0.0 : *std::max_element(load_ms_.begin(), load_ms_.end());
    }

  private:
    struct Members {
        int here = 0, next = 0;
    };
    void touch(const std::vector<int>& devices, int Members::*side) {
        for (int u : devices) {
            for (int link : in_.shared->links_of(u)) {
                if (count_[link].here + count_[link].next == 0) touched_.push_back(link);
                ++(count_[link].*side);
            }
        }
    }
    void add(int side, double bytes) { load_ms_[side] += bytes / in_.shared->capacity(side); }

    void add_channel(int end_layer, const std::vector<int>& devices, const std::vector<int>& next) {
        const double k = static_cast<double>(devices.size()), m = static_cast<double>(next.size());
        const double there = in_.num_microbatches * in_.output_bytes[end_layer - 1] / (k * m);
        const double back = in_.num_microbatches * in_.gradient_bytes[end_layer - 1] / (k * m);
        touch(devices, &Members::here), touch(next, &Members::next);
        for (int link : touched_) {
            const double leaves = count_[link].here * (m - count_[link].next);
            const double enters = count_[link].next * (k - count_[link].here);
            add(2 * link, leaves * there + enters * back);
            add(2 * link + 1, enters * there + leaves * back);
            count_[link] = {};
        }
        touched_.clear();
    }
    // A ring leaves and enters the members at least once, unless it has all its devices there.
    void add_ring(const std::vector<int>& devices, double parameter_bytes) {
        const double k = static_cast<double>(devices.size());
        touch(devices, &Members::here);
        for (int link : touched_) {
            if (count_[link].here < static_cast<int>(devices.size())) {
                add(2 * link, 2.0 * (k - 1) / k * parameter_bytes);
                add(2 * link + 1, 2.0 * (k - 1) / k * parameter_bytes);
            }
            count_[link] = {};
        }
        touched_.clear();
    }

    const Instance& in_;
    std::vector<double> load_ms_;  // [sides]
    std::vector<Members> count_;   // [links]
    std::vector<int> touched_;
};

}  // namespace pipeplan
