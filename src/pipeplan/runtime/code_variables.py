"""Finds the variables that a model's own code reads: globals, closures, attributes of classes.

Looked at are the functions of the modules' own classes and of the loss, and the functions that
these call by name. Of a function: names of globals that it reads, attributes of
modules that it reads (`config.alpha`), and variables that it encloses. Code of libraries is left
alone. What is remembered elsewhere, as in a cache of functools, is not found.
"""

import dis
import functools
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

__all__ = [
    "ENVIRONMENT",
    "MISSING",
    "NAMESPACES",
    "Variable",
    "find_functions",
    "find_held",
    "find_kept",
    "find_variables",
    "is_foreign",
    "words_of_code",
    "words_of_methods",
]

FOREIGN = ("torch", "numpy", "transformers", "pipeplan", "builtins", "typing", "collections")
"""Packages whose own variables are left alone, besides those of Python itself."""
NAMESPACES = ("Namespace", "SimpleNamespace")
"""Of argparse and types: objects of Python that hold what users put into them."""
MISSING = object()
"""The value of a variable that does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A variable, and how it is read and set."""

    name: str
    get: Callable[[], Any]
    """`MISSING` if there is no such variable now."""
    set: Callable[[Any], None]
    words: frozenset[str]
    """Names of attributes and texts in the code that reads it."""


ENVIRONMENT = Variable(
    name="os.environ", get=lambda: dict(os.environ), set=lambda _: None, words=frozenset()
)
"""Each rank has its own, but code may read it while a program changes it."""


def find_variables(
    modules: Iterable[nn.Module], functions: Iterable[Any] = ()
) -> tuple[Variable, ...]:
    """The variables of these modules' classes, and of these functions, in a fixed order."""
    return tuple(_search(modules, functions).found.values())


def find_kept(modules: Iterable[nn.Module], functions: Iterable[Any] = ()) -> tuple[Variable, ...]:
    """The same, and whatever else functions remember: defaults, attributes, closures of layers'.

    To look at all of this takes longer.
    """
    modules = list(modules)
    held = [each for module in modules for each in vars(module).values() if _is_function(each)]
    search = _search(modules, [*functions, *held], keeps_all=True)
    return tuple(search.found.values())


def find_functions(
    modules: Iterable[nn.Module], functions: Iterable[Any] = ()
) -> tuple[Variable, ...]:
    """The variables of the same code that hold functions: methods, too, and `functions`."""
    functions = list(functions)
    plain = [getattr(function, "__func__", function) for function in functions]
    given = [
        _constant(each.__qualname__, each, frozenset())
        for each in plain
        if isinstance(each, types.FunctionType)
    ]
    return (*given, *_search(modules, functions).functions.values())


def _is_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType | types.MethodType | functools.partial)


def _search(
    modules: Iterable[nn.Module], functions: Iterable[Any], *, keeps_all: bool = False
) -> "_Search":
    search = _Search(keeps_all=keeps_all)
    kinds = {type(module): None for module in modules}  # in their order, each once
    for kind in kinds:
        for each in kind.__mro__:
            search.look_at_class(each)
    for function in functions:
        search.look_at(function)
    return search


def words_of_code(modules: Iterable[nn.Module], functions: Iterable[Any] = ()) -> frozenset[str]:
    """Names of attributes and texts in all code that these modules and functions run."""
    kinds = {type(module): None for module in modules}
    search = _search(modules, functions)
    words = frozenset(search.words | {"forward"})
    for kind in kinds:  # those of libraries, too
        words |= words_of_methods(kind, words_of_methods(kind, frozenset({"forward"})))
    return words


def find_held(modules: Iterable[nn.Module]) -> tuple[Variable, ...]:
    """Objects that several layers may hold, such as a configuration; each once."""
    found: dict[int, Variable] = {}
    for module in modules:
        for name, value in vars(module).items():
            kind = type(value)
            is_object = not is_foreign(kind.__module__) or kind.__name__ in NAMESPACES
            if is_object and _is_data(value) and not isinstance(value, nn.Module | torch.Tensor):
                words = words_of_methods(type(module), frozenset({"forward"}))
                words = words_of_methods(type(module), words)  # and of methods that it calls
                text = f"{type(module).__name__}.{name}"
                before = found.get(id(value))
                if before is not None:
                    words, text = words | before.words, before.name
                found[id(value)] = _constant(text, value, words)
    return tuple(found.values())


def _constant(name: str, value: Any, words: frozenset[str]) -> Variable:
    return Variable(name=name, get=lambda: value, set=lambda _: None, words=words)


def is_foreign(module: str | None) -> bool:
    """Whether a module belongs to Python, to torch or to another package that needs no look."""
    package = (module or "").partition(".")[0]
    is_main = package == "__main__"  # in the list of Python's own modules, too
    return package in FOREIGN or (package in sys.stdlib_module_names and not is_main)


@dataclass(slots=True)
class _Search:
    found: dict[Any, Variable] = field(default_factory=dict)
    functions: dict[Any, Variable] = field(default_factory=dict)
    """Variables that hold functions."""
    words: set[str] = field(default_factory=set)
    """Those of all functions that were looked at."""
    keeps_all: bool = False
    """Whether to look at defaults and attributes of functions, too."""
    _seen: set[Any] = field(default_factory=set)

    def look_at_class(self, kind: type) -> None:
        if is_foreign(kind.__module__) or kind in self._seen:
            return
        self._seen.add(kind)
        for name, value in list(vars(kind).items()):
            if isinstance(value, types.FunctionType | staticmethod | classmethod | property):
                self.look_at(value)
                self._note_function(kind, name, vars(kind), f"{kind.__name__}.{name}")
            elif not name.startswith("__") and _is_data(value):
                self._note_attribute(("class", kind, name), f"{kind.__name__}.{name}", kind, name)

    def look_at(self, function: Any) -> None:
        """A function of any kind: also a method, a partial, or an object that can be called."""
        attributes = getattr(function, "__dict__", None)
        if self.keeps_all and hasattr(function, "__qualname__") and type(attributes) is dict:
            self._note_constant(function.__qualname__, attributes)
        if isinstance(function, functools.partial):
            self.look_at(function.func)
            for entry in (*function.args, *function.keywords.values()):
                self.look_at(entry)
        elif isinstance(function, property):
            for part in (function.fget, function.fset):
                self.look_at(part)
        elif isinstance(function, types.MethodType):
            self._look_at_object(function.__self__)
            self.look_at(function.__func__)
        elif isinstance(function, staticmethod | classmethod):
            self.look_at(function.__func__)
        elif isinstance(function, types.FunctionType):
            self._look_at_function(function)
        elif callable(function) and not isinstance(function, type | nn.Module):
            self._look_at_object(function)

    def _look_at_object(self, owner: Any) -> None:
        """An object whose method is called: what it remembers, and what its class reads."""
        if isinstance(owner, type | nn.Module) or is_foreign(type(owner).__module__):
            return
        self.look_at_class(type(owner))
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if _is_data(value):
                text = f"{type(owner).__name__}.{name}"
                self._note_attribute(("object", id(owner), name), text, owner, name)

    def _look_at_function(self, function: types.FunctionType) -> None:
        function = getattr(function, "__wrapped__", function)
        if not isinstance(function, types.FunctionType) or is_foreign(function.__module__):
            return
        if function in self._seen:
            return
        self._seen.add(function)
        words = _words(function.__code__)
        self.words |= words
        if self.keeps_all:
            defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            for value in defaults:
                self._note_constant(f"a default of {function.__qualname__}", value)
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            self._look_at_cell(name, cell, words)
        variables = function.__globals__
        for name in _global_names(function.__code__):
            value = variables.get(name, MISSING)
            if isinstance(value, types.ModuleType):
                self._look_at_module(value, words)
            elif value is not MISSING and not self._look_into(value):
                self._note_item(("global", id(variables), name), name, variables, words)
            elif isinstance(value, types.FunctionType):
                self._note_function(id(variables), name, variables, name)

    def _look_at_cell(self, name: str, cell: types.CellType, words: frozenset[str]) -> None:
        value = _contents(cell)
        if value is MISSING:
            return
        if not self._look_into(value):
            self._note_attribute(("cell", id(cell)), name, cell, "cell_contents", words)
        elif isinstance(value, types.FunctionType):
            held = _constant(name, value, frozenset())
            self.functions[id(cell)] = replace(held, get=lambda: _contents(cell))

    def _look_into(self, value: Any) -> bool:
        """Look into code that a variable holds; False if it holds data."""
        if _is_data(value):
            return False
        if isinstance(value, type):
            self.look_at_class(value)
        else:
            self.look_at(value)
        return True

    def _look_at_module(self, module: types.ModuleType, words: frozenset[str]) -> None:
        """Attributes of a module of the user's own that the code may read."""
        if is_foreign(module.__name__):
            return
        variables = vars(module)
        for name in sorted(words & variables.keys()):
            if not self._look_into(variables[name]):
                text = f"{module.__name__}.{name}"
                self._note_item(("global", id(variables), name), text, variables, words, name)
            elif isinstance(variables[name], types.FunctionType):
                self._note_function(id(variables), name, variables, f"{module.__name__}.{name}")

    def _note_constant(self, text: str, value: Any) -> None:
        """Something that stays the same object, but may hold other values."""
        if _is_data(value):
            self.found.setdefault(("constant", id(value)), _constant(text, value, frozenset()))

    def _note_function(self, owner: Any, name: str, space: Mapping[str, Any], text: str) -> None:
        def get() -> Any:
            return space.get(name, MISSING)

        variable = Variable(name=text, get=get, set=lambda _: None, words=frozenset())
        self.functions.setdefault((owner, name), variable)

    def _note_attribute(
        self, key: Any, text: str, owner: Any, name: str, words: frozenset[str] = frozenset()
    ) -> None:
        def get() -> Any:
            try:
                return getattr(owner, name, MISSING)
            except ValueError:  # an empty cell
                return MISSING

        def put(value: Any) -> None:
            setattr(owner, name, value)

        self.found.setdefault(key, Variable(name=text, get=get, set=put, words=words))

    def _note_item(
        self,
        key: Any,
        text: str,
        variables: dict[str, Any],
        words: frozenset[str],
        name: str | None = None,
    ) -> None:
        name = name or text

        def get() -> Any:
            return variables.get(name, MISSING)

        def put(value: Any) -> None:
            variables[name] = value

        before = self.found.get(key)
        if before is not None:
            words |= before.words
        self.found[key] = Variable(name=text, get=get, set=put, words=words)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return MISSING


def _inner_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of functions and comprehensions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _inner_codes(constant)


@functools.cache
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a function reads or sets, each once."""
    names = ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME")
    found = {
        instruction.argval: None
        for inner in _inner_codes(code)
        for instruction in dis.get_instructions(inner)
        if instruction.opname in names
    }
    return tuple(found)


@functools.cache
def _words(code: types.CodeType) -> frozenset[str]:
    """Names of attributes and texts in a function."""
    words: set[str] = set()
    for inner in _inner_codes(code):
        words.update(inner.co_names)
        words.update(constant for constant in inner.co_consts if isinstance(constant, str))
    return frozenset(words)


def words_of_methods(kind: type, words: frozenset[str]) -> frozenset[str]:
    """These words, and those of the methods that they name: methods read attributes, too."""
    found = set(words)
    for each in kind.__mro__:
        for name, value in vars(each).items():
            function = value.fget if isinstance(value, property) else value
            is_named = name in words or (name.startswith("__") and name != "__init__")
            if is_named and isinstance(function, types.FunctionType):
                found |= _words(function.__code__)
    return frozenset(found)


def _is_data(value: Any) -> bool:
    """Whether a value may be something that code remembers; code itself is not."""
    code = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
    is_called = callable(value) and not isinstance(value, torch.Tensor | nn.Module)
    return not isinstance(value, code) and not is_called
