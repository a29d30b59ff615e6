"""How regular a cluster is: sets of exchangeable devices, and different links."""

from collections import Counter
from collections.abc import Sequence
from math import comb

from pipeplan.cost import CostModel

__all__ = ["num_link_rates", "num_set_triples"]

SOME_DEVICES = 16
"""So many are looked at; links of all devices of a large cluster would take a while to sort."""


def num_set_triples(classes: Sequence[int]) -> int:
    """The number of triples (first set, next set, rest): planning on sets takes so many steps.

    `classes` has for each device the number of its class of exchangeable devices.
    """
    product = 1
    for count in Counter(classes).values():
        product *= comb(count + 3, 3)
    return product


def num_link_rates(cost: CostModel) -> int:
    """How many different rates the links of some devices have; in a large cluster of hosts, two."""
    if cost.host_links is not None:
        return 2
    return len(set(cost.bytes_per_ms_DD[:SOME_DEVICES].ravel().tolist()))
