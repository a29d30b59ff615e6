"""From a schedule and costs to the timeline of every block, transfer and all-reduce.

The rules are those of `docs/formats.md`, ties included; the event loop is a kernel
(`_core/simulate.cpp`). Here are the guard in front of it and the nouns behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from pipeplan import _core
from pipeplan.cost import CostModel, Floats, PipelineCosts
from pipeplan.errors import ScheduleError
from pipeplan.pipeline import (
    AllReduce,
    Block,
    Kind,
    Plan,
    Schedule,
    TimedBlock,
    Timeline,
    Transfer,
)

__all__ = ["Codes", "Preference", "Run", "run_list", "run_plan", "run_schedule", "simulate"]

Codes = NDArray[np.int32]
Trace = tuple[Codes, Floats, Codes, Floats, Codes, Floats]
"""What a kernel returns: the arrays of `Run`, the blocks done and the end of each stage."""


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

    @property
    def iteration_ms(self) -> float:
        """The latest end of any stage's all-reduce."""
        return float(self.end_ms_S.max())


def simulate(plan: Plan) -> Timeline:
    """The timeline of a plan; a schedule that deadlocks or is incomplete raises `ScheduleError`."""
    return _timeline(*run_plan(plan))


def run_plan(plan: Plan) -> tuple[PipelineCosts, Run]:
    """The same as arrays, which is all that a large plan has room for."""
    costs = CostModel(plan.model, plan.cluster).pipeline_costs(plan.stages)
    codes = _complete_codes(plan.schedule, plan.microbatches, len(plan.stages))
    return costs, run_schedule(costs, codes)


def run_schedule(costs: PipelineCosts, codes: Codes) -> Run:
    """One iteration in the given order of blocks, each of which is there exactly once."""
    trace = _core.run_schedule(costs.for_kernels(), codes)
    blocks_done = trace[4].tolist()
    if any(done < codes.shape[1] for done in blocks_done):
        raise ScheduleError(_explain_deadlock(Schedule.from_codes(codes.tolist()), blocks_done))
    return _run(costs, trace)


def run_list(
    costs: PipelineCosts,
    num_microbatches: int,
    preference: Preference,
    caps: Sequence[int] | None = None,
) -> Run:
    """One iteration in the order that a list scheduler decides as it goes.

    A free stage runs its next forward or its next backward, whichever is there, and by
    `preference` if both are; it never holds more than its cap of microbatches.
    """
    caps_S = np.array(caps or [num_microbatches] * costs.num_stages, dtype=np.int32)
    trace = _core.run_list(costs.for_kernels(), num_microbatches, preference, caps_S)
    return _run(costs, trace)


def _run(costs: PipelineCosts, trace: Trace) -> Run:
    order, block_start, sent, transfer_start, _, stage_end = trace
    return Run(
        order_SM2=order,
        block_start_ms_SM2=block_start,
        sent_C2M=sent,
        transfer_start_ms_C2M=transfer_start,
        end_ms_S=stage_end + costs.all_reduce_ms_S,
    )


def _complete_codes(schedule: Schedule, num_microbatches: int, num_stages: int) -> Codes:
    """The schedule as an array, once every block is known to be there exactly once."""
    if len(schedule) != num_stages:
        raise ScheduleError(f"schedule: has {len(schedule)} orders for {num_stages} stages")
    every_block = list(range(-num_microbatches, num_microbatches))
    rows = schedule.to_codes()
    for stage, row in enumerate(rows):
        if sorted(row) != every_block:
            raise ScheduleError(
                f"schedule[{stage}]: does not hold every microbatch of 0..{num_microbatches - 1}"
                " exactly once forward and once backward"
            )
    return np.array(rows, dtype=np.int32)


def _timeline(costs: PipelineCosts, run: Run) -> Timeline:
    schedule = Schedule.from_codes(run.order_SM2.tolist())
    lengths = list(zip(costs.forward_ms_S.tolist(), costs.backward_ms_S.tolist(), strict=True))
    blocks = tuple(
        tuple(
            TimedBlock(block, start, start + lengths[stage][block.kind is Kind.BACKWARD])
            for block, start in zip(order, starts, strict=True)
        )
        for stage, (order, starts) in enumerate(
            zip(schedule, run.block_start_ms_SM2.tolist(), strict=True)
        )
    )
    transfers = []
    for channel, lanes in enumerate(zip(run.sent_C2M, run.transfer_start_ms_C2M, strict=True)):
        for kind, length, codes, starts in (
            (Kind.FORWARD, float(costs.send_forward_ms_C[channel]), lanes[0][0], lanes[1][0]),
            (Kind.BACKWARD, float(costs.send_backward_ms_C[channel]), lanes[0][1], lanes[1][1]),
        ):
            transfers += [
                Transfer(kind, channel, code if code >= 0 else -1 - code, start, start + length)
                for code, start in zip(codes.tolist(), starts.tolist(), strict=True)
            ]
    ends = run.end_ms_S.tolist()
    lasts = [order[-1].end_ms for order in blocks]
    return Timeline(
        blocks=blocks,
        transfers=tuple(transfers),
        all_reduces=tuple(
            AllReduce(stage, last, end)
            for stage, (last, end) in enumerate(zip(lasts, ends, strict=True))
        ),
        iteration_ms=run.iteration_ms,
    )


def _explain_deadlock(schedule: Schedule, blocks_done: list[int]) -> str:
    """Which block waits for which, around the circle.

    Every stage that is not done waits at one block for another that has not run; following
    these from stage to stage ends in a circle, since nothing can run.
    """
    waits_at = {
        stage: order[done]
        for stage, (order, done) in enumerate(zip(schedule, blocks_done, strict=True))
        if done < len(order)
    }
    stage = min(waits_at)
    visited: list[int] = []
    while stage not in visited:
        visited.append(stage)
        stage = _needed_by(waits_at[stage], schedule.num_stages).stage
    circle = visited[visited.index(stage) :]
    steps = [
        f"stage {n} waits at {waits_at[n]} for {_needed_by(waits_at[n], schedule.num_stages)}"
        for n in circle
    ]
    return f"schedule: deadlocks: {', '.join(steps)}"


def _needed_by(block: Block, num_stages: int) -> Block:
    """The block whose output this one waits for."""
    if block.kind is Kind.FORWARD:
        return Block(Kind.FORWARD, block.stage - 1, block.microbatch)
    if block.stage == num_stages - 1:
        return Block(Kind.FORWARD, block.stage, block.microbatch)
    return Block(Kind.BACKWARD, block.stage + 1, block.microbatch)
