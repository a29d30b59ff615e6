"""All ranks find the same loss of the whole model: its code does not depend on the rank.

A stage is compared with the whole model on the same rank. So code that asks for its rank, for the
environment or for a file gives both the same, but each rank something else.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from pipeplan.runtime.fingerprints import fingerprint
from pipeplan.runtime.verification.stage_calls import StageCalls

__all__ = ["find_other_loss", "fingerprint_whole"]


class HasLoss(Protocol):
    """What a stage reports."""

    @property
    def loss(self) -> float:
        """The whole model's loss on its rank."""

    @property
    def weights(self) -> int:
        """Stands for the values of the whole model on its rank."""


def fingerprint_whole(stage: StageCalls) -> int:
    """Of the values of the whole model and the loss."""
    with stage.module.whole() as model:
        found = [model.state_dict()]
        if isinstance(stage.loss.loss_fn, nn.Module):
            found.append(stage.loss.loss_fn.state_dict())
        tensors = [t for each in found for t in each.values() if isinstance(t, torch.Tensor)]
        return fingerprint(tuple(tensors), 0)


def find_other_loss(reports: Sequence[HasLoss], rounding: Callable[[float], float]) -> str | None:
    """Compare the losses.

    Ranks that have loaded their stage from a checkpoint differ in the rest of the model. Then
    nothing can be said.
    """
    losses = [report.loss for report in reports]
    is_near = max(losses) - min(losses) <= rounding(max(map(abs, losses)))
    if is_near or len({report.weights for report in reports}) > 1:
        return None
    if any(map(math.isnan, losses)):
        return None  # NaN
    return (
        f"model: the whole model has a loss of {min(losses):.6g} on one rank and {max(losses):.6g}"
        " on another, with the same weights and rows; its code or its loss's reads something that"
        " differs: the rank, the environment, a file"
    )
