// Divides every range of layers over the units of one level of a cluster, with the least bottleneck.
//
// Narayanan et al. 2019 (PipeDream), SOSP, section 3.1:
//
//     A(i, j, m) = min( one stage on m units,
//                       min over m' < m, k of  max( A(i, k, m - m'), last stage k..j-1 on m' units ) )
//
// O(L^2 m^2) for each first layer i. Ties go to one stage, then to the fewest units, then to the
// earliest cut.
#include <algorithm>
#include <cstddef>
#include <vector>

#include "kernels.hpp"

namespace pipeplan {

SplitLevel split_level(const StageTimes& one_stage, const StageTimes& last_stage, int num_starts,
                       Control& control) {
    const int units = one_stage.num_sizes;
    const std::size_t width = static_cast<std::size_t>(one_stage.num_layers) + 1;
    const std::size_t size = static_cast<std::size_t>(units) * num_starts * width;
    SplitLevel level{std::vector<double>(size), std::vector<int>(size, -1), std::vector<int>(size, 0)};
    std::vector<double> value(width);
    std::vector<int> cut(width), behind(width);
    for (int first = 0; first < num_starts; ++first) {
        const auto row = [&](int m) { return (static_cast<std::size_t>(m) * num_starts + first) * width; };
        for (int m = 0; m < units; ++m) {  // m + 1 units
            control.check();
            double* best = &level.best_ms[row(m)];
            std::copy_n(one_stage.of(m, first), width, best);
            std::fill(value.begin(), value.end(), kInfinity);
            for (int last = 0; last < m; ++last) {
                const double* front = &level.best_ms[row(m - last - 1)];
                for (std::size_t k = first + 1; k + 1 < width; ++k) {
                    const double* stage_ms = last_stage.of(last, static_cast<int>(k));
                    for (std::size_t end = k + 1; end < width; ++end) {
                        const double total = std::max(front[k], stage_ms[end]);
                        const bool better = total < value[end];
                        value[end] = better ? total : value[end];
                        cut[end] = better ? static_cast<int>(k) : cut[end];
                        behind[end] = better ? last + 1 : behind[end];
                    }
                }
            }
            for (std::size_t end = 0; end < width; ++end) {
                if (!(value[end] < best[end])) continue;
                best[end] = value[end];
                level.cut[row(m) + end] = cut[end];
                level.behind[row(m) + end] = behind[end];
            }
        }
    }
    return level;
}

}  // namespace pipeplan
