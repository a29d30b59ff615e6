"""Put the devices into one linear order in which well-connected devices are neighbours (RDO).

Reference:
    Luo et al. 2022, arXiv:2204.10562, "recursive device ordering". Stages will occupy
    consecutive devices of the order.
    Differs: the paper leaves open which side of a cut comes first. Here it is the side with the
    lowest device index. Parts without any path between them have no common order. Planners plan
    on each of these parts (`connected_parts`) separately.

Complexity: up to D - 1 minimum cuts of O(D^3) each (`_core/min_cut.cpp`).
"""

from collections.abc import Sequence

import numpy as np

from pipeplan import _core
from pipeplan.cost import CostModel

__all__ = ["connected_parts", "recursive_device_order"]


def recursive_device_order(
    cost: CostModel, devices: Sequence[int], *, deadline: float = np.inf
) -> tuple[int, ...]:
    """The order of `devices` by recursive minimum cuts of the bandwidth graph."""
    bandwidth_DD = np.where(cost.connected_DD(), cost.bytes_per_ms_DD, 0.0)
    weight_DD = bandwidth_DD + bandwidth_DD.T
    np.fill_diagonal(weight_DD, 0.0)
    order: list[int] = []
    parts = [sorted(devices)]  # a stack: the next part to order lies on top
    while parts:
        part = parts.pop()
        if len(part) <= 2:
            order += part
            continue
        _, side = _core.min_cut(np.ascontiguousarray(weight_DD[np.ix_(part, part)]), deadline)
        cut_off = [device for device, cut in zip(part, side, strict=True) if cut]
        rest = [device for device, cut in zip(part, side, strict=True) if not cut]
        parts += sorted((cut_off, rest), reverse=True)
    return tuple(order)


def connected_parts(cost: CostModel) -> list[list[int]]:
    """The devices in groups; there is no path between two groups."""
    if cost.is_connected:
        return [list(range(len(cost.speed_D)))]
    connected_DD = cost.connected_DD()
    parts: list[list[int]] = []
    unseen = set(range(len(connected_DD)))
    while unseen:
        reached = {min(unseen)}
        frontier = list(reached)
        while frontier:
            neighbours = set(np.flatnonzero(connected_DD[frontier.pop()]).tolist()) - reached
            reached |= neighbours
            frontier += sorted(neighbours)
        parts.append(sorted(reached))
        unseen -= reached
    return parts
