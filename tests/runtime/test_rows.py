"""Rows are divided so that each pair of devices carries the product of its shares."""

import random

import pytest

from pipeplan.errors import RuntimeMismatchError
from pipeplan.pipeline import Stage
from pipeplan.runtime import rows as rows_module
from pipeplan.runtime.rows import divide_batch, divide_rows


def stages_of(*replicas, shares=None):
    return tuple(
        Stage(
            layers=range(n, n + 1),
            devices=tuple(range(10 * n, 10 * n + count)),
            shares=shares[n] if shares else None,
        )
        for n, count in enumerate(replicas)
    )


WITHOUT_MATRIX = [
    ([(9, 2, 4, 7), (9, 9, 8, 7), (4, 4, 1)], 8),
    ([(1, 8), (1,), (4, 9, 8, 7, 7), (5, 7)], 12),
]
"""Shares, by weights, and rows: the first rounding leaves no matrix for a later channel."""


def weighted_stages(weights):
    shares = [tuple(weight / sum(stage) for weight in stage) for stage in weights]
    return stages_of(*map(len, weights), shares=shares)


def random_stages(rng):
    stages = []
    for index in range(rng.randint(2, 4)):
        weights = [rng.choice([1, 2, rng.uniform(0.2, 2)]) for _ in range(rng.randint(1, 5))]
        uneven = tuple(weight / sum(weights) for weight in weights)
        stages.append(
            Stage(
                layers=range(index, index + 1),
                devices=tuple(range(10 * index, 10 * index + len(weights))),
                shares=uneven if rng.random() < 0.6 else None,
            )
        )
    return tuple(stages)


def test_two_by_two_carries_quarters():
    division = divide_rows(stages_of(2, 2), 8)
    assert division.rows == (((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1, 4, 5), (2, 3, 6, 7)))
    assert division.runs == (((2, 2), (2, 2)),)


def check_division(stages, num_rows, most_off):
    """All rows are there once, and every pair is within so many rows of its product."""
    division = divide_rows(stages, num_rows)
    for n, stage in enumerate(stages):
        held = division.rows[n]
        assert sorted(row for mine in held for row in mine) == list(range(num_rows))
        for mine, share in zip(held, stage.device_shares, strict=True):
            assert abs(len(mine) - share * num_rows) <= most_off + 1e-9
    for n, runs in enumerate(division.runs):
        for u, x in enumerate(stages[n].device_shares):
            for v, y in enumerate(stages[n + 1].device_shares):
                shared = set(division.rows[n][u]) & set(division.rows[n + 1][v])
                assert runs[u][v] == len(shared)
                assert abs(runs[u][v] - x * y * num_rows) <= most_off + 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_every_pair_within_one_row(seed):
    rng = random.Random(seed)
    for _ in range(500):
        stages = random_stages(rng)
        num_rows = rng.randint(max(stage.num_replicas for stage in stages), 40)
        check_division(stages, num_rows, 1)


def test_the_last_resort_is_within_two_rows(monkeypatch):
    """What is done if no order of ties gives a matrix; nobody has met such stages yet."""
    divide_rows.cache_clear()
    monkeypatch.setattr(rows_module, "MAX_ATTEMPTS", 0)
    rng = random.Random(5)
    for _ in range(200):
        stages = random_stages(rng)
        num_rows = rng.randint(max(stage.num_replicas for stage in stages), 40)
        check_division(stages, num_rows, 2)
    for weights, num_rows in WITHOUT_MATRIX:
        check_division(weighted_stages(weights), num_rows, 2)
    divide_rows.cache_clear()


def test_each_attempt_breaks_ties_in_another_order():
    rngs = [random.Random(seed) for seed in range(20)]
    thirds, halves = (1 / 3,) * 3, (0.5, 0.5)
    counts = {tuple(rows_module._round_shares(thirds, 4, rng)) for rng in rngs}
    assert counts == {(2, 1, 1), (1, 2, 1), (1, 1, 2)}
    whole = {tuple(rows_module._round_shares((0.5, 0.25, 0.25), 4, rng)) for rng in rngs}
    assert whole == {(2, 1, 1)}  # nothing is rounded, so nothing varies
    matrices = {
        tuple(map(tuple, rows_module._round_products(halves, halves, (1, 1), rng))) for rng in rngs
    }
    assert matrices == {((1, 0), (0, 1)), ((0, 1), (1, 0))}


def test_an_attempt_that_gets_stuck_is_followed_by_another(monkeypatch):
    attempts = []
    try_division = rows_module._try_division

    def stuck_twice(stages, num_rows, rng, *, by_counts=False):
        attempts.append((rng.random() if rng else None, by_counts))
        return try_division(stages, num_rows, rng) if len(attempts) > 2 else None

    monkeypatch.setattr(rows_module, "_try_division", stuck_twice)
    divide_rows.cache_clear()
    divide_rows(stages_of(2, 2), 5)
    divide_rows.cache_clear()
    expected = [None, random.Random(1).random(), random.Random(2).random()]
    assert attempts == [(number, False) for number in expected]


@pytest.mark.parametrize(("weights", "num_rows"), WITHOUT_MATRIX)
def test_a_rounding_without_a_matrix_behind_it_is_replaced(weights, num_rows):
    stages = weighted_stages(weights)
    assert rows_module._try_division(stages, num_rows, None) is None
    check_division(stages, num_rows, 1)


def test_numbers_that_mean_a_whole_number_are_not_rounded():
    assert [rows_module._down(number) for number in (2.9999999999, 3.0, 3.1)] == [3, 3, 3]
    assert [rows_module._up(number) for number in (3.0000000001, 3.0, 2.9)] == [3, 3, 3]
    assert (rows_module._down(2.99), rows_module._up(3.01)) == (2, 4)


@pytest.mark.parametrize(
    ("exact", "row_sums", "lows", "highs", "why"),
    [
        ([[1.0, 1.0]], [1], [0, 0], [2, 2], "a row has less than its entries rounded down"),
        ([[1.0], [1.0]], [1, 1], [1], [1], "a column has more than it may"),
        ([[0.5, 0.5]], [1], [1, 1], [1, 1], "one row cannot give two columns their least"),
        ([[1.0, 1.0]], [3], [0, 0], [3, 3], "no entry may be rounded up"),
    ],
)
def test_impossible_matrices_are_refused(exact, row_sums, lows, highs, why):
    assert rows_module._round_matrix(exact, row_sums, lows, highs) is None, why


def test_a_path_moves_other_rows_aside():
    """The second row fits only into the first column, which the first row takes at first."""
    exact = [[0.5, 0.5], [0.5, 0.0]]
    assert rows_module._round_matrix(exact, [1, 1], [1, 1], [1, 1]) == [[0, 1], [1, 0]]


def test_both_ends_of_a_transfer_are_slices():
    for replicas in ((3, 2, 4), (1, 3, 2), (4, 4, 4)):
        division = divide_rows(stages_of(*replicas), 13)
        for n, runs in enumerate(division.runs):
            for u, mine in enumerate(division.rows[n]):
                sent = 0
                for v, length in enumerate(runs[u]):
                    before = sum(runs[w][v] for w in range(u))
                    theirs = division.rows[n + 1][v][before : before + length]
                    assert mine[sent : sent + length] == theirs
                    sent += length


def counts_of(division):
    return [[len(mine) for mine in held] for held in division.rows]


def test_nobody_is_idle_if_that_can_be():
    # The largest remainder is that of the first replica, but it has rows already.
    division = divide_rows(stages_of(3, 3, shares=[(0.725, 0.1375, 0.1375)] * 2), 4)
    assert counts_of(division) == [[2, 1, 1]] * 2
    even = divide_rows(stages_of(3, 2, 3), 3)
    assert all(mine for held in even.rows for mine in held)


def test_somebody_is_idle_if_shares_leave_no_other_way():
    """3.6 rows are rounded to 3 or 4, so that one is left for two replicas of a fifth of a row."""
    division = divide_rows(stages_of(3, 3, shares=[(0.9, 0.05, 0.05)] * 2), 4)
    assert counts_of(division)[0] == [3, 1, 0]
    assert sorted(counts_of(division)[1]) in ([0, 0, 4], [0, 1, 3])


def test_whole_products_are_kept_whole():
    """0.1 * 0.7 * 100 is 6.999999999999999 in floating point, and means 7."""
    shares = [(0.1, 0.9), (0.7, 0.3)]
    assert divide_rows(stages_of(2, 2, shares=shares), 100).runs == (((7, 3), (63, 27)),)


def test_more_replicas_than_rows_is_refused():
    with pytest.raises(RuntimeMismatchError, match="stage 1: has 3 replicas for a microbatch of 2"):
        divide_rows(stages_of(1, 3), 2)


def test_batch_sizes_differ_by_one():
    assert [len(rows) for rows in divide_batch(11, 4)] == [3, 3, 3, 2]
    assert divide_batch(4, 2) == [range(2), range(2, 4)]
    with pytest.raises(RuntimeMismatchError, match="batch: has 3 rows for 4 microbatches"):
        divide_batch(3, 4)
