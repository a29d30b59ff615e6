"""Ways to cut a chain of layers that do not look at the cluster, and stages from cuts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeplan import _core
from pipeplan.cost import Floats
from pipeplan.pipeline import Stage
from pipeplan.planning.baselines.view import range_sums

__all__ = ["Split", "balanced_ends", "even_ends", "least_bottleneck_ends", "stages_from_ends"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The stages that a design chooses, and its own estimate."""

    stages: tuple[Stage, ...]
    objective_ms: float
    """The value of the design's own objective; it is not a time of our cost model."""


def even_ends(num_layers: int, num_stages: int) -> list[int]:
    """Where stages of equally many layers end; a remainder goes to the first stages."""
    size, rest = divmod(num_layers, num_stages)
    return [(n + 1) * size + min(n + 1, rest) for n in range(num_stages)]


def balanced_ends(work_ms_L: Floats, num_stages: int) -> list[int]:
    """Where the stages end whose largest sum of work is the smallest possible."""
    return _core.least_bottleneck(range_sums(work_ms_L)[None], [0] * num_stages)


def least_bottleneck_ends(stage_ms_SLL: Sequence[Floats]) -> list[int]:
    """Where the stages end whose largest time is the smallest possible.

    Entry [i, j] of the n-th array is the time of stage n with layers i..j-1, or infinite if this is
    not allowed. Every stage has at least one layer. Empty if no cut is allowed.
    """
    return _core.least_bottleneck(np.stack(stage_ms_SLL), list(range(len(stage_ms_SLL))))


def stages_from_ends(ends: Sequence[int], devices: Sequence[Sequence[int]]) -> list[Stage]:
    """Consecutive stages with these ends, each on its devices."""
    starts = [0, *ends[:-1]]
    return [
        Stage(layers=range(start, end), devices=tuple(its_devices))
        for start, end, its_devices in zip(starts, ends, devices, strict=True)
    ]
