"""What the cost model says about a finished plan."""

import math

from pipeplan.pipeline import Prediction
from pipeplan.planning.problem import Draft, Problem

__all__ = ["predict"]


def predict(problem: Problem, draft: Draft) -> Prediction:
    """The figures that a plan carries."""
    cost, iteration_ms = problem.cost, draft.iteration_ms
    busy_ms = problem.num_microbatches * math.fsum(
        ms for stage in draft.stages for ms in cost.device_compute_ms(stage)
    )
    num_used = sum(stage.num_replicas for stage in draft.stages)
    peak_memory_gb = {}
    for stage, order in zip(draft.stages, draft.codes, strict=True):
        in_flight = int((2 * (order >= 0) - 1).cumsum().max())
        for device, need_gb in zip(stage.devices, cost.memory_gb(stage, in_flight), strict=True):
            peak_memory_gb[problem.cluster.devices[device].name] = need_gb
    return Prediction(
        iteration_ms=iteration_ms,
        bubble_fraction=1 - busy_ms / (num_used * iteration_ms) if iteration_ms else 0.0,
        peak_memory_gb=peak_memory_gb,
        schedule_guarantee_ms=draft.schedule_guarantee_ms,
        bound=draft.bound,
    )
