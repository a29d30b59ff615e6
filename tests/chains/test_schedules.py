"""List schedules of chains and their bound, judged by a constraint solver and a plain replay."""

import random
from itertools import pairwise

import pytest

from chains.random_chains import optimum_ms, random_costs, replay
from pipeplan import _core


def judge(seed: int) -> tuple[float, float, float]:
    """The bound, the optimum and the time that the scheduler finds for one random chain."""
    costs = random_costs(random.Random(seed))
    chain = costs.for_kernels()
    bound_ms = _core.chain_bound(chain)
    found_ms, order, _ = _core.schedule_chain(chain, 60, seed)
    assert replay(costs, order) == pytest.approx(found_ms, rel=1e-12)
    least_ms, most_ms = optimum_ms(costs)
    assert bound_ms <= most_ms * (1 + 1e-12), f"seed {seed}: {bound_ms} above {most_ms}"
    assert found_ms >= least_ms * (1 - 1e-12), f"seed {seed}"
    return bound_ms, most_ms, found_ms


def judge_all(seeds: range) -> None:
    pytest.importorskip("ortools")
    results = [judge(seed) for seed in seeds]
    tight = sum(bound_ms >= least_ms * (1 - 1e-9) for bound_ms, least_ms, _ in results)
    optimal = sum(found_ms <= least_ms * (1 + 1e-9) for _, least_ms, found_ms in results)
    assert tight >= 0.6 * len(results)
    assert optimal >= 0.9 * len(results)


def test_no_schedule_beats_the_bound_and_most_are_optimal() -> None:
    judge_all(range(40))


@pytest.mark.full
def test_thousands_of_tiny_chains_against_a_constraint_solver() -> None:
    judge_all(range(1000, 3200))


def test_memory_is_never_exceeded_and_nothing_deadlocks() -> None:
    rng = random.Random(1)
    for _ in range(200):
        costs = random_costs(rng, most_stages=12, most_microbatches=9)
        found_ms, order, _ = _core.schedule_chain(costs.for_kernels(), 10, 1)
        assert replay(costs, order) == pytest.approx(found_ms, rel=1e-12)
        assert found_ms >= _core.chain_bound(costs.for_kernels()) * (1 - 1e-12)


# Published schedulers on stages of equal length (Qi et al. 2024, arXiv:2405.15362, and 2401.10241):
# forward, input gradient, weight gradient and transfer in ms, groups, microbatches, half stages
# that a group may hold, the iteration time to reach, and schedules to try. The chain goes down the
# groups and up. The one of 359 ms is an optimum, by a constraint solver; exchanges on one group at
# a time end at 371.
UNIFORM = [
    ((5, 5, 5, 0), 4, 8, 6, 265, 1000),
    ((5, 5, 5, 0), 8, 16, 16, 515, 1000),
    ((5, 5, 5, 0), 8, 16, 8, 615, 1000),
    ((5, 5, 5, 0), 16, 32, 12, 1255, 1000),
    ((5, 5, 5, 2), 4, 8, 8, 275, 1000),
    ((5, 5, 5, 2), 8, 16, 10, 661, 1000),
    ((5, 6, 3, 1), 4, 8, 8, 256, 1000),
    ((5, 6, 3, 1), 8, 16, 8, 759, 1000),
    ((5, 5, 5, 2), 4, 8, 4, 359, 8000),
]


@pytest.mark.parametrize(
    ("costs", "groups", "microbatches", "room", "goal_ms", "num_runs"), UNIFORM
)
def test_schedules_reach_the_published_ones_at_the_same_memory(
    costs: tuple[float, ...],
    groups: int,
    microbatches: int,
    room: int,
    goal_ms: float,
    num_runs: int,
) -> None:
    forward, backward, weight, send = costs
    group = [*range(groups), *reversed(range(groups))]
    size = len(group)
    sends = [send if one != other else 0 for one, other in pairwise(group)] + [0]
    chain = _core.Chain(
        num_microbatches=microbatches,
        group=group,
        forward_ms=[forward] * size,
        backward_ms=[backward] * size,
        weight_ms=[weight] * size,
        there_ms=sends,
        back_ms=sends,
        reduce_ms=[0] * size,
        is_split=[True] * size,
        held_bytes=[1] * size,
        kept_bytes=[1] * size,
        room_bytes=[room] * groups,
    )
    found_ms, _, _ = _core.schedule_chain(chain, num_runs, 0)
    assert found_ms <= goal_ms * (1 + 1e-9)
