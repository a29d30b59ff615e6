"""The loss scale that keeps small float16 gradients above zero.

Reference:
    Micikevicius et al. 2018, arXiv:1710.03740, section 3.2, "dynamic loss scaling". Nothing
    differs. The constants are those of torch.amp.GradScaler.
"""

import math

import torch

from pipeplan.errors import RuntimeMismatchError

__all__ = ["LossScaler", "make_scaler"]

FIRST_SCALE = 2.0**16
STEPS_TO_GROW = 2000


class LossScaler:
    """A factor on the loss: halved after an overflow, doubled after many steps without one."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = FIRST_SCALE if enabled else 1.0
        self.num_calm_steps = 0
        """Steps since the scale changed."""

    def take(self, norm: float) -> bool:
        """Whether the optimizer may step with gradients of this norm; adapts the scale."""
        if not self.enabled:
            return True
        if not math.isfinite(norm):
            self.scale /= 2.0
            self.num_calm_steps = 0
            return False
        self.num_calm_steps += 1
        if self.num_calm_steps == STEPS_TO_GROW:
            self.scale *= 2.0
            self.num_calm_steps = 0
        return True


def make_scaler(amp_dtype: torch.dtype | None) -> LossScaler:
    """The scaler for training with this type: float16 alone needs a scale.

    Raises:
        RuntimeMismatchError: it is no type of torch, such as the name of one.
    """
    if not isinstance(amp_dtype, torch.dtype | None):
        raise RuntimeMismatchError(
            f"amp_dtype: {amp_dtype!r} is no torch.dtype; use torch.bfloat16 or torch.float16"
        )
    return LossScaler(enabled=amp_dtype is torch.float16)
