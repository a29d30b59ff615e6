"""Safetensors files, read strictly and written piece by piece.

::

    8 bytes    the length of the header, little endian
    header     {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}, spaces
    data       the bytes of the tensors one after another, without holes

This module needs neither torch nor the package `safetensors`: tensors are copied as bytes, so a
file of any size takes little memory. Whatever a file holds, reading it executes nothing. The tests
compare both directions with that package.

Reference:
    https://github.com/huggingface/safetensors, "Format". Differs: types of less than a byte are
    refused.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pipeplan.documents.text import excerpt
from pipeplan.errors import CheckpointError
from pipeplan.runtime.checkpoints.reading import open_regular, parse_strictly, quoted, shown

__all__ = [
    "ITEM_BYTES",
    "TensorEntry",
    "TensorFile",
    "TensorSource",
    "WrittenFile",
    "write_tensor_file",
]

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}
"""The bytes of one element, by the name of its type."""

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors package, too."""
MAX_DIMENSION = 2**63
PIECE_BYTES = 1 << 22
METADATA = "__metadata__"
FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where the bytes of one tensor stand in the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensor."""
        return self.end - self.begin


class TensorFile:
    """An open safetensors file whose header has been checked."""

    def __init__(self, path: Path, *, follow_links: bool = False) -> None:
        self.path = path
        self._file = open_regular(path, follow_links=follow_links)
        try:
            self.num_bytes = os.fstat(self._file.fileno()).st_size
            header = self._read_header()
            self.header_sha256 = hashlib.sha256(header).hexdigest()
            """The checksum of all bytes before the data."""
            self._data_start = len(header)
            self.entries = _entries(parse_strictly(header[LENGTH_BYTES:], path), path)
            _require_no_holes(self.entries, self.num_bytes - self._data_start, path)
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> bytes:
        start = self._file.read(LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        if len(start) < LENGTH_BYTES or length > self.num_bytes - LENGTH_BYTES:
            raise CheckpointError(f"{shown(self.path)}: ends inside its header; it is truncated")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{shown(self.path)}: has a header of {length:,} bytes; at most"
                f" {MAX_HEADER_BYTES:,} can be"
            )
        header = self._file.read(length)
        if len(header) < length:
            raise CheckpointError(f"{shown(self.path)}: ends inside its header; it is truncated")
        return start + header

    def pieces(self, name: str) -> Iterator[bytes]:
        """The bytes of a tensor, piece by piece."""
        entry = self.entries[name]
        self._file.seek(self._data_start + entry.begin)
        left = entry.num_bytes
        while left:
            piece = self._file.read(min(left, PIECE_BYTES))
            if not piece:
                raise CheckpointError(f"{shown(self.path)}: {quoted(name)} is truncated")
            left -= len(piece)
            yield piece

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _entries(header: Any, path: Path) -> dict[str, TensorEntry]:
    if not isinstance(header, dict):
        raise CheckpointError(f"{shown(path)}: its header is no object with a tensor for each name")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or any(type(text) is not str for text in metadata.values()):
        raise CheckpointError(f"{shown(path)}: {METADATA} is not made of texts")
    return {name: _entry(value, f"{shown(path)}: {quoted(name)}") for name, value in header.items()}


def _entry(value: Any, where: str) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != FIELDS:
        raise CheckpointError(f"{where} needs exactly the fields {', '.join(sorted(FIELDS))}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if type(dtype) is not str or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{where} has the type {excerpt(dtype)}, which cannot be read")
    if not _are_counts(shape):
        raise CheckpointError(f"{where} has the shape {excerpt(shape)}, which cannot be")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has the data_offsets {excerpt(offsets)}, which cannot be")
    begin, end = offsets
    needed = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != needed:
        raise CheckpointError(
            f"{where} has {end - begin:,} bytes; its shape {excerpt(shape)} of {dtype} needs"
            f" {excerpt(needed)}"
        )
    return TensorEntry(dtype=dtype, shape=tuple(shape), begin=begin, end=end)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < MAX_DIMENSION for value in values
    )


def _require_no_holes(entries: Mapping[str, TensorEntry], data_bytes: int, path: Path) -> None:
    """Each byte of the data belongs to exactly one tensor, so that each has a checksum."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            kind = "overlaps another tensor" if entry.begin < position else "begins behind a hole"
            raise CheckpointError(f"{shown(path)}: {quoted(name)} {kind} at byte {entry.begin:,}")
        position = entry.end
    if position != data_bytes:
        kind = "is truncated" if position > data_bytes else "holds bytes of no tensor"
        raise CheckpointError(
            f"{shown(path)}: {kind}: tensors need {position:,} bytes, the file has {data_bytes:,}"
        )


# ------------------------------------------------------------------------------- writing


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """A tensor to be written, as bytes that are made when they are needed."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make_pieces: Callable[[], Iterable[bytes | memoryview]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """What a reader needs to know, to find each changed bit."""

    num_bytes: int
    header_sha256: str
    sha256_of: dict[str, str]
    """The checksum of each tensor's bytes."""


def write_tensor_file(
    file: BinaryIO, sources: Sequence[TensorSource], metadata: Mapping[str, str] | None = None
) -> WrittenFile:
    """Write the tensors, those with large elements first, so that all are aligned."""
    ordered = sorted(sources, key=lambda source: (-ITEM_BYTES[source.dtype], source.name))
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    position = 0
    for source in ordered:
        if source.name in header or source.name == METADATA:
            raise CheckpointError(f"{quoted(source.name)} cannot be the name of a tensor here")
        end = position + math.prod(source.shape) * ITEM_BYTES[source.dtype]
        header[source.name] = {
            "dtype": source.dtype,
            "shape": list(source.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"{len(ordered):,} tensors need a header of {len(text):,} bytes")
    start = len(text).to_bytes(LENGTH_BYTES, "little") + text
    file.write(start)
    sha256_of = {}
    for source in ordered:
        digest, num_bytes = hashlib.sha256(), 0
        for piece in source.make_pieces():
            digest.update(piece)
            num_bytes += len(piece)
            file.write(piece)
        begin, end = header[source.name]["data_offsets"]
        assert num_bytes == end - begin, f"{source.name} has {num_bytes} bytes, not {end - begin}"
        sha256_of[source.name] = digest.hexdigest()
    return WrittenFile(
        num_bytes=len(start) + position,
        header_sha256=hashlib.sha256(start).hexdigest(),
        sha256_of=sha256_of,
    )
