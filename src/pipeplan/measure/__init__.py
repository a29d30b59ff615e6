"""From a real model to a model profile, and from real machines to a cluster.

>>> from pipeplan import measure
>>> model = measure.profile(module, batch, loss_fn=loss_fn, targets=targets)
>>> cluster = measure.measure_links().cluster  # on every rank of torch.distributed

Measuring needs the extra `torch`. Names are imported on first use, and planning imports none.
"""

from typing import TYPE_CHECKING, Any

from pipeplan.late_imports import import_with_torch

if TYPE_CHECKING:
    from pipeplan.measure.all_links import MeasuredLinks, measure_links
    from pipeplan.measure.profiling import measure_model, profile
    from pipeplan.measure.results import ModelMeasurement

__all__ = ["MeasuredLinks", "ModelMeasurement", "measure_links", "measure_model", "profile"]

_MODULE_OF = {
    "MeasuredLinks": "pipeplan.measure.all_links",
    "ModelMeasurement": "pipeplan.measure.results",
    "measure_links": "pipeplan.measure.all_links",
    "measure_model": "pipeplan.measure.profiling",
    "profile": "pipeplan.measure.profiling",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'pipeplan.measure' has no attribute {name!r}")
    value = getattr(import_with_torch(_MODULE_OF[name], "pipeplan.measure"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
