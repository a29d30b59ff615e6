"""What pipeplan uses of torch without a public, documented way; nothing private stands elsewhere.

Each name has a test of its own in `tests/runtime/test_torch_private.py`. If a new torch changes
one, that test fails and says which.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "CONNECTION_WORDS",
    "TESTED_VERSIONS",
    "TorchDispatchMode",
    "count_changes",
    "count_hooks",
    "default_store",
    "gradient_hooks",
    "make_wrapper",
    "without_torch_log",
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


def count_hooks(tensor: torch.Tensor) -> int:
    """How many such hooks a leaf has; this is asked in every step."""
    before, behind = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return (len(before) if before else 0) + (len(behind) if behind else 0)


def make_wrapper(kind: type[torch.Tensor], like: torch.Tensor, device: torch.device) -> Any:
    """A tensor of a class with a dispatch of its own: the shape of `like`, and no memory."""
    return torch.Tensor._make_wrapper_subclass(
        kind, like.shape, strides=like.stride(), dtype=like.dtype, device=device
    )


FATAL_LEVEL = 3
"""torch's C++ code logs only what ends the process."""
_QUIET = threading.Lock()
_LEVELS: list[int] = []
"""The level before, once for each thread that wants no log."""


@contextmanager
def without_torch_log() -> Iterator[None]:
    """Inside, torch's C++ code logs neither warnings nor errors, on any thread.

    A store that is gone would fill the screen with stack traces, though it raises an error, too.
    """
    level = _log_level()
    with _QUIET:
        _LEVELS.append(_LEVELS[0] if _LEVELS else level.value)
        level.value = max(FATAL_LEVEL, _LEVELS[0])
    try:
        yield
    finally:
        with _QUIET:
            before = _LEVELS.pop()
            if not _LEVELS:
                level.value = before


@cache
def _log_level() -> ctypes.c_int:
    """What TORCH_CPP_LOG_LEVEL sets; if torch has no such number, one without effect."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return ctypes.c_int(FATAL_LEVEL)
