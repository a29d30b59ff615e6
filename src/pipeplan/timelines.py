"""The times of everything in one iteration: blocks, transfers and all-reduces with start and end.

A `Timeline` is of a plan with one stage a group and whole backwards, in arrays with an axis for the
stages. A `GroupTimeline` is of any plan, in flat arrays. Both give the same objects.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeplan.blocks import KINDS, Block, Codes, Floats, GroupCodes, Kind, Schedule, unpack_codes

__all__ = ["AllReduce", "GroupTimeline", "TimedBlock", "Timeline", "Transfer"]


@dataclass(frozen=True, slots=True)
class TimedBlock:
    """A block with its times."""

    block: Block
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """One microbatch's tensors on their way between stages `channel` and `channel + 1`."""

    kind: Kind
    channel: int
    microbatch: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class AllReduce:
    """The gradient all-reduce of one stage's replicas, or one of its parts."""

    stage: int
    start_ms: float
    end_ms: float
    part: int = 1
    """Counted from 1, where a stage's gradients go in several buckets."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Timeline:
    """Everything that happens in one iteration, with its times.

    It holds arrays; `blocks`, `transfers` and `all_reduces` are made from them on first use.
    Without `slots`, because these are kept once they are made. Axes: S stages, C channels
    between neighbouring stages, M microbatches; the axis of length 2 is forward, backward.
    """

    order_SM2: Codes
    """Each stage's blocks in the order in which it runs them."""
    block_start_ms_SM2: Floats
    block_end_ms_SM2: Floats
    sent_C2M: Codes
    """The blocks whose results each channel carries, in the order in which they are sent."""
    transfer_start_ms_C2M: Floats
    transfer_end_ms_C2M: Floats
    all_reduce_start_ms_S: Floats
    all_reduce_end_ms_S: Floats

    @property
    def iteration_ms(self) -> float:
        """The latest end of any stage's all-reduce."""
        return float(self.all_reduce_end_ms_S.max())

    @cached_property
    def blocks(self) -> tuple[tuple[TimedBlock, ...], ...]:
        """For each stage, in the order in which it runs them."""
        starts_ms, ends_ms = self.block_start_ms_SM2.tolist(), self.block_end_ms_SM2.tolist()
        return tuple(
            tuple(map(TimedBlock, order, starts_ms[stage], ends_ms[stage]))
            for stage, order in enumerate(Schedule.from_codes(self.order_SM2))
        )

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """By channel, forward before backward, each in the order in which they are sent."""
        microbatch_C2M = np.where(self.sent_C2M >= 0, self.sent_C2M, -1 - self.sent_C2M)
        lists = zip(
            microbatch_C2M.tolist(),
            self.transfer_start_ms_C2M.tolist(),
            self.transfer_end_ms_C2M.tolist(),
            strict=True,
        )
        return tuple(
            Transfer(kind, channel, microbatch, start_ms, end_ms)
            for channel, both in enumerate(lists)
            for kind, *lane in zip((Kind.FORWARD, Kind.BACKWARD), *both, strict=True)
            for microbatch, start_ms, end_ms in zip(*lane, strict=True)
        )

    @cached_property
    def all_reduces(self) -> tuple[AllReduce, ...]:
        """One for each stage; of no length where the stage has one replica."""
        starts_ms, ends_ms = self.all_reduce_start_ms_S.tolist(), self.all_reduce_end_ms_S.tolist()
        return tuple(map(AllReduce, range(len(starts_ms)), starts_ms, ends_ms))

    def _arrays(self) -> tuple[NDArray[Any], ...]:
        return (
            self.order_SM2,
            self.block_start_ms_SM2,
            self.block_end_ms_SM2,
            self.sent_C2M,
            self.transfer_start_ms_C2M,
            self.transfer_end_ms_C2M,
            self.all_reduce_start_ms_S,
            self.all_reduce_end_ms_S,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Timeline):
            return NotImplemented
        return all(map(np.array_equal, self._arrays(), other._arrays()))

    def __hash__(self) -> int:
        return hash(tuple(array.tobytes() for array in self._arrays()))

    def __repr__(self) -> str:
        return f"<Timeline of {len(self.order_SM2)} stages, {self.iteration_ms:.6g} ms>"


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class GroupTimeline:
    """Everything that happens in one iteration of any plan, with its times.

    Axes: G groups, N blocks, T transfers, P parts of all-reduces. Like a `Timeline` it makes its
    objects on first use.
    """

    first_block_G1: Codes
    """Where each group's blocks begin in the arrays of blocks; at last their number."""
    code_N: GroupCodes
    """The blocks, group by group, each in the order in which it runs them."""
    block_start_ms_N: Floats
    block_end_ms_N: Floats
    sent_T: GroupCodes
    """The blocks whose results are sent: by channel, forward before backward, as they are sent."""
    transfer_start_ms_T: Floats
    transfer_end_ms_T: Floats
    part_stage_P: Codes
    part_number_P: Codes
    """The parts of each stage's all-reduce, counted from 1; a stage on one device has none."""
    part_start_ms_P: Floats
    part_end_ms_P: Floats

    @property
    def iteration_ms(self) -> float:
        """The latest end of any block and of any part of an all-reduce."""
        return float(max(self.block_end_ms_N.max(), self.part_end_ms_P.max(initial=0.0)))

    @cached_property
    def blocks(self) -> tuple[tuple[TimedBlock, ...], ...]:
        """For each group, in the order in which it runs them."""
        stages, kinds, microbatches = (part.tolist() for part in unpack_codes(self.code_N))
        timed = [
            TimedBlock(Block(KINDS[kind], stage, microbatch), start_ms, end_ms)
            for kind, stage, microbatch, start_ms, end_ms in zip(
                kinds,
                stages,
                microbatches,
                self.block_start_ms_N.tolist(),
                self.block_end_ms_N.tolist(),
                strict=True,
            )
        ]
        first = self.first_block_G1.tolist()
        return tuple(tuple(timed[first[g] : first[g + 1]]) for g in range(len(first) - 1))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """By channel, forward before backward, each in the order in which they are sent."""
        stages, kinds, microbatches = (part.tolist() for part in unpack_codes(self.sent_T))
        return tuple(
            Transfer(Kind.BACKWARD, stage - 1, microbatch, start_ms, end_ms)
            if kind
            else Transfer(Kind.FORWARD, stage, microbatch, start_ms, end_ms)
            for kind, stage, microbatch, start_ms, end_ms in zip(
                kinds,
                stages,
                microbatches,
                self.transfer_start_ms_T.tolist(),
                self.transfer_end_ms_T.tolist(),
                strict=True,
            )
        )

    @cached_property
    def all_reduces(self) -> tuple[AllReduce, ...]:
        """Every part of every stage's all-reduce; none where a stage has one replica."""
        return tuple(
            map(
                AllReduce,
                self.part_stage_P.tolist(),
                self.part_start_ms_P.tolist(),
                self.part_end_ms_P.tolist(),
                self.part_number_P.tolist(),
            )
        )

    def __repr__(self) -> str:
        num_groups = len(self.first_block_G1) - 1
        return f"<GroupTimeline of {num_groups} groups, {self.iteration_ms:.6g} ms>"
