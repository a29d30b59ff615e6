"""How much memory the devices of a group need (docs/formats.md, memory of plan/2).

A group's order is walked block by block. A microbatch is held from the start of its F to the end of
its B or I, and from then to the end of its W what the weight gradient still needs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeplan.blocks import Floats
from pipeplan.cost import BYTES_IN_GB, CostModel
from pipeplan.memory_parts import MemoryParts
from pipeplan.pipeline import Group, GroupCodes, Stage, unpack_codes

__all__ = ["HeldBytes", "group_memory_parts", "held_bytes"]

FORWARD, BACKWARD, INPUT, WEIGHT = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """What a group holds of one whole microbatch after another; N blocks.

    A device holds its share of it.
    """

    during_N: Floats
    """While each block runs."""
    after_N: Floats
    """Once it has ended, and before the next one starts."""

    @property
    def peak(self) -> float:
        """The most at any time."""
        return float(max(self.during_N.max(initial=0.0), self.after_N.max(initial=0.0)))


def held_bytes(cost: CostModel, stages: Sequence[Stage], codes: GroupCodes) -> HeldBytes:
    """What the group that runs these blocks holds; `stages` are all stages of the plan."""
    stage_N, kind_N, _ = unpack_codes(codes)

    def of_layers(values_L: Iterable[float]) -> Floats:
        values = np.fromiter(values_L, dtype=np.float64)
        return np.array([values[s.layers.start : s.layers.stop].sum() for s in stages])

    layers = cost.model.layers
    activation_N = of_layers(layer.activation_bytes for layer in layers)[stage_N]
    weight_grad_N = of_layers(layer.weight_grad_bytes for layer in layers)[stage_N]
    recomputes_N = np.array([stage.recompute for stage in stages])[stage_N]
    into_S = np.array([cost.model.bytes_into(stage.layers[0]) for stage in stages])
    kept_N = np.where(recomputes_N, into_S[stage_N], activation_N)
    taken_N = np.where(kind_N == FORWARD, kept_N, 0.0)
    left_N = np.select(
        [(kind_N == BACKWARD), (kind_N == INPUT), (kind_N == WEIGHT)],
        [-kept_N, weight_grad_N - kept_N, -weight_grad_N],
        0.0,
    )
    after_N = (taken_N + left_N).cumsum()
    before_N = np.concatenate([[0.0], after_N[:-1]])
    computed_N = np.where(recomputes_N & (kind_N != WEIGHT), activation_N, 0.0)
    return HeldBytes(during_N=before_N + taken_N + computed_N, after_N=after_N)


def group_memory_parts(
    cost: CostModel,
    stages: Sequence[Stage],
    group: Group,
    codes: GroupCodes,
    *,
    shard_optimizer: bool,
) -> list[MemoryParts]:
    """For each device of the group what its peak consists of."""
    peak_bytes = held_bytes(cost, stages, codes).peak
    parameter_gb = beside_gb = 0.0
    for index in group.stages:
        (parts, *_) = cost.memory_parts(stages[index], 0)
        parameter_gb += parts.parameter_gb
        beside_gb += parts.gradient_gb + parts.optimizer_gb
    gradient_gb = min(parameter_gb, beside_gb)
    optimizer_gb = (beside_gb - gradient_gb) / (group.num_replicas if shard_optimizer else 1)
    first = stages[group.stages[0]]
    return [
        MemoryParts(
            parameter_gb=parameter_gb,
            gradient_gb=gradient_gb,
            optimizer_gb=optimizer_gb,
            activation_gb=peak_bytes * share / BYTES_IN_GB,
        )
        for share in first.device_shares
    ]
