"""The door: inputs in, a finished plan out, by whichever planner is asked for."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace

from pipeplan.cluster import Cluster
from pipeplan.cost import BYTES_IN_GB, CostModel
from pipeplan.documents.text import nearest
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.pipeline import Plan, Schedule
from pipeplan.planning.baselines import BASELINES
from pipeplan.planning.planner.best import plan_best
from pipeplan.planning.planner.exact import plan_exact
from pipeplan.planning.planner.spp import plan_spp
from pipeplan.planning.prediction import predict
from pipeplan.planning.problem import MAX_MICROBATCHES, Draft, Planner, Problem
from pipeplan.profile import ModelProfile
from pipeplan.schedules import PORTFOLIO, SCHEDULES, schedule_guarantee_ms
from pipeplan.version import VERSION

__all__ = ["PLANNERS", "plan"]

STARTS_UPTO = {16: tuple(BASELINES), 64: ("data-parallel", "gpipe", "1f1b", "grid")}
"""Up to how many devices `best` starts from which published plans: those that take little time."""
STARTS_BEYOND = ("data-parallel", "1f1b")
MAX_START_LAYERS = 128
"""Most of the published recursions take the square of the layers or more."""


def plan_best_of_all(problem: Problem) -> Draft:
    """`best` with the published planners' complete plans among its starting points."""
    num_devices = problem.cluster.num_devices
    names: tuple[str, ...] = STARTS_BEYOND
    if problem.model.num_layers <= MAX_START_LAYERS:
        names = next((names for most, names in STARTS_UPTO.items() if num_devices <= most), names)
    return plan_best(problem, (BASELINES[name](problem) for name in names))


PLANNERS: dict[str, Planner] = {
    "best": plan_best_of_all,
    "spp": plan_spp,
    "exact": plan_exact,
    **BASELINES,
}

ANY_SCHEDULE = "portfolio"
MIN_EFFORT, MAX_EFFORT = 0.01, 1000.0


def plan(
    model: ModelProfile,
    cluster: Cluster,
    microbatches: int = 16,
    planner: str = "best",
    *,
    schedule: str | None = None,
    runnable: bool = False,
    seed: int = 0,
    effort: float = 1.0,
    time_limit_s: float | None = None,
    num_threads: int | None = None,
    report: Callable[[str], None] | None = None,
) -> Plan:
    """The plan that `planner` makes to train `model` on `cluster`.

    Args:
        model: what a microbatch costs, layer by layer.
        cluster: the devices and what connects them.
        microbatches: how many of them make an iteration.
        planner: one of `PLANNERS`.
        schedule: run the planner's stages under this rule of `SCHEDULES` instead of its own, or
            under whichever of these is fastest: `portfolio`.
        runnable: make no stage with more replicas than a microbatch has samples, since it could
            not be run.
        seed: for planners that draw random numbers; the same seed gives the same plan.
        effort: how much more, or less, to search than usual, from 0.01 to 1,000.
        time_limit_s: stop searching then; the one thing that makes plans differ from run to run.
        num_threads: by default one for each processor; never changes the plan.
        report: is told about progress, a short line each time.

    Raises:
        InputError: an unknown planner, or a number of microbatches that cannot be.
        InfeasibleError: no plan exists.
    """
    if planner not in PLANNERS:
        raise InputError(f"planner: {planner!r} is not known{nearest(planner, PLANNERS)}")
    if schedule is not None and schedule not in (*SCHEDULES, ANY_SCHEDULE):
        known = (*SCHEDULES, ANY_SCHEDULE)
        raise InputError(f"schedule: {schedule!r} is not known{nearest(schedule, known)}")
    if not 1 <= microbatches <= MAX_MICROBATCHES:
        raise InputError(f"microbatches: {microbatches} is not within 1..{MAX_MICROBATCHES}")
    if not MIN_EFFORT <= effort <= MAX_EFFORT:
        raise InputError(f"effort: {effort:g} is not within {MIN_EFFORT:g}..{MAX_EFFORT:g}")
    if time_limit_s is not None and not time_limit_s > 0:
        raise InputError(f"time_limit_s: {time_limit_s:g} is not above zero")
    problem = Problem(
        cost=CostModel(model, cluster, max_replicas=model.microbatch_size if runnable else None),
        num_microbatches=microbatches,
        seed=seed,
        effort=effort,
        deadline=math.inf if time_limit_s is None else time.monotonic() + time_limit_s,
        num_threads=num_threads or os.cpu_count() or 1,
        report=report or (lambda _: None),
    )
    _require_room(model, cluster)
    draft = PLANNERS[planner](problem)
    if runnable:
        _require_runnable(problem, draft, planner)
    if schedule is not None:
        draft = _reschedule(problem, draft, schedule)
    return Plan(
        model=model,
        cluster=cluster,
        microbatches=microbatches,
        stages=draft.stages,
        schedule=Schedule.from_codes(draft.codes.tolist()),
        planner=planner,
        predicted=predict(problem, draft),
        options={
            "microbatches": microbatches,
            "planner": planner,
            "effort": effort,
            **({} if schedule is None else {"schedule": schedule}),
            **({"runnable": True} if runnable else {}),
            **({} if time_limit_s is None else {"time_limit_s": time_limit_s}),
            **draft.notes,
        },
        seed=seed,
        version=VERSION,
    )


def _require_runnable(problem: Problem, draft: Draft, planner: str) -> None:
    """Published planners know no limit on replicas; what they make may not be runnable."""
    rows = problem.model.microbatch_size
    for index, stage in enumerate(draft.stages):
        if stage.num_replicas > rows:
            raise InfeasibleError(
                f"{planner!r} gives stage {index} {stage.num_replicas} replicas, but a microbatch"
                f" has {rows} samples; use planner 'best' or a larger microbatch_size"
            )


def _reschedule(problem: Problem, draft: Draft, schedule: str) -> Draft:
    """The same stages under another rule; a bound on all plans still holds."""
    costs = problem.cost.pipeline_costs(draft.stages)
    rules = PORTFOLIO if schedule == ANY_SCHEDULE else (schedule,)
    runs = {rule: SCHEDULES[rule](costs, problem.num_microbatches) for rule in rules}
    rule = min(runs, key=lambda rule: runs[rule].iteration_ms)
    guarantee_ms = schedule_guarantee_ms(costs, problem.num_microbatches)
    return replace(
        draft,
        codes=runs[rule].order_SM2,
        iteration_ms=runs[rule].iteration_ms,
        schedule_guarantee_ms=guarantee_ms if rule == "pe" else None,
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
