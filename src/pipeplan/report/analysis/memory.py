"""How much memory each device needs, and when."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeplan.cluster import Cluster
from pipeplan.cost import BYTES_IN_GB, CostModel, Floats
from pipeplan.pipeline import Stage
from pipeplan.report.analysis.items import FORWARD, Items
from pipeplan.simulator import Codes

__all__ = ["MemoryParts", "NeededMemory", "StageMemory", "stage_memory"]

ROUNDING = 1 + 1e-9
"""Memory that differs by less than this factor is equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """What the peak of one device consists of."""

    parameters_gb: float
    gradients_gb: float
    optimizer_gb: float
    activations_gb: float
    """Of all microbatches in flight; with recomputation their inputs, and one recomputed."""

    @property
    def total_gb(self) -> float:
        """The peak."""
        return self.parameters_gb + self.gradients_gb + self.optimizer_gb + self.activations_gb


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededMemory:
    """What one device needs at most, and what it has."""

    device: int
    peak_gb: float
    limit_gb: float | None

    @property
    def fits(self) -> bool:
        """Whether the device has what it needs."""
        return self.limit_gb is None or self.peak_gb <= self.limit_gb * ROUNDING


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """A stage's memory over time: it grows by the same amount with each microbatch held."""

    times_ms: Floats
    in_flight: Codes
    """The microbatches held from the time at the same position on."""
    devices: tuple[int, ...]
    base_gb: tuple[float, ...]
    """For each device of the stage: what it needs without any microbatch."""
    per_microbatch_gb: tuple[float, ...]
    peak_gb: tuple[float, ...]
    limit_gb: tuple[float | None, ...]
    parts: tuple[MemoryParts, ...]
    """For each device of the stage what its peak consists of."""

    @cached_property
    def most_in_flight(self) -> int:
        """The most microbatches held at once."""
        return int(self.in_flight.max())

    @cached_property
    def needs(self) -> tuple[NeededMemory, ...]:
        """What each device of the stage needs."""
        return tuple(
            NeededMemory(device=device, peak_gb=peak_gb, limit_gb=limit_gb)
            for device, peak_gb, limit_gb in zip(
                self.devices, self.peak_gb, self.limit_gb, strict=True
            )
        )


def stage_memory(
    cost: CostModel, cluster: Cluster, stage: Stage, index: int, items: Items
) -> StageMemory:
    """The memory of one stage: from the start of a forward to the end of its backward."""
    mine = items.blocks_of(index)
    is_forward = items.kind_N[mine] == FORWARD
    times_ms = np.where(is_forward, items.start_ms_N[mine], items.end_ms_N[mine])
    in_flight = np.cumsum(np.where(is_forward, 1, -1), dtype=np.int32)
    base, one = cost.memory_gb(stage, 0), cost.memory_gb(stage, 1)
    peak_gb = cost.memory_gb(stage, int(in_flight.max()))
    return StageMemory(
        times_ms=np.concatenate([[0.0], times_ms]),
        in_flight=np.concatenate([np.zeros(1, dtype=np.int32), in_flight]),
        devices=stage.devices,
        base_gb=tuple(base),
        per_microbatch_gb=tuple(b - a for a, b in zip(base, one, strict=True)),
        peak_gb=tuple(peak_gb),
        limit_gb=tuple(cluster.devices[device].memory_gb for device in stage.devices),
        parts=tuple(_parts(cost, stage, peak) for peak in peak_gb),
    )


def _parts(cost: CostModel, stage: Stage, peak_gb: float) -> MemoryParts:
    """The peak in parts: beside each parameter byte one of gradient, then the optimizer."""
    layers = slice(stage.layers.start, stage.layers.stop)
    parameters_gb = float(cost.parameter_bytes_L[layers].sum()) / BYTES_IN_GB
    ratio = cost.model.optimizer_bytes_per_parameter_byte
    return MemoryParts(
        parameters_gb=parameters_gb,
        gradients_gb=parameters_gb * min(ratio, 1.0),
        optimizer_gb=parameters_gb * max(ratio - 1.0, 0.0),
        activations_gb=max(peak_gb - parameters_gb * (1 + ratio), 0.0),
    )
