"""What every used link carries in an iteration, between devices or between hosts.

Transfers go between all devices of neighbouring stages. An all-reduce goes round the ring of its
devices, 2(k-1)/k of the gradients over each link. A *place* is a device or a host. Thousands of
devices have millions of links, so links are worked out one sender at a time.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipeplan.cost import BYTES_IN_GB, CostModel, Floats
from pipeplan.pipeline import Plan, Stage

__all__ = ["Link", "UsedLinks", "used_links"]

MS_IN_S = 1e3
SLACK = 100_000
"""How many more links than asked for are kept before the least busy ones are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What one directed link carries in an iteration."""

    source: int
    target: int
    num_bytes: float
    busy: float
    """The part of the iteration in which it carries something."""
    gb_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedLinks:
    """The busiest links that a plan uses, sorted by source and target."""

    links: tuple[Link, ...]
    num_used: int
    """How many links are used, those left out included."""


@dataclass(frozen=True, slots=True)
class _Places:
    """The places that a stage touches; arrays of one length."""

    places: NDArray[np.int64]
    devices: NDArray[np.int64]
    """One device of each place: all devices of a host are taken to have equal links."""
    shares: Floats
    """The part of a microbatch that each place takes."""
    largest: Floats
    """The largest part that one device there takes."""


@dataclass(frozen=True, slots=True)
class _Load:
    """What one place sends to several others."""

    targets: NDArray[np.int64]
    num_bytes: Floats
    busy_ms: Floats
    gb_per_s: Floats


def used_links(
    plan: Plan,
    cost: CostModel,
    iteration_ms: float,
    place_of: Sequence[int],
    most: int | None = None,
) -> UsedLinks:
    """The links that the plan uses, or the `most` busiest of them.

    Args:
        plan: the plan.
        cost: its cost model.
        iteration_ms: what `busy` is a part of.
        place_of: for each device its own number, or the number of its host.
        most: how many links to keep; None: all.
    """
    kept: list[tuple[Floats, ...]] = []
    num_used = num_kept = 0
    for columns in _links_by_source(plan, cost, iteration_ms or 1.0, place_of):
        num_used += len(columns[0])
        num_kept += len(columns[0])
        kept.append(columns)
        if most is not None and num_kept > most + SLACK:
            kept = [_busiest(kept, most)]
            num_kept = len(kept[0][0])
    columns = _busiest(kept, most) if kept else ()
    links = tuple(
        Link(source=int(source), target=int(target), num_bytes=num_bytes, busy=busy, gb_per_s=rate)
        for source, target, num_bytes, busy, rate in zip(
            *(column.tolist() for column in columns), strict=True
        )
    )
    return UsedLinks(links=links, num_used=num_used)


def _busiest(kept: list[tuple[Floats, ...]], most: int | None) -> tuple[Floats, ...]:
    """The columns joined; of more than `most` links the busiest, in their old order."""
    columns = tuple(np.concatenate(column) for column in zip(*kept, strict=True))
    if most is None or len(columns[0]) <= most:
        return columns
    chosen = np.sort(np.argsort(-columns[3], kind="stable")[:most])
    return tuple(column[chosen] for column in columns)


def _links_by_source(
    plan: Plan, cost: CostModel, whole_ms: float, place_of: Sequence[int]
) -> Iterator[tuple[Floats, ...]]:
    """For each place that sends: source, target, bytes, busy part and GB/s of its links."""
    places = [_places(stage, place_of) for stage in plan.stages]
    stages_of: dict[int, list[tuple[int, int]]] = {}
    for index, touched in enumerate(places):
        for position, place in enumerate(touched.places.tolist()):
            stages_of.setdefault(place, []).append((index, position))
    rings = _rings(plan, cost, place_of)
    num_places = max(place_of) + 1
    sums_P, busy_ms_P = np.zeros(num_places), np.zeros(num_places)
    rate_P = np.full(num_places, math.inf)
    for source in sorted(stages_of):
        loads = [
            load
            for index, position in stages_of[source]
            for load in _transfer_loads(plan, cost, places, index, position)
        ]
        loads += rings.get(source, [])
        for load in loads:
            sums_P[load.targets] += load.num_bytes
            busy_ms_P[load.targets] = np.maximum(busy_ms_P[load.targets], load.busy_ms)
            rate_P[load.targets] = np.minimum(rate_P[load.targets], load.gb_per_s)
        rate_P[source] = math.inf  # what stays in a place uses no link
        targets = np.flatnonzero(rate_P < math.inf)
        if len(targets):
            yield (
                np.full(len(targets), float(source)),
                targets.astype(np.float64),
                sums_P[targets],
                np.minimum(busy_ms_P[targets] / whole_ms, 1.0),
                rate_P[targets],
            )
        sums_P[:], busy_ms_P[:], rate_P[:] = 0.0, 0.0, math.inf


def _transfer_loads(
    plan: Plan, cost: CostModel, places: Sequence[_Places], index: int, position: int
) -> Iterator[_Load]:
    """What a place of a stage sends to the stages behind and before it."""
    layers = plan.model.layers
    mine = places[index]
    if index + 1 < len(places) and not _is_inside(plan, index):
        size = layers[plan.stages[index].layers[-1]].output_bytes
        yield _load(cost, mine, position, places[index + 1], size, plan.microbatches)
    if index > 0 and not _is_inside(plan, index - 1):
        size = layers[plan.stages[index - 1].layers[-1]].gradient_bytes
        yield _load(cost, mine, position, places[index - 1], size, plan.microbatches)


def _is_inside(plan: Plan, index: int) -> bool:
    """Whether a stage and the next are of one group, inside which nothing is sent."""
    return set(plan.stages[index].devices) == set(plan.stages[index + 1].devices)


def _load(
    cost: CostModel, sender: _Places, position: int, targets: _Places, size: float, times: int
) -> _Load:
    """`times` tensors of `size` bytes from one place to all places of another stage."""
    device = sender.devices[position]
    per_ms = cost.rates_between([device], targets.devices.tolist())[0]
    # Pairs of devices have their bandwidth to themselves: hosts are as busy as the busiest pair.
    largest = size * (sender.largest[position] * targets.largest)
    return _Load(
        targets.places,
        times * size * (sender.shares[position] * targets.shares),
        times * (cost.latency_ms_DD[device, targets.devices] + largest / per_ms),
        per_ms * MS_IN_S / BYTES_IN_GB,
    )


def _rings(plan: Plan, cost: CostModel, place_of: Sequence[int]) -> dict[int, list[_Load]]:
    """What each place sends in all-reduces, to the next device of the ring."""
    rings: dict[int, list[_Load]] = {}
    for stage in plan.stages:
        k = stage.num_replicas
        if k == 1:
            continue
        parameters = cost.parameter_bytes_L[stage.layers.start : stage.layers.stop]
        volume = 2 * (k - 1) / k * float(np.sum(parameters))
        for device, after in pairwise((*stage.devices, stage.devices[0])):
            load = _load(cost, _alone(device, place_of), 0, _alone(after, place_of), volume, 1)
            rings.setdefault(place_of[device], []).append(load)
    return rings


def _places(stage: Stage, place_of: Sequence[int]) -> _Places:
    found: dict[int, tuple[int, float, float]] = {}
    for device, part in zip(stage.devices, stage.device_shares, strict=True):
        first, share, largest = found.get(place_of[device], (device, 0.0, 0.0))
        found[place_of[device]] = (first, share + part, max(largest, part))
    devices, shares, largests = zip(*found.values(), strict=True)
    return _Places(np.array(list(found)), np.array(devices), np.array(shares), np.array(largests))


def _alone(device: int, place_of: Sequence[int]) -> _Places:
    one = np.ones(1)
    return _Places(np.array([place_of[device]]), np.array([device]), one, one)
