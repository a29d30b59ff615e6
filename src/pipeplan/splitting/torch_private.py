"""What pipeplan uses of torch without a public, documented way; nothing private stands elsewhere.

Each name has a test of its own in `tests/runtime/test_torch_private.py`. If a new torch changes
one, that test fails and says which.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "CONNECTION_WORDS",
    "TESTED_VERSIONS",
    "TorchDispatchMode",
    "count_changes",
    "default_store",
    "gradient_hooks",
    "make_wrapper",
]

TESTED_VERSIONS = ("2.13.0",)
"""The versions of torch that these names were tested with."""

CONNECTION_WORDS = ("gloo", "connection", "nccl", "socket", "broken pipe")
"""Words in the text of a RuntimeError or OSError that come from a broken connection.

gloo and NCCL have no exception class for it.
"""


def default_store() -> Any:
    """The store by which the ranks of the default process group have found each other."""
    world: Any = dist.group.WORLD
    return world.get_group_store()  # public by its name, but not documented


def count_changes(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; autograd counts it."""
    return tensor._version


def gradient_hooks(tensor: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """The hooks of a leaf: those that change a gradient, and those behind its accumulation."""
    before = getattr(tensor, "_backward_hooks", None) or {}
    behind = getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
    return list(before.values()), list(behind.values())


def make_wrapper(kind: type[torch.Tensor], like: torch.Tensor, device: torch.device) -> Any:
    """A tensor of a class with a dispatch of its own: the shape of `like`, and no memory."""
    return torch.Tensor._make_wrapper_subclass(
        kind, like.shape, strides=like.stride(), dtype=like.dtype, device=device
    )
