// The largest inputs that kernels take.
#pragma once
#include <cstddef>

namespace pipeplan {

constexpr double kMostMs = 1e100;  // far below the overflow of sums
constexpr int kMaxMicrobatches = 1 << 20;
constexpr std::size_t kMaxBlocks = std::size_t{1} << 28;

}  // namespace pipeplan
