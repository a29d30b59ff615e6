"""What enters a stage, as if a message of another rank had brought it."""

import json
from typing import Any

import torch

from pipeplan.runtime.verification.layer_records import Noted
from pipeplan.splitting.nesting import take_tensors
from pipeplan.splitting.stage_modules import StageModule

__all__ = ["as_message"]


def as_message(module: StageModule, entering: Noted | None) -> tuple[list[torch.Tensor], Any]:
    """What enters, as if it had come from another rank."""
    if entering is None:
        return [], None
    tensors, template = take_tensors(entering.value, f"layers {module.layers_text}")
    arrived = [_received(tensor) for tensor in tensors]
    for tensor, needed in zip(arrived, entering.needs_gradient, strict=True):
        tensor.requires_grad_(needed)
    return arrived, json.loads(json.dumps(template))


def _received(tensor: torch.Tensor) -> torch.Tensor:
    """The values in new memory. A message has no strides, no attributes, and no classes."""
    if tensor.layout is not torch.strided:
        return tensor.detach().clone()  # it is refused elsewhere
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(
        tensor.detach().as_subclass(torch.Tensor)
    )
