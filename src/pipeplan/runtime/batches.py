"""A batch: nested values whose rows are divided among microbatches and replicas.

::

    tensor, numpy array           its first dimension is rows
    tuple, dict, dataclass        a container: each entry by itself
    list                          a container if all tensors inside have the batch's rows; else one
                                  entry for each row; else refused
    None, number, text, Whole     every microbatch gets it whole
    anything else                 refused: nobody knows what its rows are
"""

import copy
import dataclasses
import enum
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from pipeplan.errors import RuntimeMismatchError

__all__ = ["Whole", "as_call", "as_range", "find_leaves", "mark_rows", "num_rows", "select_rows"]

PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(enum.Enum, np.generic, torch.dtype, torch.device),
)


@dataclass(frozen=True, slots=True)
class Whole:
    """A value of the batch that every microbatch gets whole, such as a mask for all rows."""

    value: Any


@dataclass(frozen=True, slots=True)
class _Entries:
    """A list with one entry for each row."""

    value: list[Any]


def as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments by which a model is called with a batch.

    A dict gives arguments by name, a tuple by position. Anything else is the only argument.
    """
    if isinstance(batch, Mapping):  # a dict class of another library, too
        return (), dict(batch)
    return (batch if isinstance(batch, tuple) else (batch,)), {}


def find_leaves(value: Any) -> list[tuple[str, Any]]:
    """Everything in the value that is no container, lists opened; with paths and in their order."""
    if isinstance(value, torch.Tensor):
        return [("", value)]
    found = [(path, leaf) for path, leaf, _ in _leaves(value, "", in_list=False)]
    return sorted(found, key=lambda entry: entry[0])  # dicts may be filled in any order


def num_rows(value: Any, what: str) -> int:
    """The number of rows; all tensors outside of lists must have the same.

    Raises:
        RuntimeMismatchError: tensors disagree, or nothing tells the number of rows.
    """
    found: list[int] = []
    has_lists = False
    for path, leaf, in_list in _leaves(value, what, in_list=False):
        if in_list:
            has_lists = True
        elif isinstance(leaf, torch.Tensor | np.ndarray):
            _require_data(leaf, path)
            if not leaf.ndim:
                raise RuntimeMismatchError(
                    f"{path}: holds a tensor without rows; wrap it in pipeplan.runtime.Whole"
                )
            found.append(len(leaf))
    if not found and has_lists:
        raise RuntimeMismatchError(
            f"{what}: holds only lists, so the number of its rows is not clear; give a tuple of"
            " arguments, or stack the rows in one tensor"
        )
    if not found:
        raise RuntimeMismatchError(f"{what}: holds no tensor with rows")
    if len(set(found)) > 1:
        raise RuntimeMismatchError(
            f"{what}: its tensors have {' and '.join(map(str, sorted(set(found))))} rows; wrap"
            " in pipeplan.runtime.Whole what all rows share"
        )
    if not found[0]:
        raise RuntimeMismatchError(f"{what}: has no rows; leave out empty batches")
    return found[0]


def mark_rows(value: Any, rows: int, what: str) -> Any:
    """The value with each list of rows marked, ready for `select_rows`.

    Raises:
        RuntimeMismatchError: something in it cannot be divided into so many rows.
    """
    if isinstance(value, list):
        return _mark_list(value, rows, what)
    if isinstance(value, torch.Tensor | np.ndarray):
        _require_data(value, what)
        if not value.ndim or len(value) != rows:
            raise RuntimeMismatchError(
                f"{what}: has shape {tuple(value.shape)} for {rows} rows; wrap in"
                " pipeplan.runtime.Whole what all rows share"
            )
        return value
    if isinstance(value, (Whole, *PLAIN)):
        return value
    return _map_entries(value, lambda entry, path: mark_rows(entry, rows, path), what)


def _require_data(value: torch.Tensor | np.ndarray[Any, Any], what: str) -> None:
    """Refuse tensors that are more than data: they need a gradient, or have no plain memory."""
    if not isinstance(value, torch.Tensor):
        return
    if value.layout is not torch.strided or value.is_nested:
        raise RuntimeMismatchError(
            f"{what}: is a sparse or nested tensor, which cannot be divided into rows; give a dense"
            " one (to_dense(), or padded), or wrap in pipeplan.runtime.Whole what all rows share"
        )
    if value.requires_grad:
        raise RuntimeMismatchError(
            f"{what}: needs a gradient, but a pipeline gives gradients to parameters of the model"
            " alone; detach() it, or make what computes it a layer of the model"
        )


def _mark_list(value: list[Any], rows: int, what: str) -> Any:
    leaves = [leaf for _, leaf, _ in _leaves(value, what, in_list=True)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor | np.ndarray)]
    are_columns = bool(tensors) and all(t.ndim and len(t) == rows for t in tensors)
    if are_columns and len(value) == rows:
        raise RuntimeMismatchError(
            f"{what}: is a list of {rows} entries whose tensors have {rows} rows each, so it can be"
            " read in two ways; give columns as a tuple, or stack the rows in one tensor"
        )
    if are_columns:
        return [mark_rows(entry, rows, f"{what}[{i}]") for i, entry in enumerate(value)]
    if len(value) == rows:
        return _Entries(value)
    raise RuntimeMismatchError(
        f"{what}: is a list of {len(value)} entries for {rows} rows; give one entry for each row,"
        " or wrap in pipeplan.runtime.Whole what all rows share"
    )


def select_rows(value: Any, rows: Sequence[int], device: torch.device | None) -> Any:
    """These rows of a marked value, on the device; views if the rows are consecutive.

    Without a device, tensors stay where they are.
    """
    return _select(value, as_range(rows), device)


def as_range(rows: Sequence[int]) -> Sequence[int]:
    """The same rows, as a range if they are consecutive."""
    if isinstance(rows, range) or not rows:
        return rows
    start, stop = rows[0], rows[-1] + 1
    return range(start, stop) if list(rows) == list(range(start, stop)) else rows


def _select(value: Any, rows: Sequence[int], device: torch.device | None) -> Any:
    # The common containers first: this runs for every microbatch.
    if type(value) is tuple:
        return tuple([_select(entry, rows, device) for entry in value])
    if type(value) is dict:
        return {key: _select(entry, rows, device) for key, entry in value.items()}
    if isinstance(value, torch.Tensor):
        if isinstance(rows, range):
            value = value[rows.start : rows.stop]
        else:
            value = value[torch.tensor(rows, device=value.device)]
        return value if device is None else value.to(device, non_blocking=True)
    if isinstance(value, np.ndarray):
        return value[list(rows)]
    if isinstance(value, Whole):
        return _move(value.value, device)
    if isinstance(value, _Entries):
        return [_move(value.value[row], device) for row in rows]
    if isinstance(value, list):
        return [_select(entry, rows, device) for entry in value]
    if isinstance(value, PLAIN):
        return value
    return _map_entries(value, lambda entry, _: _select(entry, rows, device), "")


def _move(value: Any, device: torch.device | None) -> Any:
    """The value with all tensors on the device; what is no container stays as it is."""
    if isinstance(value, torch.Tensor):
        return value if device is None else value.to(device, non_blocking=True)
    if isinstance(value, list):
        return [_move(entry, device) for entry in value]
    if _is_container(value):
        return _map_entries(value, lambda entry, _: _move(entry, device), "")
    return value


def _is_container(value: Any) -> bool:
    if isinstance(value, PackedSequence):
        return False
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type | Whole | _Entries)
    return isinstance(value, Mapping | tuple) or is_record


def _map_entries(value: Any, function: Callable[[Any, str], Any], what: str) -> Any:
    """A container of the same kind, with the function applied to each entry and its path."""
    if not _is_container(value):
        raise RuntimeMismatchError(
            f"{what}: a {type(value).__name__} cannot be divided into rows; give tensors in tuples,"
            " dicts or dataclasses, or wrap in pipeplan.runtime.Whole what all rows share"
        )
    if isinstance(value, Mapping):
        entries = {key: function(entry, f"{what}[{key!r}]") for key, entry in value.items()}
        return entries if type(value) is dict else _same_mapping(value, entries)
    if isinstance(value, tuple):
        parts = [function(entry, f"{what}[{i}]") for i, entry in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    result = copy.copy(value)
    for each in dataclasses.fields(value):
        entry = function(getattr(value, each.name), f"{what}.{each.name}")
        object.__setattr__(result, each.name, entry)  # frozen ones, too
    return result


def _same_mapping(value: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """A copy of a library's own kind of dict with other entries; a plain dict if it is fixed."""
    if not isinstance(value, MutableMapping):
        return entries
    result = copy.copy(value)
    for key, entry in entries.items():
        result[key] = entry
    return result


def _leaves(value: Any, what: str, *, in_list: bool) -> list[tuple[str, Any, bool]]:
    """Each leaf with its path, and whether it lies in a list."""
    if isinstance(value, list):
        pairs = [(f"{what}[{i}]", entry) for i, entry in enumerate(value)]
        found = [leaf for path, entry in pairs for leaf in _leaves(entry, path, in_list=True)]
        return found or [(what, None, True)]
    if isinstance(value, torch.Tensor | np.ndarray) or not _is_container(value):
        return [(what, value, in_list)]
    found = []

    def collect(entry: Any, path: str) -> Any:
        found.extend(_leaves(entry, path, in_list=in_list))
        return entry

    _map_entries(value, collect, what)
    return found
