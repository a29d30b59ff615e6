"""The schedule CSV of torch's pipelining for a plan whose groups may have several stages.

A line is a group, which is a rank of the pipeline. Torch's runtime knows several stages a rank in
any chain, and backwards cut in two::

    0F0,0F1,,3F0,3I0,3F1,3W0
    ,1F0,2F0,1F1,2F1

As in `torch_schedule`, a block stands in a later column than the blocks that it needs, and
microbatches get new numbers, so that the last stage runs its forwards in ascending order.
"""

from collections.abc import Sequence

from pipeplan.pipeline import Block, Kind, Plan

__all__ = ["group_csv"]

F, B, I, W = Kind  # noqa: E741
Step = tuple[int, str, int]
"""Stage, kind, microbatch."""


def group_csv(plan: Plan) -> str:
    """The text of a schedule that does not deadlock."""
    orders = _renamed(plan)
    last = plan.num_stages - 1
    columns: dict[Step, int] = {}
    rows: list[list[str]] = [[] for _ in orders]
    position = [0] * len(orders)
    goes_on = True
    while goes_on:
        goes_on = False
        for group, order in enumerate(orders):
            while position[group] < len(order):
                step = order[position[group]]
                needed = _needed_column(step, last, columns)
                if needed is None:
                    break
                row = rows[group]
                row += [""] * (needed + 1 - len(row))
                columns[step] = len(row)
                row.append(f"{step[0]}{step[1]}{step[2]}")
                position[group] += 1
                goes_on = True
    return "".join(",".join(row) + "\n" for row in rows)


def _renamed(plan: Plan) -> list[list[Step]]:
    """Each group's blocks, microbatches numbered as the last stage runs their forwards."""
    last = plan.num_stages - 1
    orders: Sequence[Sequence[Block]] = plan.schedule.orders
    forwards = [
        block.microbatch
        for order in orders
        for block in order
        if block.stage == last and block.kind is F
    ]
    number = {microbatch: index for index, microbatch in enumerate(forwards)}
    return [
        [(block.stage, block.kind.value, number[block.microbatch]) for block in order]
        for order in orders
    ]


def _needed_column(step: Step, last: int, columns: dict[Step, int]) -> int | None:
    """The column of the block whose result this one takes, -1 if none; None: not there yet."""
    stage, kind, m = step
    if kind == F:
        return columns.get((stage - 1, F, m)) if stage else -1
    if kind == W:
        return columns.get((stage, I, m))
    if stage == last:
        return columns.get((stage, F, m))
    return columns.get((stage + 1, B, m), columns.get((stage + 1, I, m)))
