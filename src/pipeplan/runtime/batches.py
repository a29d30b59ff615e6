"""A batch: nested tensors whose first dimension is rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeplan.errors import RuntimeMismatchError
from pipeplan.splitting.nesting import map_tensors

__all__ = ["Whole", "as_call", "num_rows", "select_rows", "signature"]


@dataclass(frozen=True, slots=True)
class Whole:
    """A value of the batch that every microbatch gets whole, such as a mask for all rows."""

    value: Any


def as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments by which a model is called with a batch.

    A dict gives arguments by name, a tuple by position. Anything else is the only argument.
    """
    if isinstance(batch, Mapping):  # a dict class of another library, too
        return (), dict(batch)
    return (batch if isinstance(batch, tuple) else (batch,)), {}


def num_rows(value: Any, what: str) -> int:
    """The number of rows; all tensors must have the same."""
    found: list[int] = []

    def count(leaf: Any) -> None:
        if isinstance(leaf, Whole):
            return
        if not leaf.ndim:
            raise RuntimeMismatchError(
                f"{what}: holds a tensor without rows; wrap it in pipeplan.runtime.Whole"
            )
        found.append(leaf.shape[0])

    map_tensors(value, count, Whole)
    if not found:
        raise RuntimeMismatchError(f"{what}: holds no tensor with rows")
    if len(set(found)) > 1:
        raise RuntimeMismatchError(
            f"{what}: its tensors have {' and '.join(map(str, sorted(set(found))))} rows; wrap"
            " in pipeplan.runtime.Whole what all rows share"
        )
    return found[0]


def select_rows(value: Any, rows: Sequence[int], device: torch.device) -> Any:
    """These rows of every tensor, on the device; a view if the rows are consecutive."""
    start, stop = rows[0], rows[-1] + 1
    is_consecutive = list(rows) == list(range(start, stop))
    index = None if is_consecutive else torch.tensor(rows)

    def pick(leaf: Any) -> Any:
        if isinstance(leaf, Whole):
            return map_tensors(leaf.value, lambda tensor: tensor.to(device))
        chosen = leaf[start:stop] if index is None else leaf[index.to(leaf.device)]
        return chosen.to(device, non_blocking=True)

    return map_tensors(value, pick, Whole)


def signature(value: Any) -> tuple[Any, ...]:
    """A key that is equal for batches whose microbatches have equal shapes."""
    found: list[Any] = []

    def describe(leaf: Any) -> None:
        tensor = leaf.value if isinstance(leaf, Whole) else leaf
        if isinstance(tensor, torch.Tensor):
            found.append((tuple(tensor.shape), str(tensor.dtype), isinstance(leaf, Whole)))

    map_tensors(value, describe, Whole)
    return tuple(found)
