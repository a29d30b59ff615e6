// A lower bound on the time of every schedule of a chain.
#pragma once
#include "chain.hpp"

namespace pipeplan {

// No order of blocks takes less. See docs/theory.md, "Chains".
double chain_bound(const Chain& chain);

}  // namespace pipeplan
