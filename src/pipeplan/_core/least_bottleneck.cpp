// Cuts the layers into stages with the least bottleneck, where each stage has its own table of times.
//
//     A(n, j) = min over i < j of  max( A(n - 1, i), time of layers i..j-1 as stage n )
//
// O(S L^2). Ties go to the earliest cut.
#include <algorithm>
#include <cstddef>
#include <vector>

#include "kernels.hpp"

namespace pipeplan {

std::vector<int> least_bottleneck(const StageTimes& times, const std::vector<int>& table_of,
                                  Control& control) {
    const std::size_t width = static_cast<std::size_t>(times.num_layers) + 1;
    std::vector<double> before(width, kInfinity), here(width);
    std::vector<std::vector<int>> cut(table_of.size(), std::vector<int>(width, 0));
    before[0] = 0.0;
    for (std::size_t n = 0; n < table_of.size(); ++n) {
        control.check();
        std::fill(here.begin(), here.end(), kInfinity);
        for (std::size_t first = 0; first + 1 < width; ++first) {
            if (before[first] == kInfinity) continue;
            const double* stage_ms = times.of(table_of[n], static_cast<int>(first));
            for (std::size_t end = first + 1; end < width; ++end) {
                const double total = std::max(before[first], stage_ms[end]);
                const bool better = total < here[end];
                here[end] = better ? total : here[end];
                cut[n][end] = better ? static_cast<int>(first) : cut[n][end];
            }
        }
        std::swap(before, here);
    }
    std::vector<int> ends;
    if (before.back() == kInfinity) return ends;
    for (std::size_t n = table_of.size(); n-- > 0;) {
        ends.push_back(ends.empty() ? times.num_layers : cut[n + 1][ends.back()]);
    }
    std::reverse(ends.begin(), ends.end());
    return ends;
}

}  // namespace pipeplan
