"""From the bytes of a file to typed fields, whatever somebody put into it, and back.

JSON always works; YAML is read for hand-written files: its core schema (1.2), so that `1e9` is
a number and `no` is text, built from parser events without running any constructor.
Files too large, nested too deeply, with duplicate keys or with aliases that multiply are
refused before they cost time. Errors name the path to the field. Writing is atomic.
"""

import dataclasses
import gc
import json
import math
import os
import re
import secrets
from collections.abc import Container, Iterator
from contextlib import suppress
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

import msgspec

from pipeplan.documents.text import excerpt, nearest
from pipeplan.errors import InputError

__all__ = ["convert", "read_document", "to_json", "write_atomically"]

MAX_JSON_BYTES = 64_000_000
MAX_YAML_BYTES = 4_000_000
MAX_JSON_VALUES = 2_200_000
"""The two matrices of a cluster of 1,024 devices have 2.1 million."""
MAX_JSON_CONTAINERS = 400_000
"""Objects and lists; a plan for 1,024 devices and 10,000 layers has 15,000."""
MAX_YAML_VALUES = 300_000
MAX_YAML_DIGITS = 1000
MAX_DEPTH = 32

YAML_SUFFIXES = {".yaml", ".yml"}
YAML_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
YAML_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
}

WORDS = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "float | array": "a number or a list",
    "int": "a whole number",
    "null": "null",
    "object": "an object",
    "str": "text",
}
"""What msgspec calls a type, in the words of somebody who writes such a file."""

T = TypeVar("T")


# ---------------------------------------------------------------------------- reading


def read_document(path: str | Path, error: type[InputError]) -> Any:
    """The content of a JSON or, by its suffix, YAML file as plain objects."""
    path = Path(path)
    is_yaml = path.suffix.lower() in YAML_SUFFIXES
    limit = MAX_YAML_BYTES if is_yaml else MAX_JSON_BYTES
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as problem:
        reason = problem.strerror or type(problem).__name__
        raise error(f"{path}: cannot be read: {reason}") from None
    try:
        if len(data) > limit:
            _refuse(f"is larger than {limit / 1e6:g} MB, the limit for such a file")
        text = data.decode("utf-8-sig")
        if not text.strip():
            _refuse("is empty")
        document = _parse_yaml(text) if is_yaml else _parse_json(text)
        _require_depth(document)
        if "\\" in text:
            msgspec.json.encode(document)  # escapes can make text that no file can hold
        return document
    except UnicodeError as problem:
        at = f" (byte {problem.start})" if isinstance(problem, UnicodeDecodeError) else ""
        raise error(f"{path}: is not UTF-8 text{at}") from None
    except InputError as problem:
        raise error(f"{path}: {problem}") from None


def _require_depth(document: Any) -> None:
    level = [document] if isinstance(document, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [
            entry
            for value in level
            for entry in (value.values() if isinstance(value, dict) else value)
            if type(entry) is list or type(entry) is dict  # quicker than isinstance, 1e6 times
        ]
    if level:
        _refuse(f"is nested deeper than {MAX_DEPTH} levels")


def _parse_json(text: str) -> Any:
    # Hostile files are mostly commas and brackets; counting them costs nothing, parsing would.
    if text.count(",") > MAX_JSON_VALUES:
        _refuse(f"has more than {MAX_JSON_VALUES:,} values")
    if text.count("[") + text.count("{") > MAX_JSON_CONTAINERS:
        _refuse(f"has more than {MAX_JSON_CONTAINERS:,} objects and lists")
    collecting = gc.isenabled()
    gc.disable()  # nothing here is garbage; 1e6 numbers load in half the time
    try:
        return json.loads(text, object_pairs_hook=_object_without_duplicates)
    except json.JSONDecodeError as problem:
        _refuse(f"is not JSON: {problem.msg} at line {problem.lineno}, column {problem.colno}")
    except RecursionError:
        _refuse(f"is nested deeper than {MAX_DEPTH} levels")
    except InputError:
        raise
    except ValueError:
        _refuse("holds a number with too many digits")
    finally:
        if collecting:
            gc.enable()


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                _refuse(f"{excerpt(key)}: stands twice in one object")
            seen.add(key)
    return result


def _parse_yaml(text: str) -> Any:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    builder = _YamlBuilder()
    try:
        for event in yaml.parse(text, Loader=loader):
            builder.take(event)
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        _refuse(f"is not YAML: {getattr(problem, 'problem', None) or 'syntax error'}{where}")
    return builder.entries[0] if builder.entries else None


class _YamlBuilder:
    """Builds plain objects from parser events, counting what aliases multiply."""

    def __init__(self) -> None:
        self.entries: list[Any] = []  # of the innermost open container; at last, the document
        self._outer: list[tuple[list[Any], str | None, int]] = []  # entries, anchor, values before
        self._anchors: dict[str, tuple[Any, int]] = {}  # value and the number of values in it
        self._num_values = 0

    def take(self, event: Any) -> None:
        kind, line = type(event).__name__, event.start_mark.line + 1
        if getattr(event, "tag", None) not in (None, "!"):  # "!" is what quoted text may carry
            _refuse(f"line {line}: the tag {excerpt(event.tag)} is not allowed")
        if kind in ("SequenceStartEvent", "MappingStartEvent"):
            if len(self._outer) >= MAX_DEPTH:
                _refuse(f"is nested deeper than {MAX_DEPTH} levels at line {line}")
            self._outer.append((self.entries, event.anchor, self._num_values))
            self.entries = []
        elif kind in ("SequenceEndEvent", "MappingEndEvent"):
            value = self.entries if kind == "SequenceEndEvent" else _mapping(self.entries, line)
            self.entries, anchor, values_before = self._outer.pop()
            self._put(value, 1, anchor, line, size=self._num_values - values_before + 1)
        elif kind == "ScalarEvent":
            is_plain = event.implicit[0]
            value = _yaml_scalar(event.value) if is_plain else event.value
            self._put(value, 1, event.anchor, line)
        elif kind == "AliasEvent":
            if event.anchor not in self._anchors:
                _refuse(f"line {line}: the alias {excerpt(event.anchor)} has no anchor before it")
            value, size = self._anchors[event.anchor]
            self._put(value, size, None, line)

    def _put(self, value: Any, num_new: int, anchor: str | None, line: int, size: int = 1) -> None:
        self._num_values += num_new
        if self._num_values > MAX_YAML_VALUES:
            _refuse(f"has more than {MAX_YAML_VALUES:,} values, aliases counted, at line {line}")
        if self.entries and not self._outer:
            _refuse("holds more than one YAML document")
        self.entries.append(value)
        if anchor:
            self._anchors[anchor] = (value, size)


def _mapping(entries: list[Any], line: int) -> dict[str, Any]:
    keys = entries[::2]
    for key in keys:
        if not isinstance(key, str):
            _refuse(f"the key {excerpt(key)} of the object that ends at line {line} is not text")
    return _object_without_duplicates(list(zip(keys, entries[1::2], strict=True)))


def _yaml_scalar(text: str) -> Any:
    if text in YAML_WORDS:
        return YAML_WORDS[text]
    if len(text) <= MAX_YAML_DIGITS and YAML_NUMBER.fullmatch(text):
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    return text


# ---------------------------------------------------------------- from plain to typed


def convert(document: Any, kind: type[T], may_be_null: Container[str] = ()) -> T:
    """The dataclass that these plain objects make, or an error with the path to the field.

    Unknown fields are refused at every level. So is null, which is no number and no text, except
    in the fields that say what it means there.
    """
    for path, fields, known in _objects_of(document, kind, ""):
        for name, value in fields.items():
            if name not in known:
                _refuse(f"{path}{_plain(name)}: is no known field{nearest(name, known)}")
            if value is None and name not in may_be_null:
                _refuse(f"{path}{name}: null is no value; give one or leave the field out")
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise InputError(_explain(str(error), document, kind)) from None


def _objects_of(
    document: Any, kind: Any, path: str
) -> Iterator[tuple[str, dict[str, Any], tuple[str, ...]]]:
    """Every object that stands for a dataclass: its path, its fields, the names it may use."""
    if not isinstance(document, dict):
        return
    kinds = _kinds_inside(kind)
    yield path, document, tuple(kinds)
    for name, inner in kinds.items():
        value = document.get(name)
        if inner is None or value is None:
            continue
        if isinstance(value, list):
            for index, entry in enumerate(value):
                yield from _objects_of(entry, inner, f"{path}{name}[{index}].")
        else:
            yield from _objects_of(value, inner, f"{path}{name}.")


@cache
def _kinds_inside(kind: Any) -> dict[str, Any]:
    """The fields that make a dataclass, each with the dataclass that it holds, if any."""
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    candidates = {name: (hints[name], *get_args(hints[name])) for name in names}
    return {name: next(filter(dataclasses.is_dataclass, candidates[name]), None) for name in names}


def _explain(message: str, document: Any, kind: Any) -> str:
    """`layers[3].forward_ms: -1 is negative`, from msgspec's message and its `$`-path."""
    text, _, path = message.partition(" - at `$")
    path = path.removesuffix("`").removeprefix(".")
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", text):
        return f"{_join(path, missing[1])}: is missing"
    if re.match(r"[\w.\[\]]+: ", text):  # ours, raised on construction: it names the field
        return _join(path, text)
    value = _value_at(document, path)
    is_plain = not isinstance(value, dict | list)
    start = f"{path}: {_as_json(value)} is" if is_plain else f"{path}: is"
    if length := re.fullmatch(r"Expected `array` of length (\d+), got (\d+)", text):
        return f"{path}: has {length[2]} entries instead of {length[1]}"
    if wrong := re.fullmatch(r"Expected `(.+)`, got `(.+)`", text):
        expected, got = (WORDS.get(name, name) for name in wrong.groups())
        if path.endswith("[...]"):  # an object with free keys, of which msgspec names none
            return f"{path.removesuffix('[...]')}: holds {got} instead of {expected}"
        # That "3" is text has to be said; that 1.5 is no whole number, or true none at all, not.
        say_got = got == "text" or not is_plain
        return f"{start} {got}, not {expected}" if say_got else f"{start} not {expected}"
    if text.startswith("Invalid enum value"):
        return f"{start} none of {', '.join(_choices(kind, path))}"
    if text == "Number out of range":
        return f"{start} too large a number"
    return f"{start} wrong: {text[:1].lower()}{text[1:]}"


def _choices(kind: Any, path: str) -> Iterator[str]:
    """The values that the field at a path may have."""
    *parents, name = re.sub(r"\[\d+\]", "", path).split(".")
    for parent in parents:
        kind = _kinds_inside(kind)[parent]
    hint = get_type_hints(kind)[name]
    for choice in (hint, *get_args(hint)):
        if isinstance(choice, type) and issubclass(choice, StrEnum):
            yield from choice


def _value_at(document: Any, path: str) -> Any:
    for key, index in re.findall(r"(\w+)|\[(\d+)\]", path):
        document = document[key] if key else document[int(index)]
    return document


def _as_json(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _join(path: str, rest: str) -> str:
    return f"{path}.{rest}" if path else rest


def _plain(name: str) -> str:
    return name if name.isidentifier() and len(name) <= 60 else excerpt(name)


# ---------------------------------------------------------------------------- writing


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write a file so that an interruption leaves the old one or the new one, never a part."""
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe or a device
            Path(path).write_bytes(data)
        else:
            _replace(Path(path).resolve(), data)  # through a link, so that the link stays one
    except OSError as problem:
        reason = problem.strerror or type(problem).__name__
        raise InputError(f"{path}: cannot be written: {reason}") from None


def _replace(target: Path, data: bytes) -> None:
    part = target.with_name(f".pipeplan-{secrets.token_hex(8)}.part")
    try:
        with open(part, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            os.chmod(part, target.stat().st_mode & 0o777)
        os.replace(part, target)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def to_json(document: dict[str, Any]) -> bytes:
    """JSON that people can read: lists of plain values and small objects stay on one line."""
    return _pretty(document, "").encode() + b"\n"


def _pretty(value: Any, indent: str) -> str:
    if _fits_one_line(value):
        return msgspec.json.encode(value).decode()
    inner = f"{indent}  "
    if isinstance(value, dict):
        entries = [f"{_pretty(key, '')}: {_pretty(value[key], inner)}" for key in value]
        return f"{{\n{inner}" + f",\n{inner}".join(entries) + f"\n{indent}}}"
    entries = [_pretty(entry, inner) for entry in value]
    return f"[\n{inner}" + f",\n{inner}".join(entries) + f"\n{indent}]"


def _fits_one_line(value: Any) -> bool:
    """Whether this is a plain value, a list of them, or a small object of these two."""
    if isinstance(value, dict):
        return len(value) <= 8 and all(
            not isinstance(entry, dict) and _fits_one_line(entry) for entry in value.values()
        )
    if isinstance(value, list | tuple):
        return not any(isinstance(entry, dict | list | tuple) for entry in value)
    return True


def _refuse(message: str) -> NoReturn:
    raise InputError(message)
