"""What `simulate`, `report`, `trace` and `plot` show: a checked plan, run again.

They refuse what the checker refuses. Only stale figures under `predicted` are no reason to
refuse: the replayed ones take their place, and a warning says so.
"""

from dataclasses import dataclass, replace

from pipeplan.checker import disagreements, structural_errors
from pipeplan.cost import CostModel, PipelineCosts
from pipeplan.errors import InputError, PlanFileError, ScheduleError
from pipeplan.figures import group_figures, predicted_figures
from pipeplan.group_costs import group_costs
from pipeplan.group_simulator import run_group_plan
from pipeplan.pipeline import GroupTimeline, Plan, Prediction, Timeline
from pipeplan.schedules import schedule_guarantee_ms
from pipeplan.simulator import Run, run_plan, timeline_of

__all__ = ["Replayed", "replay_plan", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A valid plan with the figures of its own replay."""

    plan: Plan
    """The given plan; `predicted` is replaced where it was missing or stale."""
    cost: CostModel
    costs: PipelineCosts
    """Of each stage by itself; with groups all-reduces are whole here, and backwards too."""
    run: Run | GroupTimeline
    """The iteration as arrays, enough for any picture of a large plan; with groups a timeline."""
    warnings: tuple[str, ...] = ()
    """One line if `predicted` was replaced."""

    @property
    def timeline(self) -> Timeline | GroupTimeline:
        """The iteration with its blocks, transfers and all-reduces."""
        return (
            self.run if isinstance(self.run, GroupTimeline) else timeline_of(self.costs, self.run)
        )


def simulate(plan: Plan) -> Timeline | GroupTimeline:
    """The timeline of a plan; a `GroupTimeline` if it is of the second version.

    A plan that the checker refuses raises `PlanFileError`, or `ScheduleError` if its schedule
    is incomplete or deadlocks. Figures under `predicted` are not looked at.

    Examples:
        >>> import pipeplan as pp
        >>> plan = pp.plan(pp.zoo.model("vgg19"), pp.zoo.cluster("4x2-10g"), planner="1f1b")
        >>> timeline = pp.simulate(plan)
        >>> timeline.iteration_ms == plan.iteration_ms
        True
        >>> first = timeline.blocks[0][0]
        >>> first.start_ms
        0.0
    """
    cost = _valid_cost(plan)
    if plan.uses_families:
        return run_group_plan(plan, group_costs(cost, plan.stages))
    return timeline_of(*run_plan(plan, cost))


def replay_plan(plan: Plan) -> Replayed:
    """The plan run again, with figures that are its own; errors as those of `simulate`."""
    cost = _valid_cost(plan)
    costs, run, figures = _group_run(plan, cost) if plan.uses_families else _stage_run(plan, cost)
    stale = list(disagreements(plan, figures))
    warnings: tuple[str, ...] = ()
    if plan.predicted is None:
        warnings = ("predicted: is missing; the replayed figures take its place",)
    elif stale:
        more = f" (and {len(stale) - 1} more)" if len(stale) > 1 else ""
        warnings = (f"{stale[0]}{more}; the replayed figures take their place",)
    if warnings:
        plan = replace(plan, predicted=_mended(plan, figures))
    return Replayed(plan=plan, cost=cost, costs=costs, run=run, warnings=warnings)


def _stage_run(plan: Plan, cost: CostModel) -> tuple[PipelineCosts, Run, Prediction]:
    costs, run = run_plan(plan, cost)
    figures = predicted_figures(
        cost,
        plan.stages,
        list(run.order_SM2),
        run.iteration_ms,
        schedule_guarantee_ms=schedule_guarantee_ms(costs, plan.microbatches),
    )
    return costs, run, figures


def _group_run(plan: Plan, cost: CostModel) -> tuple[PipelineCosts, GroupTimeline, Prediction]:
    costs = group_costs(cost, plan.stages)
    timeline = run_group_plan(plan, costs)
    figures = group_figures(
        cost,
        plan.stages,
        [plan.schedule.group_codes(group) for group in range(len(plan.schedule))],
        timeline.iteration_ms,
        num_microbatches=plan.microbatches,
        shard_optimizer=plan.shard_optimizer,
    )
    return costs.by_stage(), timeline, figures


def _valid_cost(plan: Plan) -> CostModel:
    """The cost model of a plan in which the checker finds nothing wrong."""
    errors = structural_errors(plan)
    if errors:
        raise _error(errors[0])
    return CostModel(plan.model, plan.cluster)


def _error(message: str) -> InputError:
    """The exception for a message of the checker, which begins with the field that is wrong."""
    return (ScheduleError if message.startswith("schedule") else PlanFileError)(message)


def _mended(plan: Plan, figures: Prediction) -> Prediction:
    """The replayed figures, with the guarantee and the bound only if the plan still has them."""
    old = plan.predicted
    if old is None:
        return replace(figures, schedule_guarantee_ms=None)
    guarantee_ms = None if old.schedule_guarantee_ms is None else figures.schedule_guarantee_ms
    mended = replace(figures, schedule_guarantee_ms=guarantee_ms, bound=old.bound)
    for message in disagreements(replace(plan, predicted=mended), figures):
        if message.startswith("predicted.schedule_guarantee_ms"):
            mended = replace(mended, schedule_guarantee_ms=None)
        else:
            mended = replace(mended, bound=None)
    return mended
