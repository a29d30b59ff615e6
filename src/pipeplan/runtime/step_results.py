"""What a step has done, for logs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["StepResult", "make_result"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One call of `step`, as `on_step` gets it; alike on every rank, except for its time."""

    step: int
    """The number of the step, from 1; batches that are accumulated have that of their update."""
    loss: float
    metrics: Mapping[str, float]
    num_rows: int
    """The rows of the batch."""
    is_update: bool
    """False if the gradients are kept for a later step."""
    is_skipped: bool
    """Whether the optimizer did not step, since something was not finite."""
    gradient_norm: float | None
    """Before clipping; None if nothing needs it."""
    learning_rates: tuple[float, ...]
    """Of each group of the optimizer, in this step."""
    loss_scale: float
    iteration_ms: float
    """How long it took on this rank."""


def make_result(pipeline: Any, loss: float, num_rows: int, *, is_update: bool) -> StepResult:
    """What a pipeline's last step has done."""
    return StepResult(
        step=pipeline.num_steps + (not is_update),
        loss=loss,
        metrics=pipeline.metrics,
        num_rows=num_rows,
        is_update=is_update,
        is_skipped=pipeline.is_skipped,
        gradient_norm=pipeline.gradient_norm,
        learning_rates=tuple(
            float(group.get("lr", math.nan)) for group in pipeline.optimizer.param_groups
        ),
        loss_scale=pipeline.loss_scale,
        iteration_ms=pipeline.iteration_ms,
    )
