"""Tiny instances with little memory, and their optimum by trying everything.

The search here shares the cost model, the simulator and the fixed-plan bound with the planner, and
nothing else: it lists all cuts, sets of devices, ways to divide whole samples, choices of stages
that recompute, and orders of blocks.
"""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from instances import random_cluster, random_model
from pipeplan.cluster import Cluster
from pipeplan.cost import CostModel, PipelineCosts
from pipeplan.errors import PlanFileError
from pipeplan.pipeline import Stage
from pipeplan.planning.planner.plan_bound import plan_bound_ms
from pipeplan.profile import ModelProfile
from pipeplan.simulator import Preference, run_list, run_schedule


def tight_instance(rng: random.Random) -> tuple[ModelProfile, Cluster, int]:
    """A model, a cluster with little memory, and a number of microbatches."""
    model = random_model(rng, rng.randint(1, 5))
    thin = rng.choice([1.0, 0.1])  # with little to send more stages pay
    layers = tuple(
        replace(
            layer,
            activation_bytes=layer.activation_bytes * rng.choice([1, 4, 10]),
            output_bytes=round(layer.output_bytes * thin),
            gradient_bytes=round(layer.gradient_bytes * thin),
        )
        for layer in model.layers
    )
    model = replace(
        model,
        microbatch_size=rng.choice([1, 2, 3, 4, 6]),
        layers=layers,
        optimizer_bytes_per_parameter_byte=rng.choice([0.0, 1.0, 3.0]),
    )
    cluster = random_cluster(rng, rng.randint(1, 4), gaps=rng.random() < 0.2)
    microbatches = rng.choice([1, 2, 3, 3, 4])
    state = (1 + model.optimizer_bytes_per_parameter_byte) * sum(
        layer.parameter_bytes for layer in layers
    )
    kept = sum(layer.activation_bytes for layer in layers)
    whole_gb = max((state + microbatches * kept) / 1e9, 1e-5)
    part = rng.uniform(0.2, 0.9)
    has_equal_memory = rng.random() < 0.5
    devices = tuple(
        replace(
            device,
            memory_gb=round(
                max(1e-6, whole_gb * part * (1.0 if has_equal_memory else rng.uniform(0.4, 2))), 9
            ),
        )
        for device in cluster.devices
    )
    return model, replace(cluster, devices=devices), microbatches


def optimum_ms(model: ModelProfile, cluster: Cluster, num_microbatches: int) -> float:
    """The time of the fastest plan that fits and gives devices whole samples; infinite if none."""
    cost = CostModel(model, cluster)
    plans = []
    for stages in _all_stages(cost):
        caps = [most_in_flight(cost, stage, num_microbatches) for stage in stages]
        if min(caps) < 1:
            continue
        try:
            costs = cost.pipeline_costs(stages)
        except PlanFileError:
            continue
        bound_ms = plan_bound_ms(costs, num_microbatches, caps)
        plans.append((bound_ms, caps, costs))
    plans.sort(key=lambda plan: plan[0])
    best_ms = math.inf
    for bound_ms, caps, costs in plans:
        if bound_ms >= best_ms * (1 - 1e-9):
            break
        best_ms = min(best_ms, fastest_ms(costs, num_microbatches, caps, bound_ms))
    return best_ms


def _all_stages(cost: CostModel) -> Iterator[tuple[Stage, ...]]:
    num_layers, num_devices = cost.model.num_layers, cost.cluster.num_devices
    samples = cost.model.microbatch_size
    for num_stages in range(1, min(num_layers, num_devices) + 1):
        for stage_of in itertools.product(range(-1, num_stages), repeat=num_devices):
            sets = [
                tuple(u for u in range(num_devices) if stage_of[u] == n) for n in range(num_stages)
            ]
            if not all(0 < len(devices) <= samples for devices in sets):
                continue
            shares = itertools.product(*(sorted(_whole_shares(cost, s)) for s in sets))
            recompute = itertools.product([False, True], repeat=num_stages)
            cuts = itertools.combinations(range(1, num_layers), num_stages - 1)
            for ends, share, again in itertools.product(cuts, shares, recompute):
                bounds = (0, *ends, num_layers)
                yield tuple(
                    Stage(
                        layers=range(bounds[n], bounds[n + 1]),
                        devices=sets[n],
                        shares=share[n],
                        recompute=again[n],
                    )
                    for n in range(num_stages)
                )


def _whole_shares(cost: CostModel, devices: tuple[int, ...]) -> set[tuple[float, ...]]:
    """Whole samples as even as can be, or nearly in proportion to speed.

    The former: every way to give some devices one sample more. The latter: off by less than a
    sample, or such that the last device is done as early as can be.
    """
    size, samples = len(devices), cost.model.microbatch_size
    fewer, more = divmod(samples, size)
    ways = {
        tuple(fewer + (n in chosen) for n in range(size))
        for chosen in itertools.combinations(range(size), more)
    }
    speeds = [float(cost.speed_D[u]) for u in devices]
    if len(set(cost.speed_D.tolist())) > 1:
        wanted = [samples * speed / sum(speeds) for speed in speeds]
        every = list(_divisions(samples, size))
        ends = [max(n / s for n, s in zip(way, speeds, strict=True)) for way in every]
        ways |= {
            way
            for way, end in zip(every, ends, strict=True)
            if end <= min(ends) * (1 + 1e-12)
            or all(abs(n - exact) < 1 for n, exact in zip(way, wanted, strict=True))
        }
    return {tuple(n / samples for n in way) for way in ways}


def _divisions(samples: int, size: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, samples), size - 1):
        ends = (*cuts, samples)
        yield tuple(end - first for first, end in zip((0, *cuts), ends, strict=True))


def most_in_flight(cost: CostModel, stage: Stage, num_microbatches: int) -> int:
    for held in range(num_microbatches, 0, -1):
        needs_gb = cost.memory_gb(stage, held)
        if all(
            need_gb <= cost.cluster.devices[u].memory_gb * (1 + 1e-9)
            for u, need_gb in zip(stage.devices, needs_gb, strict=True)
        ):
            return held
    return 0


def fastest_ms(
    costs: PipelineCosts, num_microbatches: int, caps: list[int], bound_ms: float
) -> float:
    """The time of the fastest order of blocks within the caps."""
    best_ms = min(
        run_list(costs, num_microbatches, preference, caps).iteration_ms
        for preference in Preference
    )
    orders = [list(_orders(num_microbatches, cap)) for cap in caps]
    for codes in itertools.product(*orders):
        if best_ms <= bound_ms * (1 + 1e-9):
            break
        try:
            run = run_schedule(costs, np.array(codes, dtype=np.int32))
        except Exception:  # noqa: S112 - these orders wait for each other for ever
            continue
        best_ms = min(best_ms, run.iteration_ms)
    return best_ms


def _orders(num_microbatches: int, cap: int) -> Iterator[list[int]]:
    """Every order of one stage's blocks with at most `cap` microbatches in flight."""

    def extend(order: list[int], forwards: int, backwards: int) -> Iterator[list[int]]:
        if backwards == num_microbatches:
            yield order
            return
        if forwards < num_microbatches and forwards - backwards < cap:
            yield from extend([*order, forwards], forwards + 1, backwards)
        if backwards < forwards:
            yield from extend([*order, -1 - backwards], forwards, backwards + 1)

    return extend([], 0, 0)
