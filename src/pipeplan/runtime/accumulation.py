"""Gradients of several batches as those of one larger batch.

A batch of weight w (its rows, or what `loss_weight_fn` says) has the gradient g of its mean loss.
The larger batch has the mean of all of them by weight::

    (w1 g1 + w2 g2 + ...) / (w1 + w2 + ...)

Only the last stage knows weights before a step, so its gradients are computed as multiples of the
first batch's: g1, (w2 / w1) g2, ... . At the update all ranks know all weights, and multiply the
sum by w1 / (w1 + w2 + ...).
"""

from pipeplan.errors import RuntimeMismatchError

__all__ = ["Accumulation"]


class Accumulation:
    """The batches since the last update."""

    def __init__(self) -> None:
        self.num_batches = 0
        self._first = self._total = 0.0

    def factor(self, weight: float) -> float:
        """What the gradient of the next batch is multiplied by; the last stage knows its weight."""
        if self.num_batches == 0:
            return 1.0
        return weight / (self._first or 1.0)

    def add(self, weight: float) -> None:
        """Count a batch, now that all ranks know its weight."""
        self.num_batches += 1
        if self.num_batches == 1:
            self._first = weight
        self._total += weight

    def final_factor(self) -> float:
        """What the sum of gradients is multiplied by."""
        if self.num_batches <= 1 or not self._total:
            return 1.0
        return (self._first or 1.0) / self._total

    def require_none(self, what: str) -> None:
        """Refuse to do something while gradients are kept."""
        if self.num_batches:
            raise RuntimeMismatchError(
                f"{what}: the gradients of {self.num_batches} batches are kept for the next update;"
                f" {what} after a step with update=True"
            )

    def reset(self) -> None:
        """Begin anew, after an update."""
        self.num_batches = 0
        self._first = self._total = 0.0
