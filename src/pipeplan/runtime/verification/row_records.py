"""Rows of a batch that hold something which no row held before.

A loss may be a mean over rows as long as no target is ignored (`ignore_index`, a mask). Padding may
come with some later batch only, in a few of its rows. Such rows hold a smaller or a larger number
than all rows before, or equal numbers side by side for longer. Records become rare by themselves,
so looking at these rows costs little in the long run.
"""

from typing import Any

import numpy as np
import torch

from pipeplan.runtime.batches import find_leaves

__all__ = ["RowRecords"]


class RowRecords:
    """The records of all batches so far, for each tensor of them."""

    def __init__(self, *, floats: bool = True) -> None:
        """Without `floats`, only whole numbers count."""
        self._floats = floats
        self._records: dict[str, tuple[float, float, float]] = {}
        """By path: the smallest and the largest number, and the most equal neighbours in a row."""

    def look(self, value: Any, num_rows: int) -> list[int]:
        """The rows of this batch that hold a record, rising."""
        found: set[int] = set()
        for path, leaf in find_leaves(value) if value is not None else ():
            tensor = torch.from_numpy(leaf) if _is_array(leaf) else leaf
            if isinstance(tensor, torch.Tensor) and self._counts(tensor, num_rows):
                found |= self._look_at(path, tensor.detach())
        return sorted(found)

    def _counts(self, tensor: torch.Tensor, num_rows: int) -> bool:
        has_rows = tensor.ndim > 0 and len(tensor) == num_rows and tensor.numel() > 0
        is_plain = tensor.layout is torch.strided and not tensor.is_complex()
        return has_rows and is_plain and (self._floats or not tensor.is_floating_point())

    def _look_at(self, path: str, tensor: torch.Tensor) -> set[int]:
        tensor = tensor.byte() if tensor.dtype is torch.bool else tensor
        least, most = (float(each) for each in torch.aminmax(tensor))
        equal = torch.zeros(len(tensor))
        if tensor.ndim > 1 and tensor.shape[1] > 1 and not tensor.is_floating_point():
            equal = (tensor[:, 1:] == tensor[:, :-1]).flatten(1).sum(1)
        before = self._records.get(path, (np.inf, -np.inf, -1.0))
        now = (least, most, float(equal.max()))
        beats = (now[0] < before[0], now[1] > before[1], now[2] > before[2])
        if not any(beats):
            return set()
        self._records[path] = (
            min(now[0], before[0]),
            max(now[1], before[1]),
            max(now[2], before[2]),
        )
        size = tensor.numel() // len(tensor)
        places = (int(tensor.argmin()) // size, int(tensor.argmax()) // size, int(equal.argmax()))
        return {place for place, is_record in zip(places, beats, strict=True) if is_record}


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf" and leaf.flags.writeable
