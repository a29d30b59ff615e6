"""Numbers of all ranks that ride behind the gradients, so that they need no messages of their own.

Where all ranks are replicas of all stages, the all-reduce of gradients reaches every rank at the
end of a step. Behind the last gradients, each rank has a place for its numbers, and writes zeros to
the places of the others. A number of 64 bits takes eight elements, one for each byte. Whole numbers
below 256 are exact in all types of gradients, so behind the sum every rank reads what each wrote::

    rank 0   | gradients | bytes of 0 |   zeros    |
    rank 1   | gradients |   zeros    | bytes of 1 |
    sum      | gradients | bytes of 0 | bytes of 1 |
"""

from collections.abc import Callable

import numpy as np
import torch

__all__ = ["MOST_RANKS", "GradientNotes"]

MOST_RANKS = 64
"""With more, these places would take longer than a few messages along a tree."""
NUMBER = np.dtype(np.float64)


class GradientNotes:
    """What rides behind one rank's gradients."""

    def __init__(self, rank: int, num_ranks: int, most_numbers: int) -> None:
        self._rank, self._num_ranks, self._most_numbers = rank, num_ranks, most_numbers
        self.num_elements = num_ranks * most_numbers * NUMBER.itemsize
        """How many elements of a gradient's type they take."""
        self.own: Callable[[], list[float]] | None = None
        """The numbers of this rank; is asked when all gradients of the step are there."""
        self._places: torch.Tensor | None = None

    @property
    def can_ride(self) -> bool:
        """Whether there is a place for them."""
        return self._places is not None

    def take_place(self, elements: torch.Tensor) -> None:
        """Ride in these elements, which are summed over all ranks; not if they are on a GPU."""
        if elements.device.type == "cpu" and elements.is_floating_point():
            self._places = elements.view(self._num_ranks, -1)

    def write(self) -> None:
        """Write this rank's numbers, in front of the sum."""
        if self._places is None:
            return
        self._places.zero_()
        if self.own is not None:
            numbers = self.own()
            row = np.zeros(self._most_numbers, NUMBER)
            row[: len(numbers)] = numbers
            self._places[self._rank].copy_(torch.from_numpy(row.view(np.uint8)))
            self.own = None

    def totals(self, count: int) -> list[float]:
        """The sums of the first numbers over all ranks, in the order of ranks, behind the sum."""
        assert self._places is not None  # else nothing rode
        rows = self._places.to(torch.uint8).numpy().view(NUMBER)[:, :count]
        totals: list[float] = rows.sum(axis=0).tolist()
        return totals
