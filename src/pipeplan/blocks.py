"""Blocks, and the order in which groups of devices run them.

A schedule says in which order each group runs its blocks, and no times. A group is a set of devices
with all its stages. Mostly it has one, and then the group is the stage::

    stage 0   F0 F1 F2 B0 F3 B1 B2 B3
    stage 1   F0 B0 F1 B1 F2 B2 F3 B3

With several stages a group, blocks name their stage. A backward may be cut in two: I computes the
input gradient, which the stage before needs, and W the weight gradient, which no other needs::

    group 0   0F0 0F1 2F0 2I0 2F1 2W0 ...
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeplan.errors import InputError, ScheduleError

__all__ = [
    "KINDS",
    "Block",
    "Codes",
    "Floats",
    "GroupCodes",
    "Kind",
    "Schedule",
    "most_in_flight",
    "pack_codes",
    "unpack_codes",
]

Codes = NDArray[np.int32]
"""One stage's forwards and whole backwards as numbers: F(m) is `m`, B(m) is `-1 - m`."""
GroupCodes = NDArray[np.int64]
"""Any blocks as numbers: stage * 2**32 + kind * 2**30 + microbatch, kinds as in `KINDS`."""
Floats = NDArray[np.float64]

STAGE_SHIFT, KIND_SHIFT = 32, 30
LAST_MICROBATCH = (1 << KIND_SHIFT) - 1
MISFIT = int(np.iinfo(np.int32).max)
"""Among `Codes` a block that none can express; no plan has as many microbatches."""
GROUP_MISFIT = int(np.iinfo(np.int64).max)
"""The same among `GroupCodes`."""


class Kind(StrEnum):
    """What a stage does with a microbatch."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    """The first part of a backward: the gradient that the stage before waits for."""
    WEIGHT_GRADIENT = "W"
    """The rest of it."""


KINDS = tuple(Kind)
"""By their numbers in `GroupCodes`."""


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
    """For each group the order of its blocks; no times.

    It holds one array of codes for each group. Blocks are made anew whenever somebody asks for
    them: a schedule of a million blocks has no room for a million objects. Where order n holds
    forwards and whole backwards of stage n alone, and that for each n, the arrays are `Codes`. All
    other schedules hold `GroupCodes`.
    """

    _rows: tuple[NDArray[Any], ...]
    """`Codes`, or `GroupCodes` where it is not by stage."""
    _misfits: dict[tuple[int, int], Block]
    """By order and position: blocks that no code can express, such as negative microbatches."""
    is_by_stage: bool
    """Whether order n holds forwards and whole backwards of stage n alone, for each n."""

    def __init__(self, orders: Iterable[Iterable[Block]]) -> None:
        given = [list(order) for order in orders]
        is_by_stage = all(
            not _fits(block) or (block.stage == n and block.kind in KINDS[:2])
            for n, order in enumerate(given)
            for block in order
        )
        misfits: dict[tuple[int, int], Block] = {}
        rows = []
        for n, order in enumerate(given):
            row = []
            for position, block in enumerate(order):
                if not _fits(block):
                    misfits[n, position] = block
                    row.append(MISFIT if is_by_stage else GROUP_MISFIT)
                elif is_by_stage:
                    row.append(_code(block))
                else:
                    row.append(_group_code(block))
            rows.append(_read_only(row, n, np.int32 if is_by_stage else np.int64))
        _fill(self, tuple(rows), misfits, is_by_stage)

    @classmethod
    def from_codes(cls, codes: Iterable[Sequence[int] | Codes]) -> "Schedule":
        """The schedule in which order n is of stage n: `m` is F(m), `-1 - m` is B(m)."""
        rows = tuple(_read_only(row, n, np.int32) for n, row in enumerate(codes))
        return _schedule_of(rows, {}, True)

    @classmethod
    def from_group_codes(cls, codes: Iterable[Sequence[int] | GroupCodes]) -> "Schedule":
        """The schedule of any groups, as `pack_codes` codes their blocks."""
        rows = tuple(_read_only(row, n, np.int64) for n, row in enumerate(codes))
        narrow = [_narrow(row, n) for n, row in enumerate(rows)]
        if all(row is not None for row in narrow):
            return cls.from_codes(row for row in narrow if row is not None)
        return _schedule_of(rows, {}, False)

    def to_codes(self) -> list[list[int]]:
        """Each stage's blocks as codes: F(m) is `m`, B(m) is `-1 - m`."""
        self._require_by_stage()
        return [row.tolist() for row in self._rows]

    def codes(self, stage: int) -> Codes:
        """One stage's blocks as codes, in an array that nobody can write to."""
        self._require_by_stage()
        row: Codes = self._rows[stage]
        return row

    def group_codes(self, group: int) -> GroupCodes:
        """One group's blocks as codes, whatever stages and kinds they have."""
        row = self._rows[group]
        if not self.is_by_stage:
            return row
        microbatches = np.minimum(np.where(row < 0, -1 - row, row), LAST_MICROBATCH)
        return pack_codes(group, row < 0, microbatches)

    def block(self, group: int, position: int) -> Block:
        """One block of one group, counted from 0, without making the others."""
        return self._block(group, position, int(self._rows[group][position]))

    @property
    def orders(self) -> tuple[tuple[Block, ...], ...]:
        """All blocks of all groups."""
        return tuple(self)

    @property
    def num_stages(self) -> int:
        """The number of stages, where each has an order of its own."""
        self._require_by_stage()
        return len(self._rows)

    @property
    def num_blocks(self) -> int:
        """The number of blocks of all groups together."""
        return sum(map(len, self._rows))

    def most_in_flight(self, stage: int) -> int:
        """The most microbatches that the stage has begun forward and not ended backward."""
        return most_in_flight(self.codes(stage))

    def _require_by_stage(self) -> None:
        """Stop those who take orders for stages and backwards for whole where they are not."""
        if not self.is_by_stage:
            raise ScheduleError(
                "schedule: devices have several stages, or backwards are cut in two;"
                " plan with one stage a device and whole backwards for this use"
            )

    def _block(self, group: int, position: int, code: int) -> Block:
        if self._misfits and (group, position) in self._misfits:
            return self._misfits[group, position]
        if not self.is_by_stage:
            stage, rest = divmod(code, 1 << STAGE_SHIFT)
            kind, microbatch = divmod(rest, 1 << KIND_SHIFT)
            return Block(KINDS[kind], stage, microbatch)
        if code >= 0:
            return Block(Kind.FORWARD, group, code)
        return Block(Kind.BACKWARD, group, -1 - code)

    def __iter__(self) -> Iterator[tuple[Block, ...]]:
        return (self[group] for group in range(len(self)))

    def __getitem__(self, group: int) -> tuple[Block, ...]:
        group = range(len(self))[group]
        codes = self._rows[group].tolist()
        return tuple(self._block(group, position, code) for position, code in enumerate(codes))

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return (
            len(self) == len(other)
            and self.is_by_stage == other.is_by_stage
            and self._misfits == other._misfits
            and all(map(np.array_equal, self._rows, other._rows))
        )

    def __hash__(self) -> int:
        return hash(tuple(row.tobytes() for row in self._rows))

    def __reduce__(self) -> tuple[Any, ...]:
        return _schedule_of, (self._rows, self._misfits, self.is_by_stage)

    def __repr__(self) -> str:
        noun = "stages" if self.is_by_stage else "groups"
        return f"<Schedule of {len(self)} {noun}, {self.num_blocks} blocks>"


def most_in_flight(codes: Codes) -> int:
    """The most microbatches begun forward and not ended backward, over blocks in this order."""
    return int(np.where(codes >= 0, 1, -1).cumsum().max(initial=0))


def pack_codes(stages: Any, kinds: Any, microbatches: Any) -> GroupCodes:
    """The codes of blocks with these stages, kinds (as numbers) and microbatches."""
    packed: GroupCodes = (
        (np.asarray(stages, dtype=np.int64) << STAGE_SHIFT)
        | (np.asarray(kinds, dtype=np.int64) << KIND_SHIFT)
        | np.asarray(microbatches, dtype=np.int64)
    )
    return packed


def unpack_codes(codes: GroupCodes) -> tuple[GroupCodes, GroupCodes, GroupCodes]:
    """The stages, kinds and microbatches of coded blocks."""
    rest = codes & ((1 << STAGE_SHIFT) - 1)
    return codes >> STAGE_SHIFT, rest >> KIND_SHIFT, rest & LAST_MICROBATCH


def _fits(block: Block) -> bool:
    """Whether a code can express the block."""
    return 0 <= block.microbatch <= LAST_MICROBATCH and 0 <= block.stage < MISFIT


def _code(block: Block) -> int:
    return block.microbatch if block.kind == Kind.FORWARD else -1 - block.microbatch


def _group_code(block: Block) -> int:
    kind = KINDS.index(Kind(block.kind))
    return (block.stage << STAGE_SHIFT) | (kind << KIND_SHIFT) | block.microbatch


def _narrow(row: GroupCodes, stage: int) -> Codes | None:
    """The same blocks as codes of a stage, if they are forwards and whole backwards of it."""
    stages, kinds, microbatches = unpack_codes(row)
    if row.size and not ((stages == stage) & (kinds < 2)).all():
        return None
    return np.where(kinds == 0, microbatches, -1 - microbatches).astype(np.int32)


def _fill(
    schedule: Schedule,
    rows: tuple[Any, ...],
    misfits: dict[tuple[int, int], Block],
    is_by_stage: bool,
) -> None:
    object.__setattr__(schedule, "_rows", rows)
    object.__setattr__(schedule, "_misfits", misfits)
    object.__setattr__(schedule, "is_by_stage", is_by_stage)


def _schedule_of(
    rows: tuple[Any, ...], misfits: dict[tuple[int, int], Block], is_by_stage: bool
) -> Schedule:
    """A schedule of these parts, also of those that pickle has made writable."""
    schedule = object.__new__(Schedule)
    for row in rows:
        row.flags.writeable = False
    _fill(schedule, rows, misfits, is_by_stage)
    return schedule


def _read_only(codes: Any, order: int, kind: type[np.signedinteger[Any]]) -> NDArray[Any]:
    """A copy of one order's codes that nobody can write to."""
    given = np.asarray(codes)
    if given.size == 0:
        given = given.astype(kind)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise InputError(f"schedule[{order}]: is not a list of whole numbers")
    row = given.astype(kind)
    wrong = np.flatnonzero(row != given)
    if kind is np.int64 and not wrong.size:
        wrong = np.flatnonzero(row < 0)
    if wrong.size:
        raise InputError(
            f"schedule[{order}][{wrong[0]}]: {given[wrong[0]]} is no block;"
            f" microbatches are numbered below {MISFIT}"
        )
    row.flags.writeable = False
    return row
