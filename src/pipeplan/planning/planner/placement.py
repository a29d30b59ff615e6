"""Stages of planners to plans of kernels, and back."""

from collections.abc import Sequence

from pipeplan import _core
from pipeplan.pipeline import Stage

__all__ = ["placed_plan", "placed_stages", "shared_stage", "stage_of_shares", "stages_by_speed"]

RECOMPUTES, BY_SPEED = 1, 2
"""The bits of a kernel's mode: a stage computes its activations again; its devices share
microbatches in proportion to their speeds."""


def placed_stages(
    placed: _core.PlacedPlan,
    instance: _core.Instance | None = None,
    *,
    order: Sequence[int] | None = None,
    end_layer: Sequence[int] | None = None,
) -> tuple[Stage, ...]:
    """The stages of a plan from a kernel, with the shares of `instance`, or even ones.

    The kernel's k-th device is `order[k]`, and its k-th layer ends at `end_layer[k]` of the model.
    By default the kernel's devices and layers are those of the cluster and the model.
    """
    ends = placed.end_layer if end_layer is None else [end_layer[k - 1] for k in placed.end_layer]
    return tuple(
        _stage(
            instance,
            range(first, end),
            devices if order is None else [order[k] for k in devices],
            mode,
        )
        for first, end, devices, mode in zip(
            [0, *ends[:-1]], ends, placed.devices, placed.modes, strict=True
        )
    )


def shared_stage(instance: _core.Instance, stage: Stage) -> Stage:
    """The stage with shares as the kernels give them: by speed if it has such, else even ones."""
    return _stage(instance, stage.layers, stage.devices, _mode(instance, stage))


def stages_by_speed(instance: _core.Instance, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages with shares in proportion to the speeds of their devices."""
    return tuple(
        _stage(
            instance, stage.layers, stage.devices, (RECOMPUTES if stage.recompute else 0) | BY_SPEED
        )
        for stage in stages
    )


def _stage(
    instance: _core.Instance | None, layers: range, devices: Sequence[int], mode: int
) -> Stage:
    """The stage on these devices, which share microbatches as the kernels say.

    Devices with more samples come first; among equals the cluster's order counts.
    """
    shares = [1.0]
    if instance is not None and len(devices) > 1:
        shares = instance.shares(devices, layers.start, layers.stop, mode)
    return stage_of_shares(layers, devices, shares, recompute=bool(mode & RECOMPUTES))


def stage_of_shares(
    layers: range, devices: Sequence[int], shares: Sequence[float], *, recompute: bool = False
) -> Stage:
    """The stage with these shares, which are left out if all are equal."""
    if max(shares) == min(shares):
        return Stage(layers=layers, devices=tuple(sorted(devices)), recompute=recompute)
    ordered = sorted(zip(devices, shares, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return Stage(
        layers=layers,
        devices=tuple(device for device, _ in ordered),
        shares=tuple(share for _, share in ordered),
        recompute=recompute,
    )


def _mode(instance: _core.Instance, stage: Stage) -> int:
    mode = RECOMPUTES if stage.recompute else 0
    if not instance.any_shares or stage.shares is None:
        return mode
    even = instance.shares(stage.devices, stage.layers.start, stage.layers.stop, mode)
    return mode if tuple(even) == stage.shares else mode | BY_SPEED


def placed_plan(instance: _core.Instance, stages: Sequence[Stage]) -> _core.PlacedPlan:
    """The stages as kernels read them; kernels give them shares of their own."""
    return _core.PlacedPlan(
        instance,
        [stage.layers.stop for stage in stages],
        [stage.devices for stage in stages],
        [_mode(instance, stage) for stage in stages],
    )
