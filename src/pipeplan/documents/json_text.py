"""JSON, from the bytes of a file to plain objects and back.

A plan's schedule has up to ten million blocks. As Python texts they would take most of a gigabyte,
so the bytes of the schedule are taken out first and become arrays. Everything else is read by
Python's own parser.
"""

import gc
import json
import numbers
import re
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pipeplan.documents.limits import MAX_DEPTH, require_json_size
from pipeplan.documents.text import excerpt
from pipeplan.errors import InputError
from pipeplan.validation import MAX_BLOCKS, MAX_DEVICES

__all__ = [
    "LEFT_OUT",
    "NotJson",
    "PackedOrder",
    "PackedOrders",
    "object_without_duplicates",
    "parse_json",
    "require_no_underflow",
    "require_readable",
    "to_json",
]

SPACE = rb"[ \t\r\n]*+"
NUMBER = rb"(?:0|[1-9][0-9]{0,8})"
BLOCK = rb'"%b?+[FBIW]%b"' % (NUMBER, NUMBER)
TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[{]|[\]}]|[^"\[\]{}]++', re.DOTALL)
"""A text, a bracket, or all that stands between these."""
MAX_TOKENS = 6_000_000
"""How far to look for the schedule; a file with more before it is too large anyway."""


def _list_of(entry: bytes) -> bytes:
    """The pattern of a list whose entries all match; possessive, so it never goes back."""
    more = rb"(?:%b,%b%b)*+" % (SPACE, SPACE, entry)
    return rb"\[%b(?:%b%b%b)?+\]" % (SPACE, entry, more, SPACE)


SCHEDULE = re.compile(rb"%b:%b(%b)" % (SPACE, SPACE, _list_of(_list_of(BLOCK))))
ORDER = re.compile(rb"\[([^\[\]]*+)\]")
LETTERS = b"FBIW"
IS_LETTER = np.isin(np.arange(256), list(LETTERS))
LETTERS_TO_COMMAS = bytes.maketrans(LETTERS, b"," * len(LETTERS))
QUOTE = ord('"')
LEFT_OUT = -1
"""In place of a block's stage."""
NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters of JSON texts that YAML forbids, or takes for the end of a line."""


TINY = (
    re.compile(r"e-0*[1-9][0-9][0-9]"),
    re.compile(r"E-0*[1-9][0-9][0-9]"),
    re.compile("0" * 100),
)
"""Each number that is not 0 but becomes 0 as a float matches one of these; few others do."""
NOT_ZERO = re.compile(r"[-+.0]*[1-9]")


class DuplicateKeyError(InputError):
    """A key that stands twice in one object."""


class NotJson(InputError):
    """Text that does not follow the grammar of JSON."""


@dataclass(frozen=True, slots=True)
class PackedOrder:
    """One order of blocks as arrays of one length."""

    letters: NDArray[np.uint8]
    microbatches: NDArray[np.int32]
    stages: NDArray[np.int32] | None
    """`LEFT_OUT` where a block does not name its stage; None where no block does."""


@dataclass(frozen=True, slots=True)
class PackedOrders:
    """A schedule as arrays."""

    orders: list[PackedOrder]


# ---------------------------------------------------------------------------- reading


def parse_json(data: bytes, *, pack_schedule: bool = False) -> Any:
    """The content as plain objects; on request the top-level `schedule` as `PackedOrders`.

    A schedule that is not made of blocks stays a list of lists, for the reader to explain.
    """
    span = _find_schedule(data) if pack_schedule else None
    start, end = span or (len(data), len(data))
    rest = data if span is None else b"%b0%b" % (data[:start], data[end:])
    require_json_size(rest)

    def place(offset: int) -> int:
        """The offset in the file of an offset in the rest."""
        return offset if offset <= start else offset + end - start - 1

    try:
        text = rest.decode()
        document = _loads(text)
    except UnicodeDecodeError as problem:
        problem.start = place(problem.start)
        raise
    except json.JSONDecodeError as problem:
        before = data[: place(len(text[: problem.pos].encode()))]
        line, column = before.count(b"\n") + 1, len(before[before.rfind(b"\n") + 1 :].decode()) + 1
        raise NotJson(
            f"is not JSON: {problem.msg.removesuffix(' at')} at line {line}, column {column}"
        ) from None
    if span is not None:
        document["schedule"] = _pack(data[start:end])
    return document


def _find_schedule(data: bytes) -> tuple[int, int] | None:
    """Where the schedule of the outermost object stands, if it is made of blocks."""
    if b'"schedule"' not in data:
        return None
    depth = 0
    for _, token in zip(range(MAX_TOKENS), TOKEN.finditer(data), strict=False):
        text = token[0]
        if text in (b"[", b"{"):
            depth += 1
        elif text in (b"]", b"}"):
            depth -= 1
        elif depth == 1 and text == b'"schedule"' and (end := SCHEDULE.match(data, token.end())):
            return end.span(1)
    return None


def _pack(schedule: bytes) -> PackedOrders:
    if schedule.count(b"[") - 1 > MAX_DEVICES:
        raise InputError(f"schedule: has more than {MAX_DEVICES:,} orders, one for each group")
    if schedule.count(b'"') // 2 > MAX_BLOCKS:
        raise InputError(
            f"schedule: has more than the {MAX_BLOCKS:,} blocks that a plan may have;"
            " use fewer microbatches"
        )
    return PackedOrders([_pack_order(order[1]) for order in ORDER.finditer(schedule, 1)])


def _pack_order(order: bytes) -> PackedOrder:
    characters = np.frombuffer(order, dtype=np.uint8)
    at = np.flatnonzero(IS_LETTER[characters])
    letters = characters[at]
    if (characters[at - 1] == QUOTE).all():
        digits = order.translate(None, b'"FBIW \t\r\n')
        return PackedOrder(letters, np.fromstring(digits, dtype=np.int32, sep=","), None)
    for letter in LETTERS:
        order = order.replace(b'"%c' % letter, b'"%d%c' % (LEFT_OUT, letter))
    digits = order.translate(LETTERS_TO_COMMAS, b'" \t\r\n')
    numbers = np.fromstring(digits, dtype=np.int32, sep=",")
    return PackedOrder(letters, numbers[1::2], numbers[::2])


def _loads(text: str) -> Any:
    """What Python's parser makes of the text; no key stands twice in an object."""
    collecting = gc.isenabled()
    gc.disable()  # nothing here is garbage; a million numbers load in half the time
    try:
        document = json.loads(text, object_pairs_hook=object_without_duplicates)
        if any(pattern.search(text) for pattern in TINY):
            json.loads(text, parse_float=require_no_underflow)
    except DuplicateKeyError as problem:
        path = _path_to_duplicate(json.loads(text, object_pairs_hook=_Pairs))
        raise InputError(f"{path}{problem}") from None
    except RecursionError:
        raise InputError(f"is nested deeper than {MAX_DEPTH} levels") from None
    except (InputError, json.JSONDecodeError):
        raise
    except ValueError:
        raise InputError("holds a number with too many digits") from None
    finally:
        if collecting:
            gc.enable()
    if "\\" in text:
        msgspec.json.encode(document)  # escapes can make text that no file can hold
    return document


def object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values; a key that stands twice is refused."""
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKeyError(f"{excerpt(key)}: stands twice in one object")
            seen.add(key)
    return result


def require_no_underflow(literal: str) -> float:
    """The number that a literal says, unless it says another one than 0 that becomes 0."""
    number = float(literal)
    if number == 0 and NOT_ZERO.match(literal):
        raise InputError(f"{excerpt(literal)} is too small a number to be told from 0; write 0")
    return number


class _Pairs(list[tuple[str, Any]]):
    """An object with all its keys, those that stand twice included."""


def _path_to_duplicate(document: Any) -> str:
    """The path to an object in which a key stands twice, with a point at its end."""
    left: list[tuple[str, Any]] = [("", document)]
    while left:
        path, value = left.pop()
        prefix = f"{path}." if path else ""
        if isinstance(value, _Pairs):
            if len(dict(value)) < len(value):
                return prefix
            left += [(f"{prefix}{key[:60]}", entry) for key, entry in reversed(value)]
        elif isinstance(value, list):
            entries = reversed(list(enumerate(value)))
            left += [(f"{path}[{i}]", entry) for i, entry in entries if isinstance(entry, list)]
    return ""


# ---------------------------------------------------------------------------- writing


def to_json(document: dict[str, Any]) -> bytes:
    """JSON that people can read: lists of plain values and small objects stay on one line.

    It is YAML, too: characters that YAML does not take as they are become escapes.
    """
    text = NOT_IN_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", _pretty(document, ""))
    return text.encode() + b"\n"


def require_readable(data: bytes) -> bytes:
    """These bytes of JSON, unless they are too large to be read again."""
    span = _find_schedule(data)
    require_json_size(data if span is None else data[: span[0]] + data[span[1] :])
    return data


def _pretty(value: Any, indent: str) -> str:
    if _fits_one_line(value):
        return msgspec.json.encode(value, enc_hook=_plain_value).decode()
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
        return not any(issubclass(kind, dict | list | tuple) for kind in set(map(type, value)))
    return True


def _plain_value(value: Any) -> int | float | str:
    """A number or a text of another kind, such as one of numpy, as Python's own."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, str):
        return str(value)
    raise InputError(f"{excerpt(value)} cannot be written as JSON")
