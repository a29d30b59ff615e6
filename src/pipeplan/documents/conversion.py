"""From plain objects to typed ones, or an error with the path to the field.

Unknown fields are refused at every level. So is null, which is no number and no text, except in
the fields that say what it means there. A path is built on the way down, never read back out of a
message: names in a file may look like one.
"""

import dataclasses
import json
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pipeplan.cluster import HostMatrix
from pipeplan.documents.text import excerpt, nearest
from pipeplan.errors import InputError
from pipeplan.validation import LONG_NUMBER_BITS, number_text

__all__ = ["convert"]

T = TypeVar("T")
Convert = Callable[[Any, str], Any]
"""From a plain value and its path to a typed one."""

KIND_WORDS: dict[type, str] = {
    bool: "true or false",
    dict: "an object",
    float: "a number",
    int: "a whole number",
    list: "a list",
    NoneType: "null",
    str: "text",
}
"""Python's kinds in the words of somebody who writes such a file."""


def convert(document: Any, kind: type[T], may_be_null: tuple[str, ...] = ()) -> T:
    """The dataclass that these plain objects make, or an error with the path to the field."""
    return cast(T, _object(kind, may_be_null, document, ""))


def _object(kind: Any, may_be_null: tuple[str, ...], value: Any, path: str) -> Any:
    """The dataclass that an object makes."""
    if not isinstance(value, dict):
        raise _wrong(value, path, "an object")
    prefix = f"{path}." if path else ""
    known = _fields_of(kind, may_be_null)
    typed = {}
    for name, entry in value.items():
        if name not in known:
            raise InputError(f"{prefix}{_plain(name)}: is no known field{nearest(name, known)}")
        if entry is not None:
            typed[name] = known[name].convert(entry, f"{prefix}{name}")
        elif name not in may_be_null:
            raise InputError(f"{prefix}{name}: null is no value; give one or leave the field out")
    for name, field in known.items():
        if field.is_required and name not in typed:
            raise InputError(f"{prefix}{name}: is missing")
    try:
        return kind(**typed)
    except InputError as problem:
        raise InputError(f"{prefix}{problem}") from None


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    convert: Convert
    is_required: bool


@cache
def _fields_of(kind: Any, may_be_null: tuple[str, ...]) -> dict[str, _Field]:
    """The fields that make a dataclass."""
    hints = get_type_hints(kind)
    missing = dataclasses.MISSING
    return {
        field.name: _Field(
            _converter(hints[field.name], may_be_null),
            field.default is missing and field.default_factory is missing,
        )
        for field in dataclasses.fields(kind)
        if field.init
    }


@cache
def _converter(hint: Any, may_be_null: tuple[str, ...]) -> Convert:
    """How a value becomes what a type hint says."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value, path: value
    if origin in (Union, UnionType):
        return _union([a for a in arguments if a is not NoneType], may_be_null)
    if origin is tuple and arguments[-1] is ...:
        return _list(arguments[0], may_be_null)
    if origin is tuple:
        return _fixed_list([_converter(a, may_be_null) for a in arguments])
    if origin is dict:
        return _free_object(arguments[1])
    if dataclasses.is_dataclass(hint):
        return lambda value, path: _object(hint, may_be_null, value, path)
    if issubclass(hint, StrEnum):
        return _choice(hint)
    return _number if hint is float else _plain_value(hint)


def _number(value: Any, path: str) -> float:
    if type(value) is float:
        return value
    if type(value) is not int:
        raise _wrong(value, path, "a number")
    try:
        return float(value)
    except OverflowError:
        raise InputError(f"{path}: {_as_json(value)} is too large a number") from None


def _plain_value(kind: type) -> Convert:
    def convert_plain(value: Any, path: str) -> Any:
        if type(value) is not kind:
            raise _wrong(value, path, KIND_WORDS[kind])
        return value

    return convert_plain


def _choice(kind: type[StrEnum]) -> Convert:
    def convert_choice(value: Any, path: str) -> StrEnum:
        if type(value) is not str:
            raise _wrong(value, path, "text")
        if value not in tuple(kind):
            raise InputError(f"{path}: {_as_json(value)} is none of {', '.join(kind)}")
        return kind(value)

    return convert_choice


def _union(hints: list[Any], may_be_null: tuple[str, ...]) -> Convert:
    """A type that may be absent, or a number that may be a list instead."""
    hints = [hint for hint in hints if hint is not HostMatrix]  # files hold hosts in shorthand
    if len(hints) == 1:
        return _converter(hints[0], may_be_null)
    number, several = hints  # the only other union: one number, or several in a list or an object
    assert number is float, hints
    container: type = dict if get_origin(several) is dict else list
    convert_several = _converter(several, may_be_null)

    def convert_either(value: Any, path: str) -> Any:
        if isinstance(value, container):
            return convert_several(value, path)
        if type(value) not in (int, float):
            raise _wrong(value, path, f"a number or {KIND_WORDS[container]}")
        return _number(value, path)

    return convert_either


def _list(hint: Any, may_be_null: tuple[str, ...]) -> Convert:
    convert_entry = _converter(hint, may_be_null)

    def convert_list(value: Any, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _wrong(value, path, "a list")
        kinds = set(map(type, value)) if hint in (float, str) else None
        if kinds == {hint}:  # a million numbers at once
            return tuple(value)
        return tuple(convert_entry(entry, f"{path}[{i}]") for i, entry in enumerate(value))

    return convert_list


def _fixed_list(converters: list[Convert]) -> Convert:
    def convert_fixed(value: Any, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _wrong(value, path, "a list")
        if len(value) != len(converters):
            raise InputError(f"{path}: has {len(value)} entries instead of {len(converters)}")
        return tuple(
            convert_entry(entry, f"{path}[{i}]")
            for i, (convert_entry, entry) in enumerate(zip(converters, value, strict=True))
        )

    return convert_fixed


def _free_object(hint: Any) -> Convert:
    """An object whose keys are free; its entries are numbers or anything."""

    def convert_free(value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _wrong(value, path, "an object")
        if hint is Any:
            return value
        for entry in value.values():
            if type(entry) not in (int, float):
                raise InputError(f"{path}: holds {_kind_word(entry)} instead of a number")
        return {name: _number(entry, f"{path}[{excerpt(name)}]") for name, entry in value.items()}

    return convert_free


def _wrong(value: Any, path: str, expected: str) -> InputError:
    """That a value is of another kind."""
    if isinstance(value, dict | list):
        return InputError(f"{path}: is {_kind_word(value)}, not {expected}")
    # That "3" is text has to be said; that 1.5 is no whole number, or true none at all, not.
    is_text = "text, " if isinstance(value, str) else ""
    return InputError(f"{path}: {_as_json(value)} is {is_text}not {expected}")


def _kind_word(value: Any) -> str:
    return KIND_WORDS.get(type(value), "something else")


def _as_json(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 4 * LONG_NUMBER_BITS:
        return number_text(value)  # Python refuses to print the longest
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _plain(name: str) -> str:
    return name if name.isidentifier() and len(name) <= 60 else excerpt(name)
