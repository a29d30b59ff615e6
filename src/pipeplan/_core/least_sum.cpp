// Cuts the layers into stages with the least sum of times, none longer than a limit.
//
// Zheng et al. 2022 (Alpa), arXiv:2201.12023, section 5.2: the recursion F for one t_max.
//
//     F(l, d) = min over sizes s, ends j of  t(s, l, j) + F(j, d - s),   t(s, l, j) <= t_max
//
// O(L^2 D K) for K sizes. Ties go to the first size and the nearest end.
#include <cstddef>
#include <vector>

#include "kernels.hpp"

namespace pipeplan {

LeastSum least_sum(const StageTimes& times, const int* sizes, int num_devices, double limit_ms,
                   Control& control) {
    const int L = times.num_layers, D = num_devices;
    const std::size_t row = static_cast<std::size_t>(D) + 1;
    std::vector<double> least((L + 1) * row, kInfinity);  // [first layer][devices]
    std::vector<int> end_of((L + 1) * row, 0), size_of((L + 1) * row, 0);
    least[L * row] = 0.0;
    for (int first = L - 1; first >= 0; --first) {
        double* here = &least[first * row];
        control.check();
        for (int k = 0; k < times.num_sizes; ++k) {
            const double* stage_ms = times.of(k, first);
            for (int end = first + 1; end <= L; ++end) {
                if (!(stage_ms[end] <= limit_ms)) continue;
                const double* rest = &least[end * row];
                for (int d = sizes[k]; d <= D; ++d) {
                    const double total = stage_ms[end] + rest[d - sizes[k]];
                    if (total < here[d]) {
                        here[d] = total;
                        end_of[first * row + d] = end;
                        size_of[first * row + d] = k;
                    }
                }
            }
        }
    }
    LeastSum found{least[D], {}, {}};
    if (found.sum_ms == kInfinity) return found;
    for (int layer = 0, left = D; layer < L;) {
        const std::size_t at = layer * row + left;
        found.end_layer.push_back(end_of[at]);
        found.size.push_back(sizes[size_of[at]]);
        layer = end_of[at];
        left -= sizes[size_of[at]];
    }
    return found;
}

}  // namespace pipeplan
