"""Changes parameters that could hide a difference: those whose elements are all equal."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

__all__ = ["nudged"]

NUDGE = 0.05  # the size of the changes


@contextlib.contextmanager
def nudged(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, parameters whose elements are all equal are a little different."""
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for tensor in tensors:
        if id(tensor) in kept or not isinstance(tensor, nn.Parameter) or not tensor.numel():
            continue
        if not tensor.is_floating_point() or tensor.is_meta:
            continue
        values = tensor.detach()
        if bool((values == values.flatten()[0]).all()):
            kept[id(tensor)] = (tensor, values.clone())
            generator = torch.Generator().manual_seed(tensor.numel())  # alike on all ranks
            noise = torch.randn(tensor.shape, generator=generator) * NUDGE
            tensor.data.add_(noise.to(tensor.device, tensor.dtype))
    try:
        yield
    finally:
        for tensor, values in kept.values():
            tensor.data.copy_(values)
