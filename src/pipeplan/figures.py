"""The figures that a plan carries, from its costs, its order of blocks and its time."""

import math
from collections.abc import Sequence

from pipeplan.cost import CostModel
from pipeplan.group_memory import group_memory_parts
from pipeplan.pipeline import (
    Bound,
    Codes,
    GroupCodes,
    Prediction,
    Stage,
    groups_of,
    most_in_flight,
)

__all__ = ["group_figures", "predicted_figures"]


def predicted_figures(
    cost: CostModel,
    stages: Sequence[Stage],
    codes: Sequence[Codes],
    iteration_ms: float,
    *,
    schedule_guarantee_ms: float | None = None,
    bound: Bound | None = None,
) -> Prediction:
    """What the cost model says about these stages, if each runs its `codes` in this time."""
    num_microbatches = len(codes[0]) // 2
    busy_ms = num_microbatches * math.fsum(
        ms for stage in stages for ms in cost.device_compute_ms(stage)
    )
    num_used = sum(stage.num_replicas for stage in stages)
    peak_memory_gb = {
        cost.cluster.devices[device].name: need_gb
        for stage, order in zip(stages, codes, strict=True)
        for device, need_gb in zip(
            stage.devices, cost.memory_gb(stage, most_in_flight(order)), strict=True
        )
    }
    return Prediction(
        iteration_ms=iteration_ms,
        bubble_fraction=1 - busy_ms / (num_used * iteration_ms) if iteration_ms else 0.0,
        peak_memory_gb=peak_memory_gb,
        schedule_guarantee_ms=schedule_guarantee_ms,
        bound=bound,
    )


def group_figures(
    cost: CostModel,
    stages: Sequence[Stage],
    orders: Sequence[GroupCodes],
    iteration_ms: float,
    *,
    num_microbatches: int,
    shard_optimizer: bool = False,
    bound: Bound | None = None,
) -> Prediction:
    """The same for groups, each of which runs its order; there is no guarantee for them."""
    busy_ms = num_microbatches * math.fsum(
        ms for stage in stages for ms in cost.device_compute_ms(stage)
    )
    groups = groups_of(stages)
    num_used = sum(group.num_replicas for group in groups)
    peak_memory_gb = {
        cost.cluster.devices[device].name: parts.total_gb
        for group, order in zip(groups, orders, strict=True)
        for device, parts in zip(
            group.devices,
            group_memory_parts(cost, stages, group, order, shard_optimizer=shard_optimizer),
            strict=True,
        )
    }
    return Prediction(
        iteration_ms=iteration_ms,
        bubble_fraction=1 - busy_ms / (num_used * iteration_ms) if iteration_ms else 0.0,
        peak_memory_gb=peak_memory_gb,
        bound=bound,
    )
