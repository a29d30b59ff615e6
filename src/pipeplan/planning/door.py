"""The door: a problem and a planner in, a finished plan or a reason out.

`plan`, `compare` and `sweep` all come through `attempt`. It judges every plan in the same way: the
order of blocks that the planner gives is simulated, and the figures come from that run. A
planner's own word for its time counts for nothing.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from pipeplan import _core
from pipeplan.checker import check
from pipeplan.cluster import Cluster
from pipeplan.cost import BYTES_IN_GB, CostModel
from pipeplan.errors import InfeasibleError, InputError, PlanningInterrupted
from pipeplan.pipeline import Plan, Schedule
from pipeplan.planning.prediction import predict
from pipeplan.planning.problem import (
    Draft,
    Planner,
    Problem,
    SearchInterrupted,
)
from pipeplan.planning.registry import PLANNERS, find_planner
from pipeplan.plugins import SCHEDULE_GROUP, find
from pipeplan.profile import ModelProfile
from pipeplan.schedules import PORTFOLIO, SCHEDULES, ScheduleRule, schedule_guarantee_ms
from pipeplan.simulator import run_schedule
from pipeplan.validation import (
    MICROBATCHES,
    require_count,
    require_plan_size,
    require_seed,
)
from pipeplan.version import VERSION

__all__ = ["Attempt", "attempt", "make_problem", "plan"]

ANY_SCHEDULE = "portfolio"
MIN_EFFORT, MAX_EFFORT = 0.01, 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What became of one planner on one problem: a plan, or the reason why there is none."""

    planner: str
    planning_s: float
    plan: Plan | None = None
    reason: str | None = None


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
        planner: one of `PLANNERS`, or a planner of another installed package.
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
        PlanningInterrupted: Ctrl-C; a `KeyboardInterrupt` that carries the best plan so far.
    """
    problem = make_problem(
        model,
        cluster,
        microbatches,
        runnable=runnable,
        seed=seed,
        effort=effort,
        time_limit_s=time_limit_s,
        num_threads=num_threads,
        report=report,
    )
    made = attempt(problem, planner, schedule=schedule)
    if made.plan is None:
        raise InfeasibleError(made.reason)
    return made.plan


def make_problem(
    model: ModelProfile,
    cluster: Cluster,
    microbatches: int,
    *,
    runnable: bool = False,
    seed: int = 0,
    effort: float = 1.0,
    time_limit_s: float | None = None,
    num_threads: int | None = None,
    report: Callable[[str], None] | None = None,
) -> Problem:
    """What planners get, once everything that the caller asked for is known to be possible."""
    require_count(InputError, "microbatches", microbatches, MICROBATCHES)
    require_plan_size(min(model.num_layers, cluster.num_devices), microbatches)
    require_seed(seed)
    if not MIN_EFFORT <= effort <= MAX_EFFORT:
        raise InputError(f"effort: {effort:g} is not within {MIN_EFFORT:g}..{MAX_EFFORT:g}")
    if time_limit_s is not None and not 0 < time_limit_s < math.inf:
        raise InputError(f"time_limit_s: {time_limit_s:g} is not a number above zero")
    if num_threads is not None and num_threads < 1:
        raise InputError(f"num_threads: {num_threads} is not at least 1")
    return Problem(
        cost=CostModel(model, cluster, max_replicas=model.microbatch_size if runnable else None),
        num_microbatches=microbatches,
        runnable=runnable,
        seed=seed,
        effort=effort,
        time_limit_s=time_limit_s,
        deadline=math.inf if time_limit_s is None else time.monotonic() + time_limit_s,
        num_threads=num_threads or os.cpu_count() or 1,
        report=report or (lambda _: None),
    )


def attempt(
    problem: Problem,
    planner: str,
    *,
    schedule: str | None = None,
    function: Planner | None = None,
) -> Attempt:
    """What the planner makes of the problem: a finished plan, or why there is none.

    `function` stands for the planner of that name; by default it is looked up.
    """
    make_draft = function or find_planner(planner)
    rules = _rules(schedule)
    began_s = time.perf_counter()
    try:
        _require_room(problem.model, problem.cluster)
        draft = make_draft(problem)
        if problem.runnable:
            _require_runnable(problem, draft, planner)
    except InfeasibleError as error:
        return Attempt(planner=planner, planning_s=time.perf_counter() - began_s, reason=str(error))
    except _core.DeadlineError:
        reason = f"the time limit of {problem.time_limit_s:g} s passed before there was a plan"
        return Attempt(
            planner=planner,
            planning_s=time.perf_counter() - began_s,
            reason=f"{reason}; allow more time or use planner 'best'",
        )
    except SearchInterrupted as stop:
        raise PlanningInterrupted(_finish(problem, planner, schedule, rules, stop.draft)) from None
    plan = _finish(problem, planner, schedule, rules, draft)
    if make_draft is not PLANNERS.get(planner):
        _require_valid(plan)
    return Attempt(planner=planner, planning_s=time.perf_counter() - began_s, plan=plan)


def _rules(schedule: str | None) -> dict[str, ScheduleRule]:
    """The rules that a plan may be run under instead of its planner's order; none by default."""
    if schedule is None:
        return {}
    if schedule == ANY_SCHEDULE:
        return {rule: SCHEDULES[rule] for rule in PORTFOLIO}
    known = {**SCHEDULES, ANY_SCHEDULE: SCHEDULES["pe"]}  # so that messages list it
    return {schedule: find("schedule", schedule, known, SCHEDULE_GROUP)}


def _finish(
    problem: Problem,
    planner: str,
    schedule: str | None,
    rules: dict[str, ScheduleRule],
    draft: Draft,
) -> Plan:
    """The plan of a draft, with figures that a simulation of its order gives."""
    draft = _run_draft(problem, draft, rules)
    return Plan(
        model=problem.model,
        cluster=problem.cluster,
        microbatches=problem.num_microbatches,
        stages=draft.stages,
        schedule=Schedule.from_codes(draft.codes.tolist()),
        planner=planner,
        predicted=predict(problem, draft),
        options={
            "microbatches": problem.num_microbatches,
            "planner": planner,
            "effort": problem.effort,
            **({} if schedule is None else {"schedule": schedule}),
            **({"runnable": True} if problem.runnable else {}),
            **({} if problem.time_limit_s is None else {"time_limit_s": problem.time_limit_s}),
            **draft.notes,
        },
        seed=problem.seed,
        version=VERSION,
    )


def _run_draft(problem: Problem, draft: Draft, rules: dict[str, ScheduleRule]) -> Draft:
    """The draft in its own order, or in the fastest of the rules' orders, with its true time.

    A bound on all plans holds whatever the order is.
    """
    costs = problem.cost.pipeline_costs(draft.stages)
    orders = {
        rule: np.asarray(run(costs, problem.num_microbatches).order_SM2, dtype=np.int32)
        for rule, run in rules.items()
    } or {"": draft.codes}
    times_ms = {rule: run_schedule(costs, codes).iteration_ms for rule, codes in orders.items()}
    rule = min(times_ms, key=lambda rule: times_ms[rule])
    guarantee_ms = draft.schedule_guarantee_ms
    if rules:
        is_pe = rule == "pe"
        guarantee_ms = schedule_guarantee_ms(costs, problem.num_microbatches) if is_pe else None
    return replace(
        draft,
        codes=orders[rule],
        iteration_ms=times_ms[rule],
        schedule_guarantee_ms=guarantee_ms,
    )


def _require_valid(plan: Plan) -> None:
    """Another package's planner may be wrong; the checker says so before anybody relies on it."""
    verdict = check(plan)
    if not verdict.ok:
        raise InputError(
            f"planner: {plan.planner!r} made a plan that is not valid: {verdict.errors[0]}"
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


def _require_room(model: ModelProfile, cluster: Cluster) -> None:
    """Refuse a model with a layer that no device can hold, whatever the plan.

    Only the bare parameters count here. Optimizer state and activations can be sharded,
    offloaded or recomputed, so too much of them is a warning about the plan.
    """
    rooms_gb = [math.inf if d.memory_gb is None else d.memory_gb for d in cluster.devices]
    layer = max(model.layers, key=lambda layer: layer.parameter_bytes)
    need_gb = layer.parameter_bytes / BYTES_IN_GB
    if need_gb > max(rooms_gb):
        raise InfeasibleError(
            f"layer {layer.name!r} has {need_gb:.3g} GB of parameters, more than any device"
            f" can hold ({max(rooms_gb):g} GB); use larger devices or split the layer"
        )
