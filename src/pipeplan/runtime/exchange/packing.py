"""Small messages in one piece: header and tensors, one after another, in one buffer.

A message has a fixed cost, about that of copying 100 kB. So copying small tensors behind their
header is cheaper than sending the header by itself::

    tensors of one type      | header 384 B | tensor 0 | tensor 1 |                elements
    of several types         | header 384 B | tensor 0 | pad | tensor 1 | pad |    bytes
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from pipeplan.runtime.byte_views import as_bytes
from pipeplan.runtime.exchange.contents import AS_FORECAST, HEADER_BYTES, Contents

__all__ = ["Packing", "find_packing"]

MOST_BYTES = 65_536
ALIGNMENT = 16
"""The largest number of bytes of one element."""
SINGLE_TYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}
"""Types whose tensors may share a buffer of their own type; others are copied as bytes."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    """In elements of the buffer."""
    stop: int


@dataclass(frozen=True, slots=True)
class Packing:
    """How a header and so many rows of some tensors lie in one buffer."""

    dtype: torch.dtype
    size: int
    """In elements of this type."""
    places: tuple[_Place, ...]
    header: torch.Tensor
    """The header of a message as forecast."""

    @property
    def num_bytes(self) -> int:
        """The size of the buffer."""
        return self.size * self.dtype.itemsize

    def fill(self, header: torch.Tensor) -> torch.Tensor:
        """A message with this header, and nothing of use behind it."""
        buffer = torch.zeros(self.size, dtype=self.dtype)
        buffer.view(torch.uint8)[:HEADER_BYTES] = header
        return buffer

    def pack(self, tensors: Sequence[torch.Tensor], header: torch.Tensor) -> torch.Tensor:
        """Header and tensors in one buffer."""
        parts = [self.header if header is AS_FORECAST else header.view(self.dtype)]
        for tensor, place in zip(tensors, self.places, strict=True):
            flat = tensor.detach().reshape(-1)
            if place.dtype is not self.dtype:
                flat = as_bytes(flat)  # `cat` by itself minds strides and lazy conjugates
            parts.append(flat)
            padding = place.stop - place.start - flat.numel()
            if padding:
                parts.append(self.header[:padding])  # any bytes will do
        return torch.cat(parts)

    def unpack(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of a buffer, as views of it."""
        return [
            buffer.as_strided(place.shape, place.strides, place.start)
            if place.dtype is self.dtype
            else _view(buffer, place)
            for place in self.places
        ]


@lru_cache(maxsize=1024)
def find_packing(contents: Contents, num_rows: int) -> Packing | None:
    """How so many rows travel with their header; None if they are too large for one message."""
    sizes = [kind.num_bytes(num_rows) for kind in contents.kinds]
    if HEADER_BYTES + sum(map(_padded, sizes)) > MOST_BYTES:
        return None
    dtypes = {kind.dtype for kind in contents.kinds}
    is_uniform = len(dtypes) == 1 and dtypes <= SINGLE_TYPES
    dtype = dtypes.pop() if is_uniform else torch.uint8
    start, places = HEADER_BYTES // dtype.itemsize, []
    for kind, size in zip(contents.kinds, sizes, strict=True):
        length = size // dtype.itemsize if is_uniform else _padded(size)
        shape = kind.shape_for(num_rows)
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        places.append(_Place(kind.dtype, shape, strides, start, start + length))
        start += length
    return Packing(dtype, start, tuple(places), AS_FORECAST.view(dtype))


def _view(buffer: torch.Tensor, place: _Place) -> torch.Tensor:
    num_bytes = math.prod(place.shape) * place.dtype.itemsize
    return buffer[place.start : place.start + num_bytes].view(place.dtype).view(place.shape)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
