"""What the checker asks of plans with several stages a group or backwards cut in two.

A group is a set of devices with all its stages. Its stages have the same shares. Its order holds
for each of its stages and microbatches F and B, or F, I and W.
"""

from collections.abc import Iterator
from itertools import pairwise

from pipeplan.pipeline import Group, Kind, Plan, unpack_codes

__all__ = ["device_errors", "order_errors", "share_errors", "split_errors"]

SHARE_TOLERANCE = 1e-9
ROUNDING = 1e-9
"""By which part a weight gradient's time may exceed its backward's."""
MOST_BUCKETS = 1000
LETTERS = tuple(Kind)
FORWARD, BACKWARD, INPUT, WEIGHT = range(4)


def device_errors(plan: Plan) -> Iterator[str]:
    """Devices that serve two stages whose sets are not the same."""
    stage_of: dict[int, int] = {}
    devices = plan.cluster.devices
    for index, stage in enumerate(plan.stages):
        for device in stage.devices:
            if not 0 <= device < len(devices):
                yield f"stages[{index}].devices: there is no device {device}"
                continue
            first = stage_of.setdefault(device, index)
            if first == index:
                continue
            already = f"stages[{index}].devices: {devices[device].name!r} already serves stage"
            if set(plan.stages[first].devices) != set(stage.devices):
                yield f"{already} {first}; the devices of two stages are all the same, or none is"
            elif plan.schedule.is_by_stage:
                yield f"{already} {first}; stages on the same devices have one order for all"


def share_errors(plan: Plan) -> Iterator[str]:
    """Stages of one group whose devices take other shares, and buckets beyond their limits."""
    for index, stage in enumerate(plan.stages):
        if not 1 <= stage.gradient_buckets <= MOST_BUCKETS:
            yield (
                f"stages[{index}].gradient_buckets: {stage.gradient_buckets} is not within"
                f" 1..{MOST_BUCKETS}"
            )
    for group in plan.groups:
        first = plan.stages[group.stages[0]]
        share_of = dict(zip(first.devices, first.device_shares, strict=False))
        for index in group.stages[1:]:
            stage = plan.stages[index]
            for device, share in zip(stage.devices, stage.device_shares, strict=False):
                if abs(share - share_of.get(device, share)) > SHARE_TOLERANCE:
                    yield (
                        f"stages[{index}].shares: device {device} takes {share:g}, but"
                        f" {share_of[device]:g} in stages[{group.stages[0]}]; a device has one"
                        " share in all its stages"
                    )
                    break


def split_errors(plan: Plan) -> Iterator[str]:
    """Backwards cut in two of layers that do not say how long their weight gradients take."""
    for stage in sorted(_split_stages(plan)):
        for number in plan.stages[stage].layers:
            layer = plan.model.layers[number]
            path = f"model.layers[{number}].weight_grad_ms"
            if layer.weight_grad_ms is None:
                yield f"{path}: is missing, but stage {stage} cuts its backwards in I and W; add it"
            elif layer.weight_grad_ms > layer.backward_ms * (1 + ROUNDING):
                yield (
                    f"{path}: {layer.weight_grad_ms:g} is above {layer.backward_ms:g}, the"
                    " backward_ms that it is a part of"
                )


def _split_stages(plan: Plan) -> set[int]:
    found: set[int] = set()
    if not plan.schedule.is_by_stage:
        for g in range(len(plan.schedule)):
            stages, kinds, _ = unpack_codes(plan.schedule.group_codes(g))
            found.update(stages[kinds >= INPUT].tolist())
    return {stage for stage in found if stage < len(plan.stages)}


def order_errors(plan: Plan) -> Iterator[str]:
    """Blocks that are missing, superfluous or before what they need of their own stage."""
    groups = plan.groups
    if len(plan.schedule) != len(groups):
        yield f"schedule: has {len(plan.schedule)} orders for {len(groups)} groups of devices"
        return
    for g, group in enumerate(groups):
        position_of: dict[tuple[int, int, int], int] = {}
        parts = (part.tolist() for part in unpack_codes(plan.schedule.group_codes(g)))
        for position, (stage, kind, microbatch) in enumerate(zip(*parts, strict=True)):
            block = (stage, kind, microbatch)
            if stage not in group.stages or microbatch >= plan.microbatches:
                name = plan.schedule.block(g, position)
                where = "stage" if len(group.stages) == 1 else "group"
                yield f"schedule[{g}][{position}]: {name} is not a block of this {where}"
            elif block in position_of:
                first = position_of[block]
                yield f"schedule[{g}][{position}]: {_name(*block)} stands at {first} already"
            else:
                position_of[block] = position
        yield from _stage_errors(g, group, plan.microbatches, position_of)


def _stage_errors(
    g: int, group: Group, num_microbatches: int, position_of: dict[tuple[int, int, int], int]
) -> Iterator[str]:
    """What is wrong with the blocks of each stage and microbatch of one group."""
    for stage in group.stages:
        for m in range(num_microbatches):
            is_split = (stage, INPUT, m) in position_of or (stage, WEIGHT, m) in position_of
            if is_split and (stage, BACKWARD, m) in position_of:
                whole = _name(stage, BACKWARD, m)
                yield f"schedule[{g}]: {whole} stands beside I{m} or W{m}; keep B, or I and W"
                continue
            kinds = (FORWARD, INPUT, WEIGHT) if is_split else (FORWARD, BACKWARD)
            missing = [
                _name(stage, kind, m) for kind in kinds if (stage, kind, m) not in position_of
            ]
            if missing:
                listed = " and ".join(missing)
                yield f"schedule[{g}]: does not hold every block: {listed} missing"
                continue
            for before, after in pairwise(kinds):
                if position_of[stage, after, m] < position_of[stage, before, m]:
                    earlier, later = _name(stage, after, m), _name(stage, before, m)
                    yield f"schedule[{g}]: {earlier} stands before {later}"


def _name(stage: int, kind: int, microbatch: int) -> str:
    return f"{stage}{LETTERS[kind]}{microbatch}"
