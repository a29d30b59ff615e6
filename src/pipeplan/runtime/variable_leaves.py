"""What a variable holds, one inside of another: numbers, texts and tensors, with their paths."""

import re
import threading
from collections import deque
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from pipeplan.runtime.code_variables import (
    MISSING,
    NAMESPACES,
    Variable,
    is_foreign,
    words_of_methods,
)
from pipeplan.runtime.memories import read_context

__all__ = ["MOST_LEAVES", "NUMBERS", "Leaf", "collect_leaves", "leaves_of"]

MOST_DEPTH = 4
MOST_LEAVES = 256
"""Of one variable; a program may keep its data in one."""
NUMBERS = (bool, int, float, complex)
DEVICE = re.compile(r"(cpu|cuda|xpu|mps)(:\d+)?")


class Leaf(NamedTuple):
    """A plain value or tensor that a variable holds."""

    path: str
    value: Any


def leaves_of(variable: Variable) -> list[Leaf]:
    """What a variable holds, as far as it can be compared."""
    value = variable.get()
    if value is MISSING:
        return []
    found: list[Leaf] = []
    collect_leaves(value, variable.name, variable.words, 0, found, set())
    return found


def collect_leaves(
    value: Any,
    path: str,
    words: frozenset[str],
    depth: int,
    found: list[Leaf],
    seen: set[int],
) -> None:
    """Add what a value holds to `found`; of objects, attributes that the code names."""
    if len(found) >= MOST_LEAVES or depth > MOST_DEPTH:
        return
    if isinstance(value, ContextVar):
        value = read_context(value)
    if isinstance(value, (*NUMBERS, str, bytes, np.generic, np.ndarray, torch.Tensor)):
        if not (isinstance(value, str) and DEVICE.fullmatch(value)):
            found.append(Leaf(path, value))
        return
    if value is None or id(value) in seen:
        return
    seen.add(id(value))
    for name, entry in _entries(value, words):
        collect_leaves(entry, f"{path}{name}", words, depth + 1, found, seen)


def _entries(value: Any, words: frozenset[str]) -> list[tuple[str, Any]]:
    """The entries of a container, or the attributes of an object; those that the code names."""
    if isinstance(value, list | tuple | deque):
        return [(f"[{i}]", entry) for i, entry in enumerate(list(value)[:MOST_LEAVES])]
    if isinstance(value, Mapping):
        keys = [key for key in value if isinstance(key, str | int)]
        # The code may also make up its keys: then all of them count.
        named = [key for key in keys if key in words] or keys
        return [(f"[{key!r}]", value[key]) for key in named]
    is_opaque = isinstance(value, nn.Module | type) or is_foreign(type(value).__module__)
    is_opaque = is_opaque and not isinstance(value, threading.local)
    if is_opaque and type(value).__name__ not in NAMESPACES:
        return []
    attributes = getattr(value, "__dict__", {})
    known = words_of_methods(type(value), words)
    return [(f".{name}", entry) for name, entry in attributes.items() if name in known]
