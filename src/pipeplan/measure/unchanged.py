"""Leaves a model as it was: buffers, gradients, modes and random numbers."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

__all__ = ["in_training", "left_unchanged"]


@contextlib.contextmanager
def left_unchanged(model: nn.Module) -> Iterator[None]:
    """Restore at the end what running a model changes: running means, gradients, random state."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)


@contextlib.contextmanager
def in_training(model: nn.Module) -> Iterator[None]:
    """Train mode, without a cache of keys and values; what was set before comes back."""
    modes = [(module, module.training) for module in model.modules()]
    config = getattr(model, "config", None)
    used_cache = getattr(config, "use_cache", None)
    model.train()
    if used_cache:
        config.use_cache = False  # type: ignore[union-attr]  # a cache holds keys of earlier calls
    try:
        yield
    finally:
        if used_cache:
            config.use_cache = used_cache  # type: ignore[union-attr]
        for module, mode in modes:
            module.training = mode
