"""Random plans of the second version: small, awkward, reproducible from a seed.

Irregular chains of groups, uneven replicas and shares, whole and split backwards mixed, buckets,
recomputation, half duplex, shared links, work of no length, sharded optimizers.
"""

import random
from dataclasses import replace

from instances import random_cluster, random_model, whole_samples
from pipeplan.cluster import Cluster
from pipeplan.pipeline import Block, Kind, Plan, Schedule, Stage, groups_of
from pipeplan.profile import LayerProfile, ModelProfile
from shared_plans import random_cluster as random_shared_cluster

F, B, I, W = Kind  # noqa: E741


def random_family_plan(
    rng: random.Random,
    *,
    max_stages: int = 8,
    max_microbatches: int = 6,
    shared: bool | None = None,
    deadlocks: bool = False,
) -> Plan:
    """A valid plan without figures; with `deadlocks` its groups may wait for each other."""
    if rng.random() < 0.25 if shared is None else shared:
        cluster = random_shared_cluster(rng)
    else:
        cluster = random_cluster(rng, rng.randint(1, 7))
    num_stages = rng.randint(1, max_stages)
    model = split_model(rng, random_model(rng, rng.randint(num_stages, num_stages + 4)))
    stages = random_group_stages(rng, model, cluster, num_stages)
    microbatches = rng.randint(1, max_microbatches)
    make_order = shuffled_orders if deadlocks else causal_orders
    return Plan(
        model=model,
        cluster=cluster,
        microbatches=microbatches,
        stages=stages,
        schedule=Schedule(make_order(rng, stages, random_kinds(rng, num_stages, microbatches))),
        planner="random",
        shard_optimizer=rng.random() < 0.3,
    )


def split_model(rng: random.Random, model: ModelProfile) -> ModelProfile:
    """The model with weight gradients: none, all or a part of each backward."""

    def split(layer: LayerProfile) -> LayerProfile:
        part_ms = rng.choice([0.0, layer.backward_ms, layer.backward_ms / 2, layer.backward_ms / 3])
        kept = rng.choice([layer.activation_bytes, 0.0, float(rng.randint(1, 4_000_000))])
        small = 0 < part_ms < 1e-6
        return replace(layer, weight_grad_ms=0.0 if small else part_ms, weight_grad_bytes=kept)

    return replace(
        model,
        layers=tuple(map(split, model.layers)),
        optimizer_bytes_per_parameter_byte=rng.choice([0.0, 0.5, 1.0, 3.0]),
    )


def random_group_stages(
    rng: random.Random, model: ModelProfile, cluster: Cluster, num_stages: int
) -> tuple[Stage, ...]:
    """A chain of stages over random groups, in any order."""
    num_groups = rng.randint(1, min(num_stages, cluster.num_devices))
    devices = rng.sample(range(cluster.num_devices), rng.randint(num_groups, cluster.num_devices))
    ends = [*sorted(rng.sample(range(1, len(devices)), num_groups - 1)), len(devices)]
    sets = [tuple(devices[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    chain = [
        *range(num_groups),
        *(rng.randrange(num_groups) for _ in range(num_stages - num_groups)),
    ]
    rng.shuffle(chain)
    cuts = [0, *sorted(rng.sample(range(1, model.num_layers), num_stages - 1)), model.num_layers]
    shares = [random_shares(rng, model, each) for each in sets]
    stages = []
    for n, group in enumerate(chain):
        order = rng.sample(range(len(sets[group])), len(sets[group]))  # names are free in order
        mine = shares[group]
        stages.append(
            Stage(
                layers=range(cuts[n], cuts[n + 1]),
                devices=tuple(sets[group][k] for k in order),
                shares=None if mine is None else tuple(mine[k] for k in order),
                recompute=rng.random() < 0.25,
                gradient_buckets=rng.choice([1, 1, 2, 3, 5]),
            )
        )
    return tuple(stages)


def random_shares(
    rng: random.Random, model: ModelProfile, devices: tuple[int, ...]
) -> tuple[float, ...] | None:
    """Even, whole samples, or any."""
    choice = rng.random()
    if choice < 0.5:
        return None
    if choice < 0.75:
        stage = Stage(layers=range(1), devices=devices)
        return whole_samples(stage, model.microbatch_size).shares
    weights = [rng.uniform(0.5, 2) for _ in devices]
    return tuple(weight / sum(weights) for weight in weights)


def random_kinds(
    rng: random.Random, num_stages: int, num_microbatches: int
) -> dict[tuple[int, int], tuple[Kind, ...]]:
    """For each stage and microbatch its blocks in order; whole, split or both."""
    split_part = [rng.choice([0.0, 1.0, rng.random()]) for _ in range(num_stages)]
    return {
        (stage, m): (F, I, W) if rng.random() < split_part[stage] else (F, B)
        for stage in range(num_stages)
        for m in range(num_microbatches)
    }


def causal_orders(
    rng: random.Random,
    stages: tuple[Stage, ...],
    kinds: dict[tuple[int, int], tuple[Kind, ...]],
) -> list[list[Block]]:
    """Orders that cannot deadlock: every group's part of one causal execution."""
    group_of = {s: g for g, group in enumerate(groups_of(stages)) for s in group.stages}
    orders: list[list[Block]] = [[] for _ in set(group_of.values())]
    last = len(stages) - 1
    ready = [Block(F, 0, m) for stage, m in kinds if stage == 0]
    prefers = rng.choice([None, F, B])
    while ready:
        choice = rng.randrange(min(len(ready), rng.randint(1, 4)))
        if prefers and rng.random() < 0.8:
            wanted = [k for k, b in enumerate(ready) if (b.kind is F) == (prefers is F)]
            choice = rng.choice(wanted) if wanted else choice
        block = ready.pop(choice)
        stage, m = block.stage, block.microbatch
        orders[group_of[stage]].append(block)
        if block.kind is F:
            turned = Block(kinds[stage, m][1], stage, m)
            ready.append(Block(F, stage + 1, m) if stage < last else turned)
        elif block.kind is not W:
            if block.kind is I:
                ready.append(Block(W, stage, m))
            if stage:
                ready.append(Block(kinds[stage - 1, m][1], stage - 1, m))
    return orders


def shuffled_orders(
    rng: random.Random,
    stages: tuple[Stage, ...],
    kinds: dict[tuple[int, int], tuple[Kind, ...]],
) -> list[list[Block]]:
    """Complete orders in which groups may wait for each other, a few swaps from causal ones."""
    orders = causal_orders(rng, stages, kinds)
    for order in orders:
        for _ in range(rng.randint(0, 3)):
            a, b = rng.randrange(len(order)), rng.randrange(len(order))
            order[a], order[b] = order[b], order[a]
        # What a stage does with a microbatch stays in its order.
        positions: dict[tuple[int, int], list[int]] = {}
        for position, block in enumerate(order):
            positions.setdefault((block.stage, block.microbatch), []).append(position)
        for (stage, m), places in positions.items():
            for place, kind in zip(places, kinds[stage, m], strict=True):
                order[place] = Block(kind, stage, m)
    return orders
