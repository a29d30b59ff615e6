"""Where the backward of a stage begins, so that nobody holds the gradients that it begins with."""

from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = ["exits_of"]

SMALL_BYTES = 16_384
"""A smaller gradient may stay until the backward ends."""


def exits_of(
    tensors: list[torch.Tensor], gradients: list[torch.Tensor | None]
) -> list[GradientEdge | None]:
    """Where the backward of each tensor begins; None where it has no gradient.

    Autograd holds what it is given until its last node has run. So large gradients go into the
    graph, which frees them behind its first node, and numbers take their place in the list.
    """
    exits: list[GradientEdge | None] = []
    for position, tensor in enumerate(tensors):
        if not tensor.requires_grad:
            exits.append(None)
            continue
        gradient = gradients[position]
        leaving = tensor
        if gradient is not None and gradient.nbytes > SMALL_BYTES:
            leaving = _Exit.apply(tensor, [gradient])  # type: ignore[no-untyped-call]
            gradients[position] = leaving.detach()
        exits.append(get_gradient_edge(leaving))
    return exits


class _Exit(torch.autograd.Function):
    """A number whose backward, which runs once, gives a tensor the gradient of a list."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, gradient: list[torch.Tensor]) -> torch.Tensor:
        """Any number."""
        ctx.gradient = gradient
        return tensor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Gives the gradient away."""
        return ctx.gradient.pop(), None
