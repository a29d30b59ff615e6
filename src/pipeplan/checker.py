"""Judges any plan, whoever made it.

Shares only `cost` with the rest: its own slow, plain replay runs the schedule by the rules
of `docs/formats.md` instead of trusting the simulator that predicted the figures.
"""

import math
from dataclasses import dataclass

from pipeplan.cost import CostModel, PipelineCosts
from pipeplan.errors import ScheduleError
from pipeplan.pipeline import Block, Kind, Plan

__all__ = ["Verdict", "check", "memory_excesses", "replay"]

SAME_INSTANT_MS = 1e-9
RELATIVE_TOLERANCE = 1e-6
PE_WARM_UP = 4
"""PE's guarantee is (M + 4(S - 1)) rounds of the bottleneck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is wrong with a plan, and what is only worth a warning."""

    errors: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the plan is valid."""
        return not self.errors


def check(plan: Plan, *, strict_memory: bool = False) -> Verdict:
    """The verdict on a plan: coverage, devices, links, schedule, memory, predicted figures.

    Too much memory is a warning, with `strict_memory` an error.
    """
    errors = _check_stages(plan) + _check_shares(plan)
    if not errors:
        errors = _check_links(plan)
    errors += _check_schedule(plan)
    if errors:
        return Verdict(errors=tuple(errors))
    cost = CostModel(plan.model, plan.cluster)
    costs = cost.pipeline_costs(plan.stages)
    try:
        end_ms_of = replay(costs, [list(order) for order in plan.schedule])
    except ScheduleError as error:
        return Verdict(errors=(str(error),))
    too_much = memory_excesses(plan)
    errors = _check_predicted(plan, cost, costs, end_ms_of)
    if strict_memory:
        return Verdict(errors=tuple(errors + too_much))
    return Verdict(errors=tuple(errors), warnings=tuple(too_much))


def _check_stages(plan: Plan) -> list[str]:
    errors = []
    next_layer = 0
    stage_of: dict[int, int] = {}
    num_devices = len(plan.cluster.devices)
    if plan.microbatches < 1:
        errors.append(f"microbatches: {plan.microbatches} is not at least 1")
    for index, stage in enumerate(plan.stages):
        if stage.layers.start != next_layer:
            errors.append(
                f"stages[{index}].layers: starts at {stage.layers.start}, not at {next_layer};"
                " stages cover all layers once, in order"
            )
        next_layer = stage.layers.stop
        for device in stage.devices:
            if not 0 <= device < num_devices:
                errors.append(f"stages[{index}].devices: there is no device {device}")
            elif device in stage_of:
                errors.append(
                    f"stages[{index}].devices: {plan.cluster.devices[device].name!r} already"
                    f" serves stage {stage_of[device]}; a device serves one stage"
                )
            else:
                stage_of[device] = index
    if next_layer != len(plan.model.layers):
        errors.append(
            f"stages: cover {next_layer} of {len(plan.model.layers)} layers;"
            " stages cover all layers once, in order"
        )
    return errors


def _check_shares(plan: Plan) -> list[str]:
    errors = []
    for index, stage in enumerate(plan.stages):
        if stage.shares is None:
            continue
        path = f"stages[{index}].shares"
        if len(stage.shares) != len(stage.devices):
            errors.append(f"{path}: has {len(stage.shares)} for {len(stage.devices)} devices")
        elif not all(share > 0 for share in stage.shares):
            errors.append(f"{path}: {min(stage.shares):g} is not above zero")
        elif abs(math.fsum(stage.shares) - 1) > RELATIVE_TOLERANCE:
            errors.append(f"{path}: sum to {math.fsum(stage.shares):g}, not to 1")
    return errors


def _check_links(plan: Plan) -> list[str]:
    """Devices of one stage, and of neighbouring stages, need paths in both directions."""
    bandwidth = plan.cluster.bandwidth_gb_per_s
    names = [device.name for device in plan.cluster.devices]
    errors = []
    for index, stage in enumerate(plan.stages):
        behind = plan.stages[index + 1].devices if index + 1 < len(plan.stages) else ()
        for position, u in enumerate(stage.devices):
            for v in (*stage.devices[position + 1 :], *behind):
                for sender, receiver in ((u, v), (v, u)):
                    if not bandwidth[sender][receiver] > 0:
                        errors.append(
                            f"stages[{index}].devices: needs a path from {names[sender]!r}"
                            f" to {names[receiver]!r}, but the cluster has none"
                        )
    return errors


def _check_schedule(plan: Plan) -> list[str]:
    if len(plan.schedule) != len(plan.stages):
        return [f"schedule: has {len(plan.schedule)} orders for {len(plan.stages)} stages"]
    errors = []
    for stage, order in enumerate(plan.schedule):
        position_of: dict[Block, int] = {}
        for position, block in enumerate(order):
            path = f"schedule[{stage}][{position}]"
            if block.stage != stage or not 0 <= block.microbatch < plan.microbatches:
                errors.append(f"{path}: {block} is not a block of this stage")
            elif block in position_of:
                errors.append(f"{path}: {block} stands at {position_of[block]} already")
            else:
                position_of[block] = position
        for microbatch in range(plan.microbatches):
            forward = Block(Kind.FORWARD, stage, microbatch)
            backward = Block(Kind.BACKWARD, stage, microbatch)
            missing = [str(block) for block in (forward, backward) if block not in position_of]
            if missing:
                errors.append(f"schedule[{stage}]: {' and '.join(missing)} missing")
            elif position_of[backward] < position_of[forward]:
                errors.append(f"schedule[{stage}]: {backward} stands before {forward}")
    return errors


def memory_excesses(plan: Plan) -> list[str]:
    """Where a stage needs more memory than its device has."""
    cost = CostModel(plan.model, plan.cluster)
    limits = [device.memory_gb for device in plan.cluster.devices]
    messages = []
    for index, needs in enumerate(_memory_gb(plan, cost)):
        for device, need_gb in zip(plan.stages[index].devices, needs, strict=True):
            limit_gb = limits[device]
            if limit_gb is not None and need_gb > limit_gb * (1 + RELATIVE_TOLERANCE):
                messages.append(
                    f"stage {index} needs {need_gb:.3g} GB on"
                    f" {plan.cluster.devices[device].name!r} ({limit_gb:g} GB);"
                    " use more devices, a smaller microbatch or fewer microbatches in flight"
                )
    return messages


def _memory_gb(plan: Plan, cost: CostModel) -> list[list[float]]:
    """For each stage its devices' memory, from the most microbatches there at once."""
    memory = []
    for stage, order in zip(plan.stages, plan.schedule, strict=True):
        in_flight = most = 0
        for block in order:
            in_flight += 1 if block.kind is Kind.FORWARD else -1
            most = max(most, in_flight)
        memory.append(cost.memory_gb(stage, most))
    return memory


def _check_predicted(
    plan: Plan, cost: CostModel, costs: PipelineCosts, end_ms_of: dict[Block, float]
) -> list[str]:
    predicted = plan.predicted
    if predicted is None:
        return []
    errors = []
    all_reduce_ms = costs.all_reduce_ms_S.tolist()
    iteration_ms = max(
        max(end_ms_of[block] for block in order) + all_reduce_ms[stage]
        for stage, order in enumerate(plan.schedule)
    )
    busy_ms = plan.microbatches * math.fsum(
        ms for stage in plan.stages for ms in cost.device_compute_ms(stage)
    )
    num_used = sum(len(stage.devices) for stage in plan.stages)
    bubble = 1 - busy_ms / (num_used * iteration_ms) if iteration_ms else 0.0

    def compare(field: str, claimed: float, actual: float) -> None:
        if not math.isclose(claimed, actual, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-6):
            errors.append(f"predicted.{field}: says {claimed:.9g}, the replay {actual:.9g}")

    compare("iteration_ms", predicted.iteration_ms, iteration_ms)
    compare("bubble_fraction", predicted.bubble_fraction, bubble)
    actual_memory = {
        plan.cluster.devices[device].name: need_gb
        for stage, needs in zip(plan.stages, _memory_gb(plan, cost), strict=True)
        for device, need_gb in zip(stage.devices, needs, strict=True)
    }
    if set(predicted.peak_memory_gb) != set(actual_memory):
        errors.append("predicted.peak_memory_gb: does not name exactly the used devices")
    else:
        for name, need_gb in actual_memory.items():
            compare(f"peak_memory_gb[{name!r}]", predicted.peak_memory_gb[name], need_gb)
    if predicted.schedule_guarantee_ms is not None:
        num_stages = len(plan.stages)
        rounds = plan.microbatches + PE_WARM_UP * (num_stages - 1)
        slowest_ms = max([*(costs.forward_ms_S + costs.backward_ms_S), *costs.channel_ms_C])
        guarantee_ms = float(rounds * slowest_ms + max(all_reduce_ms))
        compare("schedule_guarantee_ms", predicted.schedule_guarantee_ms, guarantee_ms)
        if iteration_ms > guarantee_ms * (1 + RELATIVE_TOLERANCE):
            errors.append(
                f"predicted.schedule_guarantee_ms: {guarantee_ms:.9g} is broken"
                f" by an iteration of {iteration_ms:.9g}"
            )
    if predicted.bound is not None:
        bound_ms = predicted.bound.lower_bound_ms
        if bound_ms > iteration_ms * (1 + RELATIVE_TOLERANCE):
            errors.append(
                f"predicted.lower_bound_ms: {bound_ms:.9g} is above"
                f" the plan's own iteration of {iteration_ms:.9g}"
            )
    return errors


def replay(costs: PipelineCosts, orders: list[list[Block]]) -> dict[Block, float]:
    """When each block ends, found by walking from instant to instant.

    At an instant all ends and arrivals are taken first, then channels are served, then stages
    start; work of no length opens another round at that instant.
    """
    num_stages = len(orders)
    length_ms = {
        Kind.FORWARD: costs.forward_ms_S.tolist(),
        Kind.BACKWARD: costs.backward_ms_S.tolist(),
    }
    send_ms = {
        Kind.FORWARD: costs.send_forward_ms_C.tolist(),
        Kind.BACKWARD: costs.send_backward_ms_C.tolist(),
    }
    end_ms_of: dict[Block, float] = {}
    arrived = {block for block in orders[0] if block.kind is Kind.FORWARD}
    left = [list(reversed(order)) for order in orders]
    running: dict[int, tuple[float, Block]] = {}  # by stage
    sending: dict[tuple[int, Kind], tuple[float, int]] = {}  # by channel and direction
    waiting: dict[tuple[int, Kind], list[int]] = {
        (channel, kind): [] for channel in range(num_stages - 1) for kind in Kind
    }
    begun = dict.fromkeys(waiting, 0)

    def take_ends() -> None:
        for stage, (end_ms, block) in list(running.items()):
            if end_ms > now_ms + SAME_INSTANT_MS:
                continue
            del running[stage]
            end_ms_of[block] = end_ms
            if block.kind is Kind.FORWARD and stage == num_stages - 1:
                arrived.add(Block(Kind.BACKWARD, stage, block.microbatch))
            elif block.kind is Kind.FORWARD:
                waiting[stage, Kind.FORWARD].append(block.microbatch)
            elif stage > 0:
                waiting[stage - 1, Kind.BACKWARD].append(block.microbatch)
        for (channel, kind), (end_ms, microbatch) in list(sending.items()):
            if end_ms > now_ms + SAME_INSTANT_MS:
                continue
            del sending[channel, kind]
            receiver = channel + 1 if kind is Kind.FORWARD else channel
            arrived.add(Block(kind, receiver, microbatch))

    def serve(channel: int) -> None:
        wanted = [
            kind for kind in Kind if waiting[channel, kind] and (channel, kind) not in sending
        ]
        if costs.half_duplex:
            if any((channel, kind) in sending for kind in Kind):
                return
            if len(wanted) == 2:
                i, j = begun[channel, Kind.BACKWARD], begun[channel, Kind.FORWARD]
                backward_first = i + 4 * (num_stages - 1) - 2 * channel - 1 <= j + 2 * channel + 1
                wanted = [Kind.BACKWARD if backward_first else Kind.FORWARD]
        for kind in wanted:
            begun[channel, kind] += 1
            sending[channel, kind] = (
                now_ms + send_ms[kind][channel],
                waiting[channel, kind].pop(0),
            )

    def start(stage: int) -> None:
        if stage in running or not left[stage] or left[stage][-1] not in arrived:
            return
        block = left[stage].pop()
        running[stage] = (now_ms + length_ms[block.kind][stage], block)

    now_ms = 0.0
    while True:
        take_ends()
        for channel in range(num_stages - 1):
            serve(channel)
        for stage in range(num_stages):
            start(stage)
        ends = [end_ms for end_ms, _ in (*running.values(), *sending.values())]
        if not ends:
            break
        if min(ends) > now_ms + SAME_INSTANT_MS:
            now_ms = min(ends)
    stuck = [f"stage {stage} at {rest[-1]}" for stage, rest in enumerate(left) if rest]
    if stuck:
        raise ScheduleError(f"schedule: deadlocks: {', '.join(stuck)} wait for ever")
    return end_ms_of
