"""Runs a plan: synchronous pipeline training on torch.distributed.

>>> from pipeplan.runtime import Pipeline
>>> pipeline = Pipeline(plan, model, loss_fn, lambda parameters: torch.optim.AdamW(parameters))
>>> loss = pipeline.step(batch, targets)

This package needs the extra `torch`. Its names are imported on first use.
"""

from typing import TYPE_CHECKING, Any

from pipeplan.late_imports import import_with_torch

if TYPE_CHECKING:
    from pipeplan.errors import CheckpointError, NonFiniteLossError, RuntimeMismatchError
    from pipeplan.runtime.batches import Whole
    from pipeplan.runtime.extra_losses import add_loss, collect_losses
    from pipeplan.runtime.step_results import StepResult
    from pipeplan.runtime.supervision.launching import join_ranks
    from pipeplan.runtime.supervision.watchdog import WatchdogOptions
    from pipeplan.runtime.training import Pipeline

__all__ = [
    "CheckpointError",
    "NonFiniteLossError",
    "Pipeline",
    "RuntimeMismatchError",
    "StepResult",
    "WatchdogOptions",
    "Whole",
    "add_loss",
    "auto",
    "collect_losses",
    "join_ranks",
]

_MODULE_OF = {
    "CheckpointError": "pipeplan.errors",
    "NonFiniteLossError": "pipeplan.errors",
    "Pipeline": "pipeplan.runtime.training",
    "RuntimeMismatchError": "pipeplan.errors",
    "StepResult": "pipeplan.runtime.step_results",
    "WatchdogOptions": "pipeplan.runtime.supervision.watchdog",
    "Whole": "pipeplan.runtime.batches",
    "add_loss": "pipeplan.runtime.extra_losses",
    "auto": "pipeplan.measure.auto",
    "collect_losses": "pipeplan.runtime.extra_losses",
    "join_ranks": "pipeplan.runtime.supervision.launching",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'pipeplan.runtime' has no attribute {name!r}")
    value = getattr(import_with_torch(_MODULE_OF[name], "pipeplan.runtime"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
