// The all-reduces of a group, one after the other.
#pragma once
#include <algorithm>
#include <vector>

#include "chain.hpp"

namespace pipeplan {

// Runs the all-reduces of a group's stages in the order in which they may begin. Of an all-reduce in
// many parts, all but the last one count as one, which may begin with the first.
class ChainRings {
  public:
    // `stages` are those of the group; `end_ms` is, by stage, when its last block ends.
    void take(const Chain& chain, const int* stages, int num_stages, const double* end_ms) {
        parts_.clear();
        for (int k = 0; k < num_stages; ++k) {
            const int p = stages[k];
            if (chain.reduce_ms[p] == 0.0) continue;
            const double before_ms = chain.reduce_ms[p] - chain.last_part_ms[p];
            if (before_ms > 0) parts_.push_back({end_ms[p] - chain.early_ms[p], before_ms, p});
            parts_.push_back({end_ms[p], chain.last_part_ms[p], p});
        }
        std::sort(parts_.begin(), parts_.end(), [](const Part& a, const Part& b) {
            return a.ready_ms < b.ready_ms || (a.ready_ms == b.ready_ms && a.stage < b.stage);
        });
        end_ms_ = 0.0, cause_ = -1;
        for (const Part& part : parts_) {
            // Where a part is ready before the start, it begins with it.
            if (cause_ < 0 || part.ready_ms >= end_ms_)
                end_ms_ = std::max(0.0, part.ready_ms), cause_ = part.stage;
            end_ms_ += part.ms;
        }
    }

    double end_ms() const { return end_ms_; }
    // The stage for whose last block they waited last; -1 if there is nothing to reduce.
    int cause() const { return cause_; }

  private:
    struct Part {
        double ready_ms, ms;
        int stage;
    };
    std::vector<Part> parts_;
    double end_ms_ = 0.0;
    int cause_ = -1;
};

}  // namespace pipeplan
