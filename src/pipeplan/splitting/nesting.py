"""Takes tensors out of tuples, lists and dicts, to send or divide them, and puts them back."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch

from pipeplan.errors import RuntimeMismatchError

__all__ = [
    "first_argument",
    "map_tensors",
    "put_tensors",
    "take_tensors",
    "tensors_in",
    "with_argument",
]

Template = Any
"""The value with a number in the place of each tensor. It is JSON, so other ranks can read it."""


def take_tensors(value: Any, where: str) -> tuple[list[torch.Tensor], Template]:
    """The tensors of a nested value, in order, and the template that puts them back."""
    tensors: list[torch.Tensor] = []
    template = _take(value, tensors, where)
    return tensors, template


def _take(part: Any, tensors: list[torch.Tensor], where: str) -> Template:
    # This is no inner function: an inner function that calls itself is a reference cycle. It would
    # keep the tensors alive until the garbage collector runs.
    if isinstance(part, torch.Tensor):
        if part.layout is not torch.strided or part.is_nested:
            raise RuntimeMismatchError(
                f"{where}: a sparse or nested tensor cannot cross a cut; call to_dense() in the"
                " layer, or pad it"
            )
        tensors.append(part)
        return ["tensor", len(tensors) - 1]
    if isinstance(part, dict) and all(isinstance(key, str) for key in part):
        kind = "ordered" if type(part) is OrderedDict else "dict"
        return [kind, {key: _take(entry, tensors, where) for key, entry in part.items()}]
    if isinstance(part, dict) and all(isinstance(key, bool | int | float | str) for key in part):
        return ["pairs", [[key, _take(entry, tensors, where)] for key, entry in part.items()]]
    if isinstance(part, torch.Size):
        return ["size", list(part)]
    if isinstance(part, tuple | list):
        entries = [_take(entry, tensors, where) for entry in part]
        if hasattr(part, "_fields"):
            return ["named", [_name_of(type(part), where), *entries]]
        return ["tuple" if isinstance(part, tuple) else "list", entries]
    # An enum with numbers or text as values would arrive as a bare number or text.
    if part is None or (isinstance(part, bool | int | float | str) and not isinstance(part, Enum)):
        return ["plain", part]
    if isinstance(part, dict):
        raise RuntimeMismatchError(
            f"{where}: a dict whose keys are neither text nor numbers cannot cross a cut; use text"
        )
    raise RuntimeMismatchError(
        f"{where}: a {type(part).__name__} cannot cross a cut; only tensors, numbers, text and"
        " None can, alone or in tuples, lists and dicts"
    )


def _name_of(kind: type, where: str) -> str:
    if "<" in kind.__qualname__:
        raise RuntimeMismatchError(
            f"{where}: a {kind.__name__} cannot cross a cut, since other ranks cannot import it;"
            " define it at the top of a module"
        )
    return f"{kind.__module__}:{kind.__qualname__}"


def put_tensors(template: Template, tensors: Sequence[torch.Tensor]) -> Any:
    """The nested value with these tensors in it."""
    kind, content = template
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: put_tensors(entry, tensors) for key, entry in content.items()}
    if kind == "ordered":
        return OrderedDict((key, put_tensors(entry, tensors)) for key, entry in content.items())
    if kind == "pairs":
        return {key: put_tensors(entry, tensors) for key, entry in content}
    if kind == "size":
        return torch.Size(content)
    if kind in ("tuple", "list"):
        entries = [put_tensors(entry, tensors) for entry in content]
        return tuple(entries) if kind == "tuple" else entries
    if kind == "named":
        module, _, name = content[0].partition(":")
        fields = [put_tensors(entry, tensors) for entry in content[1:]]
        return attrgetter(name)(import_module(module))(*fields)
    return content


def map_tensors(value: Any, function: Callable[[Any], Any], leaf: type = torch.Tensor) -> Any:
    """The value with `function` applied to every tensor; everything else stays."""
    if isinstance(value, leaf | torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        entries = {key: map_tensors(entry, function, leaf) for key, entry in value.items()}
        return OrderedDict(entries) if type(value) is OrderedDict else entries
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple | list):
        parts = [map_tensors(entry, function, leaf) for entry in value]
        if hasattr(value, "_fields"):
            return type(value)(*parts)
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a nested value, also inside dict classes of other libraries."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in tensors_in(part)]
    return []


def first_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | str | None:
    """The position or name of the argument that a layer gets from the layer before.

    It is the first tensor, or else the first container with tensors; None if there is neither.
    """
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    tensors = [place for place, value in given if isinstance(value, torch.Tensor)]
    return next(iter([*tensors, *(place for place, value in given if tensors_in(value))]), None)


def with_argument(
    args: Sequence[Any], kwargs: Mapping[str, Any], place: int | str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with another one at this position or of this name."""
    if isinstance(place, str):
        return tuple(args), {**kwargs, place: value}
    return (*args[:place], value, *args[place + 1 :]), dict(kwargs)
