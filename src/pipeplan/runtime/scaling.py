"""The loss scale that keeps small float16 gradients above zero.

Reference:
    Micikevicius et al. 2018, arXiv:1710.03740, section 3.2, "dynamic loss scaling". Nothing
    differs; the constants are those of torch.amp.GradScaler.
"""

import math
from collections.abc import Iterable

from torch import nn

__all__ = ["LossScaler"]

FIRST_SCALE = 2.0**16
STEPS_TO_GROW = 2000


class LossScaler:
    """A factor on the loss: halved after an overflow, doubled after long calm."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = FIRST_SCALE if enabled else 1.0
        self._num_calm = 0

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take the factor out of the gradients."""
        if self.enabled:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(1.0 / self.scale)

    def take(self, norm: float) -> bool:
        """Whether a step with gradients of this norm may be taken; adapts the scale."""
        if not self.enabled:
            return True
        if not math.isfinite(norm):
            self.scale /= 2.0
            self._num_calm = 0
            return False
        self._num_calm += 1
        if self._num_calm == STEPS_TO_GROW:
            self.scale *= 2.0
            self._num_calm = 0
        return True
