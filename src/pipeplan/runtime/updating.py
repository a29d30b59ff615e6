"""The end of a step: the loss summed over ranks, gradients clipped, the optimizer's step."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from pipeplan.runtime.scaling import LossScaler

__all__ = ["Updater"]

CHUNK = 1 << 20
"""Elements squared at once. A double copy of a whole embedding would be the largest tensor."""


class Updater:
    """Steps one rank's optimizer, in agreement with all other ranks."""

    def __init__(self, *, clip_norm: float | None, scaler: LossScaler) -> None:
        self._clip_norm, self.scaler = clip_norm, scaler
        self.optimizer: torch.optim.Optimizer | None = None
        self.parameters: Sequence[nn.Parameter] = ()
        self.norm_parameters: Sequence[nn.Parameter] = ()
        """Parameters that this rank adds to the norm. Over all ranks, each counts once."""
        self.gradient_norm: float | None = None
        """The norm in the last step, before clipping; None if nothing needs it."""

    def update(self, stats: torch.Tensor) -> None:
        """Sum the loss and metrics over ranks, clip, and step the optimizer."""
        if self._clip_norm is None and not self.scaler.enabled:
            work = dist.all_reduce(stats, async_op=True)
            if self.optimizer is not None:
                self.optimizer.step()
            if work is not None:
                work.wait()
            return
        self.scaler.unscale(self.parameters)
        norm = self._sum_with_squares(stats)
        self.gradient_norm = norm
        if not self.scaler.take(norm):
            return
        self._clip(norm)
        if self.optimizer is not None:
            self.optimizer.step()

    def _sum_with_squares(self, stats: torch.Tensor) -> float:
        """Sum `stats` over ranks, and the squares of gradients with them; returns the norm."""
        total = stats.new_zeros(1)
        for parameter in self.norm_parameters:
            if parameter.grad is not None:
                for piece in torch.split(parameter.grad.detach().flatten(), CHUNK):
                    total += piece.double().square().sum()
        joined = torch.cat([stats, total])
        dist.all_reduce(joined)
        stats.copy_(joined[:-1])
        return float(joined[-1].sqrt())

    def _clip(self, norm: float) -> None:
        if self._clip_norm is None:
            return
        # The same small constant as in torch.nn.utils.clip_grad_norm_.
        factor = self._clip_norm / (norm + 1e-6)
        if factor < 1:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
