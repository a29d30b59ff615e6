"""Plans of our own with equally many replicas in each stage, for frameworks that need them."""

from collections.abc import Sequence
from dataclasses import replace
from inspect import signature

from pipeplan.documents.json_text import to_json
from pipeplan.documents.plans import plan_document
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.group_schedules import GROUP_SCHEDULES
from pipeplan.interop.exported import CannotExport, Exported, ExportSettings
from pipeplan.interop.nearest import find_nearest
from pipeplan.interop.replica_grid import require_grid
from pipeplan.pipeline import Plan
from pipeplan.planning.limits import Limits, broken_limits, make_limits
from pipeplan.replaying import Replayed, replay_plan
from pipeplan.schedules import PORTFOLIO, SCHEDULES

__all__ = ["export_grid_plan", "nearest_grid_plan"]

LIMITS = tuple(signature(make_limits).parameters)[2:]
"""The options that limit plans, by their names."""


def export_grid_plan(replayed: Replayed, settings: ExportSettings) -> Exported:
    """The plan as it is; refused unless its stages have equally many, even replicas."""
    require_grid(replayed.plan)
    return Exported(data=to_json(plan_document(replayed.plan)))


def nearest_grid_plan(plan: Plan, schedule: str | None = None) -> Plan:
    """The fastest plan with equal replicas that is found near a plan; itself if none is faster.

    With `schedule`, its order is that of this rule. It keeps what was asked of the plan: memory and
    constraints. So the bound of the plan stays, which speaks of all plans that keep these.
    """
    if schedule in GROUP_SCHEDULES and _is_grid(plan):
        return plan
    if schedule is not None and schedule not in SCHEDULES:
        raise InputError(
            f"schedule: {schedule!r} cannot be searched with equal replicas;"
            f" take one of {', '.join(SCHEDULES)}"
        )
    rules: Sequence[str] = PORTFOLIO if schedule is None else (schedule,)
    limits = _limits_of(plan)

    def accept(each: Replayed) -> None:
        require_grid(each.plan)
        broken = broken_limits(each.plan, limits)
        if broken.constraint is not None or (limits.memory and not broken.fits_memory):
            raise CannotExport("it breaks a limit of the plan")

    found = find_nearest(replay_plan(plan), accept, rules, with_groups=schedule is None)
    if found is None:
        raise InfeasibleError(
            "no plan with equally many replicas in each stage was found that keeps memory and"
            " constraints; relax these (--ignore-memory), or plan without --uniform-replicas"
        )
    is_same = (found.plan.stages, found.plan.schedule) == (plan.stages, plan.schedule)
    own_order_is_better = schedule is None and found.plan.iteration_ms >= plan.iteration_ms
    if is_same or (own_order_is_better and _is_grid(plan)):
        return plan
    predicted = replace(found.plan.require_predicted(), bound=plan.bound)
    return replace(
        found.plan,
        planner=plan.planner,
        options={**plan.options, "uniform_replicas": True},
        predicted=predicted,
    )


def _limits_of(plan: Plan) -> Limits:
    """What was asked of the plan, as it records it."""
    asked = {name: plan.options[name] for name in LIMITS if name in plan.options}
    return make_limits(plan.model, plan.cluster, **asked)


def _is_grid(plan: Plan) -> bool:
    try:
        require_grid(plan)
    except CannotExport:
        return False
    return True
