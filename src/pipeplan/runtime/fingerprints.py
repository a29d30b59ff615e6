"""A number that tells batches apart, from a sample of their values.

Of each tensor, at most 1024 values are read, spread over it. Every step reads other places. So two
batches that differ in many values are told apart at once, and two that differ in few after some
steps. Values of a GPU come to the host in one copy.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from pipeplan.runtime.batches import Whole, find_leaves
from pipeplan.runtime.byte_views import as_bytes

__all__ = ["fingerprint", "given_tensors", "memory_of", "shape_key"]

MOST_VALUES = 1024
STRIDE_OF_STEPS = 7919
"""A prime, so that steps read different places."""
ARRAY_TYPES = {torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8}
"""The usual types of batches, which numpy knows."""
NUM_BYTES = 7
"""So that the number fits into a signed integer of 64 bits."""


def fingerprint(value: Any, step: int) -> int:
    """A number that is equal for equal values, on all ranks in the same step."""
    digest = hashlib.blake2b(digest_size=NUM_BYTES)
    on_device: list[torch.Tensor] = []
    for path, leaf in _opened(value):
        if isinstance(leaf, torch.Tensor):
            digest.update(f"{path}{leaf.dtype}{tuple(leaf.shape)}".encode(errors="replace"))
            if _is_array(leaf):  # numpy takes the sample faster
                digest.update(_sample_array(leaf.numpy(), step))
                continue
            sample = _sample(leaf, step)
            if sample.device.type == "cpu":
                digest.update(sample.numpy().data)
            else:
                on_device.append(sample)
        elif isinstance(leaf, np.ndarray):
            digest.update(f"{path}{leaf.dtype}{leaf.shape}".encode(errors="replace"))
            digest.update(_sample_array(leaf, step))
        elif _has_stable_text(leaf):
            digest.update(f"{path}{leaf!r}".encode(errors="replace"))
    if on_device:
        digest.update(torch.cat(on_device).cpu().numpy().data)
    return int.from_bytes(digest.digest(), "big")


def _is_array(tensor: torch.Tensor) -> bool:
    """Whether numpy can look at the tensor's memory, without a copy."""
    return (
        tensor.dtype in ARRAY_TYPES
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and type(tensor) is torch.Tensor
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def _opened(value: Any) -> list[tuple[str, Any]]:
    """All leaves with their paths, also those that are marked as whole."""
    if isinstance(value, torch.Tensor):
        return [("", value)]
    found = []
    for path, leaf in find_leaves(value):
        if isinstance(leaf, Whole):
            found += [(f"{path}/{inner}", entry) for inner, entry in _opened(leaf.value)]
        else:
            found.append((path, leaf))
    return found


def shape_key(value: Any, prefix: str) -> int:
    """A number that is equal for batches whose tensors have equal shapes and types."""
    parts = [prefix]
    for _, leaf in find_leaves(value):
        tensor = leaf.value if isinstance(leaf, Whole) else leaf
        if isinstance(tensor, torch.Tensor):
            parts.append(f"{tuple(tensor.shape)}{tensor.dtype}{isinstance(leaf, Whole)}")
    text = "/".join(parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=NUM_BYTES).digest(), "big")


def _sample(tensor: torch.Tensor, step: int) -> torch.Tensor:
    """Some values of a tensor, as bytes."""
    if tensor.layout is not torch.strided:
        return torch.zeros(0, dtype=torch.uint8, device=tensor.device)
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.numel() <= MOST_VALUES:
        return as_bytes(plain)
    start, stride = _places(plain.numel(), step)
    if plain.is_contiguous():
        values = plain.view(-1)[start : start + MOST_VALUES * stride : stride]
        return as_bytes(values)
    # To flatten it would copy all of it.
    return as_bytes(plain[_coordinates(plain, start, stride)])


def _coordinates(tensor: torch.Tensor, start: int, stride: int) -> tuple[torch.Tensor, ...]:
    """Where these values of the flattened tensor stand in the tensor."""
    index = torch.arange(MOST_VALUES, device=tensor.device) * stride + start
    return torch.unravel_index(index, tensor.shape)


def _sample_array(array: np.ndarray[Any, Any], step: int) -> bytes:
    if array.size <= MOST_VALUES:
        chosen = array.reshape(-1)
    elif array.flags.c_contiguous:
        start, stride = _places(array.size, step)
        chosen = array.reshape(-1)[start : start + MOST_VALUES * stride : stride]
    else:
        start, stride = _places(array.size, step)
        chosen = array.take(np.arange(MOST_VALUES) * stride + start)
    if array.dtype.hasobject:
        return repr(chosen.tolist()).encode(errors="replace")
    return chosen.tobytes()


def _places(num_values: int, step: int) -> tuple[int, int]:
    """Where the sample begins in this step, and how far apart its values are."""
    stride = num_values // MOST_VALUES
    stride -= stride > 1 and stride % 2 == 0  # odd, so that it meets all columns of a power of 2
    return step * STRIDE_OF_STEPS % stride, stride


def _has_stable_text(leaf: Any) -> bool:
    """Whether equal values have equal texts on all ranks; other objects show their address."""
    return isinstance(leaf, bool | int | float | complex | str | bytes | None)


def given_tensors(value: Any) -> Iterator[Any]:
    """The tensors and arrays of a batch that are divided into microbatches."""
    if value is None:
        return
    for _, leaf in find_leaves(value):
        inner = leaf.value if isinstance(leaf, Whole) else leaf
        if isinstance(inner, torch.Tensor | np.ndarray) and not isinstance(leaf, Whole):
            yield inner


def memory_of(value: Any) -> int:
    """Where the values of a tensor or an array begin, with all that it is a view of."""
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().data_ptr() if value.layout is torch.strided else id(value)
    while isinstance(value.base, np.ndarray):
        value = value.base
    return int(value.__array_interface__["data"][0])
