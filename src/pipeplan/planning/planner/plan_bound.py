"""No schedule runs given stages in less time than this: the fixed-plan bound.

Suffix recurrences over the stages (`_core/bound.hpp`, docs/theory.md), O(S). It is the
objective of the planners and, for a plan at hand, a proof.
"""

from collections.abc import Sequence

import numpy as np

from pipeplan import _core
from pipeplan.cost import PipelineCosts

__all__ = ["plan_bound_ms"]


def plan_bound_ms(
    costs: PipelineCosts, num_microbatches: int, caps: Sequence[int] | None = None
) -> float:
    """The least time of an iteration under any schedule that holds the caps on microbatches."""
    caps_S = np.array(caps or [num_microbatches] * costs.num_stages, dtype=np.int32)
    return _core.plan_bound(costs.for_kernels(), num_microbatches, caps_S)
