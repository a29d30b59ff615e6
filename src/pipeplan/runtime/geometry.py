"""What one rank computes and exchanges in a step with a given number of rows."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.pipeline import Stage
from pipeplan.runtime.channels import Run
from pipeplan.runtime.rows import divide_batch, divide_rows

__all__ = ["Geometry", "make_geometry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """One rank's rows and runs, each by microbatch."""

    num_rows: int
    """Of the whole batch."""
    rows: tuple[tuple[int, ...], ...]
    """The batch's rows that this rank computes, in the order in which it holds them."""
    runs_in: tuple[tuple[Run, ...], ...]
    """With the stage before."""
    runs_out: tuple[tuple[Run, ...], ...]
    """With the stage behind."""
    announces: bool
    """Whether this rank tells the stage behind what kinds of tensors come."""


def make_geometry(
    stages: tuple[Stage, ...],
    stage_ranks: Sequence[Sequence[int]],
    stage: int,
    replica: int,
    num_rows: int,
    num_microbatches: int,
) -> Geometry:
    """The geometry of one replica; stages that cannot run are refused."""
    rows, runs_in, runs_out = [], [], []
    microbatches = divide_batch(num_rows, num_microbatches)
    for microbatch in microbatches:
        division = divide_rows(stages, len(microbatch))
        rows.append(tuple(microbatch.start + row for row in division.rows[stage][replica]))
        before: list[int] = []
        if stage:
            before = [lengths[replica] for lengths in division.runs[stage - 1]]
        runs_in.append(_runs(before, stage_ranks[stage - 1]))
        behind: Sequence[int] = ()
        if stage + 1 < len(stages):
            behind = division.runs[stage][replica]
        runs_out.append(_runs(behind, stage_ranks[(stage + 1) % len(stages)]))
    held = [len(mine) for mine in divide_rows(stages, len(microbatches[-1])).rows[stage]]
    return Geometry(
        num_rows=num_rows,
        rows=tuple(rows),
        runs_in=tuple(runs_in),
        runs_out=tuple(runs_out),
        announces=replica == held.index(max(held)),
    )


def _runs(lengths: Sequence[int], ranks: Sequence[int]) -> tuple[Run, ...]:
    runs, start = [], 0
    for position, length in enumerate(lengths):
        if length:
            runs.append(Run(rank=ranks[position], start=start, stop=start + length))
        start += length
    return tuple(runs)
