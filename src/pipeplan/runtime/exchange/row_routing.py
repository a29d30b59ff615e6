"""Which rows one rank computes in a step, and with which ranks it exchanges them."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.pipeline import Stage
from pipeplan.runtime.rows import divide_batch, divide_rows

__all__ = ["RowRouting", "RowRun", "route_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRun:
    """Consecutive rows of this rank's tensor that one other rank sends or gets."""

    rank: int
    """The other rank."""
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRouting:
    """One rank's rows and their runs, each by microbatch."""

    num_rows: int
    """The rows of the whole batch."""
    rows: tuple[tuple[int, ...], ...]
    """The rows of the batch that this rank computes, in the order in which it holds them."""
    runs_in: tuple[tuple[RowRun, ...], ...]
    """Runs shared with the stage before."""
    runs_out: tuple[tuple[RowRun, ...], ...]
    """Runs shared with the stage behind."""
    announces: bool
    """Whether this rank tells the stage behind what kinds of tensors it sends."""


def route_rows(
    stages: tuple[Stage, ...],
    stage_ranks: Sequence[Sequence[int]],
    stage: int,
    replica: int,
    num_rows: int,
    num_microbatches: int,
) -> RowRouting:
    """The routing of one replica.

    Raises:
        RuntimeMismatchError: a stage has more replicas than a microbatch has rows.
    """
    rows, runs_in, runs_out = [], [], []
    microbatches = divide_batch(num_rows, num_microbatches)
    for microbatch in microbatches:
        division = divide_rows(stages, len(microbatch))
        rows.append(tuple(microbatch.start + row for row in division.rows[stage][replica]))
        lengths_in: list[int] = []
        if stage:
            lengths_in = [lengths[replica] for lengths in division.runs[stage - 1]]
        runs_in.append(_runs(lengths_in, stage_ranks[stage - 1]))
        lengths_out: Sequence[int] = ()
        if stage + 1 < len(stages):
            lengths_out = division.runs[stage][replica]
        runs_out.append(_runs(lengths_out, stage_ranks[(stage + 1) % len(stages)]))
    # The last microbatch is the smallest. Who holds most of it surely has something to send.
    smallest = divide_rows(stages, len(microbatches[-1]))
    num_held = [len(held) for held in smallest.rows[stage]]
    return RowRouting(
        num_rows=num_rows,
        rows=tuple(rows),
        runs_in=tuple(runs_in),
        runs_out=tuple(runs_out),
        announces=replica == num_held.index(max(num_held)),
    )


def _runs(lengths: Sequence[int], ranks: Sequence[int]) -> tuple[RowRun, ...]:
    """One run after another, for each rank that has rows."""
    runs, start = [], 0
    for position, length in enumerate(lengths):
        if length:
            runs.append(RowRun(rank=ranks[position], start=start, stop=start + length))
        start += length
    return tuple(runs)
