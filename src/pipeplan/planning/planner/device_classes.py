"""The number of device sets to plan on, if exchangeable devices count as one kind."""

from collections import Counter
from collections.abc import Sequence
from math import comb

__all__ = ["num_set_triples"]


def num_set_triples(classes: Sequence[int]) -> int:
    """The number of triples (first set, next set, rest): planning on sets takes so many steps.

    `classes` has for each device the number of its class of exchangeable devices.
    """
    product = 1
    for count in Counter(classes).values():
        product *= comb(count + 3, 3)
    return product
