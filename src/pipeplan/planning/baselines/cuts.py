"""Ways to cut a chain of layers that do not look at the cluster, and stages from cuts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
    work_ms_LL = range_sums(work_ms_L)
    return least_bottleneck_ends([work_ms_LL] * num_stages)


def least_bottleneck_ends(stage_ms_SLL: Sequence[Floats]) -> list[int]:
    """Where the stages end whose largest time is the smallest possible.

    Entry [i, j] of the n-th array is the time of stage n with layers i..j-1, or infinite if this is
    not allowed. Every stage has at least one layer. Empty if no cut is allowed.

    Complexity: O(S L^2).
    """
    num_layers = len(stage_ms_SLL[0]) - 1
    size = num_layers + 1
    no_layer = np.tril(np.ones((size, size), dtype=bool))
    best_ms = np.full(size, np.inf)
    best_ms[0] = 0.0
    choices = []
    for stage_ms_LL in stage_ms_SLL:
        # [i, j]: the earlier stages end at i, this one at j
        total_ms = np.where(no_layer, np.inf, np.maximum(best_ms[:, None], stage_ms_LL))
        choices.append(total_ms.argmin(axis=0))
        best_ms = total_ms.min(axis=0)
    if not np.isfinite(best_ms[num_layers]):
        return []
    ends = [num_layers]
    for choice in reversed(choices[1:]):
        ends.append(int(choice[ends[-1]]))
    return ends[::-1]


def stages_from_ends(ends: Sequence[int], devices: Sequence[Sequence[int]]) -> list[Stage]:
    """Consecutive stages with these ends, each on its devices."""
    starts = [0, *ends[:-1]]
    return [
        Stage(layers=range(start, end), devices=tuple(its_devices))
        for start, end, its_devices in zip(starts, ends, devices, strict=True)
    ]
