"""Windows of blocks and lists of plans against an enemy; all orders of blocks are the judge."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from instances import model_of, random_cluster, random_model
from oracles import stage_orders
from pipeplan import _core
from pipeplan.cluster import Cluster, Device, Duplex
from pipeplan.cost import CostModel, PipelineCosts
from pipeplan.planning.planner.every_placement import all_placements, whole_sample_variants
from pipeplan.planning.planner.plan_bound import plan_bound_ms
from pipeplan.simulator import run_schedule

STEPS = 2e6


def all_orders_ms(costs: PipelineCosts, num_microbatches: int, enough_ms: float = -1.0) -> float:
    """The fastest of all schedules; microbatches keep one order (docs/theory.md, section 8).

    Once one takes no more than `enough_ms`, no others are looked at.
    """
    least_ms = np.inf
    kernel_costs = costs.for_kernels()
    for rows in itertools.product(stage_orders(num_microbatches), repeat=costs.num_stages):
        trace = _core.run_schedule(kernel_costs, np.array(rows, dtype=np.int32))
        if trace[4].min() == 2 * num_microbatches:  # else it deadlocks
            least_ms = min(least_ms, float((trace[5] + costs.all_reduce_ms_S).max()))
        if least_ms <= enough_ms:
            break
    return least_ms


def awkward_costs(rng: random.Random, num_stages: int) -> PipelineCosts:
    """Times that tie, vanish, differ by orders of magnitude, or are near an instant."""
    scale = rng.choice([1.0, 1.0, 1.0, 1e-9])
    kind = rng.choice(["whole", "any", "extreme", "slow stage", "slow reduce"])

    def times(number: int) -> np.ndarray:
        if kind == "whole":
            return np.array([float(rng.randint(0, 3)) for _ in range(number)]) * scale
        if kind == "extreme":
            return np.array([rng.choice([0.0, 1e-6, 1.0, 1e3]) for _ in range(number)]) * scale
        return np.array([rng.uniform(0.5, 2.0) for _ in range(number)]) * scale

    costs = PipelineCosts(
        forward_ms_S=times(num_stages),
        backward_ms_S=times(num_stages) * rng.choice([1.0, 2.0]),
        send_forward_ms_C=times(num_stages - 1) * rng.choice([0.0, 0.1, 1.0]),
        send_backward_ms_C=times(num_stages - 1) * rng.choice([0.0, 0.1, 1.0]),
        all_reduce_ms_S=times(num_stages) * rng.choice([0.0, 1.0, 4.0]),
        half_duplex=rng.random() < 0.2,
    )
    worst = rng.randrange(num_stages)
    if kind == "slow stage":
        costs.forward_ms_S[worst] *= 3
        costs.backward_ms_S[worst] *= 2
    if kind == "slow reduce":
        costs.all_reduce_ms_S[worst] *= 8
    return costs


@pytest.mark.parametrize("count", [120, pytest.param(4000, marks=pytest.mark.full)])
def test_no_order_is_below_the_windows(count):
    tight = reached = plain = 0
    for seed in range(count):
        rng = random.Random(seed)
        num_stages = rng.choice([1, 2, 2, 3])
        M = rng.randint(1, 4 if num_stages < 3 else 3)
        costs = awkward_costs(rng, num_stages)
        least_ms = all_orders_ms(costs, M)
        limit_ms = least_ms * rng.choice([1 + 1e-7, 1.01, 1.5, 3.0])
        bound_ms, found_ms, codes = _core.best_schedule(costs.for_kernels(), M, limit_ms, 6)
        instants_ms = (2 * M + 4 * num_stages + 8) * 1e-9  # a certificate is lower by these
        assert bound_ms - instants_ms <= least_ms * (1 + 1e-9), seed
        assert found_ms >= least_ms * (1 - 1e-9), seed
        if len(codes):
            assert run_schedule(costs, codes).iteration_ms == found_ms
        plain += plan_bound_ms(costs, M) > least_ms * (1 - 2e-5)
        tight += bound_ms > least_ms * (1 - 2e-5)
        reached += found_ms < least_ms * (1 + 1e-5)
    assert tight > plain
    assert tight > 0.9 * count
    assert reached > 0.9 * count


def test_two_needs_that_do_not_fit_together():
    """Each stage alone could end in time, but the last one needs all forwards at once."""
    costs = PipelineCosts(
        forward_ms_S=np.array([2.0, 1.0]),
        backward_ms_S=np.array([2.0, 1.0]),
        send_forward_ms_C=np.zeros(1),
        send_backward_ms_C=np.zeros(1),
        all_reduce_ms_S=np.array([0.0, 9.0]),
        half_duplex=False,
    )
    least_ms = all_orders_ms(costs, 3)
    bound_ms, found_ms, _ = _core.best_schedule(costs.for_kernels(), 3, 30.0, 4)
    assert bound_ms <= least_ms <= found_ms
    assert found_ms == pytest.approx(least_ms)
    assert bound_ms == pytest.approx(least_ms, rel=2e-5)


def test_many_microbatches_are_left_to_the_plain_bound():
    costs = awkward_costs(random.Random(1), 2)
    bound_ms, found_ms, codes = _core.best_schedule(costs.for_kernels(), 300, 1e9, 4)
    assert bound_ms == plan_bound_ms(costs, 300)
    assert (found_ms, len(codes)) == (1e9, 0)


# ------------------------------------------------------------------------------ plans on sets


def enemy(rng: random.Random) -> CostModel:
    """Relays, stars, gateways, one-way links, free layers, extreme ratios, whole samples."""
    V = rng.choice([2, 3, 3, 4])
    kind = rng.choice(["random", "relay", "star", "gateway", "one-way", "extreme"])
    if kind == "random":
        cluster = random_cluster(rng, V, gaps=rng.random() < 0.5)
        return CostModel(random_model(rng, rng.randint(1, 4)), cluster)
    rates = [[rng.choice([0.01, 0.02]) for _ in range(V)] for _ in range(V)]
    middle = rng.randrange(V)
    for u in range(V):
        fast = rng.choice([1.0, 5.0])
        if kind == "relay":  # a chain of fast links
            rates[u][(u + 1) % V], rates[(u + 1) % V][u] = fast, fast
        elif kind == "star":
            rates[u][middle] = rates[middle][u] = fast
        elif kind == "gateway":  # two halves with one good pair between
            for v in range(V):
                if (u < V // 2) == (v < V // 2) or {u, v} == {0, V - 1}:
                    rates[u][v] = fast
        elif kind == "one-way":
            for v in range(u):
                rates[u][v], rates[v][u] = fast, rng.choice([0.0, 0.1])
        else:
            rates[u] = [10.0 ** rng.randint(-4, 4) for _ in range(V)]
    speeds = [rng.choice([1.0, 1.0, 2.0, 0.1]) for _ in range(V)]
    cluster = Cluster(
        name=kind,
        devices=tuple(Device(name=f"d{u}", speed=speed) for u, speed in enumerate(speeds)),
        bandwidth_gb_per_s=tuple(map(tuple, rates)),
        latency_us=rng.choice([0.0, 50.0]),
        duplex=rng.choice(list(Duplex)),
    )
    layers = [
        (rng.choice([0, 0, 1, 3]), rng.choice([0, 1e5, 2e6]), rng.choice([0, 0, 1e6, 1e7]))
        for _ in range(rng.randint(1, 4))
    ]
    return CostModel(
        replace(model_of(*layers), microbatch_size=rng.choice([1, 2, 3, 4, 5])), cluster
    )


def joint_optimum_ms(cost: CostModel, num_microbatches: int) -> float:
    """The fastest of all plans with even shares, or with whole samples, under all schedules.

    Plans with low bounds come first. So most others need no schedule at all.
    """
    by_bound = []
    for stages in all_placements(cost):
        for variant in (stages, *whole_sample_variants(cost, stages)):
            costs = cost.pipeline_costs(variant)
            by_bound.append((plan_bound_ms(costs, num_microbatches), costs))
    least_ms = np.inf
    for bound_ms, costs in sorted(by_bound, key=lambda one: one[0]):
        if bound_ms >= least_ms:
            break
        least_ms = min(least_ms, all_orders_ms(costs, num_microbatches, bound_ms))
    return least_ms


@pytest.mark.parametrize("count", [40, pytest.param(3000, marks=pytest.mark.full)])
def test_no_certificate_is_above_the_joint_optimum(count):
    proved = 0
    for seed in range(count):
        rng = random.Random(seed)
        cost, M = enemy(rng), rng.choice([1, 2, 2, 3])
        least_ms = joint_optimum_ms(cost, M)
        limit_ms = least_ms * rng.choice([1.0, 1.02, 1.5])
        if not limit_ms > 0:
            continue
        instance = cost.kernel_instance(M)
        classes = _core.device_classes(instance)
        bound_ms, _, found = _core.prove_on_sets(
            instance, classes, rng.choice([1, 2, 16]), limit_ms, 0, STEPS, rng.choice([1, 2])
        )
        assert bound_ms <= least_ms * (1 + 1e-9), seed
        for iteration_ms, placed, codes in found:
            assert iteration_ms >= least_ms * (1 - 1e-9), seed
            assert len(codes) == len(placed.devices)
        known_ms = min([limit_ms, *(iteration_ms for iteration_ms, _, _ in found)])
        proved += bound_ms > known_ms * (1 - 1e-6)
    assert proved > 0.5 * count


@pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.full)])
def test_small_sets_alone_are_not_above_the_joint_optimum(count):
    """With sets of one, two or three devices known, and any bound to begin with."""
    rose = 0
    for seed in range(count):
        rng = random.Random(seed)
        cost, M = enemy(rng), rng.choice([1, 2, 2, 3])
        least_ms = joint_optimum_ms(cost, M)
        proved_ms = least_ms * rng.choice([0.3, 0.8, 0.99])
        instance = cost.kernel_instance(M)
        bound_ms, _, found = _core.prove_on_near_sets(
            instance,
            rng.choice([1, 2, 16]),
            proved_ms,
            least_ms * rng.choice([1.0, 1.02, 1.5]),
            rng.choice([1e3, 1e4, 1e9]),
            rng.choice([10, STEPS]),
            rng.choice([1, 2]),
        )
        assert proved_ms <= bound_ms <= least_ms * (1 + 1e-9), seed
        assert all(iteration_ms >= least_ms * (1 - 1e-9) for iteration_ms, _, _ in found), seed
        rose += bound_ms > proved_ms * (1 + 1e-6)
    assert rose > count // 4


def test_steps_and_threads_only_decide_how_far_it_goes():
    """The bound rises with the steps and never depends on the number of threads."""
    rose = 0
    for seed in range(16):
        rng = random.Random(seed)
        rates = [[rng.uniform(0.5, 5) for _ in range(6)] for _ in range(6)]
        devices = tuple(Device(name=f"d{u}") for u in range(6))
        cluster = Cluster(name="c", devices=devices, bandwidth_gb_per_s=tuple(map(tuple, rates)))
        layers = [(rng.uniform(1, 5), 1e6, rng.choice([1e6, 2e7])) for _ in range(10)]
        instance = CostModel(model_of(*layers), cluster).kernel_instance(5)
        classes = list(range(6))
        least_ms, _ = _core.plan_on_sets(instance, classes, 2, np.inf, 0, 1)
        limit_ms = least_ms * 1.02
        results = [
            _core.prove_on_sets(instance, classes, 2, limit_ms, 0, steps, threads)
            for steps, threads in ((0, 1), (1e3, 1), (1e3, 2), (STEPS, 1), (STEPS, 2))
        ]
        bounds = [bound_ms for bound_ms, _, _ in results]
        assert bounds[0] <= bounds[1] * (1 + 1e-12)
        assert bounds[1] == bounds[2]
        assert bounds[3] == bounds[4]
        times = [[iteration_ms for iteration_ms, _, _ in found] for _, _, found in results]
        assert times[1] == times[2]
        assert times[3] == times[4]
        rose += bounds[3] > bounds[0] * (1 + 1e-9)
    assert rose > 0


@pytest.mark.parametrize("count", [6, pytest.param(150, marks=pytest.mark.full)])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 3), (3, 2)])
def test_no_other_order_of_microbatches_is_faster(num_stages, num_microbatches, count):
    """Section 8: each stage takes its microbatches in any order, forwards and backwards too."""
    blocks = [*range(num_microbatches), *(-1 - m for m in range(num_microbatches))]
    every_order = [
        order
        for order in itertools.permutations(blocks)
        if all(order.index(m) < order.index(-1 - m) for m in range(num_microbatches))
    ]
    for seed in range(count):
        costs = awkward_costs(random.Random(seed), num_stages)
        kernel_costs, least_ms = costs.for_kernels(), np.inf
        for rows in itertools.product(every_order, repeat=num_stages):
            trace = _core.run_schedule(kernel_costs, np.array(rows, dtype=np.int32))
            if trace[4].min() == 2 * num_microbatches:  # else it deadlocks
                least_ms = min(least_ms, float((trace[5] + costs.all_reduce_ms_S).max()))
        instants = 1e-9 * 4 * num_stages * num_microbatches
        assert all_orders_ms(costs, num_microbatches) <= least_ms + instants, seed
