"""Stages of planners to plans of kernels, and back."""

from collections.abc import Sequence

from pipeplan import _core
from pipeplan.pipeline import Stage

__all__ = ["placed_plan", "placed_stages"]


def placed_stages(
    placed: _core.PlacedPlan,
    *,
    order: Sequence[int] | None = None,
    end_layer: Sequence[int] | None = None,
) -> tuple[Stage, ...]:
    """The stages of a plan from a kernel.

    The kernel's k-th device is `order[k]`, and its k-th layer ends at `end_layer[k]` of the model.
    By default the kernel's devices and layers are those of the cluster and the model.
    """
    ends = placed.end_layer if end_layer is None else [end_layer[k - 1] for k in placed.end_layer]
    return tuple(
        Stage(
            layers=range(first, end),
            devices=tuple(sorted(devices if order is None else (order[k] for k in devices))),
        )
        for first, end, devices in zip([0, *ends[:-1]], ends, placed.devices, strict=True)
    )


def placed_plan(instance: _core.Instance, stages: Sequence[Stage]) -> _core.PlacedPlan:
    """The stages as kernels read them."""
    return _core.PlacedPlan(
        instance, [stage.layers.stop for stage in stages], [stage.devices for stage in stages]
    )
