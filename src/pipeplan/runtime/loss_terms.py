"""The loss and the metrics of some rows, and by how much these rows count in the batch."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.batches import select_rows
from pipeplan.splitting.nesting import tensors_in
from pipeplan.splitting.placeholders import Placeholder

__all__ = ["Function", "LossTerms"]

Function = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """How the last stage computes the loss and the metrics from outputs."""

    loss_fn: Function
    metrics: Mapping[str, Function]
    weight_fn: Callable[[Any], Any] | None
    """The weight of targets; without it, each row weighs 1."""

    def weight(self, targets: Any, num_rows: int) -> float:
        """The weight of these targets in the mean."""
        return float(num_rows) if self.weight_fn is None else float(self.weight_fn(targets))

    def total_weight(self, targets: Any, num_rows: int) -> float:
        """The weight of a whole batch, whose targets are marked by `mark_rows`."""
        if targets is None or self.weight_fn is None:
            return float(num_rows)
        return self.weight(select_rows(targets, range(num_rows), None), num_rows)

    def of(
        self,
        output: Any,
        targets: Any,
        share: float,
        autocast: contextlib.AbstractContextManager[Any],
    ) -> torch.Tensor:
        """The mean loss of some rows; zero if their share of the batch's weight is zero."""
        if share:
            with autocast:
                loss = self.loss_fn(output, targets)
            return _one_number(loss)
        # Rows without weight have no mean loss. The backward still has to run through them.
        tensors = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
        return sum((tensor.sum() * 0.0 for tensor in tensors), torch.zeros(()))

    def with_metrics(
        self, loss: torch.Tensor, output: Any, targets: Any, share: float
    ) -> torch.Tensor:
        """The loss and the metrics in one tensor, times the share."""
        if not self.metrics:
            return loss.detach().double().reshape(1) * share
        numbers: list[Any] = [0.0] * len(self.metrics)
        if share:
            with torch.no_grad():
                numbers = [fn(output, targets) for fn in self.metrics.values()]
        found = [torch.as_tensor(number, device=loss.device) for number in (loss, *numbers)]
        return torch.stack([number.detach().double() for number in found]) * share


def _one_number(loss: Any) -> torch.Tensor:
    """The loss as a tensor of one number; refuses anything else."""
    if isinstance(loss, Placeholder):
        raise RuntimeMismatchError(
            "loss_fn: uses weights or values of other stages, which the last stage has not; let"
            " those layers call pipeplan.runtime.add_loss instead"
        )
    if not isinstance(loss, torch.Tensor):
        found = f"a {type(loss).__name__}"
    elif loss.numel() != 1 or not loss.is_floating_point():
        found = f"a tensor of shape {tuple(loss.shape)} and type {loss.dtype}"
    else:
        return loss.reshape(()) if loss.ndim else loss
    raise RuntimeMismatchError(
        f"loss_fn: returned {found}; it has to return a tensor of one number, the mean over rows"
    )
