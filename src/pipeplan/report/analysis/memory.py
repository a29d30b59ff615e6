"""How much memory each device needs, and when."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeplan.cluster import Cluster
from pipeplan.cost import BYTES_IN_GB, CostModel, Floats
from pipeplan.group_memory import group_memory_parts, held_bytes
from pipeplan.pipeline import Plan, Stage, unpack_codes
from pipeplan.report.analysis.items import FORWARD, Items
from pipeplan.simulator import Codes

__all__ = ["MemoryParts", "NeededMemory", "StageMemory", "group_memory", "stage_memory"]

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
    """The memory of a stage, or of a group with several, over time.

    A stage's grows by the same amount with each microbatch held. A group holds bytes: of several
    stages, and between the two halves of a backward.
    """

    times_ms: Floats
    in_flight: Codes | Floats
    """What is held from the time at the same position on: microbatches; in a group their bytes."""
    devices: tuple[int, ...]
    base_gb: tuple[float, ...]
    """For each device: what it needs without any microbatch."""
    per_microbatch_gb: tuple[float, ...]
    """What it needs for each that is held."""
    peak_gb: tuple[float, ...]
    limit_gb: tuple[float | None, ...]
    parts: tuple[MemoryParts, ...]
    """For each device of the stage what its peak consists of."""
    most_held: int | None = None
    """The most microbatches of a group's stages that are held at once; None for a stage."""

    @cached_property
    def most_in_flight(self) -> int:
        """The most microbatches held at once; those of several stages count for each."""
        return int(self.in_flight.max()) if self.most_held is None else self.most_held

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


def group_memory(cost: CostModel, plan: Plan, index: int, items: Items) -> StageMemory:
    """The memory of one group, walked block by block."""
    group, codes = plan.groups[index], plan.schedule.group_codes(index)
    mine = items.blocks_of(index)
    held = held_bytes(cost, plan.stages, codes)
    times_ms = np.stack([items.start_ms_N[mine], items.end_ms_N[mine]], axis=1).ravel()
    held_bytes_N2 = np.stack([held.during_N, held.after_N], axis=1).ravel()
    _, kinds, _ = unpack_codes(codes)
    counts = np.select([kinds == 0, kinds == 1, kinds == 3], [1, -1, -1], 0)
    parts = group_memory_parts(
        cost, plan.stages, group, codes, shard_optimizer=plan.shard_optimizer
    )
    shares = plan.stages[group.stages[0]].device_shares
    return StageMemory(
        times_ms=np.concatenate([[0.0], times_ms]),
        in_flight=np.concatenate([[0.0], held_bytes_N2]),
        devices=group.devices,
        base_gb=tuple(part.total_gb - part.activation_gb for part in parts),
        per_microbatch_gb=tuple(share / BYTES_IN_GB for share in shares),
        peak_gb=tuple(part.total_gb for part in parts),
        limit_gb=tuple(cost.cluster.devices[device].memory_gb for device in group.devices),
        parts=tuple(
            MemoryParts(
                parameters_gb=part.parameter_gb,
                gradients_gb=part.gradient_gb,
                optimizer_gb=part.optimizer_gb,
                activations_gb=part.activation_gb,
            )
            for part in parts
        ),
        most_held=int(counts.cumsum().max(initial=0)),
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
