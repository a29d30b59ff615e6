"""Several linear orders of the devices, since no single one is good for every cluster.

RDO (`device_order`) where it is quick; average and complete linkage on -log bandwidth (the leaves
of a dendrogram, built with nearest-neighbour chains: Murtagh 1983, O(D^2)); nearest neighbour: go
on to the device with the fastest link. Where speeds differ: the average linkage by speed, as a
whole and host by host, so that stages of equally fast devices are possible. Each also reversed.
Orders under which the cluster looks the same are kept once: on symmetric clusters eight collapse to
one.
"""

import hashlib
from collections.abc import Iterator

import numpy as np

from pipeplan.cluster import HostMatrix
from pipeplan.cost import CostModel, Floats
from pipeplan.planning.planner.device_order import recursive_device_order
from pipeplan.planning.problem import check_deadline

__all__ = ["device_orders"]


def device_orders(
    cost: CostModel, *, by_cuts: bool = True, most: float = np.inf, deadline: float = np.inf
) -> list[tuple[int, ...]]:
    """The first `most` orders worth planning on, without those that make no difference.

    `by_cuts`: the order by minimum cuts, which takes O(D^4), among them. Raises `DeadlineError` at
    the deadline.
    """
    distinct: list[tuple[int, ...]] = []
    for order in _all_orders(cost, by_cuts, deadline):
        if order in distinct:
            continue
        if cost.host_links is not None or not any(_look_alike(cost, order, o) for o in distinct):
            distinct.append(order)
        if len(distinct) >= most:
            break
    return distinct


def _look_alike(cost: CostModel, one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether a planner sees no difference: mostly the links of neighbours tell."""
    rates_DD = cost.bytes_per_ms_DD
    if (rates_DD[one[:-1], one[1:]] != rates_DD[other[:-1], other[1:]]).any():
        return False
    return _appearance(cost, one) == _appearance(cost, other)


def _all_orders(cost: CostModel, by_cuts: bool, deadline: float) -> Iterator[tuple[int, ...]]:
    """Every order as soon as it is made, then all of them reversed."""
    made = []
    for order in _forward_orders(cost, by_cuts, deadline):
        made.append(order)
        yield order
    yield from (tuple(reversed(order)) for order in made)


def _forward_orders(cost: CostModel, by_cuts: bool, deadline: float) -> Iterator[tuple[int, ...]]:
    if cost.host_links is not None:
        yield from _orders_of_hosts(cost, cost.host_links)
        return
    if by_cuts:
        yield recursive_device_order(cost, range(len(cost.speed_D)), deadline=deadline)
    symmetric_DD = np.minimum(cost.bytes_per_ms_DD, cost.bytes_per_ms_DD.T)  # 0 without a way back
    check_deadline(deadline)
    with np.errstate(divide="ignore"):
        distance_DD = -np.log(symmetric_DD)
    check_deadline(deadline)
    average = _linkage_order(distance_DD, average=True, deadline=deadline)
    yield average
    if len(set(cost.speed_D.tolist())) > 1:
        yield from _orders_by_speed(cost, average)
    yield _linkage_order(distance_DD, average=False, deadline=deadline)
    yield _nearest_neighbour_order(symmetric_DD, deadline)


def _orders_by_speed(cost: CostModel, order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The order with the fastest devices first: all of them, and those of each host."""
    devices = cost.cluster.devices
    place = {devices[u].host: index for index, u in reversed(list(enumerate(order)))}
    yield tuple(sorted(order, key=lambda u: -float(cost.speed_D[u])))
    yield tuple(sorted(order, key=lambda u: (place[devices[u].host], -float(cost.speed_D[u]))))


def _orders_of_hosts(cost: CostModel, links: HostMatrix) -> Iterator[tuple[int, ...]]:
    """The orders of a large cluster of hosts, where all hosts are equally far apart.

    Host by host; by speed, where speeds differ; and where links inside a host are slower than those
    between hosts, the first device of each host, then the second ones, and so on.
    """
    yield tuple(range(len(cost.speed_D)))
    if len(set(cost.speed_D.tolist())) > 1:
        yield tuple(np.argsort(-cost.speed_D, kind="stable").tolist())
    if links.inside_H.min() < links.between:
        _, first = np.unique(links.host_of_D, return_index=True)
        place_D = np.arange(len(cost.speed_D)) - first[links.host_of_D]
        yield tuple(np.argsort(place_D, kind="stable").tolist())


def _appearance(cost: CostModel, order: tuple[int, ...]) -> bytes:
    """What a planner sees of the cluster in this order, in short."""
    sub = np.ix_(order, order)
    off_diagonal = ~np.eye(len(order), dtype=bool)
    digest = hashlib.sha256(cost.bytes_per_ms_DD[sub][off_diagonal].tobytes())
    digest.update(cost.latency_ms_DD[sub][off_diagonal].tobytes())
    digest.update(cost.speed_D[list(order)].tobytes())
    digest.update(str([cost.cluster.devices[u].memory_gb for u in order]).encode())
    return digest.digest()


def _nearest_neighbour_order(rate_DD: Floats, deadline: float) -> tuple[int, ...]:
    rate_DD = rate_DD.copy()
    np.fill_diagonal(rate_DD, -1.0)
    order = [0]
    for _ in range(len(rate_DD) - 1):
        check_deadline(deadline)
        rate_DD[:, order[-1]] = -1.0  # never come back
        order.append(int(rate_DD[order[-1]].argmax()))
    return tuple(order)


def _linkage_order(distance_DD: Floats, *, average: bool, deadline: float) -> tuple[int, ...]:
    """The leaves of the dendrogram, by following nearest neighbours until two choose each other."""
    num_devices = len(distance_DD)
    # A pair without a path is farther than any other, but averages must stay finite.
    is_finite = np.isfinite(distance_DD)
    farthest = float(distance_DD.max(where=is_finite, initial=-np.inf))
    check_deadline(deadline)
    farthest = (farthest if np.isfinite(farthest) else 0.0) + 50.0
    distance = np.where(is_finite, distance_DD, farthest)
    np.fill_diagonal(distance, np.inf)
    leaves = {device: [device] for device in range(num_devices)}
    chain: list[int] = []
    while len(leaves) > 1:
        check_deadline(deadline)
        if not chain:
            chain = [min(leaves)]
        here = chain[-1]
        nearest = int(distance[here].argmin())
        if len(chain) > 1 and distance[here, chain[-2]] <= distance[here, nearest]:
            nearest = chain[-2]
        if len(chain) < 2 or nearest != chain[-2]:
            chain.append(nearest)
            continue
        chain = chain[:-2]
        first, second = sorted((here, nearest), key=lambda c: leaves[c][0])
        if average:
            weight = len(leaves[first]) / (len(leaves[first]) + len(leaves[second]))
            merged = weight * distance[first] + (1 - weight) * distance[second]
        else:
            merged = np.maximum(distance[first], distance[second])
        merged[first] = np.inf
        distance[first], distance[:, first] = merged, merged
        distance[second], distance[:, second] = np.inf, np.inf
        leaves[first] += leaves.pop(second)
    (order,) = leaves.values()
    return tuple(order)
