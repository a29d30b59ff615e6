"""From the bytes of a file to plain objects, whatever somebody put into it, and back.

JSON always works; YAML is read for hand-written files: its core schema (1.2), so that `1e9` is
a number and `no` is text, built from parser events without running any constructor.
Files too large, nested too deeply, with duplicate keys or with aliases that multiply are
refused before they cost time. Writing is atomic.
"""

import gc
import json
import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from pipeplan.errors import InputError

__all__ = ["read_document", "to_json", "write_atomically"]

MAX_JSON_BYTES = 64_000_000
MAX_YAML_BYTES = 4_000_000
MAX_CONTAINERS = 400_000
"""Objects and lists in one file; a plan for 1,024 devices and 10,000 layers has 15,000."""
MAX_YAML_NODES = 1_000_000
MAX_DEPTH = 32

YAML_SUFFIXES = {".yaml", ".yml"}
YAML_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
YAML_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
    **{sign + word: float(f"{sign}inf") for sign in "+-" for word in (".inf", ".Inf", ".INF")},
    **dict.fromkeys((".inf", ".Inf", ".INF"), math.inf),
}


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
    if len(data) > limit:
        raise error(f"{path}: is larger than {limit // 1_000_000} MB, the limit for such a file")
    try:
        text = data.decode("utf-8-sig")
        return _parse_yaml(text) if is_yaml else _parse_json(text)
    except UnicodeDecodeError as problem:
        raise error(f"{path}: is not UTF-8 text (byte {problem.start})") from None
    except InputError as problem:
        raise error(f"{path}: {problem}") from None


def _parse_json(text: str) -> Any:
    # Hostile files are mostly brackets; counting them costs nothing, parsing them would.
    if text.count("[") + text.count("{") > MAX_CONTAINERS:
        _refuse(f"has more than {MAX_CONTAINERS} objects and lists")
    collecting = gc.isenabled()
    gc.disable()  # nothing here is garbage; 1e6 numbers load in half the time
    try:
        return json.loads(text, object_pairs_hook=_object_without_duplicates)
    except json.JSONDecodeError as problem:
        _refuse(f"is not JSON: {problem.msg} at line {problem.lineno}, column {problem.colno}")
    except RecursionError:
        _refuse("is nested too deeply")
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
                _refuse(f"{_short(key)}: stands twice in one object")
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
    return builder.result()


class _YamlBuilder:
    """Builds plain objects from parser events, counting what aliases multiply."""

    def __init__(self) -> None:
        self._open: list[_Container] = []
        self._anchors: dict[str, tuple[Any, int]] = {}  # value, number of nodes in it
        self._num_nodes = 0
        self._documents: list[Any] = []

    def take(self, event: Any) -> None:
        kind = type(event).__name__
        line = event.start_mark.line + 1
        if kind in ("SequenceStartEvent", "MappingStartEvent"):
            self._refuse_tag(event.tag, line)
            if len(self._open) >= MAX_DEPTH:
                _refuse(f"is nested deeper than {MAX_DEPTH} levels at line {line}")
            self._open.append(
                _Container(kind == "MappingStartEvent", event.anchor, self._num_nodes)
            )
        elif kind in ("SequenceEndEvent", "MappingEndEvent"):
            container = self._open.pop()
            size = self._num_nodes - container.nodes_before + 1
            self._put(container.value, size, container.anchor, line, new_nodes=1)
        elif kind == "ScalarEvent":
            if event.tag != "!":  # what quoted text carries
                self._refuse_tag(event.tag, line)
            plain = event.implicit[0]
            value = _yaml_scalar(event.value) if plain else event.value
            self._put(value, 1, event.anchor, line, new_nodes=1)
        elif kind == "AliasEvent":
            if event.anchor not in self._anchors:
                _refuse(f"line {line}: alias *{event.anchor} has no anchor before it")
            value, size = self._anchors[event.anchor]
            self._put(value, size, None, line, new_nodes=size)

    def result(self) -> Any:
        if len(self._documents) != 1:
            _refuse(f"holds {len(self._documents)} YAML documents instead of one")
        return self._documents[0]

    def _put(self, value: Any, size: int, anchor: str | None, line: int, new_nodes: int) -> None:
        self._num_nodes += new_nodes
        if self._num_nodes > MAX_YAML_NODES:
            _refuse(f"has more than {MAX_YAML_NODES} values, aliases counted, at line {line}")
        if anchor:
            self._anchors[anchor] = (value, size)
        if self._open:
            self._open[-1].put(value, line)
        else:
            self._documents.append(value)

    @staticmethod
    def _refuse_tag(tag: str | None, line: int) -> None:
        if tag:
            _refuse(f"line {line}: the tag {_short(tag)} is not allowed")


class _Container:
    """A mapping or a list that is not closed yet."""

    def __init__(self, is_mapping: bool, anchor: str | None, nodes_before: int) -> None:
        self.value: Any = {} if is_mapping else []
        self.anchor = anchor
        self.nodes_before = nodes_before
        self._is_mapping = is_mapping
        self._key: str | None = None

    def put(self, value: Any, line: int) -> None:
        if not self._is_mapping:
            self.value.append(value)
        elif self._key is None:
            if not isinstance(value, str):
                _refuse(f"line {line}: the key {_short(value)} is not text")
            if value in self.value:
                _refuse(f"line {line}: {_short(value)}: stands twice in one object")
            self._key = value
        else:
            self.value[self._key] = value
            self._key = None


def _yaml_scalar(text: str) -> Any:
    if text in YAML_WORDS:
        return YAML_WORDS[text]
    if len(text) <= 64 and YAML_NUMBER.fullmatch(text):
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    return text


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write a file so that an interruption leaves the old one or the new one, never a part."""
    path = Path(path)
    if path.exists() and not path.is_file():  # a pipe or a device: nothing to keep
        path.write_bytes(data)
        return
    target = path.resolve()  # through a link, so that the link stays one
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
    descriptor, part = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(part, mode)
        os.replace(part, target)
    except BaseException:
        os.unlink(part)
        raise


def to_json(document: dict[str, Any]) -> bytes:
    """JSON that people can read: lists of plain values and small objects stay on one line."""
    return _pretty(document, "").encode() + b"\n"


def _pretty(value: Any, indent: str) -> str:
    line = msgspec.json.encode(value).decode() if _is_flat(value) else ""
    if line:
        return line
    inner = f"{indent}  "
    if isinstance(value, dict):
        entries = [
            f"{msgspec.json.encode(key).decode()}: {_pretty(entry, inner)}"
            for key, entry in value.items()
        ]
        return f"{{\n{inner}" + f",\n{inner}".join(entries) + f"\n{indent}}}"
    entries = [_pretty(entry, inner) for entry in value]
    return f"[\n{inner}" + f",\n{inner}".join(entries) + f"\n{indent}]"


def _is_flat(value: Any) -> bool:
    """Whether a value holds no other lists or objects, or is a small object of lists of these."""
    if isinstance(value, dict):
        return (
            len(value) <= 8
            and all(_is_flat(entry) for entry in value.values())
            and (not any(isinstance(entry, dict) for entry in value.values()))
        )
    if isinstance(value, list | tuple):
        return not any(isinstance(entry, dict | list | tuple) for entry in value)
    return True


def _umask() -> int:
    """The process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refuse(message: str) -> NoReturn:
    raise InputError(message)
