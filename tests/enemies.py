"""Instances that mix everything a certificate has to get right, and plans that it may not exceed.

Each instance draws a structure of links, and then any of: uneven speeds, little memory, shared
cards and racks, times at several sizes, free layers, nothing to send, rates without a limit, few
samples, constraints, one microbatch or very many. The judges list plans of whatever kind the
certificate speaks of. They share the cost model and the simulator with the planner, nothing else.
"""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from oracles import stage_orders
from pipeplan.cluster import Cluster, Device, Duplex
from pipeplan.cost import CostModel, PipelineCosts
from pipeplan.errors import PlanFileError
from pipeplan.pipeline import Bound, BoundLimit, BoundScope, Stage
from pipeplan.planning.planner.every_placement import all_placements
from pipeplan.profile import LayerProfile, ModelProfile, TimesAt
from pipeplan.schedules import PORTFOLIO, SCHEDULES
from pipeplan.shared_links import SharedLink
from pipeplan.simulator import Preference, run_list, run_schedule

FASTEST, FAST, SLOW = 1e9, 100.0, 0.01
SPEEDS = (
    (1.0,),
    (1.0, 1.0, 2.0),
    (1e-3, 1.0, 1e3),
    (1.0, 1.0 + 1e-9),
    (0.4, 0.7, 1.0),
    (1.0, 3.0, 3.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Enemy:
    """One planning problem."""

    model: ModelProfile
    cluster: Cluster
    num_microbatches: int
    options: dict = field(default_factory=dict)


def _chain(rng, num):
    """Only neighbours in a hidden order are linked well."""
    rates = [[SLOW] * num for _ in range(num)]
    order = rng.sample(range(num), num)
    for u, v in itertools.pairwise(order):
        rates[u][v] = rates[v][u] = FAST
    return rates


def _star(rng, num):
    rates, centre = [[rng.choice([0.0, SLOW])] * num for _ in range(num)], rng.randrange(num)
    for u in range(num):
        rates[u][centre] = rates[centre][u] = FAST
    return rates


def _clique(rng, num):
    """Some devices are linked well among themselves; all rates differ a little."""
    members = rng.sample(range(num), rng.randint(1, num))
    rates = [[SLOW * rng.uniform(1, 2) for _ in range(num)] for _ in range(num)]
    for u, v in itertools.permutations(members, 2):
        rates[u][v] = FAST * rng.uniform(1, 2)
    return rates


def _biclique(rng, num):
    """Some devices send well to some others, and get answers slowly."""
    senders = rng.sample(range(num), rng.randint(1, num))
    rates = [[SLOW * rng.uniform(1, 2) for _ in range(num)] for _ in range(num)]
    for u, v in itertools.product(senders, range(num)):
        if v not in senders:
            rates[u][v], rates[v][u] = FAST * rng.uniform(1, 2), rng.choice([SLOW, 1.0, FAST])
    return rates


def _gateway(rng, num):
    half = max(1, num // 2)
    far = rng.choice([0.0, SLOW])
    rates = [[FAST if (u < half) == (v < half) else far for v in range(num)] for u in range(num)]
    rates[0][num - 1] = rates[num - 1][0] = rng.choice([1.0, FAST])
    return rates


def _one_way(rng, num):
    return [
        [FAST if v > u else rng.choice([0.0, SLOW, 1.0]) for v in range(num)] for u in range(num)
    ]


def _equal(rng, num):
    """Ties everywhere, at some rate or at the highest that there is; or all but one link."""
    rate = rng.choice([1.0, FASTEST])
    rates = [[rate] * num for _ in range(num)]
    if rng.random() < 0.5:
        rates[rng.randrange(num)][rng.randrange(num)] = rng.choice([rate / 1.1, SLOW, FASTEST])
    return rates


def _scattered(rng, num):
    """Random rates over many orders of magnitude."""
    return [[10.0 ** rng.uniform(-3, 3) for _ in range(num)] for _ in range(num)]


LINKS = (_chain, _star, _clique, _biclique, _gateway, _one_way, _equal, _scattered)


def enemy_model(rng: random.Random, num_layers: int) -> ModelProfile:
    """Free layers, layers with parameters only, nothing to send, extreme ratios; some measured."""
    samples = rng.choice([1, 2, 3, 4, 6, 64])
    silent = rng.random() < 0.15

    def layer(index: int) -> LayerProfile:
        work_ms = rng.choice([0.0, 0.0, 1e-4, 1.0, 5.0, 5.0, 1e4])
        forward_ms = work_ms * rng.choice([0, 1, 1, 2])
        at = ()
        if rng.random() < 0.15:
            sizes = rng.sample([size for size in (1, 2, 3, 5, 100) if size != samples], 2)
            at = tuple(
                TimesAt(
                    microbatch_size=size,
                    forward_ms=forward_ms * rng.choice([0.1, 1, 4]),
                    backward_ms=work_ms * rng.choice([0, 1, 3]),
                )
                for size in sizes
            )
        return LayerProfile(
            name=f"l{index}",
            forward_ms=forward_ms,
            backward_ms=work_ms * rng.choice([0, 1, 2]),
            output_bytes=0 if silent else rng.choice([0, 1e3, 1e6, 1e8]),
            gradient_bytes=0 if silent else rng.choice([0, 1e3, 1e6, 1e8]),
            parameter_bytes=rng.choice([0, 0, 1e6, 1e8, 1e9]),
            activation_bytes=rng.choice([0, 1e6, 1e8]),
            at=at,
        )

    return ModelProfile(
        name="enemy",
        microbatch_size=samples,
        input_bytes=rng.choice([0, 1e6]),
        optimizer_bytes_per_parameter_byte=rng.choice([0.0, 2.0]),
        layers=tuple(layer(index) for index in range(num_layers)),
    )


def enemy_cluster(rng: random.Random, model: ModelProfile, num_devices: int) -> Cluster:
    """A structure of links with any of: speeds, memory, latencies, cards and racks."""
    rates = rng.choice(LINKS)(rng, num_devices)
    speeds = rng.choice(SPEEDS)
    hosts = sorted(rng.randrange(max(1, num_devices - 1)) for _ in range(num_devices))
    memory_gb: list[float | None] = [None] * num_devices
    if rng.random() < 0.4:
        state = (1 + model.optimizer_bytes_per_parameter_byte) * sum(
            layer.parameter_bytes for layer in model.layers
        )
        kept = sum(layer.activation_bytes for layer in model.layers)
        whole_gb = max((state + rng.choice([1, 3]) * kept) / 1e9, 1e-5)
        equal = rng.random() < 0.5
        part = rng.uniform(0.3, 1.2)
        memory_gb = [
            round(max(1e-6, whole_gb * (part if equal else rng.uniform(0.2, 1.5))), 9)
            if rng.random() < 0.9
            else None
            for _ in range(num_devices)
        ]
    shared: tuple[SharedLink, ...] = ()
    uplink = None
    if rng.random() < 0.35:
        uplink = rng.choice([None, 0.5, SLOW, FAST])
        names = [f"d{u}" for u in range(num_devices)]
        shared = tuple(
            SharedLink(
                name=f"s{k}",
                members=tuple(rng.sample(names, rng.randint(1, num_devices))),
                gb_per_s=rng.choice([0.05, 1.0, FAST]),
                in_gb_per_s=rng.choice([None, 0.05, 2.0]),
            )
            for k in range(rng.randint(0, 2))
        )
    latency = rng.choice([0.0, 0.0, 50.0, "matrix"])
    if latency == "matrix":
        latency = tuple(
            tuple(rng.choice([0.0, 10.0, 5000.0]) for _ in range(num_devices))
            for _ in range(num_devices)
        )
    return Cluster(
        name="enemy",
        devices=tuple(
            Device(
                name=f"d{u}", host=f"h{hosts[u]}", speed=rng.choice(speeds), memory_gb=memory_gb[u]
            )
            for u in range(num_devices)
        ),
        bandwidth_gb_per_s=tuple(map(tuple, rates)),
        latency_us=latency,
        duplex=rng.choice(list(Duplex)),
        uplink_gb_per_s=uplink,
        shared=shared,
    )


def _constraints(rng: random.Random, model: ModelProfile, cluster: Cluster) -> dict:
    names, layers = [d.name for d in cluster.devices], [layer.name for layer in model.layers]
    asked: dict = {
        "stages": rng.randint(1, 3),
        "max_stages": rng.randint(1, 2),
        "first_on": rng.choice(names),
        "last_on": rng.choice(names),
        "without": (rng.choice(names),),
        "no_cut_after": (rng.choice(layers),),
    }
    return {name: asked[name] for name in rng.sample(sorted(asked), rng.randint(1, 2))}


def make_enemy(rng: random.Random, num_devices: int, num_layers: int) -> Enemy:
    """Any mixture; M is mostly small, so that all orders can be tried."""
    model = enemy_model(rng, num_layers)
    cluster = enemy_cluster(rng, model, num_devices)
    options: dict = {"divisible": rng.random() < 0.5}
    if rng.random() < 0.2:
        options["ignore_memory"] = True
    if rng.random() < 0.3:
        options |= _constraints(rng, model, cluster)
    num_microbatches = rng.choice([1, 1, 2, 2, 2, 3, 7, 200 if num_devices < 5 else 20])
    return Enemy(model=model, cluster=cluster, num_microbatches=num_microbatches, options=options)


def keeps_constraints(enemy: Enemy, stages: tuple[Stage, ...]) -> bool:
    """Read off the options, one by one."""
    asked, cluster, model = enemy.options, enemy.cluster, enemy.model
    used = [{cluster.devices[u].name for u in stage.devices} for stage in stages]
    cuts = {model.layers[stage.layers.stop - 1].name for stage in stages[:-1]}
    return (
        asked.get("stages", len(stages)) == len(stages)
        and len(stages) <= asked.get("max_stages", len(stages))
        and asked.get("first_on", next(iter(used[0]))) in used[0]
        and asked.get("last_on", next(iter(used[-1]))) in used[-1]
        and not any(set(asked.get("without", ())) & names for names in used)
        and not cuts & set(asked.get("no_cut_after", ()))
    )


def shares_within(
    rng: random.Random, enemy: Enemy, bound: Bound, stage: Stage
) -> list[tuple[float, ...] | None]:
    """Ways to share a microbatch that the bound speaks of: all of whole samples, some of others."""
    size, samples = stage.num_replicas, enemy.model.microbatch_size
    if size == 1:
        return [None]
    whole = BoundLimit.WHOLE_SAMPLES in bound.limits
    ways: set[tuple[float, ...] | None] = set()
    if not whole or samples % size == 0:
        ways.add(None)
    if size <= samples:
        fewer, more = divmod(samples, size)
        for chosen in itertools.islice(itertools.combinations(range(size), more), 20):
            ways.add(tuple((fewer + (n in chosen)) / samples for n in range(size)))
    if bound.scope is BoundScope.EVEN_SHARES:
        return sorted(ways, key=str)
    speeds = [enemy.cluster.devices[u].speed for u in stage.devices]
    if size <= samples:
        cuts = itertools.combinations(range(1, samples), size - 1)
        for one in itertools.islice(cuts, 200):
            parts = [b - a for a, b in zip((0, *one), (*one, samples), strict=True)]
            ways.add(tuple(part / samples for part in parts))
        counts = [1] * size
        for _ in range(samples - size):
            counts[min(range(size), key=lambda k: (counts[k] + 1) / speeds[k])] += 1
        ways.add(tuple(count / samples for count in counts))
    if not whole:
        if min(speeds) / sum(speeds) >= 1e-6:
            ways.add(tuple(speed / sum(speeds) for speed in speeds))
        favourite = rng.randrange(size)
        ways.add(tuple(1 - 1e-6 * (size - 1) if k == favourite else 1e-6 for k in range(size)))
        parts = [max(1e-4, rng.random() ** 3) for _ in range(size)]
        ways.add(tuple(part / sum(parts) for part in parts))
    return sorted(ways, key=str)


def caps_of(enemy: Enemy, cost: CostModel, bound: Bound, stages: tuple[Stage, ...]) -> list[int]:
    """How many microbatches each stage may hold; an empty list if one does not fit."""
    M = enemy.num_microbatches
    if BoundLimit.MEMORY not in bound.limits:
        return [M] * len(stages)
    caps = []
    for stage in stages:
        rooms = [enemy.cluster.devices[u].memory_gb or math.inf for u in stage.devices]
        base, one = cost.memory_gb(stage, 0), cost.memory_gb(stage, 1)
        cap = M
        for room, none, some in zip(rooms, base, one, strict=True):
            if some > room * (1 + 1e-9):
                return []
            if some > none:
                cap = min(cap, int(min(M, (room * (1 + 1e-9) - none) / (some - none))))
        caps.append(cap)
    return caps


def with_shares_and_modes(
    rng: random.Random, enemy: Enemy, bound: Bound, placed: tuple[Stage, ...], most: int
) -> Iterator[tuple[Stage, ...]]:
    """Up to so many ways to share and to recompute, where the bound speaks of these."""
    recomputes = BoundLimit.MEMORY in bound.limits or bound.scope is BoundScope.ANY
    choices = [
        [
            replace(stage, shares=shares, recompute=again)
            for shares in shares_within(rng, enemy, bound, stage)
            for again in ((False, True) if recomputes else (False,))
        ]
        for stage in placed
    ]
    number = math.prod(map(len, choices))
    if number <= most:
        yield from itertools.product(*choices)
    else:
        for _ in range(most):
            yield tuple(map(rng.choice, choices))


def quick_ms(costs: PipelineCosts, num_microbatches: int, caps: list[int]) -> float:
    """The best of the list schedulers and, without caps, of the portfolio."""
    times_ms = [
        run_list(costs, num_microbatches, preference, caps).iteration_ms
        for preference in Preference
    ]
    if min(caps) >= num_microbatches:
        times_ms += [SCHEDULES[rule](costs, num_microbatches).iteration_ms for rule in PORTFOLIO]
    return min(times_ms)


def all_orders_ms(costs: PipelineCosts, num_microbatches: int, caps: list[int]) -> float:
    """The fastest of all orders of blocks within the caps."""
    least_ms = math.inf
    orders = [
        [order for order in stage_orders(num_microbatches) if _most_held(order) <= cap]
        for cap in caps
    ]
    for rows in itertools.product(*orders):
        try:
            run = run_schedule(costs, np.array(rows, dtype=np.int32))
        except Exception:  # noqa: S112 - these orders wait for each other for ever
            continue
        least_ms = min(least_ms, run.iteration_ms)
    return least_ms


def _most_held(order: list[int]) -> int:
    held = list(itertools.accumulate(1 if code >= 0 else -1 for code in order))
    return max(held)


def fastest_known_ms(rng: random.Random, enemy: Enemy, bound: Bound, most: int = 400) -> float:
    """The fastest plan of all placements, with some shares and modes; the best with all orders."""
    cost = CostModel(enemy.model, enemy.cluster)
    if BoundLimit.WHOLE_SAMPLES in bound.limits:
        cost = cost.with_max_replicas(enemy.model.microbatch_size)
    placements = [p for p in all_placements(cost) if keeps_constraints(enemy, p)]
    if not placements:
        return math.inf
    found = []
    for placed in placements:
        ways = max(1, most // len(placements))
        for stages in with_shares_and_modes(rng, enemy, bound, placed, ways):
            caps = caps_of(enemy, cost, bound, stages)
            if not caps:
                continue
            try:
                costs = cost.pipeline_costs(stages)
            except PlanFileError:  # a share below what files allow
                continue
            found.append((quick_ms(costs, enemy.num_microbatches, caps), len(found), costs, caps))
    found.sort(key=lambda one: one[:2])
    least_ms = found[0][0] if found else math.inf
    if enemy.num_microbatches <= 3:
        for _, _, costs, caps in found[:6]:
            least_ms = min(least_ms, all_orders_ms(costs, enemy.num_microbatches, caps))
    return least_ms
