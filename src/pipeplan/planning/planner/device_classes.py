"""How many sets of devices there are to plan on, counting exchangeable devices as one kind."""

from collections import Counter
from collections.abc import Sequence
from math import comb

__all__ = ["num_set_triples"]


def num_set_triples(classes: Sequence[int]) -> int:
    """How many (first set, next set, rest) there are: what planning on sets takes time for.

    `classes` says for each device which class of exchangeable devices it belongs to.
    """
    product = 1
    for count in Counter(classes).values():
        product *= comb(count + 3, 3)
    return product
