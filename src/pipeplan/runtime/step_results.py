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

    def __str__(self) -> str:
        """One line for a log, such as "step 7  loss 2.345  rate 1.00e-04  norm 1.2  35 ms"."""
        norm = f"  norm {self.gradient_norm:.3g}" if self.gradient_norm is not None else ""
        metrics = "".join(f"  {name} {value:.4g}" for name, value in self.metrics.items())
        return (
            f"step {self.step}  loss {self.loss:.4g}{metrics}  rate {self.learning_rates[0]:.2e}"
            f"{norm}  {self.iteration_ms:.0f} ms{'  skipped' if self.is_skipped else ''}"
        )


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
