"""Things that a forward may change in place, and how they get back what they held.

Lists, dicts, sets and plain objects are known to `module_state`. Here are the others: arrays of
numpy, byte arrays, objects with `__slots__`, context variables. Iterators and generators move on
and cannot be put back; a mark tells whether they have.
"""

import array
import io
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

import numpy as np

__all__ = ["Memory", "is_iterator", "mark_of", "memory_of", "read_context"]

PLAIN = (bool, int, float, complex, str, bytes, type(None))
FOREIGN = ("torch", "numpy", "transformers", "builtins", "types", "functools", "collections")
"""Packages whose objects with slots are left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """One such thing, with what it held."""

    copy: Any
    read: Callable[[], Any]
    """A copy of what it holds now."""
    write: Callable[[Any], None]
    can_be_sent: bool = False
    """Whether other ranks get it with the attributes of its layer."""

    def is_changed(self) -> bool:
        """Whether it holds something else now."""
        return not _are_same(self.copy, self.read())

    def put_back(self) -> None:
        """Let it hold what it held."""
        self.write(self.copy)

    def inside(self) -> list[Any]:
        """What it holds, if that may be changed in place, too."""
        return list(self.copy.values()) if isinstance(self.copy, dict) else []


def memory_of(value: Any) -> Memory | None:
    """How to keep what a value holds; None if it is nothing of this kind."""
    if isinstance(value, np.ndarray):
        return _of_array(value)
    if isinstance(value, bytearray | array.array):
        return _of_buffer(value)
    if isinstance(value, ContextVar):
        return _of_context(value)
    names = _slots(type(value))
    return _of_slots(value, names) if names else None


def read_context(value: ContextVar[Any]) -> Any:
    """What a context variable holds, or its default; None if there is neither."""
    try:
        return value.get()
    except LookupError:
        return None


def _of_context(value: ContextVar[Any]) -> Memory:
    def write(copy: Any) -> None:
        value.set(copy)

    return Memory(copy=read_context(value), read=lambda: read_context(value), write=write)


def _of_array(value: np.ndarray[Any, Any]) -> Memory | None:
    if value.dtype.hasobject or not value.flags.writeable:
        return None

    def write(copy: Any) -> None:
        value[...] = copy

    return Memory(copy=value.copy(), read=lambda: value, write=write, can_be_sent=True)


def _of_buffer(value: Any) -> Memory:
    def write(copy: Any) -> None:
        value[:] = copy

    return Memory(copy=value[:], read=lambda: value, write=write)


def _of_slots(value: Any, names: tuple[str, ...]) -> Memory:
    def read() -> dict[str, Any]:
        return {name: getattr(value, name) for name in names if hasattr(value, name)}

    def write(copy: dict[str, Any]) -> None:
        for name in names:
            if name in copy:
                object.__setattr__(value, name, copy[name])
            elif hasattr(value, name):
                object.__delattr__(value, name)

    return Memory(copy=read(), read=read, write=write)


def _slots(kind: type) -> tuple[str, ...]:
    if kind.__module__.partition(".")[0] in FOREIGN:
        return ()
    found: list[str] = []
    for each in kind.__mro__:
        names = vars(each).get("__slots__", ())
        found += [names] if isinstance(names, str) else list(names)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def is_iterator(value: Any) -> bool:
    """Whether a value moves on when it is asked for its next entry; files are none."""
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def mark_of(iterator: Any) -> Any:
    """Something that is equal as long as an iterator has not moved, as far as that can be seen."""
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        if frame is None:
            return None
        shown = {name: v for name, v in frame.f_locals.items() if isinstance(v, PLAIN)}
        return frame.f_lasti, repr(shown)
    try:
        return repr(iterator.__reduce__())
    except Exception:
        return None


def _are_same(first: Any, second: Any) -> bool:
    if isinstance(first, np.ndarray):
        return bool(np.array_equal(first, second, equal_nan=first.dtype.kind in "fc"))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            _are_same(value, second[name]) for name, value in first.items()
        )
    if first is second:
        return True
    return type(first) is type(second) and isinstance(first, ALIKE) and bool(first == second)


ALIKE = (*PLAIN, bytearray, array.array)
