"""Variables that forwards change, and that code of several stages reads: ranks do not share them.

A counter that layers of two stages count up grows on each rank by that rank's layers alone. Its
value may have no influence yet. So what variables hold behind the whole model's forwards is
compared with what they hold behind those of a stage, for all variables that code of the stage
reads. They begin with the same values.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from pipeplan.documents.text import excerpt, printable
from pipeplan.runtime.code_variables import Variable
from pipeplan.runtime.variable_leaves import leaves_of
from pipeplan.runtime.verification.stage_calls import Result

__all__ = ["find_shared_variable", "read_leaves"]

MISSING = "nothing"
LOOSE = (str, bytes, float)
TOLERANCE = 1e-4


def read_leaves(variables: Iterable[Variable]) -> dict[str, Any]:
    """Copies of what variables hold, by path."""
    return {path: _copy(value) for each in variables for path, value in leaves_of(each)}


def find_shared_variable(before: Mapping[str, Any], whole: Result, cut: Result) -> str | None:
    """One line about a variable that other stages change, too; None if there is none.

    Entries of dicts and lists count if forwards of this stage change them, too: others may be
    notes of each layer by itself. Texts and plain floats are left out: they may be times.
    """
    for path in dict.fromkeys((*whole.leaves, *cut.leaves)):
        start, mine, theirs = (
            each.get(path, MISSING) for each in (before, cut.leaves, whole.leaves)
        )
        is_own = not _are_alike(start, mine)
        # What cannot be put back, such as in objects of other packages, begins with other values.
        begins_alike = _are_alike(start, whole.leaves_before.get(path, MISSING))
        if not begins_alike or (isinstance(theirs, LOOSE) and theirs is not MISSING):
            continue
        if _are_alike(mine, theirs) or (not is_own and "[" in path):
            continue
        return (
            f"{printable(path)}: code of several stages reads this variable, and forwards change"
            f" it: it is {_text(theirs)} behind those of the whole model, but {_text(mine)} behind"
            " those of this stage alone; ranks do not share variables: keep it in attributes or"
            " buffers of each layer, or pass it on from layer to layer"
        )
    return None


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _are_alike(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.shape == second.shape and torch.allclose(
            first.double(), second.double(), rtol=TOLERANCE, equal_nan=True
        )
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return first.shape == second.shape and bool(np.array_equal(first, second))
    return type(first) is type(second) and bool(first == second)


def _text(value: Any) -> str:
    is_tensor = isinstance(value, torch.Tensor | np.ndarray)
    return f"a tensor {tuple(value.shape)}" if is_tensor else excerpt(str(value))
