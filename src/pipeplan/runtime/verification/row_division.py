"""Finds out whether what crosses a cut can be divided by rows, as replicas do.

What a replica gets is some rows of what the stage before sends: a part of dimension 0. So a stage
has to give, for some rows in any order, just these rows of its output::

    rows 0 1 | 2 3   ->   y0 y1 | y2 y3        what is known of two microbatches
    rows 3 1 2       ->   y3 y1 y2             has to follow

It does not if a layer sorts the rows and a later stage puts them back, if dimension 0 is time, or
if a tensor has no rows at all. Shapes alone do not tell: all of them may be equal by chance.

Evaluation is compared, where BatchNorm takes each row by itself. Other layers may let rows meet
there, too; then nobody can tell, and only shapes and exchanged rows are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipeplan.runtime.verification.arrivals import as_message
from pipeplan.runtime.verification.layer_records import Noted, note
from pipeplan.runtime.verification.runs import owned_positions
from pipeplan.runtime.verification.same_randomness import SameRandomness, seed_python
from pipeplan.runtime.verification.stage_calls import Result, Sample, StageCalls
from pipeplan.splitting.nesting import put_tensors

__all__ = ["Divided", "look_at_division", "row_orders"]

REMEDY = (
    "replicas divide what crosses a cut by dimension 0, so that has to be the rows of the"
    " microbatch in their order; cut elsewhere, change this in the layers, or plan without replicas"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """What was found."""

    problem: str | None = None
    doubt: str | None = None
    """A problem, unless rows influence each other in the whole model, too."""


def row_orders(num_rows: int) -> list[tuple[int, ...]]:
    """Some orders of rows, so that no sorting, turning or grouping fits to all of them."""
    if num_rows < 2:
        return []
    everything = tuple(range(num_rows))
    some = (num_rows - 1, *range(1, num_rows - 1))  # an odd number of them
    return [everything, some] if num_rows > 2 else [everything, everything[::-1], some]


def look_at_division(
    stage: StageCalls, samples: Sequence[Sample], whole: Result, reordered: Sequence[Sample]
) -> Divided:
    """Run the stage with rows in other orders; `whole` are the whole model's evaluations."""
    leaving = [noted for noted in whole.leaving if noted is not None]
    if whole.draws or len(leaving) != len(samples):
        return Divided()  # other rows would draw other numbers
    sizes = [sample.num_rows for sample in samples]
    text = f"layers {stage.module.layers_text}: what leaves them"
    shape = _find_shape(leaving, sizes)
    if shape is not None:
        return Divided(problem=f"{text} has the shape {shape[0]} for {shape[1]} rows; {REMEDY}")
    doubt = None
    for sample in reordered:
        found = _try_stage(stage, sample, whole)
        if found is None:
            continue
        shape = _find_shape([found], [sample.num_rows])
        if shape is not None:
            return Divided(problem=f"{text} has the shape {shape[0]} for {shape[1]} rows; {REMEDY}")
        expected = _take_rows(leaving, sample.order)
        assert expected is not None  # something leaves
        for mine, theirs in zip(found.tensors, expected.tensors, strict=True):
            if _are_near(mine, theirs, stage.amp_dtype):
                continue
            if _are_exchanged(mine, theirs, stage.amp_dtype):
                return Divided(problem=f"{text} has its rows in another order; {REMEDY}")
            doubt = (
                f"{text} is not the same for {sample.num_rows} rows together and for these rows in"
                f" two parts; {REMEDY}"
            )
    return Divided(doubt=doubt)


def _try_stage(stage: StageCalls, sample: Sample, whole: Result) -> Noted | None:
    """What leaves the stage; None if it takes no such rows: a replica would raise the same."""
    state = stage.state()
    try:
        return _leave_stage(stage, sample, _take_rows(whole.entering, sample.order))
    except Exception:
        return None
    finally:
        state.put_back()


def _leave_stage(stage: StageCalls, sample: Sample, entering: Noted | None) -> Noted:
    """What leaves a stage in evaluation if this enters; `entering` has its tensors aside."""
    module, runner = stage.module, stage.runner
    tensors, template = as_message(module, entering)
    if entering is not None:
        tensors = entering.tensors
    call = sample.copied().call if module.needs_inputs else ((), {})
    with module.alone(), runner.evaluating(), SameRandomness(owned_positions(module)):
        seed_python("start")
        output, shape = runner.forward(0, 0, tensors, template, call)
        return note(put_tensors(shape, output))


def _find_shape(
    values: Sequence[Noted], sizes: Sequence[int]
) -> tuple[tuple[int, ...], int] | None:
    """The shape of a tensor without rows, and how many rows there are."""
    for noted, size in zip(values, sizes, strict=True):
        for tensor in noted.tensors:
            if not tensor.dim() or tensor.shape[0] != size:
                return tuple(tensor.shape), size
    return None


def _take_rows(parts: Sequence[Noted | None], order: Sequence[int]) -> Noted | None:
    """Rows of all parts together, in an order; None where nothing enters."""
    first, columns = parts[0], [part.tensors for part in parts if part is not None]
    if first is None:
        return None
    tensors = [torch.cat(column)[list(order)] for column in zip(*columns, strict=True)]
    return Noted(
        value=first.value,
        tensors=tensors,
        needs_gradient=first.needs_gradient,
        gradients=[None] * len(tensors),
        live=[],
        watched=[False] * len(tensors),
    )


def _are_near(first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Whether both are equal but for rounding, which depends on the number of rows."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if not first.is_floating_point() and not first.is_complex():
        return torch.equal(first, second)
    lowest = max(torch.finfo(kind).eps for kind in (first.dtype, dtype or first.dtype))
    largest = float(second.nan_to_num(0.0, 0.0, 0.0).abs().max()) if second.numel() else 0.0
    allowed = 10 * lowest**0.75 * largest
    return torch.allclose(first, second, rtol=0.0, atol=allowed, equal_nan=True)


def _are_exchanged(first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype | None) -> bool:
    """Whether each row of the one is a row of the other."""
    return first.shape == second.shape and all(
        any(_are_near(mine, theirs, dtype) for theirs in second) for mine in first
    )
