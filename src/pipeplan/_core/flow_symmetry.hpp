// Flows that are equal by symmetry, counted as one (docs/theory.md, "Flows that are alike").
//
// Sides of shared links are *alike* if they have the same capacity and each kind of flow uses them
// equally often. Flows of a transfer are of one kind if they start together, have the same bytes and
// the same limit, and use sides that are alike. Then all flows of a kind always have the same rate. So one
// side stands for those that are alike, and one group for those of a kind.
#pragma once
#include <memory>

#include "flow_table.hpp"

namespace pipeplan {

// The coarsest such table, by colour refinement: O(rounds * groups * sides of a flow). Null where no two
// groups are of one kind; most plans show this in O(groups * log(groups)).
std::unique_ptr<const FlowTable> merge_alike(const FlowTable& flows);

}  // namespace pipeplan
