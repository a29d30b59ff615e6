"""Notices that a program has replaced a function which a model's code calls, or its defaults.

Looked at are functions that the code finds by name: globals, closures, methods of classes. To look
at one takes a fraction of a microsecond, since only identities are compared.
"""

import types
import zlib
from collections.abc import Iterable
from typing import Any

from torch import nn

from pipeplan.runtime.code_variables import find_functions

__all__ = ["FunctionWatch", "text_of_function"]


class FunctionWatch:
    """The functions that some modules and functions call."""

    def __init__(self, modules: Iterable[nn.Module], functions: Iterable[Any]) -> None:
        self._found = find_functions(modules, functions)
        self._marks: list[tuple[Any, ...]] = []
        self.settle()

    def settle(self) -> None:
        """Take note of all functions as they are."""
        self._marks = [_mark(variable.get()) for variable in self._found]

    def changes(self) -> list[tuple[str, str]]:
        """Names and texts of those that are others now."""
        found = []
        for variable, mark in zip(self._found, self._marks, strict=True):
            now = variable.get()
            if any(mine is not other for mine, other in zip(mark, _mark(now), strict=True)):
                found.append((variable.name, text_of_function(now)))
        return found


def _mark(function: Any) -> tuple[Any, ...]:
    if not isinstance(function, types.FunctionType):
        return function, None, None, None
    return function, function.__code__, function.__defaults__, function.__kwdefaults__


def text_of_function(function: Any) -> str:
    """A text that tells functions apart, by their names, code and defaults."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        return str(getattr(function, "__qualname__", type(function).__qualname__))
    code = function.__code__
    plain = (bool, int, float, str, bytes, type(None))
    constants = [each for each in code.co_consts if isinstance(each, plain)]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    shown = [each if isinstance(each, plain) else type(each).__name__ for each in defaults]
    text = repr((code.co_code, code.co_names, constants, shown)).encode(errors="replace")
    return f"{function.__qualname__} ({zlib.crc32(text):08x})"
