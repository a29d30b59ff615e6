"""From the bytes of a file to plain objects, whatever somebody put into it.

JSON always works; YAML is read for files written by hand. Files too large, nested too deeply, with
duplicate keys or with aliases that multiply are refused before they cost time.
"""

import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

from pipeplan.documents.json_text import NotJson, parse_json, require_readable, to_json
from pipeplan.documents.limits import MAX_DEPTH, MAX_JSON_BYTES, MAX_YAML_BYTES
from pipeplan.documents.writing import STANDARD_STREAM, write_atomically
from pipeplan.documents.yaml_text import parse_yaml
from pipeplan.errors import InputError

__all__ = ["read_document", "require_readable_at", "to_json", "write_atomically"]

YAML_SUFFIXES = {".yaml", ".yml"}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_document(path: str | Path, error: type[InputError], *, pack_schedule: bool = False) -> Any:
    """The content of a JSON or, by its suffix, YAML file as plain objects.

    The path `-` is the standard input: JSON, or YAML where it is not JSON. With `pack_schedule`
    a plan's schedule comes as `PackedOrders`, unless it is YAML or not made of blocks.
    """
    name = "standard input" if str(path) == STANDARD_STREAM else str(path)
    is_yaml = _is_yaml(path)
    limit = MAX_YAML_BYTES if is_yaml else MAX_JSON_BYTES
    try:
        data = _read_bytes(path, limit + 1)
    except OSError as problem:
        reason = problem.strerror or type(problem).__name__
        raise error(f"{name}: cannot be read: {reason}") from None
    except ValueError:  # a null character in the path
        raise error(f"{name!r}: cannot be read: no file has such a name") from None
    try:
        if len(data) > limit:
            raise InputError(f"is larger than {limit / 1e6:g} MB, the limit for such a file")
        data = data.removeprefix(BYTE_ORDER_MARK)
        if not data or data.isspace():
            raise InputError("is empty")
        if is_yaml:
            document = parse_yaml(data)
        elif str(path) == STANDARD_STREAM:
            document = _parse_either(data, pack_schedule)
        else:
            document = _parse_named_json(path, data, pack_schedule)
        _require_depth(document)
        return document
    except UnicodeError as problem:
        if isinstance(problem, UnicodeDecodeError):
            raise error(f"{name}: is not UTF-8 text (byte {problem.start})") from None
        raise error(f"{name}: an escape holds half of a character pair") from None
    except InputError as problem:
        raise error(f"{name}: {problem}") from None


def require_readable_at(path: str | Path, data: bytes) -> bytes:
    """These bytes of JSON, unless a file of this name, JSON or YAML, could not be read again."""
    require_readable(data)
    if _is_yaml(path):
        if len(data) > MAX_YAML_BYTES:
            raise InputError(
                f"is larger than {MAX_YAML_BYTES / 1e6:g} MB, the limit for YAML; write JSON"
            )
        try:
            is_same = parse_yaml(data) == parse_json(data)
        except InputError as problem:
            raise InputError(f"{problem}; write JSON instead") from None
        if not is_same:
            raise InputError("holds something that YAML would change; write JSON instead")
    return data


def _is_yaml(path: str | Path) -> bool:
    return Path(path).suffix.lower() in YAML_SUFFIXES


def _read_bytes(path: str | Path, limit: int) -> bytes:
    if str(path) != STANDARD_STREAM:
        with open(path, "rb") as file:
            return file.read(limit)
    stream: BinaryIO | None = getattr(sys.stdin, "buffer", None)
    if stream is None:
        raise OSError(os.strerror(9))
    return stream.read(limit)


def _parse_named_json(path: str | Path, data: bytes, pack_schedule: bool) -> Any:
    """What the bytes say as JSON; YAML under another name is refused with the remedy."""
    try:
        return parse_json(data, pack_schedule=pack_schedule)
    except NotJson as problem:
        if len(data) <= MAX_YAML_BYTES and _is_our_yaml(data):
            raise InputError(
                f"is YAML, not JSON; rename it to {Path(path).with_suffix('.yaml').name}"
            ) from None
        raise problem


def _is_our_yaml(data: bytes) -> bool:
    try:
        document = parse_yaml(data)
    except (InputError, UnicodeError):
        return False
    return isinstance(document, dict) and "format" in document


def _parse_either(data: bytes, pack_schedule: bool) -> Any:
    """What the bytes say as JSON or else as YAML; the error is that of the likelier one."""
    try:
        return parse_json(data, pack_schedule=pack_schedule)
    except NotJson:
        if len(data) > MAX_YAML_BYTES:
            raise
        try:
            return parse_yaml(data)
        except InputError:
            if not data.lstrip().startswith((b"{", b"[")):
                raise
        raise


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
        raise InputError(f"is nested deeper than {MAX_DEPTH} levels")
