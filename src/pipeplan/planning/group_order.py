"""A draft's stages in a published order for groups."""

from dataclasses import replace

from pipeplan.cost import CostModel
from pipeplan.errors import InputError
from pipeplan.group_schedules import WHOLE_BACKWARDS, group_orders
from pipeplan.pipeline import Bound, BoundScope, Stage
from pipeplan.planning.problem import Draft, Problem

__all__ = ["in_group_order", "may_cut_backwards", "require_weight_gradients"]


def in_group_order(problem: Problem, draft: Draft, schedule: str) -> Draft:
    """The draft under that schedule; `InputError` if its stages have another shape."""
    if schedule not in WHOLE_BACKWARDS:
        require_weight_gradients(problem, f"schedule: {schedule}")
        _require_known_parts(problem, draft, f"schedule: {schedule}")
    orders = group_orders(schedule, draft.stages, problem.num_microbatches)
    return replace(
        draft, orders=tuple(orders), bound=_of_families(draft.bound), schedule_guarantee_ms=None
    )


def require_weight_gradients(problem: Problem, field: str) -> None:
    """Refuse to cut backwards of which nobody knows how long the parts take."""
    for index, layer in enumerate(problem.model.layers):
        if layer.weight_grad_ms is None:
            raise InputError(
                f"{field}: layers[{index}] ({layer.name!r}) has no weight_grad_ms;"
                " add it to the model, or keep backwards whole"
            )


def may_cut_backwards(cost: CostModel, stage: Stage) -> bool:
    """Whether the parts of the stage's backward are known to add up to the whole.

    They are known for whole microbatches. Where other times are measured for the share of a
    replica, parts in proportion to the share would be shorter or longer together than the whole.
    """
    return stage.num_replicas == 1 or cost.measured is None


def _require_known_parts(problem: Problem, draft: Draft, field: str) -> None:
    for index, stage in enumerate(draft.stages):
        if not may_cut_backwards(problem.cost, stage):
            raise InputError(
                f"{field}: stage {index} has replicas, and layers have times at several microbatch"
                " sizes, but weight_grad_ms at one; leave out `at`, or keep backwards whole"
            )


def _of_families(bound: Bound | None) -> Bound | None:
    """A bound on plans with one stage a device says nothing of others."""
    return bound if bound is not None and bound.scope is BoundScope.FAMILIES else None
