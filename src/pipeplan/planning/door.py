"""The door: a problem and a planner in, a finished plan or a reason out.

`plan`, `compare` and `sweep` all call `attempt`. It judges every plan in the same way: it simulates
the planner's order of blocks, and the plan's figures come from that run. The time that the planner
itself gives is ignored. Plans of other packages' functions are checked as well.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Unpack

import numpy as np

from pipeplan import _core
from pipeplan.checker import check, structural_errors
from pipeplan.cluster import Cluster
from pipeplan.cost import BYTES_IN_GB, CostModel, PipelineCosts
from pipeplan.errors import (
    InfeasibleError,
    InputError,
    NoPlanError,
    PlanFileError,
    PlanningInterrupted,
)
from pipeplan.group_costs import group_costs
from pipeplan.group_schedules import GROUP_SCHEDULES
from pipeplan.group_simulator import run_groups
from pipeplan.pipeline import Plan
from pipeplan.planning.group_order import in_group_order
from pipeplan.planning.limits import BrokenLimits, broken_limits, require_kept
from pipeplan.planning.options import WITHOUT_FAMILIES, OptionArguments, PlanningOptions
from pipeplan.planning.prediction import predict
from pipeplan.planning.problem import (
    Draft,
    Planner,
    Problem,
    SearchInterrupted,
)
from pipeplan.planning.registry import (
    KEEP_LIMITS,
    PLANNERS,
    SEARCH_FAMILIES,
    find_planner,
    require_known_options,
)
from pipeplan.plugins import SCHEDULE_GROUP, find, foreign_code
from pipeplan.profile import ModelProfile
from pipeplan.schedules import PORTFOLIO, SCHEDULES, ScheduleRule, schedule_guarantee_ms
from pipeplan.simulator import Codes, run_schedule
from pipeplan.validation import (
    MICROBATCHES,
    THREADS,
    number_text,
    require_count,
    require_figure,
    require_plan_size,
    require_seed,
)
from pipeplan.version import VERSION

__all__ = ["Attempt", "attempt", "make_problem", "may_search_families", "plan"]

ANY_SCHEDULE = "portfolio"
MAX_TIME_LIMIT_S = 1e300


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The result of one planner on one problem: a plan, or the reason why there is none."""

    planner: str
    planning_s: float
    plan: Plan | None = None
    broken: BrokenLimits = field(default_factory=BrokenLimits)
    """Which limits the plan breaks: published planners keep none of them on purpose."""
    reason: str | None = None
    error: InfeasibleError | None = None
    """What the planner said; a `NoPlanError` says what is needed."""


def plan(
    model: ModelProfile,
    cluster: Cluster,
    microbatches: int = 16,
    planner: str = "best",
    *,
    schedule: str | None = None,
    seed: int = 0,
    time_limit_s: float | None = None,
    num_threads: int | None = None,
    report: Callable[[str], None] | None = None,
    **options: Unpack[OptionArguments],
) -> Plan:
    """The plan that `planner` makes to train `model` on `cluster`.

    Args:
        model: what a microbatch costs, layer by layer.
        cluster: the devices and the links between them.
        microbatches: the number of microbatches in an iteration.
        planner: one of `PLANNERS`, or a planner of another installed package.
        schedule: run the planner's stages under this rule instead of the planner's own order: one
            of `SCHEDULES`, a schedule of another package, or `portfolio` for the fastest of ours.
        seed: for planners that draw random numbers. The same seed gives the same plan.
        time_limit_s: stop searching after this time. Only this can make plans differ between runs.
        num_threads: by default one for each processor. It never changes the plan.
        report: called with a short line about progress, now and then.
        options: the fields of `PlanningOptions`, such as `divisible`, `ignore_memory`, `stages`,
            `without` or `effort`. With `positions=1, split_backward=False` each device has one
            stage, and backwards stay whole.

    Raises:
        InputError: an unknown planner, an impossible number, an unknown layer or device, or a
            planner of another package that fails or makes an invalid plan.
        InfeasibleError: no plan exists. `NoPlanError` where nothing fits, with what is needed.
        PlanningInterrupted: Ctrl-C; a `KeyboardInterrupt` that carries the best plan so far.

    Examples:
        >>> import pipeplan as pp
        >>> model, cluster = pp.zoo.model("bert-large"), pp.zoo.cluster("4x2-10g")
        >>> plan = pp.plan(model, cluster, microbatches=16)
        >>> plan
        <Plan of 'bert-large' on '4x2-10g' by 'best': ... stages on 8 devices, 16 microbatches, ...>
        >>> plain = pp.plan(model, cluster, microbatches=16, positions=1, split_backward=False)
        >>> plain.bound.gap(plain.iteration_ms) < 0.01, plan.iteration_ms < plain.iteration_ms
        (True, True)
    """
    problem = make_problem(
        model,
        cluster,
        microbatches,
        seed=seed,
        time_limit_s=time_limit_s,
        num_threads=num_threads,
        report=report,
        **options,
    )
    require_known_options(problem.options, planner)
    made = attempt(problem, planner, schedule=schedule)
    if made.plan is None:
        raise made.error or InfeasibleError(made.reason)
    return made.plan


def make_problem(
    model: ModelProfile,
    cluster: Cluster,
    microbatches: int,
    options: PlanningOptions | None = None,
    *,
    seed: int = 0,
    time_limit_s: float | None = None,
    num_threads: int | None = None,
    report: Callable[[str], None] | None = None,
    **given: Unpack[OptionArguments],
) -> Problem:
    """The problem that planners get, after a check of all that the caller asked for.

    Options are given one by one, or all together as `options`.
    """
    require_count(InputError, "microbatches", microbatches, MICROBATCHES)
    require_plan_size(min(model.num_layers, cluster.num_devices), microbatches)
    require_seed(seed)
    options = options or PlanningOptions(**given)
    if time_limit_s is not None:
        require_figure(InputError, "time_limit_s", time_limit_s)
        if not 0 < time_limit_s < MAX_TIME_LIMIT_S:
            raise InputError(
                f"time_limit_s: {number_text(time_limit_s)} is not a number above zero"
                f" and below {MAX_TIME_LIMIT_S:g}"
            )
    if num_threads is not None:
        require_count(InputError, "num_threads", num_threads, THREADS)
    return Problem(
        cost=CostModel(model, cluster),
        num_microbatches=int(microbatches),  # numpy's numbers become Python's
        limits=options.limits(model, cluster),
        options=options,
        seed=int(seed),
        effort=options.effort,
        time_limit_s=None if time_limit_s is None else float(time_limit_s),
        deadline=math.inf if time_limit_s is None else time.monotonic() + time_limit_s,
        num_threads=int(num_threads or os.cpu_count() or 1),
        report=report or (lambda _: None),
    )


def attempt(
    problem: Problem,
    planner: str,
    *,
    schedule: str | None = None,
    function: Planner | None = None,
) -> Attempt:
    """The planner's result: a finished plan, or the reason why there is none.

    `function` is the planner itself; by default it is looked up by its name.
    """
    make_draft = function or find_planner(planner)
    is_ours = make_draft is PLANNERS.get(planner)
    rules = _rules(schedule)
    searches = is_ours and planner in SEARCH_FAMILIES
    if not searches:  # it plans by its own rules, and the plan's record says so
        problem = replace(problem, options=replace(problem.options, **WITHOUT_FAMILIES))
    problem = _settled(problem, is_free=searches and schedule is None)
    began_s = time.perf_counter()
    try:
        _require_room(problem.model, problem.cluster)
        draft = make_draft(problem) if is_ours else _foreign_draft(problem, planner, make_draft)
    except PlanFileError as error:  # published plans may need paths that the cluster lacks
        planning_s = time.perf_counter() - began_s
        return Attempt(planner=planner, planning_s=planning_s, reason=str(error))
    except InfeasibleError as error:
        planning_s = time.perf_counter() - began_s
        return Attempt(planner=planner, planning_s=planning_s, reason=str(error), error=error)
    except _core.DeadlineError:
        reason = f"the time limit of {problem.time_limit_s:g} s passed before there was a plan"
        remedy = "allow more time" + ("" if planner == "best" else " or use planner 'best'")
        return Attempt(
            planner=planner,
            planning_s=time.perf_counter() - began_s,
            reason=f"{reason}; {remedy}",
        )
    except SearchInterrupted as stop:
        raise PlanningInterrupted(_finish(problem, planner, schedule, rules, stop.draft)) from None
    plan = _finish(problem, planner, schedule, rules, draft)
    if not is_ours:
        _require_valid("planner", planner, check(plan).errors)
    planning_s = time.perf_counter() - began_s
    broken = broken_limits(plan, problem.limits)
    if is_ours and planner in KEEP_LIMITS and schedule is None:
        require_kept(planner, plan, broken, problem.limits)
    return Attempt(planner=planner, planning_s=planning_s, plan=plan, broken=broken)


def may_search_families(options: PlanningOptions, planner: str, schedule: str | None) -> bool:
    """Whether plans may have several stages a device, cut backwards or sharded optimizers."""
    chooses = planner in SEARCH_FAMILIES and schedule is None
    return (
        chooses
        and replace(options, split_backward=options.split_backward is not False).uses_families
    )


def _settled(problem: Problem, *, is_free: bool) -> Problem:
    """The problem with what its options stand for, for a planner that chooses the order or not."""
    options = problem.options.settled(
        problem.model, problem.cluster.num_devices, problem.num_microbatches, is_free=is_free
    )
    return replace(problem, options=options)


def _rules(schedule: str | None) -> dict[str, ScheduleRule]:
    """The schedules to try instead of the planner's own order; none by default."""
    if schedule is None:
        return {}
    if schedule in GROUP_SCHEDULES:
        return {}
    if schedule == ANY_SCHEDULE:
        return {rule: SCHEDULES[rule] for rule in PORTFOLIO}
    others = (ANY_SCHEDULE, *GROUP_SCHEDULES)
    known = {**SCHEDULES, **dict.fromkeys(others, SCHEDULES["pe"])}  # messages list them too
    return {schedule: find("schedule", schedule, known, SCHEDULE_GROUP)}


def _finish(
    problem: Problem,
    planner: str,
    schedule: str | None,
    rules: dict[str, ScheduleRule],
    draft: Draft,
) -> Plan:
    """The plan of a draft, with figures from a simulation of its order."""
    draft = _run_draft(problem, draft, rules, schedule)
    return Plan(
        model=problem.model,
        cluster=problem.cluster,
        microbatches=problem.num_microbatches,
        stages=draft.stages,
        schedule=draft.schedule,
        planner=planner,
        predicted=predict(problem, draft),
        options={
            "microbatches": problem.num_microbatches,
            "planner": planner,
            **problem.options.record(),
            **({} if schedule is None else {"schedule": schedule}),
            **({} if problem.time_limit_s is None else {"time_limit_s": problem.time_limit_s}),
            **draft.notes,
        },
        seed=problem.seed,
        version=VERSION,
        shard_optimizer=draft.shard_optimizer,
    )


def _run_draft(
    problem: Problem, draft: Draft, rules: dict[str, ScheduleRule], schedule: str | None
) -> Draft:
    """The draft in its own order, or in the fastest of the rules' orders, with its true time.

    The draft's bound speaks of all plans, so it holds for every order.
    """
    if schedule in GROUP_SCHEDULES:
        return _run_groups(problem, in_group_order(problem, draft, schedule))
    if draft.orders and not rules:
        return _run_groups(problem, draft)
    if draft.orders:
        raise InputError(
            f"schedule: {schedule!r} is for one stage a device and whole backwards; leave it out,"
            f" or use one of {', '.join(GROUP_SCHEDULES)}"
        )
    costs = problem.cost.pipeline_costs(draft.stages)
    orders = {
        rule: _order_under(problem, draft, costs, rule, run) for rule, run in rules.items()
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


def _run_groups(problem: Problem, draft: Draft) -> Draft:
    """The same for groups that have several stages, or whose backwards are cut in two."""
    costs = group_costs(problem.cost, draft.stages)
    timeline = run_groups(costs, draft.orders, problem.num_microbatches)
    return replace(draft, iteration_ms=timeline.iteration_ms, schedule_guarantee_ms=None)


def _order_under(
    problem: Problem, draft: Draft, costs: PipelineCosts, name: str, rule: ScheduleRule
) -> Codes:
    """The order of blocks that the rule gives the draft's stages."""
    if rule is SCHEDULES.get(name):
        return rule(costs, problem.num_microbatches).order_SM2
    with foreign_code("schedule", name):
        codes = np.array(rule(costs, problem.num_microbatches).order_SM2, dtype=np.int32)
        draft = replace(draft, codes=codes)
        errors = structural_errors(_unsimulated_plan(problem, draft))
    _require_valid("schedule", name, errors)
    return draft.codes


def _foreign_draft(problem: Problem, name: str, planner: Planner) -> Draft:
    """The draft of another package's planner, once it is known to be complete."""
    with foreign_code("planner", name):
        draft = planner(problem)
        if not isinstance(draft, Draft):
            raise TypeError(f"it gave a {type(draft).__name__} instead of a Draft")
        draft = replace(draft, codes=np.array(draft.codes, dtype=np.int32))
        errors = structural_errors(_unsimulated_plan(problem, draft))
    _require_valid("planner", name, errors)
    return draft


def _unsimulated_plan(problem: Problem, draft: Draft) -> Plan:
    return Plan(
        model=problem.model,
        cluster=problem.cluster,
        microbatches=problem.num_microbatches,
        stages=draft.stages,
        schedule=draft.schedule,
        planner="",
        shard_optimizer=draft.shard_optimizer,
    )


def _require_valid(kind: str, name: str, errors: Sequence[str]) -> None:
    """Refuse a wrong plan of another package's function before anybody relies on it."""
    if errors:
        raise InputError(f"{kind}: {name!r} made a plan that is not valid: {errors[0]}")


def _require_room(model: ModelProfile, cluster: Cluster) -> None:
    """Refuse a model with a layer that no device can hold.

    Only the parameters count here. Optimizer state and activations can be sharded, offloaded or
    recomputed. So if these do not fit, the plan gets a warning.
    """
    rooms_gb = [math.inf if d.memory_gb is None else d.memory_gb for d in cluster.devices]
    index = max(range(model.num_layers), key=lambda layer: model.layers[layer].parameter_bytes)
    need_gb = model.layers[index].parameter_bytes / BYTES_IN_GB
    if need_gb > max(rooms_gb):
        raise NoPlanError(
            f"layer {model.layers[index].name!r} has {need_gb:.3g} GB of parameters, more than any"
            f" device can hold ({max(rooms_gb):g} GB); use larger devices or split the layer",
            layers=(index, index + 1),
            need_gb=need_gb,
            memory_gb=max(rooms_gb),
        )
