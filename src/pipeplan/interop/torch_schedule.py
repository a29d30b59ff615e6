"""The schedule CSV of torch.distributed.pipelining: a line for each rank, a cell for each step.

::

    0F0,0F1,,,0B0,,0B1
    ,1F0,1B0,1F1,1B1

A cell is `<stage><kind><microbatch>`. An empty cell is a bubble. A block stands in a later column
than the blocks that it needs, so runtimes that go from column to column work, too.

The last stage has to run its forwards in the order of their numbers: torch stores losses in the
order in which they come, and would take the wrong ones. So microbatches get new numbers.
"""

import io
from collections.abc import Sequence

import numpy as np

from pipeplan.interop.exported import Exported, ExportSettings
from pipeplan.interop.replica_grid import require_grid
from pipeplan.interop.torch_groups import group_csv
from pipeplan.pipeline import Kind, Plan, Schedule
from pipeplan.replaying import Replayed

__all__ = [
    "export_torch_csv",
    "family_notes",
    "plan_csv",
    "schedule_csv",
    "with_ascending_last_stage",
]


def export_torch_csv(replayed: Replayed, settings: ExportSettings) -> Exported:
    """The plan's order as a compute-only schedule."""
    plan = replayed.plan
    grid = require_grid(plan)
    notes = grid.pair_notes
    if grid.num_replicas > 1:
        notes = [f"each of {grid.num_replicas} data-parallel groups runs this schedule", *notes]
    recomputing = [str(n) for n, stage in enumerate(plan.stages) if stage.recompute]
    if recomputing:
        notes.append(f"the file cannot say that stages {', '.join(recomputing)} recompute")
    notes += family_notes(plan, grid.num_replicas)
    return Exported(data=plan_csv(plan).encode(), notes=tuple(notes))


def plan_csv(plan: Plan) -> str:
    """The text of a plan's schedule, of whichever version."""
    return group_csv(plan) if plan.uses_families else schedule_csv(plan.schedule)


def family_notes(plan: Plan, num_replicas: int) -> list[str]:
    """What a schedule CSV does not say about plans of the second version."""
    notes = []
    if any(stage.gradient_buckets > 1 for stage in plan.stages):
        notes.append("the file cannot say gradient buckets")
    if plan.shard_optimizer:
        notes.append("the file cannot say that the optimizer is sharded")
    if num_replicas > 1 and not plan.schedule.is_by_stage and _has_weight_gradients(plan):
        notes.append(
            "backwards are cut in two: let fully_shard or replicate reduce gradients;"
            " DistributedDataParallel leaves some out without a word"
        )
    return notes


def _has_weight_gradients(plan: Plan) -> bool:
    return any(
        block.kind is Kind.WEIGHT_GRADIENT for order in plan.schedule.orders for block in order
    )


def with_ascending_last_stage(schedule: Schedule) -> list[list[int]]:
    """The codes of all stages, microbatches renamed so that the last stage's forwards ascend."""
    last = schedule.codes(schedule.num_stages - 1)
    forwards = last[last >= 0]
    new_number = np.empty_like(forwards)
    new_number[forwards] = np.arange(len(forwards), dtype=forwards.dtype)
    renamed = []
    for stage in range(schedule.num_stages):
        codes = schedule.codes(stage)
        numbers = new_number[np.where(codes >= 0, codes, -1 - codes)]
        renamed.append(np.where(codes >= 0, numbers, -1 - numbers).tolist())
    return renamed


def schedule_csv(schedule: Schedule) -> str:
    """The text of a schedule that does not deadlock."""
    orders = with_ascending_last_stage(schedule)
    columns = _columns(orders)
    text = io.StringIO()
    for stage, order in enumerate(orders):
        cells = [""] * (columns[stage][-1] + 1)
        for column, code in zip(columns[stage], order, strict=True):
            cells[column] = f"{stage}F{code}" if code >= 0 else f"{stage}B{-1 - code}"
        text.write(",".join(cells))
        text.write("\n")
    return text.getvalue()


def _columns(orders: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each block its column: the first one behind all blocks that it needs."""
    last = len(orders) - 1
    columns: list[list[int]] = [[] for _ in orders]
    done: list[dict[int, int]] = [{} for _ in orders]
    """By stage and code, the column in which a block stands."""
    waiting = list(range(len(orders)))
    while waiting:
        stage = waiting.pop()
        order, mine = orders[stage], columns[stage]
        start = len(mine)
        while len(mine) < len(order):
            code = order[len(mine)]
            needed = _needed_column(done, stage, code, last)
            if needed is None:
                break
            mine.append(max(mine[-1] + 1 if mine else 0, needed + 1))
            done[stage][code] = mine[-1]
        if len(mine) > start:  # what has been done here may be what the neighbours wait for
            waiting += [n for n in (stage - 1, stage + 1) if 0 <= n <= last]
    return columns


def _needed_column(done: Sequence[dict[int, int]], stage: int, code: int, last: int) -> int | None:
    """The column of the block whose output this one takes, -1 if none; None: not done yet."""
    if code >= 0:
        return done[stage - 1].get(code) if stage else -1
    forward = done[stage].get(-1 - code)
    if stage == last or forward is None:
        return forward
    return done[stage + 1].get(code)
