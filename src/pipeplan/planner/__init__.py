"""The door to the planners: inputs in, a finished plan out."""

import math
from importlib.metadata import version

from pipeplan.cluster import Cluster
from pipeplan.cost import CostModel
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.pipeline import Plan, Prediction, Schedule
from pipeplan.planner.problem import Draft, Planner, Problem
from pipeplan.planner.spp import plan_spp
from pipeplan.profile import ModelProfile
from pipeplan.spelling import nearest

__all__ = ["PLANNERS", "plan"]

PLANNERS: dict[str, Planner] = {"spp": plan_spp}

MAX_MICROBATCHES = 65_536


def plan(
    model: ModelProfile,
    cluster: Cluster,
    microbatches: int = 16,
    planner: str = "spp",
    *,
    seed: int = 0,
) -> Plan:
    """The plan that `planner` makes to train `model` on `cluster`.

    Args:
        model: what a microbatch costs, layer by layer.
        cluster: the devices and what connects them.
        microbatches: how many of them make an iteration.
        planner: one of `PLANNERS`.
        seed: for planners that draw random numbers; the same seed gives the same plan.

    Raises:
        InputError: an unknown planner, or a number of microbatches that cannot be.
        InfeasibleError: no plan exists.
    """
    if planner not in PLANNERS:
        raise InputError(f"planner: {planner!r} is not known{nearest(planner, PLANNERS)}")
    if not 1 <= microbatches <= MAX_MICROBATCHES:
        raise InputError(f"microbatches: {microbatches} is not within 1..{MAX_MICROBATCHES}")
    problem = Problem(cost=CostModel(model, cluster), num_microbatches=microbatches, seed=seed)
    _require_room(model, cluster)
    draft = PLANNERS[planner](problem)
    return Plan(
        model=model,
        cluster=cluster,
        microbatches=microbatches,
        stages=draft.stages,
        schedule=Schedule.from_codes(draft.codes.tolist()),
        planner=planner,
        predicted=_predict(problem, draft),
        options={"microbatches": microbatches, "planner": planner},
        seed=seed,
        version=version("pipeplan"),
    )


def _require_room(model: ModelProfile, cluster: Cluster) -> None:
    """Refuse a model with a layer whose parameters no device can hold, whatever the plan."""
    rooms_gb = [math.inf if d.memory_gb is None else d.memory_gb for d in cluster.devices]
    per_byte = (1 + model.optimizer_bytes_per_parameter_byte) / 1e9
    layer = max(model.layers, key=lambda layer: layer.parameter_bytes)
    need_gb = layer.parameter_bytes * per_byte
    if need_gb > max(rooms_gb):
        raise InfeasibleError(
            f"layer {layer.name!r} needs {need_gb:.3g} GB for its parameters and optimizer state,"
            f" more than any device has ({max(rooms_gb):g} GB); use larger devices or split it"
        )


def _predict(problem: Problem, draft: Draft) -> Prediction:
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
    )
