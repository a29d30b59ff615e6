"""Bounds for a fixed plan: no schedule runs given stages in less time.

`plan_bound_ms` comes from recurrences over the stages, from the last to the first
(`_core/bound.hpp`, docs/theory.md), O(S). Planners minimise it. `schedule_bound_ms` is higher: it
comes from the windows of all blocks (`_core/schedule_windows.hpp`).
"""

from collections.abc import Sequence

import numpy as np

from pipeplan import _core
from pipeplan.cost import PipelineCosts

__all__ = ["plan_bound_ms", "schedule_bound_ms"]


def plan_bound_ms(
    costs: PipelineCosts, num_microbatches: int, caps: Sequence[int] | None = None
) -> float:
    """A lower bound on the iteration; `caps` limit the microbatches that each stage holds."""
    caps_S = np.array(caps or [num_microbatches] * costs.num_stages, dtype=np.int32)
    return _core.plan_bound(costs.for_kernels(), num_microbatches, caps_S)


def schedule_bound_ms(costs: PipelineCosts, num_microbatches: int, iteration_ms: float) -> float:
    """A lower bound on all schedules, at most the `iteration_ms` of a known one."""
    bound_ms, _, _ = _core.best_schedule(costs.for_kernels(), num_microbatches, iteration_ms, 0)
    return bound_ms
