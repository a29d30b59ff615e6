"""Tensors as bytes."""

import torch

__all__ = ["as_bytes"]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor, one after another, as bytes; without a copy if possible."""
    # Flags of lazy conjugates and negatives are lost in bytes.
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # a single element counts as contiguous, whatever its stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)
