"""What a model's code remembers outside of its modules: globals, closures, class attributes.

Looked at are the functions of the modules' own classes and of their hooks: names of globals that
they mention, variables that they enclose, and attributes of the classes. Values are saved and put
back as for modules. What is remembered elsewhere (a cache of functools, another library) stays.
"""

import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipeplan.runtime.module_state import Contents

__all__ = ["CodeState"]

FOREIGN = ("torch", "numpy", "transformers", "pipeplan", "builtins", "typing", "collections")
"""Packages whose own variables are left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variable:
    """A variable with the value that it had, and how it is set."""

    value: Any
    get: Callable[[], Any]
    set: Callable[[Any], None]


@dataclass(slots=True)
class CodeState:
    """The variables of some modules' code at one moment."""

    modules: Iterable[nn.Module]
    functions: Iterable[Any] = ()
    _variables: list[_Variable] = field(default_factory=list)
    _seen: set[Any] = field(default_factory=set)
    _contents: Contents = field(default_factory=Contents)

    def __post_init__(self) -> None:
        for kind in {type(module) for module in self.modules}:
            for each in kind.__mro__:
                if not _is_foreign(each.__module__):
                    self._save_class(each)
        for function in self.functions:
            self._save_function(function)
        self._contents.add([variable.value for variable in self._variables])

    def put_back(self) -> None:
        """Give all these variables the values that they had."""
        for variable in self._variables:
            if variable.get() is not variable.value:
                variable.set(variable.value)
        self._contents.put_back()

    def _save_class(self, kind: type) -> None:
        for name, value in list(vars(kind).items()):
            if isinstance(value, types.FunctionType | staticmethod | classmethod):
                self._save_function(value)
            elif not name.startswith("__") and _is_data(value):
                self._save(("class", kind, name), kind, name, value)

    def _save_function(self, function: Any) -> None:
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or _is_foreign(function.__module__):
            return
        if ("function", function) in self._seen:
            return
        self._seen.add(("function", function))
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # it is empty
                continue
            if isinstance(value, types.FunctionType):
                self._save_function(value)
            elif _is_data(value):
                self._save(("cell", id(cell)), cell, "cell_contents", value)
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, types.FunctionType):
                self._save_function(value)
            elif name in function.__globals__ and _is_data(value):
                self._save_global(function.__globals__, name, value)

    def _save(self, key: Any, owner: Any, name: str, value: Any) -> None:
        if key not in self._seen:
            self._seen.add(key)
            self._variables.append(
                _Variable(
                    value=value,
                    get=lambda: getattr(owner, name, None),
                    set=lambda old: setattr(owner, name, old),
                )
            )

    def _save_global(self, variables: dict[str, Any], name: str, value: Any) -> None:
        if ("global", id(variables), name) not in self._seen:
            self._seen.add(("global", id(variables), name))
            self._variables.append(
                _Variable(
                    value=value,
                    get=lambda: variables.get(name),
                    set=lambda old: variables.__setitem__(name, old),
                )
            )


def _is_foreign(module: str | None) -> bool:
    return (module or "").partition(".")[0] in FOREIGN


def _is_data(value: Any) -> bool:
    """Whether a value may be something that code remembers; no code, modules or models."""
    code = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, nn.Module)
    return not isinstance(value, code) and (not callable(value) or isinstance(value, torch.Tensor))
