"""Divides the rows of a microbatch among replicas, so that transfers match the cost model.

In the cost model, each pair of devices of neighbouring stages carries the product of their shares.
Equal intervals on both sides would not do that: with 2 -> 2 replicas, two pairs would carry a half
each and two pairs nothing. So each replica cuts its rows into one run for every replica behind it.
A replica behind holds the runs that it gets, one after another. Two stages of two replicas, eight
rows::

    stage 0   a: 0 1 2 3      b: 4 5 6 7
    stage 1   c: 0 1 4 5      d: 2 3 6 7        (a -> c 0 1, a -> d 2 3, b -> c 4 5, b -> d 6 7)

Both sides of every transfer are slices of one tensor. So nothing is gathered or copied. Between
neighbouring stages of one group nothing is transferred: each device keeps its rows.

The lengths of the runs are a controlled rounding of the matrix x(u) * x(v) * rows. Every entry and
every column sum is rounded up or down, and every row keeps its sum. The rounding is found as a flow
from replicas to replicas. One unit of flow is one row of the microbatch that is left after rounding
down.

Reference:
    Cox 1987, "A constructive procedure for unbiased controlled rounding", JASA 82. It proves
    existence by the integrality of flows. We use that, and do not need unbiasedness.
    Differs: the stage before gives the row sums, so a suitable matrix need not exist. Then we
    break ties in other orders. If none of them helps, we round counts * x(v) instead. That is
    always possible, but a pair may then be off by up to two rows.
"""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from pipeplan.errors import RuntimeMismatchError
from pipeplan.pipeline import Stage

__all__ = ["Division", "divide_batch", "divide_rows"]

MAX_ATTEMPTS = 64

SAME_NUMBER = 1e-9
"""A product of shares this near to a whole number counts as that number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Which replica holds which rows of one microbatch."""

    rows: tuple[tuple[tuple[int, ...], ...], ...]
    """[stage][replica]: the rows that it holds, in its order."""
    runs: tuple[tuple[tuple[int, ...], ...], ...]
    """[channel][replica before][replica behind]: the number of rows that this pair carries."""


def divide_batch(num_rows: int, num_microbatches: int) -> list[range]:
    """The rows of each microbatch; their numbers differ by at most one."""
    if not num_rows:
        raise RuntimeMismatchError("batch: has no rows; leave out empty batches")
    if num_rows < num_microbatches:
        raise RuntimeMismatchError(
            f"batch: has {num_rows} rows for {num_microbatches} microbatches;"
            " give at least one row to each or plan with fewer microbatches"
        )
    size, larger = divmod(num_rows, num_microbatches)
    ends = [(m + 1) * size + min(m + 1, larger) for m in range(num_microbatches)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


@lru_cache(maxsize=256)
def divide_rows(stages: tuple[Stage, ...], num_rows: int, *, may_idle: bool = False) -> Division:
    """The division of a microbatch of `num_rows` rows over these stages.

    `may_idle` allows fewer rows than a stage has replicas; some replicas then get none.
    """
    for index, stage in enumerate(stages):
        if stage.num_replicas > num_rows and not may_idle:
            raise RuntimeMismatchError(
                f"stage {index}: has {stage.num_replicas} replicas for a microbatch of"
                f" {num_rows} rows; plan with fewer replicas or take larger microbatches"
            )
    # The rounding of one channel may leave no matrix for the next. Then try another rounding.
    for attempt in range(MAX_ATTEMPTS):
        division = _try_division(stages, num_rows, random.Random(attempt) if attempt else None)
        if division is not None:
            return division
    division = _try_division(stages, num_rows, None, by_counts=True)
    if division is None:
        raise AssertionError("a matrix with whole row sums has a controlled rounding")
    return division


def _try_division(
    stages: tuple[Stage, ...], num_rows: int, rng: random.Random | None, *, by_counts: bool = False
) -> Division | None:
    """The division with ties broken in this random order; None if a channel has no matrix."""
    counts = _round_shares(stages[0].device_shares, num_rows, rng)
    ends = _ends(counts)
    held = [tuple(range(end - count, end)) for count, end in zip(counts, ends, strict=True)]
    rows, runs = [tuple(held)], []
    for stage, behind in itertools.pairwise(stages):
        shares = [count / num_rows for count in counts] if by_counts else stage.device_shares
        matrix: list[list[int]] | None
        if set(stage.devices) == set(behind.devices):  # each device keeps its rows
            matrix = [
                [count * (u == v) for v in behind.devices]
                for u, count in zip(stage.devices, counts, strict=True)
            ]
        else:
            matrix = _round_products(shares, behind.device_shares, counts, rng)
        if matrix is None:
            return None
        received: list[tuple[int, ...]] = [()] * behind.num_replicas
        for mine, lengths in zip(held, matrix, strict=True):
            for v, (length, end) in enumerate(zip(lengths, _ends(lengths), strict=True)):
                received[v] += mine[end - length : end]
        held = received
        counts = [len(mine) for mine in held]
        rows.append(tuple(held))
        runs.append(tuple(tuple(lengths) for lengths in matrix))
    return Division(rows=tuple(rows), runs=tuple(runs))


def _ends(lengths: Sequence[int]) -> list[int]:
    ends, total = [], 0
    for length in lengths:
        total += length
        ends.append(total)
    return ends


def _down(number: float) -> int:
    return math.floor(number + SAME_NUMBER)


def _up(number: float) -> int:
    return math.ceil(number - SAME_NUMBER)


def _round_shares(shares: Sequence[float], num_rows: int, rng: random.Random | None) -> list[int]:
    """Whole numbers of rows, each share rounded up or down; none is 0 if that is possible."""
    exact = [share * num_rows for share in shares]
    counts = [_down(number) for number in exact]
    if rng is None:
        # A replica without a row would be idle, so those come first. Then the largest remainders.
        order = sorted(range(len(exact)), key=lambda u: (counts[u] > 0, counts[u] - exact[u], u))
    else:
        order = [u for u in range(len(exact)) if _up(exact[u]) > counts[u]]
        rng.shuffle(order)
    for u in order[: num_rows - sum(counts)]:
        counts[u] += 1
    return counts


def _round_products(
    shares: Sequence[float],
    shares_behind: Sequence[float],
    counts: Sequence[int],
    rng: random.Random | None,
) -> list[list[int]] | None:
    """The number of rows that each replica sends to each replica behind; None if impossible."""
    num_rows = sum(counts)
    columns = list(range(len(shares_behind)))
    if rng is not None:
        rng.shuffle(columns)
    exact = [[x * shares_behind[v] * num_rows for v in columns] for x in shares]
    totals = [shares_behind[v] * num_rows for v in columns]
    for fewest in (1, 0):
        lows = [max(_down(total), fewest) for total in totals]
        highs = [max(_up(total), low) for total, low in zip(totals, lows, strict=True)]
        rounded = _round_matrix(exact, counts, lows, highs)
        if rounded is not None:
            place = {v: position for position, v in enumerate(columns)}
            return [[entries[place[v]] for v in range(len(columns))] for entries in rounded]
    return None


def _round_matrix(
    exact: list[list[float]], row_sums: Sequence[int], lows: list[int], highs: list[int]
) -> list[list[int]] | None:
    """Entries rounded up or down with these row sums, and column sums in bounds; or None."""
    matrix = [[_down(entry) for entry in entries] for entries in exact]
    room = [[_up(entry) - _down(entry) for entry in entries] for entries in exact]
    raised = [[0] * len(lows) for _ in exact]
    missing = [total - sum(entries) for total, entries in zip(row_sums, matrix, strict=True)]
    if min(missing) < 0:
        return None
    # First give every column its least. Then put the rest where there is room. Augmenting never
    # lowers a column's sum, so the second part does not undo the first.
    for bounds in (lows, highs):
        open_columns = [
            bound - sum(entries[v] + more[v] for entries, more in zip(matrix, raised, strict=True))
            for v, bound in enumerate(bounds)
        ]
        if min(open_columns) < 0:
            return None
        while _augment(room, raised, missing, open_columns):
            pass
        if bounds is lows and any(open_columns):
            return None
    if any(missing):
        return None
    return [
        [entry + more for entry, more in zip(*rows, strict=True)]
        for rows in zip(matrix, raised, strict=True)
    ]


def _augment(
    room: list[list[int]], raised: list[list[int]], missing: list[int], open_columns: list[int]
) -> bool:
    """Place one more row along a path that moves other rows to other columns; False if stuck."""
    came_from: dict[int, tuple[int, int | None]] = {}  # by column: its row and the previous column
    queue: list[tuple[int, int | None]] = [(u, None) for u, more in enumerate(missing) if more]
    reached = {u for u, _ in queue}
    for u, before in queue:
        for v, left in enumerate(room[u]):
            if not left or v in came_from:
                continue
            came_from[v] = (u, before)
            if open_columns[v]:
                open_columns[v] -= 1
                _shift(room, raised, missing, came_from, v)
                return True
            # An entry of this column that was rounded up may be rounded down again.
            others = [w for w, more in enumerate(raised) if more[v] and w not in reached]
            reached.update(others)
            queue += [(w, v) for w in others]
    return False


def _shift(
    room: list[list[int]],
    raised: list[list[int]],
    missing: list[int],
    came_from: dict[int, tuple[int, int | None]],
    column: int | None,
) -> None:
    """Walk back along the path that ends at `column`: round up there, down at the one before."""
    while column is not None:
        row, before = came_from[column]
        raised[row][column] += 1
        room[row][column] -= 1
        if before is None:
            missing[row] -= 1
        else:
            raised[row][before] -= 1
            room[row][before] += 1
        column = before
