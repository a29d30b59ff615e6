"""How many layers fit on some devices as one stage, from each layer on.

A stage that keeps its activations and holds one microbatch needs the least memory that it can: the
state of its layers on every device, and of the activations each device's share. Shares are even,
or as the memory of the devices allows. Whole samples are counted where samples stay whole.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeplan.cost import BYTES_IN_GB, Floats
from pipeplan.planning.problem import Problem

__all__ = ["ROUNDING", "Ends", "StageRoom"]

Ends = NDArray[np.int64]
"""For each layer the end of the longest stage that begins there; 0 layers, if none fits."""

ROUNDING = 5e-10
"""Relative. Kernels and the checker allow twice as much."""
LEAST_SHARE = 1e-6
"""Files hold no share below this."""


class StageRoom:
    """The room of a problem's devices."""

    def __init__(self, problem: Problem) -> None:
        model, cost = problem.model, problem.cost
        state = cost.parameter_bytes_L * (1 + model.optimizer_bytes_per_parameter_byte)
        self.state_bytes = np.concatenate(([0.0], np.cumsum(state)))
        self.activation_bytes = np.concatenate(([0.0], np.cumsum(cost.activation_bytes_L)))
        self.num_layers = model.num_layers
        self.num_samples = model.microbatch_size if problem.limits.whole_samples else None
        self.memory_bytes = np.array(
            [(d.memory_gb or np.inf) * BYTES_IN_GB for d in problem.cluster.devices]
        )
        self._known: dict[tuple[float, float], Ends] = {}

    @cached_property
    def needed_bytes(self) -> Floats:
        """What the first layers need, by their number, if no device shares a stage with others."""
        return self.state_bytes + self.activation_bytes

    def even_ends(self, devices: Sequence[int]) -> Ends:
        """With even shares; of whole samples the devices with the most memory take one more."""
        memory = sorted((float(self.memory_bytes[u]) for u in devices), reverse=True)
        count = len(memory)
        if self.num_samples is None:
            return self._ends(1 / count, memory[-1])
        each, over = divmod(self.num_samples, count)
        ends = self._ends(each / self.num_samples, memory[-1])
        if over:
            more = self._ends((each + 1) / self.num_samples, memory[over - 1])
            ends = np.minimum(ends, more)
        return ends

    def _ends(self, share: float, memory_bytes: float) -> Ends:
        key = (share, memory_bytes)
        if key not in self._known:
            needed = self.state_bytes + share * self.activation_bytes
            room = needed + memory_bytes * (1 + ROUNDING)
            self._known[key] = np.searchsorted(needed, room, side="right") - 1
        return self._known[key]

    def free_ends(self, devices: Sequence[int]) -> Ends:
        """With whatever shares the memory of the devices allows."""
        firsts = np.arange(self.num_layers + 1)
        low, high = firsts.copy(), np.full(self.num_layers + 1, self.num_layers + 1)
        while (high - low > 1).any():
            middle = (low + high) // 2
            fits = self._fits(devices, firsts, np.minimum(middle, self.num_layers))
            is_open = high - low > 1
            low = np.where(is_open & fits, middle, low)
            high = np.where(is_open & ~fits, middle, high)
        return low

    def _fits(self, devices: Sequence[int], first: Ends, end: Ends) -> NDArray[np.bool_]:
        shares = self._most_shares(devices, first, end)
        least = LEAST_SHARE if self.num_samples is None else 1 / self.num_samples
        enough: NDArray[np.bool_] = shares.sum(axis=0) >= 1 - 1e-12
        return enough & (shares >= least).all(axis=0)

    def _most_shares(self, devices: Sequence[int], first: Ends, end: Ends) -> Floats:
        """The largest share of each device for stages from layers to layers, [devices, stages]."""
        state = self.state_bytes[end] - self.state_bytes[first]
        activations = self.activation_bytes[end] - self.activation_bytes[first]
        memory = self.memory_bytes[list(devices)][:, None] * (1 + ROUNDING)
        room = memory - state[None]
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.where(room >= activations, 1.0, room / activations)
        if self.num_samples is not None:
            shares = np.floor(shares * self.num_samples + 1e-12) / self.num_samples
        return np.maximum(shares, 0.0)

    def shares(self, devices: Sequence[int], layers: range, speeds: Sequence[float]) -> list[float]:
        """Shares that fit: nearly in proportion to speeds, but none is more than a device holds."""
        first, end = np.array([layers.start]), np.array([layers.stop])
        most = self._most_shares(devices, first, end)[:, 0]
        if self.num_samples is not None:
            return self._samples(most, speeds)
        return [float(share) for share in _filled(most, np.array(speeds))]

    def _samples(self, most: Floats, speeds: Sequence[float]) -> list[float]:
        assert self.num_samples is not None, "samples may be split"
        samples = [1] * len(speeds)
        limits = np.round(most * self.num_samples)
        for _ in range(self.num_samples - len(speeds)):
            free = [i for i in range(len(speeds)) if samples[i] < limits[i]]
            samples[min(free, key=lambda i: (samples[i] + 1) / speeds[i])] += 1
        return [count / self.num_samples for count in samples]


def _filled(most: Floats, weights: Floats) -> Floats:
    """Shares in proportion to the weights, none above its limit; others get what is over."""
    shares = np.zeros(len(most))
    is_free = np.ones(len(most), dtype=bool)
    while True:
        left = 1 - shares[~is_free].sum()
        shares[is_free] = left * weights[is_free] / weights[is_free].sum()
        above = is_free & (shares > most)
        if not above.any():
            return shares
        shares[above] = most[above]
        is_free &= ~above
        if not is_free.any():  # all limits together are one but for rounding
            filled: Floats = shares / shares.sum()
            return filled
