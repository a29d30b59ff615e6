"""From a schedule and costs to the times of every block, transfer and all-reduce.

The rules are those of `docs/formats.md`, ties included. The event loop is a kernel
(`_core/simulate.cpp`). This module checks what goes into the kernel and explains a deadlock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from pipeplan import _core
from pipeplan.cost import CostModel, Floats, PipelineCosts
from pipeplan.errors import ScheduleError
from pipeplan.pipeline import Block, Codes, Kind, Plan, Schedule, Timeline

__all__ = [
    "Codes",
    "Preference",
    "Run",
    "run_list",
    "run_plan",
    "run_schedule",
    "timeline_of",
    "transfer_ends_ms",
]

Trace = tuple[Codes, Floats, Codes, Floats, Codes, Floats, Floats | None, Floats | None]
"""What a kernel returns: order, starts, what was sent, its starts, blocks done, ends of stages.

With shared links also the ends of transfers and of all-reduces.
"""


class Preference(IntEnum):
    """Which block a free stage runs if both its next forward and its next backward could."""

    UNIT_PIPELINE = 0
    """Whichever comes first in a pipeline in which everything takes one unit: PE."""
    BACKWARD = 1
    FORWARD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a kernel recorded of one iteration, as arrays; codes as in `Schedule.to_codes`.

    Axes: S stages, C channels, M microbatches; the axis of length 2 is forward, backward.
    """

    order_SM2: Codes
    block_start_ms_SM2: Floats
    sent_C2M: Codes
    transfer_start_ms_C2M: Floats
    end_ms_S: Floats
    """When each stage's all-reduce ends."""
    transfer_end_ms_C2M: Floats | None = None
    """Only where links are shared; else each transfer takes the time that its costs say."""

    @property
    def iteration_ms(self) -> float:
        """The latest end of any stage's all-reduce."""
        return float(self.end_ms_S.max())


def run_plan(plan: Plan, cost: CostModel | None = None) -> tuple[PipelineCosts, Run]:
    """One iteration of a plan as arrays; an incomplete schedule raises `ScheduleError`.

    `cost` is the cost model of the plan's own inputs, for callers that have it already.
    """
    if plan.uses_families:
        raise ScheduleError(
            "schedule: has blocks of groups or split backwards, which `group_simulator` runs"
        )
    cost = cost or CostModel(plan.model, plan.cluster)
    costs = cost.pipeline_costs(plan.stages)
    codes = _complete_codes(plan.schedule, plan.microbatches, len(plan.stages))
    return costs, run_schedule(costs, codes)


def run_schedule(costs: PipelineCosts, codes: Codes, deadline: float = np.inf) -> Run:
    """One iteration in the given order of blocks, each of which is there exactly once.

    Raises `DeadlineError` at the deadline, on the clock of `time.monotonic`.
    """
    trace = _core.run_schedule(costs.for_kernels(), codes, deadline)
    blocks_done = trace[4].tolist()
    if any(done < codes.shape[1] for done in blocks_done):
        raise ScheduleError(_explain_deadlock(Schedule.from_codes(codes), blocks_done))
    return _run(costs, trace)


def run_list(
    costs: PipelineCosts,
    num_microbatches: int,
    preference: Preference,
    caps: Sequence[int] | None = None,
) -> Run:
    """One iteration in the order that a list scheduler decides as it goes.

    A free stage runs its next forward or its next backward, whichever is there. If both are,
    `preference` decides. A stage never holds more microbatches than its cap.
    """
    caps_S = np.array(caps or [num_microbatches] * costs.num_stages, dtype=np.int32)
    trace = _core.run_list(costs.for_kernels(), num_microbatches, preference, caps_S)
    return _run(costs, trace)


def timeline_of(costs: PipelineCosts, run: Run) -> Timeline:
    """The run as a timeline, which makes its blocks and transfers when they are asked for."""
    is_forward_SM2 = run.order_SM2 >= 0
    block_ms_SM2 = np.where(
        is_forward_SM2, costs.forward_ms_S[:, None], costs.backward_ms_S[:, None]
    )
    block_end_ms_SM2 = run.block_start_ms_SM2 + block_ms_SM2
    return Timeline(
        order_SM2=run.order_SM2,
        block_start_ms_SM2=run.block_start_ms_SM2,
        block_end_ms_SM2=block_end_ms_SM2,
        sent_C2M=run.sent_C2M,
        transfer_start_ms_C2M=run.transfer_start_ms_C2M,
        transfer_end_ms_C2M=transfer_ends_ms(costs, run),
        all_reduce_start_ms_S=block_end_ms_SM2[:, -1],
        all_reduce_end_ms_S=run.end_ms_S,
    )


def transfer_ends_ms(costs: PipelineCosts, run: Run) -> Floats:
    """When each transfer ends, as `Run.transfer_start_ms_C2M` lists them."""
    if run.transfer_end_ms_C2M is not None:
        return run.transfer_end_ms_C2M
    send_ms_C2 = np.stack([costs.send_forward_ms_C, costs.send_backward_ms_C], axis=1)
    ends_ms: Floats = run.transfer_start_ms_C2M + send_ms_C2[:, :, None]
    return ends_ms


def _run(costs: PipelineCosts, trace: Trace) -> Run:
    order, block_start, sent, transfer_start, _, stage_end, transfer_end, all_reduce_end = trace
    return Run(
        order_SM2=order,
        block_start_ms_SM2=block_start,
        sent_C2M=sent,
        transfer_start_ms_C2M=transfer_start,
        end_ms_S=stage_end + costs.all_reduce_ms_S if all_reduce_end is None else all_reduce_end,
        transfer_end_ms_C2M=transfer_end,
    )


def _complete_codes(schedule: Schedule, num_microbatches: int, num_stages: int) -> Codes:
    """The schedule as one array, once every block is known to be there exactly once."""
    if len(schedule) != num_stages:
        raise ScheduleError(f"schedule: has {len(schedule)} orders for {num_stages} stages")
    every_code = np.arange(-num_microbatches, num_microbatches)
    for stage in range(num_stages):
        if not np.array_equal(np.sort(schedule.codes(stage)), every_code):
            raise ScheduleError(
                f"schedule[{stage}]: does not hold every microbatch of 0..{num_microbatches - 1}"
                " exactly once forward and once backward"
            )
    return np.stack([schedule.codes(stage) for stage in range(num_stages)])


def _explain_deadlock(schedule: Schedule, blocks_done: list[int]) -> str:
    """Which block waits for which, around the circle.

    No stage is done: one that is has let its neighbours finish too. So every stage waits at
    one block for another block that has not run. Following these waits from stage to stage ends
    in a circle of two neighbours, or of the last stage alone: a wait leads to a neighbour or stays.
    """
    waits_at = [schedule.block(stage, done) for stage, done in enumerate(blocks_done)]
    needed = [_needed_by(block, schedule.num_stages) for block in waits_at]
    stage = 0
    while needed[needed[stage].stage].stage != stage:
        stage = needed[stage].stage
    circle = sorted({stage, needed[stage].stage})
    steps = [f"stage {n} waits at {waits_at[n]} for {needed[n]}" for n in circle]
    return f"schedule: deadlocks: {', '.join(steps)}"


def _needed_by(block: Block, num_stages: int) -> Block:
    """The block whose output this one waits for."""
    if block.kind is Kind.FORWARD:
        return Block(Kind.FORWARD, block.stage - 1, block.microbatch)
    if block.stage == num_stages - 1:
        return Block(Kind.FORWARD, block.stage, block.microbatch)
    return Block(Kind.BACKWARD, block.stage + 1, block.microbatch)
