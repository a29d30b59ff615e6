"""The door: inputs in, a finished plan out, by whichever planner is asked for."""

import math
from importlib.metadata import version

from pipeplan.cluster import Cluster
from pipeplan.cost import BYTES_IN_GB, CostModel
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.pipeline import Plan, Schedule
from pipeplan.planner.spp import plan_spp
from pipeplan.prediction import predict
from pipeplan.problem import Planner, Problem
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
        predicted=predict(problem, draft),
        options={"microbatches": microbatches, "planner": planner},
        seed=seed,
        version=version("pipeplan"),
    )


def _require_room(model: ModelProfile, cluster: Cluster) -> None:
    """Refuse a model with a layer that no device can hold, whatever the plan.

    Only the bare parameters count here. That optimizer state and activations fit is the plan's
    affair, and too much of them a warning: they can be sharded, offloaded or recomputed.
    """
    rooms_gb = [math.inf if d.memory_gb is None else d.memory_gb for d in cluster.devices]
    layer = max(model.layers, key=lambda layer: layer.parameter_bytes)
    need_gb = layer.parameter_bytes / BYTES_IN_GB
    if need_gb > max(rooms_gb):
        raise InfeasibleError(
            f"layer {layer.name!r} has {need_gb:.3g} GB of parameters, more than any device"
            f" can hold ({max(rooms_gb):g} GB); use larger devices or split the layer"
        )
