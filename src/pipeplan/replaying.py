"""What `simulate`, `report`, `trace` and `plot` show: a checked plan, run again.

They refuse what the checker refuses. Only stale figures under `predicted` are no reason to
refuse: the replayed ones take their place, and a warning says so.
"""

from dataclasses import dataclass, replace

from pipeplan.checker import disagreements, structural_errors
from pipeplan.cost import CostModel, PipelineCosts
from pipeplan.errors import InputError, PlanFileError, ScheduleError
from pipeplan.figures import predicted_figures
from pipeplan.pipeline import Plan, Prediction, Timeline
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
    run: Run
    """The iteration as arrays, enough for any picture of a large plan."""
    warnings: tuple[str, ...] = ()
    """One line if `predicted` was replaced."""

    @property
    def timeline(self) -> Timeline:
        """The iteration with its blocks, transfers and all-reduces."""
        return timeline_of(self.costs, self.run)


def simulate(plan: Plan) -> Timeline:
    """The timeline of a plan.

    A plan that the checker refuses raises `PlanFileError`, or `ScheduleError` if its schedule
    is incomplete or deadlocks. Figures under `predicted` are not looked at.
    """
    return timeline_of(*run_plan(plan, _valid_cost(plan)))


def replay_plan(plan: Plan) -> Replayed:
    """The plan run again, with figures that are its own; errors as those of `simulate`."""
    cost = _valid_cost(plan)
    costs, run = run_plan(plan, cost)
    figures = predicted_figures(
        cost,
        plan.stages,
        list(run.order_SM2),
        run.iteration_ms,
        schedule_guarantee_ms=schedule_guarantee_ms(costs, plan.microbatches),
    )
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
