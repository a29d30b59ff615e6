"""YAML, for files written by hand, from the bytes of a file to plain objects.

The core schema of YAML 1.2 holds: `1e9` is a number, `no` is text. Objects are built from parser
events, so no constructor runs. Tags are refused. Aliases count as often as what they repeat.
"""

import math
import re
from typing import Any, NoReturn

from pipeplan.documents.json_text import (
    DuplicateKeyError,
    object_without_duplicates,
    require_no_underflow,
)
from pipeplan.documents.limits import MAX_DEPTH, MAX_YAML_VALUES
from pipeplan.documents.text import excerpt
from pipeplan.errors import InputError

__all__ = ["parse_yaml"]

MAX_YAML_DIGITS = 1000
YAML_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
YAML_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
}


def parse_yaml(data: bytes) -> Any:
    """The content as plain objects."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    builder = _YamlBuilder()
    try:
        for event in yaml.parse(data.decode(), Loader=loader):
            builder.take(event)
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        if mark and _is_tabbed(data, mark.line):
            _refuse(f"line {mark.line + 1} is indented with a tab; YAML wants spaces")
        _refuse(f"is not YAML: {getattr(problem, 'problem', None) or 'syntax error'}{where}")
    return builder.entries[0] if builder.entries else None


def _is_tabbed(data: bytes, number: int) -> bool:
    """Whether the indentation of that line has a tab."""
    lines = data.split(b"\n")
    line = lines[number] if number < len(lines) else b""
    return b"\t" in line[: len(line) - len(line.lstrip())]


class _YamlBuilder:
    """Builds plain objects from parser events, counting what aliases multiply."""

    def __init__(self) -> None:
        self.entries: list[Any] = []  # of the innermost open container; at last, the document
        self._outer: list[tuple[list[Any], str | None, int]] = []  # entries, anchor, values before
        self._in_mapping: list[bool] = []  # for each open container, whether it is a mapping
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
            self._in_mapping.append(kind == "MappingStartEvent")
            self.entries = []
        elif kind in ("SequenceEndEvent", "MappingEndEvent"):
            value = self._mapping(line) if self._in_mapping.pop() else self.entries
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

    def _mapping(self, line: int) -> dict[str, Any]:
        keys = self.entries[::2]
        for key in keys:
            if not isinstance(key, str):
                _refuse(
                    f"the key {excerpt(key)} of the object that ends at line {line} is not text"
                )
        try:
            return object_without_duplicates(list(zip(keys, self.entries[1::2], strict=True)))
        except DuplicateKeyError as problem:
            _refuse(f"{self._path_to_object()}{problem}")

    def _path_to_object(self) -> str:
        """The path to the object that is just being closed, with a point at its end."""
        path = ""
        for (entries, _, _), is_mapping in zip(self._outer[1:], self._in_mapping, strict=True):
            if is_mapping:  # an even number of entries: the object is itself a key
                path += f".{str(entries[-1])[:60]}" if len(entries) % 2 else ".(key)"
            else:
                path += f"[{len(entries)}]"
        return f"{path.lstrip('.')}." if path else ""


def _yaml_scalar(text: str) -> Any:
    if text in YAML_WORDS:
        return YAML_WORDS[text]
    if len(text) <= MAX_YAML_DIGITS and YAML_NUMBER.fullmatch(text):
        return int(text) if text.lstrip("+-").isdigit() else require_no_underflow(text)
    return text


def _refuse(message: str) -> NoReturn:
    raise InputError(message)
