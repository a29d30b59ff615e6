"""Devices that can be exchanged for one another without changing any speed, link or latency."""

from math import comb

import numpy as np
from numpy.typing import NDArray

from pipeplan.cost import CostModel

__all__ = ["device_classes", "num_set_triples"]


def device_classes(cost: CostModel) -> NDArray[np.int32]:
    """For each device the number of its class, from 0.

    Exchanging two devices of a class is a symmetry of the cluster, and being exchangeable is
    transitive, so each device is compared with one of each class. O(D^2) for each class.
    """
    representatives: list[int] = []
    classes = np.zeros(len(cost.speed_D), dtype=np.int32)
    for device in range(len(cost.speed_D)):
        for number, other in enumerate(representatives):
            if _exchangeable(cost, device, other):
                classes[device] = number
                break
        else:
            classes[device] = len(representatives)
            representatives.append(device)
    return classes


def _exchangeable(cost: CostModel, u: int, v: int) -> bool:
    if cost.speed_D[u] != cost.speed_D[v]:
        return False
    others = np.ones(len(cost.speed_D), dtype=bool)
    others[[u, v]] = False
    return all(
        matrix[u, v] == matrix[v, u]
        and (matrix[u, others] == matrix[v, others]).all()
        and (matrix[others, u] == matrix[others, v]).all()
        for matrix in (cost.bytes_per_ms_DD, cost.latency_ms_DD)
    )


def num_set_triples(classes: NDArray[np.int32]) -> int:
    """How many (first set, next set, rest) there are: what planning on sets takes time for."""
    product = 1
    for count in np.bincount(classes).tolist():
        product *= comb(count + 3, 3)
    return product
