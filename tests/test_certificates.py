"""Certificates against an enemy: instances built so that a wrong step in a proof would show.

Small instances: all placements under all schedules of the portfolio, none may beat the bound. Large
ones: plans that are planted and known; the bound may not be above any of them.
"""

import itertools
import random
from dataclasses import replace

import pytest

from one_stage import plan
from pipeplan.checker import has_whole_samples
from pipeplan.cluster import Cluster, Device, Duplex
from pipeplan.cost import CostModel
from pipeplan.pipeline import Stage
from pipeplan.planning.planner.every_placement import all_placements, whole_sample_variants
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.schedules import PORTFOLIO, SCHEDULES

FAST, SLOW = 100.0, 0.01


def cluster_of(rates, rng: random.Random, **fields) -> Cluster:
    num_devices = len(rates)
    speeds = rng.choice([(1.0,), (1.0, 1.0, 2.0), (0.001, 1.0), (1.0, 1000.0)])
    latency = rng.choice([0.0, 50.0, "matrix"])
    if latency == "matrix":
        latency = tuple(
            tuple(rng.choice([0.0, 10.0, 5000.0]) for _ in range(num_devices))
            for _ in range(num_devices)
        )
    return Cluster(
        name="hostile",
        devices=tuple(Device(name=f"d{u}", speed=rng.choice(speeds)) for u in range(num_devices)),
        bandwidth_gb_per_s=tuple(tuple(map(float, row)) for row in rates),
        latency_us=latency,
        duplex=rng.choice(list(Duplex)),
        **fields,
    )


def all_rates(num_devices: int, rate: float):
    return [[rate] * num_devices for _ in range(num_devices)]


def chain(rng, num_devices):
    """Neighbours are linked well: whoever skips one has to go through it."""
    rates = all_rates(num_devices, SLOW)
    for u in range(num_devices - 1):
        rates[u][u + 1] = rates[u + 1][u] = FAST
    return rates


def star(rng, num_devices):
    """One device is linked well to all others, and these only to it."""
    rates, centre = all_rates(num_devices, rng.choice([SLOW, 0.0])), rng.randrange(num_devices)
    for u in range(num_devices):
        rates[u][centre] = rates[centre][u] = FAST
    return rates


def clique(rng, num_devices):
    """Some devices are linked well among themselves; all rates differ a little."""
    members = rng.sample(range(num_devices), rng.randint(2, num_devices))
    rates = [[SLOW * rng.uniform(1, 2) for _ in range(num_devices)] for _ in range(num_devices)]
    for u, v in itertools.permutations(members, 2):
        rates[u][v] = FAST * rng.uniform(1, 2)
    return rates


def gateway(rng, num_devices):
    """Two groups, and one pair of devices that links them."""
    half = max(1, num_devices // 2)
    rates = [
        [FAST if (u < half) == (v < half) else rng.choice([SLOW, 0.0]) for v in range(num_devices)]
        for u in range(num_devices)
    ]
    rates[0][num_devices - 1] = rates[num_devices - 1][0] = rng.choice([1.0, FAST])
    return rates


def one_way(rng, num_devices):
    """Fast in one direction, slow or missing in the other."""
    rates = all_rates(num_devices, FAST)
    for u in range(num_devices):
        for v in range(u):
            rates[u][v] = rng.choice([0.0, SLOW, 1.0, FAST])
    return rates


def nearly_equal(rng, num_devices):
    """All links equal but one: devices that almost can be exchanged."""
    rates = all_rates(num_devices, 1.0)
    u, v = rng.sample(range(num_devices), 2) if num_devices > 1 else (0, 0)
    rates[u][v] = rng.choice([1.0 + 1e-9, 1.1, FAST, SLOW])
    return rates


CLUSTERS = (chain, star, clique, gateway, one_way, nearly_equal)


def model_of(rng: random.Random, num_layers: int) -> ModelProfile:
    """Free layers, layers with parameters only, extreme ratios: whatever hides in sums."""

    def layer(index: int) -> LayerProfile:
        kind = rng.choice(["free", "work", "parameters", "heavy", "light"])
        work_ms = {"free": 0.0, "parameters": 0.0, "heavy": 1e4, "light": 1e-4}.get(kind, 5.0)
        return LayerProfile(
            name=str(index),
            forward_ms=work_ms * rng.choice([1, 1, 2]),
            backward_ms=work_ms * rng.choice([0, 1, 2]),
            output_bytes=rng.choice([0, 1e3, 1e6, 1e8]),
            gradient_bytes=rng.choice([0, 1e3, 1e6, 1e8]),
            parameter_bytes=0 if kind == "free" else rng.choice([0, 1e6, 1e9]),
        )

    return ModelProfile(
        name="hostile",
        microbatch_size=rng.choice([1, 2, 64]),
        layers=tuple(layer(index) for index in range(num_layers)),
    )


def fastest_ms(cost: CostModel, num_microbatches: int, placements) -> float:
    return min(
        SCHEDULES[rule](costs, num_microbatches).iteration_ms
        for costs in map(cost.pipeline_costs, placements)
        for rule in PORTFOLIO
    )


@pytest.mark.parametrize("make_rates", CLUSTERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("count", [12, pytest.param(300, marks=pytest.mark.full)])
def test_no_placement_beats_the_bound(make_rates, count):
    """And `best` finds the fastest placement, or nearly."""
    for seed in range(count):
        rng = random.Random(seed)
        num_devices = rng.randint(2, 4 if count > 100 else 3)
        model = model_of(rng, rng.randint(1, 4))
        cluster = cluster_of(make_rates(rng, num_devices), rng)
        microbatches, whole = rng.choice([1, 2, 5]), rng.random() < 0.5
        made = plan(model, cluster, microbatches, divisible=not whole)
        cost = CostModel(model, cluster, max_replicas=model.microbatch_size if whole else None)
        placements = list(all_placements(cost))
        if whole:
            placements += [v for p in placements for v in whole_sample_variants(cost, p)]
            samples = model.microbatch_size
            placements = [p for p in placements if all(has_whole_samples(s, samples) for s in p)]
        fastest = fastest_ms(cost, microbatches, placements)
        assert made.bound.lower_bound_ms <= fastest * (1 + 1e-9), seed
        assert made.iteration_ms <= fastest * 1.05, seed


def planted_plan(rng, num_devices: int, num_layers: int, num_stages: int) -> tuple[Stage, ...]:
    devices = rng.sample(range(num_devices), num_devices)
    ends = [*sorted(rng.sample(range(1, num_layers), num_stages - 1)), num_layers]
    used = rng.randint(num_stages, num_devices)
    cuts = [0, *sorted(rng.sample(range(1, used), num_stages - 1)), used]
    return tuple(
        Stage(layers=range(first, end), devices=tuple(sorted(devices[cuts[n] : cuts[n + 1]])))
        for n, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
    )


@pytest.mark.parametrize("num_devices", [11, 16, 33, 40])
@pytest.mark.parametrize("count", [2, pytest.param(40, marks=pytest.mark.full)])
def test_no_planted_plan_beats_the_bound(num_devices, count):
    """All rates differ; just the links that the planted plan needs are fast."""
    for seed in range(count):
        rng = random.Random(seed)
        model = model_of(rng, rng.randint(3, 12))
        num_stages = rng.randint(1, min(5, model.num_layers))
        stages = planted_plan(rng, num_devices, model.num_layers, num_stages)
        rates = [[SLOW * rng.uniform(1, 9) for _ in range(num_devices)] for _ in range(num_devices)]
        together = [
            (*stage.devices, *behind.devices)
            for stage, behind in zip(stages, (*stages[1:], stages[-1]), strict=True)
        ]
        for group in together:
            for u, v in itertools.permutations(group, 2):
                rates[u][v] = FAST * rng.uniform(0.1, 1)
        cluster = replace(cluster_of(rates, rng), latency_us=rng.choice([0.0, 20.0]))
        microbatches = rng.choice([1, 3, 8])
        made = plan(model, cluster, microbatches, effort=0.1, divisible=True)
        planted = fastest_ms(CostModel(model, cluster), microbatches, [stages])
        assert made.bound.lower_bound_ms <= planted * (1 + 1e-9), seed
