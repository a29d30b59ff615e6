"""The times of layers that were measured at several microbatch sizes.

The time t(n) of n samples is piecewise linear through all measured sizes, and proportional to the
nearest one beyond them. Between two neighbours among the sizes of all layers every layer is linear,
so the times of a stage are too: a table for each of these sizes is enough.

Axes of arrays: P sizes, rising; L layers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.profile import LayerProfile, ModelProfile

__all__ = ["MeasuredTimes", "measured_times", "times_of_layer"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimes:
    """The times of all layers at all sizes."""

    sizes_P: Floats
    forward_ms_PL: Floats
    backward_ms_PL: Floats

    def stage_ms(self, layers: range, num_samples: float, forward: bool, backward: bool) -> float:
        """The time of this many samples through these layers, on a device of speed 1."""
        place, low, high = self._mix(num_samples)
        ms = 0.0
        for ms_PL in [self.forward_ms_PL] * forward + [self.backward_ms_PL] * backward:
            ms += low * float(ms_PL[place, layers.start : layers.stop].sum())
            if high:
                ms += high * float(ms_PL[place + 1, layers.start : layers.stop].sum())
        return ms

    def _mix(self, num_samples: float) -> tuple[int, float, float]:
        """Which two neighbouring sizes count, and how much."""
        sizes = self.sizes_P
        if num_samples <= sizes[0]:
            return 0, num_samples / float(sizes[0]), 0.0
        if num_samples >= sizes[-1]:
            return len(sizes) - 1, num_samples / float(sizes[-1]), 0.0
        place = int(np.searchsorted(sizes, num_samples, side="right")) - 1
        high = (num_samples - float(sizes[place])) / float(sizes[place + 1] - sizes[place])
        return place, 1 - high, high

    def least_ms_L(self, ms_PL: Floats, microbatch_size: int) -> Floats:
        """For each layer a time of the microbatch, such that no n samples take less in proportion.

        On a line between two points t(n)/n is no less than at one of its ends. No device takes more
        than the microbatch, which is one of the sizes.
        """
        possible = self.sizes_P <= microbatch_size
        least: Floats = (ms_PL / self.sizes_P[:, None])[possible].min(axis=0) * microbatch_size
        return least


def measured_times(model: ModelProfile) -> MeasuredTimes | None:
    """The table of a model; None where no layer was measured at another size."""
    sizes = {model.microbatch_size} | {t.microbatch_size for x in model.layers for t in x.at}
    if len(sizes) == 1:
        return None
    sizes_P = np.array(sorted(sizes), dtype=np.float64)
    tables = [_layer_table(layer, model.microbatch_size, sizes_P) for layer in model.layers]
    forward_ms_PL, backward_ms_PL = (
        np.ascontiguousarray(np.stack([table[kind] for table in tables], axis=1)) for kind in (0, 1)
    )
    return MeasuredTimes(
        sizes_P=sizes_P, forward_ms_PL=forward_ms_PL, backward_ms_PL=backward_ms_PL
    )


def times_of_layer(layer: LayerProfile, own_size: int, num_samples: int) -> tuple[float, float]:
    """The forward and backward time of a layer for this many samples."""
    forward_ms, backward_ms = _layer_table(layer, own_size, np.array([num_samples], np.float64))
    return float(forward_ms[0]), float(backward_ms[0])


def _layer_table(layer: LayerProfile, own_size: int, sizes_P: Floats) -> tuple[Floats, Floats]:
    """The forward and backward times of one layer at all sizes."""
    points = sorted(
        [(own_size, layer.forward_ms, layer.backward_ms)]
        + [(t.microbatch_size, t.forward_ms, t.backward_ms) for t in layer.at]
    )
    mine = np.array([size for size, _, _ in points], dtype=np.float64)
    below, above = sizes_P < mine[0], sizes_P > mine[-1]

    def column(kind: int) -> Floats:
        ms = np.array([point[kind] for point in points], dtype=np.float64)
        result: Floats = np.interp(sizes_P, mine, ms)
        result[below] = ms[0] * sizes_P[below] / mine[0]
        result[above] = ms[-1] * sizes_P[above] / mine[-1]
        return result

    return column(1), column(2)
