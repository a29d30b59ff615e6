"""Where a plan with several stages a device keeps all constraints, one is found."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from chains.test_planning import split_model
from instances import flat_cluster, random_cluster, random_model
from pipeplan.checker import check
from pipeplan.cluster import Cluster
from pipeplan.cost import CostModel
from pipeplan.errors import InfeasibleError
from pipeplan.planning.door import plan
from pipeplan.planning.planner.chain_starts import orders_of
from pipeplan.profile import LayerProfile, ModelProfile

EFFORT = 0.01


def simple_model(num_layers: int, microbatch_size: int = 1) -> ModelProfile:
    layer = {"forward_ms": 2.0, "backward_ms": 4.0, "output_bytes": 1e6, "parameter_bytes": 1e8}
    layers = (LayerProfile(name=f"l{n}", **layer) for n in range(num_layers))
    return ModelProfile(name="simple", microbatch_size=microbatch_size, layers=tuple(layers))


@pytest.mark.parametrize(
    ("num_layers", "num_devices", "asked"),
    [
        (4, 3, {"stages": 2, "first_on": "d1", "last_on": "d1", "positions": 2}),
        (6, 2, {"stages": 5, "last_on": "d1", "positions": 3}),
        (7, 3, {"stages": 7, "first_on": "d2"}),
        (4, 2, {"stages": 4, "first_on": "d1", "positions": 2}),
        (12, 1, {"stages": 6, "positions": 6}),
        (5, 4, {"stages": 3, "without": ("d0", "d2", "d3")}),
    ],
)
def test_as_many_stages_as_asked_for(num_layers, num_devices, asked):
    made = plan(simple_model(num_layers), flat_cluster(num_devices, 1.0), 3, effort=EFFORT, **asked)
    assert check(made).ok
    assert len(made.stages) == asked["stages"]


def test_groups_that_only_constraints_ask_for():
    """Two of three devices, together, and only with their optimizer shared out."""
    model, cluster = simple_model(3, microbatch_size=2), flat_cluster(3, 1.0)
    devices = tuple(replace(device, memory_gb=1.0) for device in cluster.devices)
    asked = {"stages": 1, "first_on": "d2", "last_on": "d1", "effort": EFFORT}
    small = replace(cluster, devices=(replace(devices[0], memory_gb=0.1), *devices[1:]))
    with pytest.raises(InfeasibleError):
        plan(model, small, 2, **asked)
    made = plan(model, small, 2, shard_optimizer=True, **asked)
    assert check(made, strict_memory=True).ok
    assert set(made.stages[0].devices) == {1, 2}


def test_regular_chains_stay_where_there_are_paths():
    """Groups of all devices would need paths that are not there."""
    bandwidth = tuple(tuple(10.0 * (u // 3 == v // 3) for v in range(6)) for u in range(6))
    cluster = replace(flat_cluster(6, 10.0), bandwidth_gb_per_s=bandwidth)
    assert {frozenset(order) for order in orders_of(CostModel(simple_model(8), cluster))} == {
        frozenset({0, 1, 2}),
        frozenset({3, 4, 5}),
    }


def groups_of(devices: list[int], most: int) -> Iterator[list[list[int]]]:
    """All lists of disjoint sets of some of the devices, with at most so many each."""
    if not devices:
        yield []
        return
    first, *others = devices
    for groups in groups_of(others, most):
        yield groups
        yield [*groups, [first]]
        for index, group in enumerate(groups):
            if len(group) < most:
                yield [*groups[:index], [*group, first], *groups[index + 1 :]]


def chains_of(groups: list[list[int]], num_stages: int, most: int) -> Iterator[tuple[int, ...]]:
    """All ways to give so many stages to all of the groups, at most so many to each."""
    for chain in itertools.product(range(len(groups)), repeat=num_stages):
        if {chain.count(group) for group in range(len(groups))} <= set(range(1, most + 1)):
            yield chain


def has_plan(model: ModelProfile, cluster: Cluster, positions: int, asked: dict) -> bool:
    """Whether some chain keeps the constraints; memory does not count."""
    links, names = cluster.bandwidth_gb_per_s, [device.name for device in cluster.devices]
    first, last = (names.index(asked[key]) if key in asked else None for key in KEYS)
    stages = asked["stages"]
    devices = [n for n, name in enumerate(names) if name not in asked.get("without", ())]
    if stages > model.num_layers:
        return False
    for groups in groups_of(devices, model.microbatch_size):
        pairs = [pair for group in groups for pair in itertools.permutations(group, 2)]
        if not all(links[u][v] for u, v in pairs):
            continue
        for chain in chains_of(groups, stages, positions):
            ends = (groups[chain[0]], groups[chain[-1]])
            if any(
                u is not None and u not in end for u, end in zip((first, last), ends, strict=True)
            ):
                continue
            hops = [(a, b) for a, b in itertools.pairwise(chain) if a != b]
            if all(
                links[u][v] and links[v][u] for a, b in hops for u in groups[a] for v in groups[b]
            ):
                return True
    return False


KEYS = ("first_on", "last_on")


def search_case(seed: int) -> bool:
    """Whether there is a plan; then one is found, else none."""
    rng = random.Random(seed)
    num_devices = rng.randint(1, 4)
    model = split_model(rng, rng.randint(2, 7)) if rng.random() < 0.5 else random_model(rng, 5)
    model = replace(model, microbatch_size=rng.choice([1, 2]))
    cluster = random_cluster(rng, num_devices, gaps=rng.random() < 0.5)
    positions = rng.choice([2, 3])
    asked = {"stages": rng.randint(1, min(6, positions * num_devices))}
    for key in KEYS:
        if rng.random() < 0.5:
            asked[key] = f"d{rng.randrange(num_devices)}"
    if num_devices > 1 and rng.random() < 0.3:
        asked["without"] = (f"d{rng.randrange(num_devices)}",)
    try:
        made = plan(model, cluster, 2, effort=EFFORT, positions=positions, **asked)
    except InfeasibleError:
        assert not has_plan(model, cluster, positions, asked), f"seed {seed}: {asked}"
        return False
    assert check(made).ok
    return True


def test_random_constraints():
    assert sum(map(search_case, range(60))) > 25


@pytest.mark.full
def test_many_random_constraints():
    assert sum(map(search_case, range(60, 1500))) > 500
