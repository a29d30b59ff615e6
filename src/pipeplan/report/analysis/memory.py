"""How much memory each device needs, and when."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeplan.cluster import Cluster
from pipeplan.cost import CostModel, Floats
from pipeplan.pipeline import Stage
from pipeplan.report.analysis.items import FORWARD, Items
from pipeplan.simulator import Codes

__all__ = ["NeededMemory", "StageMemory", "stage_memory"]

ROUNDING = 1 + 1e-9
"""Memory that differs by less than this factor is equal."""


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
    return StageMemory(
        times_ms=np.concatenate([[0.0], times_ms]),
        in_flight=np.concatenate([np.zeros(1, dtype=np.int32), in_flight]),
        devices=stage.devices,
        base_gb=tuple(base),
        per_microbatch_gb=tuple(b - a for a, b in zip(base, one, strict=True)),
        peak_gb=tuple(cost.memory_gb(stage, int(in_flight.max()))),
        limit_gb=tuple(cluster.devices[device].memory_gb for device in stage.devices),
    )
