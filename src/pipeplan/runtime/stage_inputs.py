"""What layers get as their inputs: tensors that they may change in place."""

from typing import Any

import torch

from pipeplan.splitting.nesting import map_tensors

__all__ = ["cloned", "entered"]

SMALL_BYTES = 65_536
"""Smaller tensors are copied where a larger one would share its memory."""


def entered(carried: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors as layers get them. A copy of a small one is cheaper than an entrance."""
    if not torch.is_grad_enabled():
        return carried
    return [_enter(tensor) if tensor.requires_grad else tensor for tensor in carried]


def _enter(leaf: torch.Tensor) -> torch.Tensor:
    if leaf.nbytes <= SMALL_BYTES:
        return leaf.clone()
    entered: torch.Tensor = _Entrance.apply(leaf)  # type: ignore[no-untyped-call]
    return entered


def cloned(value: Any) -> Any:
    """The same with copies of all tensors."""
    return map_tensors(value, lambda tensor: tensor.clone())


class _Entrance(torch.autograd.Function):
    """Gives layers a tensor that is no leaf, as in the whole model; they may work on it in place.

    It shares the memory of the leaf, but not its count of changes.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """The same values."""
        return tensor.data

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The same gradient."""
        return gradients[0]
