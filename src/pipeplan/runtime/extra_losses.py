"""Losses that layers add themselves, such as the balance of a mixture of experts.

A layer's forward calls `add_loss`, on whatever stage it runs. The pipeline adds the value to the
batch's loss and runs the backward through it, on that stage. In a loop without a pipeline, collect
the losses and add them yourself::

    with collect_losses() as extra:
        output = model(batch)
    loss = loss_fn(output, targets) + sum(extra)
"""

import contextlib
from contextvars import ContextVar, Token

import torch

from pipeplan.errors import RuntimeMismatchError

__all__ = ["add_loss", "collect_losses", "sum_of_losses"]

_collected: ContextVar[list[torch.Tensor] | None] = ContextVar("pipeplan_losses", default=None)


def add_loss(loss: torch.Tensor) -> None:
    """Add a mean over rows to the loss of the microbatch; without a collector, do nothing.

    Raises:
        RuntimeMismatchError: it is no single number.
    """
    if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.is_floating_point():
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise RuntimeMismatchError(f"add_loss: got {shape}; give a tensor of one number")
    losses = _collected.get()
    if losses is not None:
        losses.append(loss)


class _Collecting:
    """Inside, a list collects; every forward makes one, so it is no generator."""

    __slots__ = ("_token",)
    _token: Token[list[torch.Tensor] | None]

    def __enter__(self) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        self._token = _collected.set(losses)
        return losses

    def __exit__(self, *_: object) -> None:
        _collected.reset(self._token)


def collect_losses() -> contextlib.AbstractContextManager[list[torch.Tensor]]:
    """Collect inside what layers add; the list fills while they run."""
    return _Collecting()


def sum_of_losses(
    losses: list[torch.Tensor], row_share: float, device: torch.device
) -> torch.Tensor:
    """Added losses of a microbatch that has this share of the batch's rows, as one number."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return sum((loss.detach().double() * row_share for loss in losses), start=zero)
