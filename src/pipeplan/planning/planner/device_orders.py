"""Several linear orders of the devices, since no single one is good for every cluster.

RDO (`device_order`) where it is quick; average and complete linkage on -log bandwidth (the leaves
of a dendrogram, built with nearest-neighbour chains: Murtagh 1983, O(D^2)); nearest neighbour: go
on to the device with the fastest link; by speed, where speeds differ. Each also reversed. Orders
under which the cluster looks the same are kept once: on symmetric clusters eight collapse to one.
"""

import hashlib

import numpy as np

from pipeplan.cost import CostModel, Floats
from pipeplan.planning.planner.device_order import recursive_device_order

__all__ = ["device_orders"]


def device_orders(cost: CostModel, *, by_cuts: bool = True) -> list[tuple[int, ...]]:
    """The orders worth planning on, without those that make no difference.

    `by_cuts`: the order by minimum cuts, which takes O(D^4), among them.
    """
    num_devices = len(cost.speed_D)
    symmetric_DD = np.where(
        cost.connected_DD(), np.minimum(cost.bytes_per_ms_DD, cost.bytes_per_ms_DD.T), 0.0
    )
    with np.errstate(divide="ignore"):
        distance_DD = -np.log(symmetric_DD)
    orders = [
        _linkage_order(distance_DD, average=True),
        _linkage_order(distance_DD, average=False),
        _nearest_neighbour_order(symmetric_DD),
    ]
    if by_cuts:
        orders.insert(0, recursive_device_order(cost, range(num_devices)))
    if len(set(cost.speed_D.tolist())) > 1:
        orders.append(tuple(np.argsort(-cost.speed_D, kind="stable").tolist()))
    orders += [tuple(reversed(order)) for order in orders]
    distinct: dict[bytes, tuple[int, ...]] = {}
    for order in orders:
        distinct.setdefault(_appearance(cost, order), order)
    return list(distinct.values())


def _appearance(cost: CostModel, order: tuple[int, ...]) -> bytes:
    """What a planner sees of the cluster in this order, in short."""
    sub = np.ix_(order, order)
    off_diagonal = ~np.eye(len(order), dtype=bool)
    digest = hashlib.sha256(cost.bytes_per_ms_DD[sub][off_diagonal].tobytes())
    digest.update(cost.latency_ms_DD[sub][off_diagonal].tobytes())
    digest.update(cost.speed_D[list(order)].tobytes())
    return digest.digest()


def _nearest_neighbour_order(rate_DD: Floats) -> tuple[int, ...]:
    rate_DD = rate_DD.copy()
    np.fill_diagonal(rate_DD, -1.0)
    order = [0]
    for _ in range(len(rate_DD) - 1):
        rate_DD[:, order[-1]] = -1.0  # never come back
        order.append(int(rate_DD[order[-1]].argmax()))
    return tuple(order)


def _linkage_order(distance_DD: Floats, *, average: bool) -> tuple[int, ...]:
    """The leaves of the dendrogram, by following nearest neighbours until two choose each other."""
    num_devices = len(distance_DD)
    # A pair without a path is farther than any other, but averages must stay finite.
    finite = distance_DD[np.isfinite(distance_DD)]
    farthest = (float(finite.max()) if len(finite) else 0.0) + 50.0
    distance = np.where(np.isfinite(distance_DD), distance_DD, farthest)
    np.fill_diagonal(distance, np.inf)
    leaves = {device: [device] for device in range(num_devices)}
    chain: list[int] = []
    while len(leaves) > 1:
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
