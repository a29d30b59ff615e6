"""Cut the layers into stages and map them to consecutive devices of an order (PRM).

Reference:
    Luo et al. 2022, arXiv:2204.10562, "partition, replication and mapping". Their W(l, x, r, i)
    is the bottleneck of the first l layers as x stages on the first i devices, the last stage on
    the last r of these. Optimal for its order and objective, for each number of stages.
    Differs: the recursion in `_core/partition.cpp` takes fewer steps; the result is the same.

Complexity: O(L D^3) for each number of stages, less with a limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeplan import _core
from pipeplan.cost import CostModel
from pipeplan.pipeline import Stage
from pipeplan.planning.planner.placement import placed_stages

__all__ = ["Partition", "best_partitions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Stages, and the time that the busiest stage or channel takes for an iteration."""

    stages: tuple[Stage, ...]
    bottleneck_ms: float


def best_partitions(
    cost: CostModel,
    order: Sequence[int],
    num_microbatches: int,
    *,
    max_stages: int | None = None,
    limit_ms: float = np.inf,
    num_threads: int = 1,
    deadline: float = np.inf,
) -> list[Partition]:
    """For each number of stages the partition with the least bottleneck, if there is one.

    The paper's model: samples may be split, and memory does not count. Devices at the end of the
    order may stay unused. Partitions with a bottleneck above `limit_ms` are left out.
    """
    possible = min(len(cost.forward_ms_L), len(order))
    found = _core.partition(
        cost.kernel_instance(num_microbatches).on_devices(order),
        min(possible, max_stages or possible),
        limit_ms,
        num_threads,
        deadline,
    )
    return [
        Partition(stages=placed_stages(placed, order=order), bottleneck_ms=bottleneck_ms)
        for bottleneck_ms, placed in found
    ]
