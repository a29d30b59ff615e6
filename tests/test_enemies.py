"""Certificates against mixtures of shares, memory, cards, measured times and constraints."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from enemies import (
    FAST,
    SLOW,
    Enemy,
    caps_of,
    enemy_model,
    fastest_known_ms,
    keeps_constraints,
    make_enemy,
    quick_ms,
    with_shares_and_modes,
)
from one_stage import plan
from pipeplan.checker import check
from pipeplan.cluster import Cluster
from pipeplan.cost import CostModel
from pipeplan.errors import InfeasibleError
from pipeplan.interop.grid_plan import nearest_grid_plan
from pipeplan.pipeline import Plan, Stage

ROUNDING = 1 + 1e-9


def plan_for(enemy: Enemy, **options) -> Plan:
    return plan(
        enemy.model,
        enemy.cluster,
        enemy.num_microbatches,
        num_threads=1,
        **{**enemy.options, **options},
    )


def refutes(enemy: Enemy, made: Plan, known_ms: float) -> str:
    """What is wrong with a certificate; nothing if all is well."""
    bound = made.bound
    if bound.lower_bound_ms > known_ms * ROUNDING:
        return f"bound {bound.lower_bound_ms!r} above a plan of {known_ms!r} ms"
    if bound.lower_bound_ms > made.iteration_ms * ROUNDING:
        return f"bound {bound.lower_bound_ms!r} above its own plan of {made.iteration_ms!r} ms"
    if "optimal" in bound.verdict(made.iteration_ms) and made.iteration_ms > known_ms * (1 + 2e-6):
        return f"optimal at {made.iteration_ms!r} ms, but {known_ms!r} is possible"
    return "; ".join(check(made).errors)


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.full)])
def test_no_tiny_plan_is_below_a_certificate(count):
    """All placements of up to four devices; little effort, so that bounds have much to close."""
    judged = 0
    for seed in range(count):
        rng = random.Random(seed)
        num_devices = rng.choice([1, 2, 2, 3, 3, 4 if count > 100 else 3])
        enemy = make_enemy(rng, num_devices, rng.randint(1, 4))
        try:
            made = plan_for(enemy, effort=rng.choice([0.01, 1.0]))
        except InfeasibleError:
            continue
        if made.bound is None:  # shares by memory, where no other plan fits: nothing is claimed
            assert any(stage.shares for stage in made.stages), seed
            continue
        known_ms = fastest_known_ms(rng, enemy, made.bound)
        assert refutes(enemy, made, known_ms) == "", seed
        judged += known_ms < math.inf
    assert judged > 0.6 * count


@pytest.mark.parametrize("count", [10, pytest.param(500, marks=pytest.mark.full)])
def test_equal_replicas_keep_a_true_certificate(count):
    """The bound of the plan before stays; so the plan after has to be one that it speaks of."""
    for seed in range(count):
        rng = random.Random(seed)
        enemy = make_enemy(rng, rng.randint(2, 5), rng.randint(1, 4))
        try:
            made = nearest_grid_plan(plan_for(enemy, effort=0.01))
        except InfeasibleError:
            continue
        assert made.bound.lower_bound_ms <= made.iteration_ms * ROUNDING, seed


def planted_enemy(rng: random.Random, num_devices: int) -> tuple[Enemy, tuple[Stage, ...]]:
    """A mixture in which only one placement has fast links and, mostly, fast devices."""
    model = enemy_model(rng, rng.randint(2, 10))
    enemy = make_enemy(rng, num_devices, model.num_layers)
    num_stages = rng.randint(1, min(6, enemy.model.num_layers, num_devices))
    order = rng.sample(range(num_devices), num_devices)
    used = rng.randint(num_stages, num_devices)
    ends = [0, *sorted(rng.sample(range(1, used), num_stages - 1)), used]
    sets = [tuple(sorted(order[a:b])) for a, b in itertools.pairwise(ends)]
    if not enemy.options["divisible"]:
        sets = [devices[: enemy.model.microbatch_size] for devices in sets]
    cuts = sorted(rng.sample(range(1, enemy.model.num_layers), num_stages - 1))
    bounds = [0, *cuts, enemy.model.num_layers]
    stages = tuple(
        Stage(layers=range(a, b), devices=devices)
        for (a, b), devices in zip(itertools.pairwise(bounds), sets, strict=True)
    )
    rates = [[SLOW * rng.uniform(1, 9) for _ in range(num_devices)] for _ in range(num_devices)]
    for n, devices in enumerate(sets):
        near = FAST * rng.choice([1.0, rng.uniform(0.01, 1)])
        behind = sets[n + 1] if n + 1 < num_stages else ()
        for u, v in itertools.permutations((*devices, *behind), 2):
            if u in devices or v in devices:
                rates[u][v] = near * rng.choice([1.0, rng.uniform(1, 1.5)])
    planted = {u for devices in sets for u in devices}
    suits = rng.random() < 0.5
    fastest = max(device.speed for device in enemy.cluster.devices)
    devices = tuple(
        replace(device, speed=fastest) if suits and u in planted and rng.random() < 0.9 else device
        for u, device in enumerate(enemy.cluster.devices)
    )
    cluster: Cluster = replace(
        enemy.cluster, devices=devices, bandwidth_gb_per_s=tuple(map(tuple, rates))
    )
    enemy = replace(enemy, cluster=cluster)
    if not keeps_constraints(enemy, stages):
        enemy = replace(enemy, options={"divisible": enemy.options["divisible"]})
    return enemy, stages


@pytest.mark.parametrize("num_devices", [5, 9, 12, 17, 26, 40])
@pytest.mark.parametrize("count", [4, pytest.param(120, marks=pytest.mark.full)])
def test_no_planted_plan_is_below_a_certificate(num_devices, count):
    """Nor is what a longer search finds, or another planner."""
    judged = 0
    for seed in range(count):
        rng = random.Random(f"{num_devices} {seed}")
        enemy, stages = planted_enemy(rng, num_devices)
        try:
            made = plan_for(enemy, effort=0.01)
        except InfeasibleError:
            continue
        known_ms = planted_ms(rng, enemy, made, stages)
        if count > 100:
            known_ms = min(known_ms, plan_for(enemy, effort=0.3, seed=seed + 1).iteration_ms)
        assert refutes(enemy, made, known_ms) == "", seed
        judged += known_ms < math.inf
    assert judged > (0.4 * count if count > 100 else 0)


def planted_ms(rng: random.Random, enemy: Enemy, made: Plan, stages: tuple[Stage, ...]) -> float:
    """The planted placement with many shares and modes."""
    cost, known_ms = CostModel(enemy.model, enemy.cluster), math.inf
    for variant in with_shares_and_modes(rng, enemy, made.bound, stages, 60):
        caps = caps_of(enemy, cost, made.bound, variant)
        if caps:
            costs = cost.pipeline_costs(variant)
            known_ms = min(known_ms, quick_ms(costs, enemy.num_microbatches, caps))
    return known_ms
