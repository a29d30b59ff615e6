"""Plans with the same stages, several a group, for programs that know fewer orders."""

from collections.abc import Iterator
from dataclasses import replace

from pipeplan.errors import InputError
from pipeplan.group_schedules import group_orders
from pipeplan.interop.chain_shapes import INTERLEAVED, whole_backwards
from pipeplan.pipeline import Plan, Schedule, Stage

__all__ = ["group_candidates", "plain_stages"]


def plain_stages(plan: Plan) -> tuple[Stage, ...]:
    """The plan's stages with even shares, one bucket, and recomputation in all stages or none."""
    recompute = all(stage.recompute for stage in plan.stages)
    return tuple(
        replace(stage, shares=None, recompute=recompute, gradient_buckets=1)
        for stage in plan.stages
    )


def group_candidates(plan: Plan) -> Iterator[tuple[tuple[Stage, ...], Schedule]]:
    """Its stages in its own order, with whole backwards, and in interleaved 1F1B if they fit."""
    stages = plain_stages(plan)
    yield stages, plan.schedule
    yield stages, Schedule.from_group_codes(whole_backwards(plan))
    try:
        yield (
            stages,
            Schedule.from_group_codes(group_orders(INTERLEAVED, stages, plan.microbatches)),
        )
    except InputError:  # another chain, or not a multiple of the groups
        return
