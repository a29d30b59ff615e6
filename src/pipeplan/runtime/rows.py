"""Which rows of a microbatch each replica takes, so that transfers are what the cost model says.

Every pair of devices of neighbouring stages has to carry the product of their shares. Equal
intervals on both sides would not do: with 2 -> 2 replicas two pairs would carry a half each and
two nothing. So each replica cuts what it holds into one run for every replica behind it, and a
replica holds, one after another, the runs that it was cut from those before it. Two stages of two
replicas, eight rows::

    stage 0   a: 0 1 2 3      b: 4 5 6 7
    stage 1   c: 0 1 4 5      d: 2 3 6 7        (a -> c 0 1, a -> d 2 3, b -> c 4 5, b -> d 6 7)

Both sides of every transfer are then slices of one tensor: nothing is gathered or copied.

How long the runs are is a controlled rounding of the matrix x(u) * x(v) * rows: every entry and
every column is rounded up or down, every row keeps its sum. It is found as a flow from replicas
to replicas, one unit a row of the microbatch that rounding still has to place.

Reference:
    Cox 1987, "A constructive procedure for unbiased controlled rounding", JASA 82. Its existence
    proof is the integrality of flows, which is what is used here; unbiasedness is not needed.
    Differs: row sums are given by the stage before. A matrix with all of that need not exist;
    then ties are broken in other orders, and if none of them helps, counts * x(v) is
    rounded instead, which always can be; a pair may then be off by up to two rows.
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
"""Products of shares this near to a whole number are that number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Who holds which rows of one microbatch."""

    rows: tuple[tuple[tuple[int, ...], ...], ...]
    """[stage][replica]: the microbatch's rows there, in the order in which it holds them."""
    runs: tuple[tuple[tuple[int, ...], ...], ...]
    """[channel][replica before][replica behind]: how many rows this pair carries."""


def divide_batch(num_rows: int, num_microbatches: int) -> list[range]:
    """The rows of each microbatch; their numbers differ by at most one."""
    if num_rows < num_microbatches:
        raise RuntimeMismatchError(
            f"batch: has {num_rows} rows for {num_microbatches} microbatches;"
            " give at least one row to each or plan with fewer microbatches"
        )
    size, larger = divmod(num_rows, num_microbatches)
    ends = [(m + 1) * size + min(m + 1, larger) for m in range(num_microbatches)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


@lru_cache(maxsize=256)
def divide_rows(stages: tuple[Stage, ...], num_rows: int) -> Division:
    """The division of a microbatch of `num_rows` rows over these stages."""
    for index, stage in enumerate(stages):
        if stage.num_replicas > num_rows:
            raise RuntimeMismatchError(
                f"stage {index}: has {stage.num_replicas} replicas for a microbatch of"
                f" {num_rows} rows; plan with fewer replicas or take larger microbatches"
            )
    # Which way one channel rounds may leave the next without a matrix: then another way is tried.
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
    """The division that rounding gives if ties go in this random order; None if it gets stuck."""
    counts = _round_shares(stages[0].device_shares, num_rows, rng)
    ends = _ends(counts)
    held = [tuple(range(end - count, end)) for count, end in zip(counts, ends, strict=True)]
    rows, runs = [tuple(held)], []
    for stage, behind in itertools.pairwise(stages):
        shares = [count / num_rows for count in counts] if by_counts else stage.device_shares
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
    """Whole numbers of rows, each rounded up or down; none is 0 if that can be."""
    exact = [share * num_rows for share in shares]
    counts = [_down(number) for number in exact]
    if rng is None:
        # A replica without a row is idle, so these come first; then the largest remainders.
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
    """How many of its rows each replica sends to each replica behind."""
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
    """Entries rounded up or down, with these row sums and column sums within their bounds."""
    matrix = [[_down(entry) for entry in entries] for entries in exact]
    room = [[_up(entry) - _down(entry) for entry in entries] for entries in exact]
    raised = [[0] * len(lows) for _ in exact]
    missing = [total - sum(entries) for total, entries in zip(row_sums, matrix, strict=True)]
    if min(missing) < 0:
        return None
    # First every column gets its least, then the rest goes where there is room: augmenting
    # never takes from a column's sum, so the first part is not undone by the second.
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
    """Place one more row of the microbatch along a path that moves others aside."""
    came_from: dict[int, tuple[int, int | None]] = {}  # column: the row, and the column before
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
            # An entry of this column that was rounded up can be taken back.
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
    """Walk back along the path that ends at `column`: round up there, down where it came from."""
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
