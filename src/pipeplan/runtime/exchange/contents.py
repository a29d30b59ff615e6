"""What a message carries, and the header that says so.

A message is a header and tensors. The header is a block of bytes of fixed size, so a receive for it
can be posted before anybody knows what comes::

    byte 0          0: as forecast, nothing follows   1: other contents, described as text
    bytes 4-7       the length of the text
    bytes 8-255     the text, if it fits; a longer text is a message of its own
    bytes 256-383   a note: numbers that ride with the message (`riding`)

The text holds the shape and type of each tensor, whether it has a gradient, and the template: the
nesting of tuples, lists and dicts with all plain values. Contents are compared as text, so that
1, 1.0 and True differ and NaN equals NaN.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from pipeplan.errors import RuntimeMismatchError

__all__ = [
    "AS_FORECAST",
    "HEADER_BYTES",
    "NOTE_START",
    "Contents",
    "TensorKind",
    "describe",
    "encode_header",
    "noted_header",
    "parse_template",
    "read_header",
]

HEADER_BYTES = 384
TEXT_START, TEXT_STOP = 8, 256
NOTE_START = TEXT_STOP
LENGTH = slice(4, TEXT_START)
COMMON_TEMPLATES = tuple((template, json.dumps(template)) for template in (["tensor", 0], [0]))
"""One tensor, and the gradient of one tensor; with their texts."""
AS_FORECAST = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
"""The header of a message that carries what both ends expect."""


class TensorKind(NamedTuple):
    """A tensor that crosses a cut: all that is known of it except its number of rows.

    Between two stages of one rank each, nothing is divided. There a tensor may lie otherwise.

    This is no dataclass, since every message makes and compares some: tuples do that faster.
    """

    shape: tuple[int, ...]
    """The shape of one row, or of the tensor if its first dimension is not rows."""
    dtype: torch.dtype
    has_rows: bool
    has_gradient: bool

    def shape_for(self, num_rows: int) -> tuple[int, ...]:
        """The shape of the tensor."""
        return (num_rows, *self.shape) if self.has_rows else self.shape

    def num_bytes(self, num_rows: int) -> int:
        """The size of the tensor."""
        return math.prod(self.shape_for(num_rows)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Contents:
    """What a message carries, apart from the values and the number of rows of its tensors."""

    kinds: tuple[TensorKind, ...]
    template: str
    """JSON: where the tensors go, and all plain values."""

    def has_layout_of(self, other: "Contents") -> bool:
        """Whether the tensors have the same shapes and types."""
        mine, theirs = self.kinds, other.kinds
        return mine is theirs or [kind[:3] for kind in mine] == [kind[:3] for kind in theirs]

    def num_bytes(self, num_rows: int) -> int:
        """The size of all tensors."""
        return sum(kind.num_bytes(num_rows) for kind in self.kinds)


def describe(
    tensors: Sequence[torch.Tensor],
    have_gradient: Sequence[bool],
    template: Any,
    num_rows: int,
    stage: int,
    *,
    is_divided: bool = True,
) -> Contents:
    """The contents of a message with these tensors.

    Raises:
        RuntimeMismatchError: it is divided or joined by rows, and the first dimension of a tensor
            is not their number.
    """
    kinds = [
        _kind(tensor.shape, tensor.dtype, tensor.layout, has_gradient, num_rows, stage, is_divided)
        for tensor, has_gradient in zip(tensors, have_gradient, strict=True)
    ]
    return _contents(tuple(kinds), _text_of(template))


@lru_cache(maxsize=1024)
def _kind(
    shape: torch.Size,
    dtype: torch.dtype,
    layout: torch.layout,
    has_gradient: bool,
    num_rows: int,
    stage: int,
    is_divided: bool,
) -> TensorKind:
    has_rows = bool(shape) and shape[0] == num_rows
    if is_divided and not has_rows:
        raise RuntimeMismatchError(
            f"stage {stage}: its last layer returns a tensor of shape"
            f" {tuple(shape)} for {num_rows} rows; what replicas divide has the microbatch's rows"
            " as its first dimension: change this in the layer, or plan without replicas there"
        )
    if layout is not torch.strided:
        raise RuntimeMismatchError(
            f"stage {stage}: its last layer returns a tensor of layout {layout}; only"
            " dense tensors cross a cut, so call to_dense() in the layer"
        )
    return TensorKind(shape[1:] if has_rows else shape, dtype, has_rows, has_gradient)


@lru_cache(maxsize=1024)
def _contents(kinds: tuple[TensorKind, ...], template: str) -> Contents:
    """One object for equal contents, so that they are compared fast."""
    return Contents(kinds, template)


def _text_of(template: Any) -> str:
    for common, text in COMMON_TEMPLATES:
        if template == common:
            return text
    return json.dumps(template)


@lru_cache(maxsize=256)
def parse_template(text: str) -> Any:
    """The template that joins tensors into the nested value."""
    return json.loads(text)


def encode_header(
    contents: Contents, note: bytes = b""
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The header of a message with these contents, and its text if the header cannot hold it."""
    entries = [[list(shape), str(dtype), *flags] for shape, dtype, *flags in contents.kinds]
    text = json.dumps([entries, contents.template]).encode()
    header = bytearray(HEADER_BYTES)
    header[0] = 1
    header[LENGTH] = len(text).to_bytes(TEXT_START - LENGTH.start, "little")
    header[NOTE_START : NOTE_START + len(note)] = note
    if len(text) <= TEXT_STOP - TEXT_START:
        header[TEXT_START : TEXT_START + len(text)] = text
        return torch.frombuffer(header, dtype=torch.uint8), None
    return (
        torch.frombuffer(header, dtype=torch.uint8),
        torch.frombuffer(bytearray(text), dtype=torch.uint8),
    )


def noted_header(note: bytes) -> torch.Tensor:
    """The header of a message as forecast, with a note."""
    return torch.frombuffer(bytearray(NOTE_START) + note, dtype=torch.uint8)


def read_header(header: bytes | bytearray) -> tuple[bool, int, Contents | None]:
    """Whether the message is as forecast; else the length of its text; and the contents if known.

    The contents are None if the text is a message of its own.
    """
    if not header[0]:
        return True, 0, None
    length = int.from_bytes(header[LENGTH], "little")
    if length > TEXT_STOP - TEXT_START:
        return False, length, None
    return False, length, decode(bytes(header[TEXT_START : TEXT_START + length]))


@lru_cache(maxsize=1024)
def decode(text: bytes) -> Contents:
    """The contents that a text describes."""
    entries, template = json.loads(text)
    kinds = [
        TensorKind(tuple(shape), getattr(torch, dtype.removeprefix("torch.")), *flags)
        for shape, dtype, *flags in entries
    ]
    return _contents(tuple(kinds), template)
