"""What a stage keeps of a microbatch from its forward to its backward, and where that begins."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeplan.runtime.code_state import KeptState
from pipeplan.splitting.split_backward import take_gradients
from pipeplan.splitting.torch_private import run_backward

__all__ = ["Kept", "known_roots", "roots_of", "run_whole", "small_roots_of"]

SMALL_BYTES = 16_384
"""Outputs of this size may stay until the backward."""


@dataclass(slots=True)
class Kept:
    """What the backward of a microbatch needs."""

    carried: list[torch.Tensor]
    roots: Sequence[torch.Tensor | GradientEdge | None]
    """Where the backward of each output begins; empty with recomputation. Those of large outputs
    are edges of the graph: they are freed once they are sent. None has no gradient."""
    grad_outputs: list[torch.Tensor | None] | None
    """The gradient of the loss, on the last stage; None elsewhere."""
    call: Any
    seed: int
    extra_roots: list[GradientEdge]
    """Where the backward of losses that layers added begins; empty with recomputation."""
    extra_scale: float
    """The gradient of each of these losses."""
    state: KeptState | None
    """What the modules remembered in front of the forward; None without recomputation."""


def run_whole(
    kept: Kept, roots: list[tuple[torch.Tensor | GradientEdge, torch.Tensor]]
) -> list[torch.Tensor | None]:
    """Run a whole backward, and return the gradient of each tensor that entered."""
    if roots:
        begins: Any = [root for root, _ in roots]  # torch takes a mixture, but does not say so
        run_backward(begins, [grad for _, grad in roots])
    return take_gradients(kept.carried)


def small_roots_of(tensors: list[torch.Tensor]) -> list[torch.Tensor | GradientEdge | None]:
    """The same as `roots_of`, with small tensors themselves: torch checks these much faster."""
    return [
        (tensor if tensor.nbytes <= SMALL_BYTES else get_gradient_edge(tensor))
        if tensor.requires_grad
        else None
        for tensor in tensors
    ]


def roots_of(tensors: list[torch.Tensor]) -> list[GradientEdge | None]:
    """Where the backward of each tensor begins; None where it has no gradient."""
    return [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in tensors]


def known_roots(tensors: list[torch.Tensor]) -> list[GradientEdge]:
    """The same without those that have none."""
    return [root for root in roots_of(tensors) if root is not None]
