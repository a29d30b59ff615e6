"""Finds out whether rows influence each other: in the loss, in the model, or in a backward.

The runtime divides a batch into microbatches. That gives what the whole batch would give only if
each row is computed by itself. A loss that is no mean over rows is refused. If rows meet in the
model (BatchNorm, experts with a capacity, a gradient that is normalised), a note says so: each
microbatch is then computed by itself, as with gradient accumulation.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeplan.documents.text import printable
from pipeplan.runtime.verification.loss_rows import LossOfRows
from pipeplan.runtime.verification.runs import evaluate_whole, gradients_of_whole
from pipeplan.runtime.verification.stage_calls import Result, Sample, StageCalls

__all__ = ["RowReport", "look_at_rows"]

BY_ITSELF = "each microbatch is computed by itself, as with gradient accumulation"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReport:
    """What was found."""

    problem: str | None = None
    """Why the loss is refused."""
    note: str | None = None
    loss_rows: LossOfRows | None = None
    """By which the last stage looks at targets of later batches."""


def look_at_rows(
    stage: StageCalls,
    samples: Sequence[Sample],
    wholes: dict[bool, Result],
    joint: Sample,
    spread: tuple[Any, int] | None,
) -> RowReport:
    """Compare the whole model's results for all rows together with those of `samples`.

    `wholes` are the latter, in training and in evaluation. The first stage looks at all gradients,
    and the last one looks at the loss.
    """
    report = RowReport()
    if stage.module.is_last:
        aims = spread or (joint.targets, joint.num_rows)
        report = _look_at_loss(stage, samples, wholes[False], joint, aims)
    # Every stage has the whole model. One look at all gradients is enough.
    if stage.module.is_first and report.problem is None and report.note is None:
        note = _look_at_gradients(stage, samples, wholes, joint) if len(samples) > 1 else None
        return RowReport(note=note, loss_rows=report.loss_rows)
    return report


def _look_at_loss(
    stage: StageCalls,
    samples: Sequence[Sample],
    whole: Result,
    joint: Sample,
    spread: tuple[Any, int],
) -> RowReport:
    with _whole(stage):
        try:
            found, output = evaluate_whole(stage, joint)
        except Exception:
            return RowReport()  # the batch's rows alone are what counts
    rows = LossOfRows.of(stage.loss, output, joint.num_rows, stage.device, stage.amp_dtype)
    problem = rows.find_problem(*spread) if rows is not None else None
    if problem is not None:
        return RowReport(problem=problem)
    shares = stage.shares(samples)
    mean = sum(float(loss) for loss in whole.losses)
    parts = [float(loss) / share for loss, share in zip(whole.losses, shares, strict=True) if share]
    rounding = _rounding(stage, whole)

    def is_near(value: float) -> bool:
        return math.isclose(found, value, rel_tol=5 * rounding, abs_tol=1e-6)

    if is_near(mean) or not all(map(math.isfinite, (found, mean))):
        return RowReport(loss_rows=rows)
    if rows is None and is_near(sum(parts)):
        return RowReport(
            problem=f"loss_fn: is a sum over rows ({found:.6g} for {joint.num_rows} rows,"
            f" {parts[0]:.6g} for {samples[0].num_rows} of them), but has to be their mean; use"
            " reduction='mean'"
        )
    text = (
        f"its loss is {found:.6g} for {joint.num_rows} rows, and {mean:.6g} as the mean of"
        f" {len(samples)} microbatches"
    )
    if rows is None and stage.loss.weight_fn is None:
        return RowReport(
            problem=f"loss_fn: is no mean over rows: {text}; if targets weigh differently"
            " (ignore_index), compute the loss of the model's output and of targets in loss_fn, and"
            " give loss_weight_fn; if each microbatch shall have a loss of its own, give"
            " loss_weight_fn=lambda targets: 1"
        )
    note = f"rows influence each other in the model or in loss_fn: {text}; {BY_ITSELF}"
    return RowReport(note=note, loss_rows=rows)


def _look_at_gradients(
    stage: StageCalls, samples: Sequence[Sample], wholes: dict[bool, Result], joint: Sample
) -> str | None:
    """Compare gradients; without dropout, which would draw other numbers for other rows."""
    whole = wholes[True]
    if wholes[False].draws:
        return None  # it always draws, so nothing can be said
    with _whole(stage), _without(stage, randomness=bool(whole.draws)):
        try:
            state = stage.state()
            parts = gradients_of_whole(stage, samples)
            state.put_back()
            together = gradients_of_whole(stage, [joint])
        except Exception:
            return None
    allowed = max(1e-3, 5 * _rounding(stage, whole))
    pairs = {
        name: (gradient, parts[name])
        for name, gradient in together.items()
        if gradient is not None and gradient.numel()
    }
    sizes = [float(gradient.abs().max()) for gradient, _ in pairs.values()] or [0.0]
    for name, (gradient, other) in pairs.items():
        other = torch.zeros_like(gradient) if other is None else other
        largest = max(float(gradient.abs().max()), float(other.abs().max()), 1e-3 * max(sizes))
        difference = float((gradient - other).abs().max())
        if difference > allowed * largest:  # not so for NaN
            return (
                f"rows influence each other in the model: the gradient of {printable(name)!r}"
                f" differs by {difference / largest:.1%} between {joint.num_rows} rows and the mean"
                f" of {len(samples)} microbatches; {BY_ITSELF}"
            )
    return None


@contextlib.contextmanager
def _whole(stage: StageCalls) -> Iterator[None]:
    """Inside, the model is whole; afterwards it remembers nothing of it."""
    with stage.module.whole():
        state = stage.state()
        try:
            yield
        finally:
            state.put_back()


@contextlib.contextmanager
def _without(stage: StageCalls, *, randomness: bool) -> Iterator[None]:
    """Inside, modules are in evaluation mode if they draw random numbers in training."""
    modes = [(module, module.training) for module in stage.modules() if randomness]
    for module, _ in modes:
        module.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _rounding(stage: StageCalls, whole: Result) -> float:
    kinds = {loss.dtype for loss in whole.losses} | {t.dtype for t in stage.parameters.values()}
    kinds |= {stage.amp_dtype or torch.float32}
    return float(max(torch.finfo(kind).eps ** 0.75 for kind in kinds))
