"""The costs of a plan whose groups may have several stages (docs/formats.md, rules 14-18).

Axes of arrays: S stages, C = S - 1 cuts between neighbouring stages; the axis of length 4 is the
kind of block: F, B, I, W.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeplan import _core
from pipeplan.cost import CostModel, Floats, PipelineCosts
from pipeplan.pipeline import Codes, Stage, groups_of

__all__ = ["GroupCosts", "group_costs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCosts:
    """The times of all blocks, transfers and parts of all-reduces in a pipeline of groups."""

    group_of_S: Codes
    """For each stage its group; groups are numbered by their first stages."""
    length_ms_S4: Floats
    """NaN for I and W where the model does not say how long a weight gradient takes."""
    recompute_ms_S: Floats
    """The part of a whole backward that passes before gradients come."""
    send_forward_ms_C: Floats
    """0 inside a group, where nothing is sent."""
    send_backward_ms_C: Floats
    part_ms_S: Floats
    """The time of one part of the stage's all-reduce."""
    num_parts_S: Codes
    """0 for a stage on one device."""
    half_duplex: bool
    flows: _core.GroupFlows | None = None
    """Where the cluster has shared links; the times above are then the least that they can be."""

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.group_of_S)

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return int(self.group_of_S.max()) + 1

    def by_stage(self) -> PipelineCosts:
        """The times of each stage by itself, with whole backwards and whole all-reduces."""
        return PipelineCosts(
            forward_ms_S=self.length_ms_S4[:, 0],
            backward_ms_S=self.length_ms_S4[:, 1],
            send_forward_ms_C=self.send_forward_ms_C,
            send_backward_ms_C=self.send_backward_ms_C,
            all_reduce_ms_S=self.part_ms_S * self.num_parts_S,
            half_duplex=self.half_duplex,
        )

    def for_kernels(self) -> _core.GroupCosts:
        """The same costs as kernels read them."""
        sends = np.stack([self.send_forward_ms_C, self.send_backward_ms_C], axis=1).ravel()
        return _core.GroupCosts(
            group_of=self.group_of_S.tolist(),
            length_ms=self.length_ms_S4.ravel(),
            recompute_ms=self.recompute_ms_S,
            send_ms=np.concatenate([sends, self.part_ms_S]),
            num_parts=self.num_parts_S.tolist(),
            half_duplex=self.half_duplex,
            flows=self.flows,
        )


def group_costs(cost: CostModel, stages: Sequence[Stage]) -> GroupCosts:
    """The costs of these stages; raises PlanFileError if devices that talk have no path."""
    group_of_S = np.zeros(len(stages), dtype=np.int32)
    for number, group in enumerate(groups_of(stages)):
        group_of_S[list(group.stages)] = number
    cuts = [
        (stages[c], stages[c + 1]) if group_of_S[c] != group_of_S[c + 1] else None
        for c in range(len(stages) - 1)
    ]
    return GroupCosts(
        group_of_S=group_of_S,
        length_ms_S4=np.array([_lengths_ms(cost, stage) for stage in stages]),
        recompute_ms_S=np.array(
            [cost.forward_ms(stage) if stage.recompute else 0.0 for stage in stages]
        ),
        send_forward_ms_C=np.array([cost.send_forward_ms(*cut) if cut else 0.0 for cut in cuts]),
        send_backward_ms_C=np.array([cost.send_backward_ms(*cut) if cut else 0.0 for cut in cuts]),
        part_ms_S=np.array([cost.all_reduce_ms(stage, stage.gradient_buckets) for stage in stages]),
        num_parts_S=np.array(
            [stage.gradient_buckets if stage.num_replicas > 1 else 0 for stage in stages],
            dtype=np.int32,
        ),
        half_duplex=cost.half_duplex,
        flows=_flows(cost, stages, group_of_S) if cost.contention else None,
    )


def _flows(cost: CostModel, stages: Sequence[Stage], group_of_S: Codes) -> _core.GroupFlows:
    return _core.GroupFlows(
        instance=cost.kernel_instance(num_microbatches=1),
        end_layer=[stage.layers.stop for stage in stages],
        devices=[list(stage.devices) for stage in stages],
        shares=[list(stage.device_shares) for stage in stages],
        group_of=group_of_S.tolist(),
        num_parts=[stage.gradient_buckets for stage in stages],
    )


def _lengths_ms(cost: CostModel, stage: Stage) -> list[float]:
    """The times of F, B, I and W of one microbatch (rules 1 and 14)."""
    input_ms = weight_ms = 0.0
    for layer in cost.model.layers[stage.layers.start : stage.layers.stop]:
        layer_ms = math.nan if layer.weight_grad_ms is None else layer.weight_grad_ms
        weight_ms += layer_ms
        input_ms += max(0.0, layer.backward_ms - layer_ms)
    if stage.recompute:
        input_ms += sum(
            layer.forward_ms for layer in cost.model.layers[stage.layers.start : stage.layers.stop]
        )
    slowest = max(
        share / cost.cluster.devices[device].speed
        for device, share in zip(stage.devices, stage.device_shares, strict=True)
    )
    if math.isnan(weight_ms):
        input_ms = math.nan  # `max` above may have hidden it
    return [
        cost.forward_ms(stage),
        cost.backward_ms(stage),
        input_ms * slowest,
        weight_ms * slowest,
    ]
