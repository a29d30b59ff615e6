"""Which rows one rank computes in a step, and with which ranks it exchanges them."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.pipeline import Plan, Stage
from pipeplan.runtime.batches import as_range
from pipeplan.runtime.rows import divide_batch, divide_rows

__all__ = ["RowRouter", "RowRouting", "RowRun", "route_rows"]


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
    ranges: tuple[Sequence[int], ...]
    """The same rows, each as a range if they are consecutive."""
    runs_in: tuple[tuple[RowRun, ...], ...]
    """Runs shared with the stage before."""
    runs_out: tuple[tuple[RowRun, ...], ...]
    """Runs shared with the stage behind."""


def route_rows(
    stages: tuple[Stage, ...],
    stage_ranks: Sequence[Sequence[int]],
    stage: int,
    replica: int,
    num_rows: int,
    num_microbatches: int,
) -> RowRouting:
    """The routing of one replica.

    A batch with few rows uses fewer microbatches, so that each replica gets a row. If the whole
    batch has fewer rows than a stage has replicas, some of them get none.
    """
    rows: list[tuple[int, ...]] = []
    runs_in: list[tuple[RowRun, ...]] = []
    runs_out: list[tuple[RowRun, ...]] = []
    most_replicas = max(stage.num_replicas for stage in stages)
    num_used = max(1, min(num_microbatches, num_rows // most_replicas))
    microbatches = divide_batch(num_rows, num_used)
    microbatches += [range(num_rows, num_rows)] * (num_microbatches - num_used)
    for microbatch in microbatches:
        if not microbatch:
            rows.append(())
            runs_in.append(())
            runs_out.append(())
            continue
        division = divide_rows(stages, len(microbatch), may_idle=True)
        rows.append(tuple(microbatch.start + row for row in division.rows[stage][replica]))
        lengths_in: list[int] = []
        if stage:
            lengths_in = [lengths[replica] for lengths in division.runs[stage - 1]]
        runs_in.append(_runs(lengths_in, stage_ranks[stage - 1]))
        lengths_out: Sequence[int] = ()
        if stage + 1 < len(stages):
            lengths_out = division.runs[stage][replica]
        runs_out.append(_runs(lengths_out, stage_ranks[(stage + 1) % len(stages)]))
    return RowRouting(
        num_rows=num_rows,
        rows=tuple(rows),
        ranges=tuple(map(as_range, rows)),
        runs_in=tuple(runs_in),
        runs_out=tuple(runs_out),
    )


def _runs(lengths: Sequence[int], ranks: Sequence[int]) -> tuple[RowRun, ...]:
    """One run after another, for each rank that has rows."""
    runs, start = [], 0
    for position, length in enumerate(lengths):
        if length:
            runs.append(RowRun(rank=ranks[position], start=start, stop=start + length))
        start += length
    return tuple(runs)


class RowRouter:
    """The routings of one replica, by the rows of a batch; each is made once."""

    def __init__(
        self, plan: Plan, stage_ranks: Sequence[Sequence[int]], stage: int, replica: int
    ) -> None:
        self._plan, self._place = plan, (stage, replica)
        self._stage_ranks = stage_ranks
        self._made: dict[int, RowRouting] = {}

    def route(self, num_rows: int) -> RowRouting:
        """The routing of a batch with so many rows."""
        if num_rows not in self._made:
            self._made[num_rows] = route_rows(
                self._plan.stages,
                self._stage_ranks,
                *self._place,
                num_rows,
                self._plan.microbatches,
            )
        return self._made[num_rows]
