"""Bounds on clusters with shared links against all plans under all schedules, truly simulated."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from instances import model_of
from oracles import stage_orders
from pipeplan import _core
from pipeplan.cluster import Cluster, Device, Duplex
from pipeplan.cost import CostModel, PipelineCosts
from pipeplan.planning.planner.every_placement import all_placements, whole_sample_variants
from pipeplan.planning.planner.lower_bound import relaxed_bound_ms
from pipeplan.planning.planner.plan_bound import plan_bound_ms
from pipeplan.shared_links import SharedLink

STEPS = 2e6


def all_orders_ms(costs: PipelineCosts, num_microbatches: int) -> float:
    """The fastest of all schedules; microbatches keep one order (docs/theory.md, section 8)."""
    least_ms = np.inf
    kernel_costs = costs.for_kernels()
    for rows in itertools.product(stage_orders(num_microbatches), repeat=costs.num_stages):
        trace = _core.run_schedule(kernel_costs, np.array(rows, dtype=np.int32))
        if trace[4].min() == 2 * num_microbatches:  # else it deadlocks
            least_ms = min(least_ms, float(trace[7].max()))
    return least_ms


def enemy(rng: random.Random) -> CostModel:
    """Hosts with uplinks, racks around them, any sets; narrow, wide and one-sided links."""
    V = rng.choice([2, 3, 4, 4])
    hosts = sorted(rng.randrange(max(1, V - 1)) for _ in range(V))
    latency_us = rng.choice([0.0, 0.0, 30.0])
    waits = [
        [0.0 if u == v else 5.0 if hosts[u] == hosts[v] else 25.0 for v in range(V)]
        for u in range(V)
    ]
    between = rng.choice([0.5, 1.0, 2.0])
    rates = [
        [rng.choice([5.0, 10.0]) if hosts[u] == hosts[v] else between for v in range(V)]
        for u in range(V)
    ]
    names = [f"d{u}" for u in range(V)]
    shared = tuple(
        SharedLink(
            name=f"s{k}",
            members=tuple(rng.sample(names, rng.randint(1, V))),
            gb_per_s=rng.choice([0.2, 0.5, 1.0, 4.0]),
            in_gb_per_s=rng.choice([None, None, 0.1, 2.0]),
        )
        for k in range(rng.choice([0, 0, 1, 2]))
    )
    uplink = rng.choice([between, between / 2, 2 * between])
    speeds = rng.choice([[1.0] * V, [rng.choice([1.0, 2.0]) for _ in range(V)]])
    cluster = Cluster(
        name="enemy",
        devices=tuple(
            Device(name=name, host=f"h{host}", speed=speed)
            for name, host, speed in zip(names, hosts, speeds, strict=True)
        ),
        bandwidth_gb_per_s=tuple(map(tuple, rates)),
        latency_us=rng.choice([latency_us, tuple(map(tuple, waits))]),
        duplex=rng.choice([Duplex.FULL, Duplex.FULL, Duplex.HALF]),
        uplink_gb_per_s=rng.choice([uplink, uplink, {"h0": uplink} if 0 in hosts else None]),
        shared=shared or (SharedLink(name="one", members=("d0",), gb_per_s=between),),
    )
    layers = [
        (rng.choice([0, 1, 1, 3]), rng.choice([0, 5e5, 2e6]), rng.choice([0, 0, 1e6, 4e6]))
        for _ in range(rng.randint(1, 4))
    ]
    return CostModel(replace(model_of(*layers), microbatch_size=rng.choice([1, 2, 3, 4])), cluster)


def joint_optimum_ms(cost: CostModel, num_microbatches: int) -> float:
    """The fastest of all plans with even shares, or with whole samples, under all schedules."""
    least_ms = np.inf
    for stages in all_placements(cost):
        for variant in (stages, *whole_sample_variants(cost, stages)):
            costs = cost.pipeline_costs(variant)
            bound_ms = plan_bound_ms(costs, num_microbatches)
            if bound_ms < least_ms:
                own_ms = all_orders_ms(costs, num_microbatches)
                assert bound_ms <= own_ms * (1 + 1e-9)
                least_ms = min(least_ms, own_ms)
    return least_ms


@pytest.mark.parametrize("count", [60, pytest.param(2500, marks=pytest.mark.full)])
def test_no_bound_is_above_the_joint_optimum(count):
    """Exact sets, small sets and relaxed: none is above, and the first is mostly exact."""
    exact = aware = 0
    for seed in range(count):
        rng = random.Random(seed)
        cost, M = enemy(rng), rng.choice([1, 2, 2])
        least_ms = joint_optimum_ms(cost, M)
        if not least_ms > 0:
            continue
        limit_ms = least_ms * rng.choice([1.0, 1.02, 1.5])
        bounds = [bounds_ms(rng, one, M, limit_ms) for one in (cost, cost.without_shared_links())]
        for name, bound_ms in bounds[0].items():
            assert bound_ms <= least_ms * (1 + 1e-9), (seed, name)
        assert bounds[0]["sets"] >= bounds[1]["sets"] * (1 - 1e-6), seed
        exact += bounds[0]["sets"] > least_ms * (1 - 1e-6)
        aware += bounds[0]["relaxed"] > bounds[1]["relaxed"] * (1 + 1e-6)
    assert exact > 0.5 * count
    assert aware > 0.1 * count


def bounds_ms(rng: random.Random, cost: CostModel, M: int, limit_ms: float) -> dict[str, float]:
    instance = cost.kernel_instance(M)
    classes = _core.device_classes(instance)
    V = cost.cluster.num_devices
    sets_ms, _, _ = _core.prove_on_sets(instance, classes, 16, limit_ms, 0, STEPS, 1)
    near_ms, _, _ = _core.prove_on_near_sets(
        instance, 2, limit_ms * 0.3, limit_ms, rng.choice([1e3, 1e9]), rng.choice([10, STEPS]), 1
    )
    relaxed_ms = relaxed_bound_ms(instance, range(1, V + 1), limit_ms, 1)
    groups = sorted({*rng.sample(range(1, V + 1), rng.randint(1, V)), V})
    grouped_ms = relaxed_bound_ms(instance, groups, limit_ms, 1)
    return {"sets": sets_ms, "near": near_ms, "relaxed": relaxed_ms, "grouped": grouped_ms}
