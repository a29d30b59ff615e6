"""Torch tensors as bytes of a safetensors file, and back."""

import hashlib
from collections.abc import Iterator

import torch

from pipeplan.errors import CheckpointError
from pipeplan.runtime.byte_views import as_bytes
from pipeplan.runtime.checkpoints.reading import quoted, shown
from pipeplan.runtime.checkpoints.tensor_files import TensorFile, TensorSource

__all__ = ["DTYPES", "read_tensor", "require_like", "source_of"]

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAME_OF = {dtype: name for name, dtype in DTYPES.items()}
PIECE_BYTES = 1 << 24


def source_of(name: str, tensor: torch.Tensor) -> TensorSource:
    """The tensor as bytes to be written; its values are copied when they are written.

    Raises:
        CheckpointError: a file cannot hold such a tensor.
    """
    values = tensor.detach()
    if values.layout is not torch.strided or values.is_quantized or values.is_meta:
        raise CheckpointError(f"{quoted(name)}: is no dense tensor with values; it cannot be saved")
    if values.dtype not in NAME_OF:
        raise CheckpointError(
            f"{quoted(name)}: has the type {values.dtype}, which a safetensors file cannot hold"
        )

    def make_pieces() -> Iterator[memoryview]:
        if values.numel():
            yield from _pieces(values.cpu())

    return TensorSource(
        name=name,
        dtype=NAME_OF[values.dtype],
        shape=tuple(values.shape),
        make_pieces=make_pieces,
    )


def require_like(file: TensorFile, name: str, like: torch.Tensor) -> None:
    """Refuse a tensor of another shape or type than the model's."""
    entry = file.entries[name]
    where = f"{shown(file.path)}: {quoted(name)}"
    if entry.shape != tuple(like.shape):
        raise CheckpointError(
            f"{where} has the shape {list(entry.shape)}, the model's has {list(like.shape)};"
            " it is of another model"
        )
    if DTYPES[entry.dtype] is not like.dtype:
        raise CheckpointError(
            f"{where} has the type {DTYPES[entry.dtype]}, the model's has {like.dtype};"
            " build the model with the same type"
        )


def read_tensor(file: TensorFile, name: str, sha256: str | None) -> torch.Tensor:
    """A tensor of a file, on the CPU; with `sha256` its checksum has to be this one."""
    entry = file.entries[name]
    where = f"{shown(file.path)}: {quoted(name)}"
    dtype = DTYPES[entry.dtype]
    try:
        tensor = torch.empty(entry.shape, dtype=dtype)
    except RuntimeError:  # dimensions of any size, one of them 0
        raise CheckpointError(
            f"{where} has the shape {list(entry.shape)}, which is too large"
        ) from None
    digest = hashlib.sha256()
    position = 0
    target = next(_pieces(tensor, whole=True)) if entry.num_bytes else memoryview(b"")
    for piece in file.pieces(name):
        digest.update(piece)
        target[position : position + len(piece)] = piece
        position += len(piece)
    if sha256 is not None and digest.hexdigest() != sha256:
        raise CheckpointError(f"{where}: its checksum differs; the file is damaged")
    return tensor


def _pieces(tensor: torch.Tensor, *, whole: bool = False) -> Iterator[memoryview]:
    """The memory of a tensor with elements; that of a copy, if it is not contiguous."""
    memory: memoryview = as_bytes(tensor).numpy().data
    step = len(memory) if whole else PIECE_BYTES
    for start in range(0, len(memory), step):
        yield memory[start : start + step]
