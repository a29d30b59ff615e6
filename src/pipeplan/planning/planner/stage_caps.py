"""How many microbatches the stages of a plan may hold, so that its devices have the memory."""

import math
from dataclasses import replace

from pipeplan.cost import PipelineCosts
from pipeplan.pipeline import Stage
from pipeplan.planning.problem import Problem

__all__ = ["capped_costs"]

MEMORY_ROUNDING = 1e-9


def capped_costs(problem: Problem, stages: tuple[Stage, ...]) -> PipelineCosts | None:
    """The costs of stages with the microbatches that each may hold; None if one does not fit."""
    costs = problem.cost.pipeline_costs(stages)
    if not problem.limits_memory:
        return costs
    caps = tuple(_most_in_flight(problem, stage) for stage in stages)
    return replace(costs, caps=caps) if min(caps) > 0 else None


def _most_in_flight(problem: Problem, stage: Stage) -> int:
    devices, most = problem.cluster.devices, problem.num_microbatches
    base_gb = problem.cost.memory_gb(stage, 0)
    one_gb = problem.cost.memory_gb(stage, 1)
    for u, base, one in zip(stage.devices, base_gb, one_gb, strict=True):
        room_gb = (devices[u].memory_gb or math.inf) * (1 + MEMORY_ROUNDING)
        if one > room_gb:
            return 0
        if one > base:
            most = min(most, int(min(most, (room_gb - base) / (one - base))))
    return most
