"""The fixed-plan bound of any plan: how fast its stages could be under the best order.

A plan's stages, groups and memory are kept; its order is free. Where a stage has input and weight
gradients apart for some microbatches, it counts as if all were apart, which is never slower.
"""

import math
from collections.abc import Sequence

import numpy as np

from pipeplan import _core
from pipeplan.cost import BYTES_IN_GB, CostModel, Floats
from pipeplan.group_costs import GroupCosts, group_costs
from pipeplan.pipeline import Plan, Stage, groups_of, unpack_codes

__all__ = ["chain_of_plan", "fixed_plan_bound_ms"]

BACKWARD, INPUT, WEIGHT = 1, 2, 3
"""Kinds of blocks by their numbers."""


def fixed_plan_bound_ms(plan: Plan, cost: CostModel | None = None) -> float:
    """No order of blocks makes an iteration of these stages shorter, within the same memory."""
    return _core.chain_bound(chain_of_plan(plan, cost or CostModel(plan.model, plan.cluster)))


def chain_of_plan(plan: Plan, cost: CostModel) -> _core.Chain:
    """The plan's chain as kernels read it, recomputing stages as if memory did not count."""
    costs = group_costs(cost, plan.stages)
    is_split = _split_stages(plan)
    back = np.where(is_split, costs.length_ms_S4[:, INPUT], costs.length_ms_S4[:, BACKWARD])
    weight = np.where(is_split, costs.length_ms_S4[:, WEIGHT], 0.0)
    layers = plan.model.layers
    held = [sum(layers[n].activation_bytes for n in s.layers) for s in plan.stages]
    kept = [sum(layers[n].weight_grad_bytes for n in s.layers) for s in plan.stages]
    return _core.Chain(
        num_microbatches=plan.microbatches,
        group=costs.group_of_S.tolist(),
        forward_ms=costs.length_ms_S4[:, 0].tolist(),
        backward_ms=back.tolist(),
        weight_ms=weight.tolist(),
        there_ms=[*costs.send_forward_ms_C.tolist(), 0.0],
        back_ms=[*costs.send_backward_ms_C.tolist(), 0.0],
        reduce_ms=(costs.part_ms_S * costs.num_parts_S).tolist(),
        early_ms=_early_ms(plan, costs).tolist(),
        last_part_ms=np.where(costs.num_parts_S > 0, costs.part_ms_S, 0.0).tolist(),
        is_split=is_split.tolist(),
        held_bytes=held,
        kept_bytes=np.where(is_split, kept, 0.0).tolist(),
        room_bytes=_rooms(plan, cost),
        half_duplex=cost.half_duplex,
    )


def _early_ms(plan: Plan, costs: GroupCosts) -> Floats:
    """How long before the end of a stage's last block its all-reduce may begin, at most.

    That block is a weight gradient, or one of the stage's whole backwards if it has some. The first
    of p parts is ready when 1/p of it has run.
    """
    last_ms_S = np.zeros(len(plan.stages))
    for group in range(len(plan.schedule)):
        stages, kinds, _ = unpack_codes(plan.schedule.group_codes(group))
        for kind in (BACKWARD, WEIGHT):
            these = np.unique(stages[kinds == kind])
            last_ms_S[these] = np.maximum(last_ms_S[these], costs.length_ms_S4[these, kind])
    num_parts_S = np.maximum(costs.num_parts_S, 1)
    early: Floats = np.where(costs.num_parts_S > 0, last_ms_S * (1 - 1 / num_parts_S), 0.0)
    return early


def _split_stages(plan: Plan) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    is_split = np.zeros(len(plan.stages), dtype=np.bool_)
    for group in range(len(plan.schedule)):
        stages, kinds, _ = unpack_codes(plan.schedule.group_codes(group))
        is_split[stages[kinds == INPUT]] = True
    return is_split


def _rooms(plan: Plan, cost: CostModel) -> list[float]:
    """What each group may hold of whole microbatches; infinite where no device has a limit."""
    return [
        _room(plan, cost, [plan.stages[index] for index in group.stages])
        for group in groups_of(plan.stages)
    ]


def _room(plan: Plan, cost: CostModel, stages: Sequence[Stage]) -> float:
    if any(stage.recompute for stage in stages):
        return math.inf
    room = math.inf
    for device, share in zip(stages[0].devices, stages[0].device_shares, strict=True):
        memory_gb = plan.cluster.devices[device].memory_gb
        if memory_gb is None:
            continue
        state_gb = 0.0
        for stage in stages:
            (parts, *_) = cost.memory_parts(stage, 0)
            shared = len(stage.devices) if plan.shard_optimizer else 1
            state_gb += parts.parameter_gb + parts.gradient_gb + parts.optimizer_gb / shared
        room = min(room, max(0.0, (memory_gb - state_gb) * BYTES_IN_GB / share))
    return room
