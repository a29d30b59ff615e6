"""A draft's stages in a published order for groups."""

from dataclasses import replace

from pipeplan.errors import InputError
from pipeplan.group_schedules import WHOLE_BACKWARDS, group_orders
from pipeplan.pipeline import Bound, BoundScope
from pipeplan.planning.problem import Draft, Problem

__all__ = ["in_group_order", "require_weight_gradients"]


def in_group_order(problem: Problem, draft: Draft, schedule: str) -> Draft:
    """The draft under that schedule; `InputError` if its stages have another shape."""
    if schedule not in WHOLE_BACKWARDS:
        require_weight_gradients(problem, f"schedule: {schedule}")
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


def _of_families(bound: Bound | None) -> Bound | None:
    """A bound on plans with one stage a device says nothing of others."""
    return bound if bound is not None and bound.scope is BoundScope.FAMILIES else None
