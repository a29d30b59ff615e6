"""Small messages in one piece: header and tensors, one after another, in one buffer of bytes.

A message has a fixed cost, about that of copying 100 kB. So copying small tensors behind their
header is cheaper than sending the header by itself::

    | header 256 B | tensor 0 | pad | tensor 1 | pad |
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

from pipeplan.runtime.exchange.contents import HEADER_BYTES, Contents

__all__ = ["fits_in_one", "pack", "packed_bytes", "unpack"]

MOST_BYTES = 65_536
ALIGNMENT = 16
"""The largest number of bytes of one element."""


def fits_in_one(contents: Contents, num_rows: int) -> bool:
    """Whether the header and so many rows travel as one message."""
    return packed_bytes(contents, num_rows) <= MOST_BYTES


@lru_cache(maxsize=1024)
def packed_bytes(contents: Contents, num_rows: int) -> int:
    """The size of header and tensors."""
    sizes = (num_rows * kind.row_bytes for kind in contents.kinds)
    return HEADER_BYTES + sum(_padded(size) for size in sizes)


def pack(header: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Header and tensors in one buffer."""
    parts = [header]
    for tensor in tensors:
        flat = tensor.reshape(-1).view(torch.uint8)
        parts.append(flat)
        padding = -flat.numel() % ALIGNMENT
        if padding:
            parts.append(header[:padding])  # any bytes will do
    return torch.cat(parts)


def unpack(buffer: torch.Tensor, contents: Contents, num_rows: int) -> list[torch.Tensor]:
    """The tensors of a buffer, as views of it."""
    tensors, start = [], HEADER_BYTES
    for kind in contents.kinds:
        size = num_rows * kind.row_bytes
        piece = buffer[start : start + size].view(kind.dtype)
        tensors.append(piece.view(num_rows, *kind.shape))
        start += _padded(size)
    return tensors


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
