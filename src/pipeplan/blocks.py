"""Blocks, the order in which stages run them, and the times that this gives.

A schedule says in which order each stage runs its blocks, and no times::

    stage 0   F0 F1 F2 B0 F3 B1 B2 B3
    stage 1   F0 B0 F1 B1 F2 B2 F3 B3

A timeline is what becomes of it under the cost model: blocks, transfers and all-reduces
with their start and end.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeplan.errors import InputError

__all__ = [
    "AllReduce",
    "Block",
    "Codes",
    "Floats",
    "Kind",
    "Schedule",
    "TimedBlock",
    "Timeline",
    "Transfer",
    "most_in_flight",
]

Codes = NDArray[np.int32]
"""Blocks as numbers: F(m) is `m`, B(m) is `-1 - m`."""
Floats = NDArray[np.float64]


class Kind(StrEnum):
    """The two directions that a microbatch goes through the pipeline."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class Block:
    """The smallest scheduled work: one microbatch forward or backward through one stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True, init=False, repr=False, eq=False)
class Schedule:
    """For each stage the order of its blocks; no times.

    It holds one array of codes for each stage. Blocks are made anew whenever somebody asks for
    them: a schedule of a million blocks has no room for a million objects.
    """

    _rows: tuple[Codes, ...]
    _misfits: dict[tuple[int, int], Block]
    """By stage and position: blocks that no code can express, such as those of another stage."""

    def __init__(self, orders: Iterable[Iterable[Block]]) -> None:
        misfits: dict[tuple[int, int], Block] = {}
        rows = []
        for stage, order in enumerate(orders):
            row = []
            for position, block in enumerate(order):
                if block.stage == stage and 0 <= block.microbatch < MISFIT:
                    row.append(_code(block))
                else:
                    misfits[stage, position] = block
                    row.append(MISFIT)
            rows.append(_read_only(row, stage))
        object.__setattr__(self, "_rows", tuple(rows))
        object.__setattr__(self, "_misfits", misfits)

    @classmethod
    def from_codes(cls, codes: Iterable[Sequence[int] | Codes]) -> "Schedule":
        """The schedule that a kernel wrote: `m` is F(m), `-1 - m` is B(m)."""
        return _schedule_of(tuple(_read_only(row, n) for n, row in enumerate(codes)), {})

    def to_codes(self) -> list[list[int]]:
        """The schedule as lists of codes: F(m) is `m`, B(m) is `-1 - m`."""
        return [row.tolist() for row in self._rows]

    def codes(self, stage: int) -> Codes:
        """One stage's blocks as codes, in an array that nobody can write to."""
        return self._rows[stage]

    def block(self, stage: int, position: int) -> Block:
        """One block of one stage, counted from 0, without making the others."""
        return self._block(stage, position, int(self._rows[stage][position]))

    @property
    def orders(self) -> tuple[tuple[Block, ...], ...]:
        """All blocks of all stages."""
        return tuple(self)

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self._rows)

    @property
    def num_blocks(self) -> int:
        """The number of blocks of all stages together."""
        return sum(map(len, self._rows))

    def most_in_flight(self, stage: int) -> int:
        """The most microbatches that the stage has begun forward and not ended backward."""
        return most_in_flight(self._rows[stage])

    def _block(self, stage: int, position: int, code: int) -> Block:
        if code == MISFIT and (stage, position) in self._misfits:
            return self._misfits[stage, position]
        if code >= 0:
            return Block(Kind.FORWARD, stage, code)
        return Block(Kind.BACKWARD, stage, -1 - code)

    def __iter__(self) -> Iterator[tuple[Block, ...]]:
        return (self[stage] for stage in range(len(self)))

    def __getitem__(self, stage: int) -> tuple[Block, ...]:
        stage = range(len(self))[stage]
        codes = self._rows[stage].tolist()
        return tuple(self._block(stage, position, code) for position, code in enumerate(codes))

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return (
            len(self) == len(other)
            and self._misfits == other._misfits
            and all(map(np.array_equal, self._rows, other._rows))
        )

    def __hash__(self) -> int:
        return hash(tuple(row.tobytes() for row in self._rows))

    def __reduce__(self) -> tuple[Any, ...]:
        return _schedule_of, (self._rows, self._misfits)

    def __repr__(self) -> str:
        return f"<Schedule of {len(self)} stages, {self.num_blocks} blocks>"


MISFIT = int(np.iinfo(np.int32).max)
"""The code of a block that none can express; no plan has as many microbatches."""


def most_in_flight(codes: Codes) -> int:
    """The most microbatches begun forward and not ended backward, over blocks in this order."""
    return int(np.where(codes >= 0, 1, -1).cumsum().max(initial=0))


def _code(block: Block) -> int:
    return block.microbatch if block.kind == Kind.FORWARD else -1 - block.microbatch


def _schedule_of(rows: tuple[Codes, ...], misfits: dict[tuple[int, int], Block]) -> Schedule:
    """A schedule of these parts, also of those that pickle has made writable."""
    schedule = object.__new__(Schedule)
    for row in rows:
        row.flags.writeable = False
    object.__setattr__(schedule, "_rows", rows)
    object.__setattr__(schedule, "_misfits", misfits)
    return schedule


def _read_only(codes: Sequence[int] | Codes, stage: int) -> Codes:
    """A copy of one stage's codes that nobody can write to."""
    given = np.asarray(codes)
    if given.size == 0:
        given = given.astype(np.int32)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise InputError(f"schedule[{stage}]: is not a list of whole numbers")
    row = given.astype(np.int32)
    wrong = np.flatnonzero(row != given)
    if wrong.size:
        raise InputError(
            f"schedule[{stage}][{wrong[0]}]: {given[wrong[0]]} is no block;"
            f" microbatches are numbered below {MISFIT}"
        )
    row.flags.writeable = False
    return row


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
    """The gradient all-reduce of one stage's replicas."""

    stage: int
    start_ms: float
    end_ms: float


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
            for kind, *lane in zip(Kind, *both, strict=True)
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
