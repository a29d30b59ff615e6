"""Starts where memory is short: plans that fit, and a plan with shares that follow memory."""

from collections.abc import Sequence

from pipeplan.pipeline import Stage
from pipeplan.planning.planner.fitting import Found, stages_that_fit
from pipeplan.planning.planner.no_plan import explain_no_plan
from pipeplan.planning.planner.placement import stage_of_shares
from pipeplan.planning.planner.stage_caps import capped_costs
from pipeplan.planning.planner.stage_room import StageRoom
from pipeplan.planning.problem import Draft, Problem, check_deadline
from pipeplan.schedules import PORTFOLIO, SCHEDULES

__all__ = ["draft_by_memory", "even_plans", "order_of"]


def even_plans(problem: Problem) -> list[tuple[Stage, ...]]:
    """Some plans with even shares that fit; whole samples are shared later, by kernels."""
    found = stages_that_fit(problem)
    return [
        tuple(Stage(layers=layers, devices=devices) for layers, devices in plan)
        for plan in found.plans
    ]


def order_of(stages: Sequence[Stage], num_devices: int) -> tuple[int, ...]:
    """The order in which a plan uses the devices, unused ones last."""
    used = [device for stage in stages for device in stage.devices]
    return (*used, *sorted(set(range(num_devices)) - set(used)))


def draft_by_memory(problem: Problem, orders: Sequence[tuple[int, ...]]) -> Draft:
    """A plan whose shares follow memory, where nothing else fits; without a bound.

    Raises the reason why there is none, or `DeadlineError`.
    """
    check_deadline(problem.deadline)
    # Where only even shares are asked for, other plans are known already.
    found = stages_that_fit(problem, free_shares=True) if problem.limits.shares else Found()
    drafts = (_draft(problem, _shared(problem, plan)) for plan in found.plans)
    fitting = [draft for draft in drafts if draft is not None]
    if not fitting:
        raise explain_no_plan(problem, orders, is_proved=found.is_complete)
    return min(fitting, key=lambda draft: draft.iteration_ms)


def _shared(problem: Problem, plan: Sequence[tuple[range, tuple[int, ...]]]) -> tuple[Stage, ...]:
    room, speed_D = StageRoom(problem), problem.cost.speed_D
    return tuple(
        stage_of_shares(
            layers, devices, room.shares(devices, layers, speed_D[list(devices)].tolist())
        )
        for layers, devices in plan
    )


def _draft(problem: Problem, stages: tuple[Stage, ...]) -> Draft | None:
    """The stages under the best rule of the portfolio; None if they do not fit after all."""
    costs = capped_costs(problem, stages)
    if costs is None:
        return None
    runs = [SCHEDULES[rule](costs, problem.num_microbatches) for rule in PORTFOLIO]
    best = min(runs, key=lambda run: run.iteration_ms)
    return Draft(stages=stages, codes=best.order_SM2, iteration_ms=best.iteration_ms)
