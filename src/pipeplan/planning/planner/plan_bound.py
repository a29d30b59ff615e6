"""The fixed-plan bound: no schedule runs given stages in less time.

Recurrences over the stages, from the last to the first (`_core/bound.hpp`, docs/theory.md), O(S).
Planners minimise this bound. For a plan it is a proof.
"""

from collections.abc import Sequence

import numpy as np

from pipeplan import _core
from pipeplan.cost import PipelineCosts

__all__ = ["plan_bound_ms"]


def plan_bound_ms(
    costs: PipelineCosts, num_microbatches: int, caps: Sequence[int] | None = None
) -> float:
    """A lower bound on the iteration; `caps` limit the microbatches that each stage holds."""
    caps_S = np.array(caps or [num_microbatches] * costs.num_stages, dtype=np.int32)
    return _core.plan_bound(costs.for_kernels(), num_microbatches, caps_S)
