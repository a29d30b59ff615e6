"""From the orders of groups and their costs to the times of every block, transfer and part.

The rules are 14-20 of `docs/formats.md`. The event loop is a kernel (`_core/simulate_groups.cpp`).
This module explains a deadlock. Plans with one stage a group and whole backwards go through
`simulator`, which is faster.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pipeplan import _core
from pipeplan.errors import ScheduleError
from pipeplan.group_costs import GroupCosts
from pipeplan.pipeline import Block, GroupCodes, GroupTimeline, Kind, Plan, Schedule

__all__ = ["group_time_ms", "run_group_plan", "run_groups"]


def run_group_plan(plan: Plan, costs: GroupCosts) -> GroupTimeline:
    """One iteration of a plan of any kind, whose orders the checker finds complete."""
    orders = [plan.schedule.group_codes(group) for group in range(len(plan.schedule))]
    return run_groups(costs, orders, plan.microbatches)


def run_groups(
    costs: GroupCosts, orders: Sequence[GroupCodes], num_microbatches: int
) -> GroupTimeline:
    """One iteration in the given orders, one for each group; `ScheduleError` if they deadlock."""
    sizes = [len(order) for order in orders]
    codes = np.concatenate(orders)
    trace = _core.run_groups(costs.for_kernels(), num_microbatches, codes, sizes)
    done = trace[9]
    if done.tolist() != sizes:
        schedule = Schedule.from_group_codes(orders)
        raise ScheduleError(_explain_deadlock(costs, schedule, done.tolist()))
    return GroupTimeline(
        first_block_G1=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
        code_N=codes,
        block_start_ms_N=trace[0],
        block_end_ms_N=trace[1],
        sent_T=trace[2],
        transfer_start_ms_T=trace[3],
        transfer_end_ms_T=trace[4],
        part_stage_P=trace[5],
        part_number_P=trace[6],
        part_start_ms_P=trace[7],
        part_end_ms_P=trace[8],
    )


def group_time_ms(
    costs: GroupCosts, orders: Sequence[GroupCodes], num_microbatches: int
) -> float | None:
    """The iteration time alone, for those who try many orders; None if they deadlock."""
    sizes = [len(order) for order in orders]
    ms = _core.group_time(costs.for_kernels(), num_microbatches, np.concatenate(orders), sizes)
    return None if math.isinf(ms) else ms


def _explain_deadlock(costs: GroupCosts, schedule: Schedule, blocks_done: list[int]) -> str:
    """Which block waits for which, around the circle.

    A group that waits does so at one block for another that has not run. That one's group waits
    too, at that block or before it. Followed from group to group, these waits end in a circle.
    """
    group_of = costs.group_of_S.tolist()
    waits_at = {
        group: schedule.block(group, done)
        for group, done in enumerate(blocks_done)
        if done < len(schedule.group_codes(group))
    }
    there = {str(block) for order in schedule for block in order}
    needed = {
        group: _needed_by(block, costs.num_stages, there) for group, block in waits_at.items()
    }
    path = [next(iter(waits_at))]
    while (group := group_of[needed[path[-1]].stage]) not in path:
        path.append(group)
    circle = path[path.index(group) :]
    steps = [f"group {g} waits at {waits_at[g]} for {needed[g]}" for g in sorted(circle)]
    return f"schedule: deadlocks: {', '.join(steps)}"


def _needed_by(block: Block, num_stages: int, there: set[str]) -> Block:
    """The block whose result this one waits for, as the orders have it."""
    if block.kind is Kind.FORWARD:
        return Block(Kind.FORWARD, block.stage - 1, block.microbatch)
    if block.kind is Kind.WEIGHT_GRADIENT:
        return Block(Kind.INPUT_GRADIENT, block.stage, block.microbatch)
    if block.stage == num_stages - 1:
        return Block(Kind.FORWARD, block.stage, block.microbatch)
    whole = Block(Kind.BACKWARD, block.stage + 1, block.microbatch)
    return whole if str(whole) in there else replace(whole, kind=Kind.INPUT_GRADIENT)
