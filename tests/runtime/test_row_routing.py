"""Both ends of every transfer agree, for all ranks of random plans; no process is started."""

import random

import pytest

torch = pytest.importorskip("torch")

from pipeplan.pipeline import Stage  # noqa: E402
from pipeplan.runtime.exchange.row_routing import RowRun, route_rows  # noqa: E402


def stages_of(*replicas):
    return tuple(
        Stage(layers=range(n, n + 1), devices=tuple(range(10 * n, 10 * n + count)))
        for n, count in enumerate(replicas)
    )


def test_two_by_two_by_hand():
    """Rows 0-7 and 8-14; stage 1 gets from both replicas of stage 0, and sends to one."""
    stages, ranks = stages_of(2, 2, 1), ((0, 1), (3, 2), (4,))
    first = route_rows(stages, ranks, 0, 0, 15, 2)
    assert first.num_rows == 15
    assert first.rows == ((0, 1, 2, 3), (8, 9, 10, 11))
    assert first.runs_in == ((), ())
    assert first.runs_out[0] == (
        RowRun(rank=3, start=0, stop=2),
        RowRun(rank=2, start=2, stop=4),
    )
    middle = route_rows(stages, ranks, 1, 1, 15, 2)
    assert middle.rows[0] == (2, 3, 6, 7)
    assert middle.runs_in[0] == (
        RowRun(rank=0, start=0, stop=2),
        RowRun(rank=1, start=2, stop=4),
    )
    assert middle.runs_out[0] == (RowRun(rank=4, start=0, stop=4),)
    last = route_rows(stages, ranks, 2, 0, 15, 2)
    assert last.rows[0] == (0, 1, 4, 5, 2, 3, 6, 7)
    assert last.runs_in[0] == (RowRun(rank=3, start=0, stop=4), RowRun(rank=2, start=4, stop=8))
    assert last.runs_out == ((), ())


@pytest.mark.parametrize("seed", range(3))
def test_both_ends_of_every_transfer_agree(seed):
    rng = random.Random(seed)
    for _ in range(60):
        replicas = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
        numbers = rng.sample(range(20), sum(replicas))
        ranks = []
        for count in replicas:
            ranks.append(tuple(numbers[:count]))
            numbers = numbers[count:]
        num_microbatches = rng.randint(1, 3)
        num_rows = num_microbatches * rng.randint(max(replicas), 12) + rng.randint(0, 2)
        stages = stages_of(*replicas)
        routing_of = {
            ranks[stage][replica]: route_rows(
                stages, ranks, stage, replica, num_rows, num_microbatches
            )
            for stage, count in enumerate(replicas)
            for replica in range(count)
        }
        check_ends(ranks, routing_of, num_rows, num_microbatches)


def check_ends(ranks, routing_of, num_rows, num_microbatches):
    for stage, stage_ranks in enumerate(ranks):
        held = [row for rank in stage_ranks for rows in routing_of[rank].rows for row in rows]
        assert sorted(held) == list(range(num_rows))
        for rank in stage_ranks:
            mine = routing_of[rank]
            for microbatch in range(num_microbatches):
                for runs, neighbour in ((mine.runs_out, stage + 1), (mine.runs_in, stage - 1)):
                    if not 0 <= neighbour < len(ranks):
                        assert runs[microbatch] == ()
                        continue
                    # The runs cover all rows of this rank, one after another.
                    edges = [0, *(run.stop for run in runs[microbatch])]
                    assert [run.start for run in runs[microbatch]] == edges[:-1]
                    assert edges[-1] == len(mine.rows[microbatch])
                for run in mine.runs_out[microbatch]:
                    theirs = routing_of[run.rank]
                    back = next(r for r in theirs.runs_in[microbatch] if r.rank == rank)
                    sent = mine.rows[microbatch][run.start : run.stop]
                    assert sent == theirs.rows[microbatch][back.start : back.stop]
                    assert sent
