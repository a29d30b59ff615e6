"""The blocks of single stages, in plans whose orders are those of groups."""

from pipeplan.pipeline import Block, Kind, Plan

__all__ = ["group_of", "last_weight_block", "splits_backward", "stage_order"]


def group_of(plan: Plan, stage: int) -> int:
    """The number of the group that serves a stage."""
    return next(number for number, group in enumerate(plan.groups) if stage in group.stages)


def stage_order(plan: Plan, stage: int) -> tuple[Block, ...]:
    """The blocks of one stage, in the order in which its group runs them."""
    order = plan.schedule[group_of(plan, stage)]
    return tuple(block for block in order if block.stage == stage)


def splits_backward(plan: Plan, stage: int) -> bool:
    """Whether the stage cuts a backward in two."""
    return any(block.kind is Kind.INPUT_GRADIENT for block in stage_order(plan, stage))


def last_weight_block(plan: Plan, stage: int) -> int:
    """The position of the block in its group's order with which a stage's gradients are done."""
    order = plan.schedule[group_of(plan, stage)]
    return max(position for position, block in enumerate(order) if block.stage == stage)
