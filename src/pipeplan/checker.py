"""Judges any plan, whoever made it.

It shares only `cost` with the rest. Its own plain replay (`plain_replay`) runs the schedule by the
rules of `docs/formats.md`. It does not trust the simulator that predicted the figures.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from pipeplan.bound_checks import bound_errors
from pipeplan.cost import CostModel, PipelineCosts
from pipeplan.errors import ScheduleError
from pipeplan.group_checks import device_errors, order_errors, share_errors, split_errors
from pipeplan.group_costs import group_costs
from pipeplan.number_checks import MAX_MICROBATCHES, SHARES, Matrix, number_errors
from pipeplan.pipeline import Codes, Plan, Prediction, Stage
from pipeplan.plain_flows import longest_times, replay_flows
from pipeplan.plain_group_flows import replay_group_flows
from pipeplan.plain_group_memory import group_memory_gb
from pipeplan.plain_groups import replay_groups
from pipeplan.plain_replay import block_name, replay

__all__ = [
    "Verdict",
    "check",
    "disagreements",
    "has_whole_samples",
    "memory_excesses",
    "memory_warning",
    "replay",
    "structural_errors",
]

MAX_MESSAGES = 200
RELATIVE_TOLERANCE = 1e-6
INSTANT_MS = 1e-9  # How much a time may differ besides, and memory: a thousandth of a byte.
MEMORY_ROUNDING_GB = 1e-12
BUBBLE_ROUNDING = 1e-6
SHARE_SUM_TOLERANCE = 1e-9
PE_WARM_UP = 4  # PE's guarantee is (M + 4(S - 1)) rounds of the bottleneck


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is wrong with a plan, and what is only worth a warning."""

    errors: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    """Those of `errors` that say that a figure under `predicted` is not the plan's."""

    @property
    def ok(self) -> bool:
        """Whether the plan is valid."""
        return not self.errors


def check(plan: Plan, *, strict_memory: bool = False) -> Verdict:
    """The verdict on a plan: coverage, devices, links, schedule, memory, predicted figures.

    Too much memory is one warning; with `strict_memory` each device is an error. Devices that take
    a part of a sample are a warning too. After a few hundred messages one more says that there are
    others.

    Examples:
        >>> import pipeplan as pp
        >>> plan = pp.plan(pp.zoo.model("vgg19"), pp.zoo.cluster("4x2-10g"), planner="1f1b")
        >>> pp.check(plan).ok
        True
        >>> from dataclasses import replace
        >>> pp.check(replace(plan, stages=plan.stages[:-1])).errors[0]
        'stages: cover 21 of 24 layers; stages cover all layers once, in order'
    """
    errors = structural_errors(plan)
    if errors:
        return Verdict(errors=tuple(errors))
    cost = CostModel(plan.model, plan.cluster)
    try:
        figures = _group_figures(plan, cost) if plan.uses_families else _stage_figures(plan, cost)
    except ScheduleError as error:
        return Verdict(errors=(str(error),))
    stale = _first_few(disagreements(plan, figures))
    too_much = memory_excesses(plan, cost)
    split = tuple(_split_samples(plan))
    if strict_memory:
        wrong = tuple(_first_few(chain(stale, too_much)))
        return Verdict(errors=wrong, warnings=split, stale=tuple(stale))
    warnings = [memory_warning(plan, cost)] if too_much else []
    return Verdict(errors=tuple(stale), warnings=(*warnings, *split), stale=tuple(stale))


def _replayed_ends(plan: Plan, costs: PipelineCosts) -> list[float]:
    """When each stage's all-reduce ends."""
    if plan.cluster.links:
        return replay_flows(plan, costs)[1]
    # Views of the arrays take no room and give plain integers.
    ends_ms = replay(costs, [plan.schedule.codes(n).data for n in range(len(plan.stages))])
    all_reduce_ms = costs.all_reduce_ms_S.tolist()
    return [ends[-1] + all_reduce_ms[stage] for stage, ends in enumerate(ends_ms)]


def structural_errors(plan: Plan) -> list[str]:
    """What is wrong with a plan before anything runs: numbers, stages, links, orders of blocks."""
    return _first_few(_find_structural_errors(plan))


def _first_few(messages: Iterable[str]) -> list[str]:
    """The first messages; the others are never made."""
    few = list(islice(messages, MAX_MESSAGES + 1))
    if len(few) > MAX_MESSAGES:
        few[MAX_MESSAGES:] = [f"there are more than these {MAX_MESSAGES} messages"]
    return few


def _find_structural_errors(plan: Plan) -> Iterator[str]:
    wrong = False
    for message in chain(
        _check_stages(plan), _check_shares(plan), number_errors(plan), split_errors(plan)
    ):
        wrong = True
        yield message
    if not wrong:
        yield from _check_links(plan)
    yield from order_errors(plan) if plan.uses_families else _check_schedule(plan)


def _check_stages(plan: Plan) -> Iterator[str]:
    next_layer = 0
    if plan.microbatches < 1:
        yield f"microbatches: {plan.microbatches} is not at least 1"
    elif plan.microbatches > MAX_MICROBATCHES:
        yield f"microbatches: {plan.microbatches} is above {MAX_MICROBATCHES}"
    for index, stage in enumerate(plan.stages):
        if stage.layers.start != next_layer:
            yield (
                f"stages[{index}].layers: starts at {stage.layers.start}, not at {next_layer};"
                " stages cover all layers once, in order"
            )
        next_layer = stage.layers.stop
    yield from device_errors(plan)
    if next_layer != len(plan.model.layers):
        yield (
            f"stages: cover {next_layer} of {len(plan.model.layers)} layers;"
            " stages cover all layers once, in order"
        )


def _check_shares(plan: Plan) -> Iterator[str]:
    for index, stage in enumerate(plan.stages):
        if stage.shares is None:
            continue
        path = f"stages[{index}].shares"
        if len(stage.shares) != len(stage.devices):
            yield f"{path}: has {len(stage.shares)} for {len(stage.devices)} devices"
        elif (wrong := next((x for x in stage.shares if not x > 0), None)) is not None:
            yield f"{path}: {wrong:g} is not above zero"
        elif min(stage.shares) < SHARES[0] or max(stage.shares) > SHARES[1]:
            yield f"{path}: {min(stage.shares):g}..{max(stage.shares):g} is not within 1e-06..1"
        elif abs(math.fsum(stage.shares) - 1) > SHARE_SUM_TOLERANCE:
            yield f"{path}: sum to {math.fsum(stage.shares):.12g}, not to 1"
    yield from share_errors(plan)


def _check_links(plan: Plan) -> Iterator[str]:
    """Devices of one stage, and of neighbouring stages, need paths in both directions."""
    names = [device.name for device in plan.cluster.devices]
    row_D, paths = _paths(plan.cluster.bandwidth_gb_per_s)
    for index, stage in enumerate(plan.stages):
        behind = plan.stages[index + 1].devices if index + 1 < len(plan.stages) else ()
        if set(behind) == set(stage.devices):
            behind = ()  # what stays in a group is not sent
        others = np.array([*stage.devices, *behind], dtype=np.intp)
        for position, u in enumerate(stage.devices):
            rest = others[position + 1 :]
            has_both_ways = paths[row_D[u], rest] & paths[row_D[rest], u]
            for v in rest[~has_both_ways].tolist():
                for sender, receiver in ((u, v), (v, u)):
                    if not paths[row_D[sender], receiver]:
                        yield (
                            f"stages[{index}].devices: needs a path from {names[sender]!r}"
                            f" to {names[receiver]!r}, but the cluster has none"
                        )


def _paths(bandwidth: Matrix) -> tuple[Codes, NDArray[np.bool_]]:
    """For each device its row, and in which columns the row has a path; shared rows once."""
    paths, row_D, before = [], [], None
    for row in bandwidth:
        if row is not before:
            before = row
            paths.append(np.array(row) > 0)
        row_D.append(len(paths) - 1)
    return np.array(row_D), np.stack(paths)


def _check_schedule(plan: Plan) -> Iterator[str]:
    if len(plan.schedule) != len(plan.stages):
        yield f"schedule: has {len(plan.schedule)} orders for {len(plan.stages)} stages"
        return
    for stage in range(len(plan.stages)):
        position_of: dict[int, int] = {}
        for position, code in enumerate(plan.schedule.codes(stage).tolist()):
            if not -plan.microbatches <= code < plan.microbatches:
                block = plan.schedule.block(stage, position)
                yield f"schedule[{stage}][{position}]: {block} is not a block of this stage"
            elif code in position_of:
                first = position_of[code]
                name = block_name(stage, code)
                yield f"schedule[{stage}][{position}]: {name} stands at {first} already"
            else:
                position_of[code] = position
        for forward in range(plan.microbatches):
            backward = -1 - forward
            if forward in position_of and backward in position_of:
                if position_of[backward] < position_of[forward]:
                    later, earlier = block_name(stage, forward), block_name(stage, backward)
                    yield f"schedule[{stage}]: {earlier} stands before {later}"
            else:
                missing = [code for code in (forward, backward) if code not in position_of]
                listed = " and ".join(block_name(stage, code) for code in missing)
                yield f"schedule[{stage}]: does not hold every block: {listed} missing"


def memory_excesses(plan: Plan, cost: CostModel | None = None) -> list[str]:
    """Where a stage needs more memory than its device has; the first few hundred of them."""
    cost = cost or CostModel(plan.model, plan.cluster)
    return _first_few(_find_memory_excesses(plan, cost))


def memory_warning(plan: Plan, cost: CostModel | None = None) -> str:
    """One line about all devices that have too little memory; empty if all have enough."""
    messages = _find_memory_excesses(plan, cost or CostModel(plan.model, plan.cluster))
    first = next(messages, "")
    more = sum(1 for _ in messages)
    if not more:
        return first
    what, _, remedy = first.rpartition("; ")
    return f"{what} (and {more} device{'s' if more > 1 else ''} more); {remedy}"


def _split_samples(plan: Plan) -> Iterator[str]:
    """One line if devices take parts of samples, which cannot be run."""
    samples = plan.model.microbatch_size
    split = [
        index for index, stage in enumerate(plan.stages) if not has_whole_samples(stage, samples)
    ]
    if split:
        stage = plan.stages[split[0]]
        others = len(split) - 1
        more = f" (and {others} stage{'s' if others > 1 else ''} more)" if others else ""
        share = max(stage.device_shares)
        yield (
            f"stage {split[0]} splits samples: a device takes {share * samples:.3g} of {samples}"
            f"{more}; plan without --divisible for whole samples"
        )


def _find_memory_excesses(plan: Plan, cost: CostModel) -> Iterator[str]:
    noun = "group" if plan.uses_families else "stage"
    for index, needs in enumerate(_memory_gb(plan, cost)):
        for u, need_gb in needs.items():
            device = plan.cluster.devices[u]
            if device.memory_gb is None:
                continue
            if need_gb > device.memory_gb * (1 + RELATIVE_TOLERANCE):
                yield (
                    f"{noun} {index} needs {need_gb:.3g} GB on"
                    f" {device.name!r} ({device.memory_gb:g} GB);"
                    " use more devices, a smaller microbatch or fewer microbatches in flight"
                )


def _memory_gb(plan: Plan, cost: CostModel) -> list[dict[int, float]]:
    """For each stage or group its devices' memory."""
    if plan.uses_families:
        return group_memory_gb(plan)
    memory = []
    for index, stage in enumerate(plan.stages):
        in_flight = most = 0
        for code in plan.schedule.codes(index).tolist():
            in_flight += 1 if code >= 0 else -1
            if in_flight > most:
                most = in_flight
        memory.append(dict(zip(stage.devices, cost.memory_gb(stage, most), strict=True)))
    return memory


def _group_figures(plan: Plan, cost: CostModel) -> Prediction:
    """What a plan with groups should predict; it has no guarantee."""
    replay_plan = replay_group_flows if plan.cluster.links else replay_groups
    iteration_ms = replay_plan(plan, group_costs(cost, plan.stages)).iteration_ms
    busy_ms = plan.microbatches * math.fsum(
        ms for stage in plan.stages for ms in cost.device_compute_ms(stage)
    )
    num_used = len({device for stage in plan.stages for device in stage.devices})
    return Prediction(
        iteration_ms=iteration_ms,
        bubble_fraction=1 - busy_ms / (num_used * iteration_ms) if iteration_ms else 0.0,
        peak_memory_gb={
            plan.cluster.devices[device].name: need_gb
            for needs in _memory_gb(plan, cost)
            for device, need_gb in needs.items()
        },
    )


def _stage_figures(plan: Plan, cost: CostModel) -> Prediction:
    """What the plan should predict; its guarantee as if its schedule were PE's."""
    costs = cost.pipeline_costs(plan.stages)
    all_reduce_ms = costs.all_reduce_ms_S.tolist()
    iteration_ms = max(_replayed_ends(plan, costs))
    busy_ms = plan.microbatches * math.fsum(
        ms for stage in plan.stages for ms in cost.device_compute_ms(stage)
    )
    num_used = sum(len(stage.devices) for stage in plan.stages)
    rounds = plan.microbatches + PE_WARM_UP * (len(plan.stages) - 1)
    channel_ms = costs.channel_ms_C.tolist()
    if plan.cluster.links:
        channel_ms, all_reduce_ms = longest_times(plan)
    slowest_ms = max([*(costs.forward_ms_S + costs.backward_ms_S), *channel_ms])
    return Prediction(
        iteration_ms=iteration_ms,
        bubble_fraction=1 - busy_ms / (num_used * iteration_ms) if iteration_ms else 0.0,
        peak_memory_gb={
            plan.cluster.devices[device].name: need_gb
            for needs in _memory_gb(plan, cost)
            for device, need_gb in needs.items()
        },
        schedule_guarantee_ms=float(rounds * slowest_ms + max(all_reduce_ms)),
    )


def disagreements(plan: Plan, replayed: Prediction) -> Iterator[str]:
    """Where the plan's predicted figures differ from the replayed ones, one message each.

    `replayed` holds the guarantee that the plan has if its schedule is PE's.
    """
    predicted = plan.predicted
    if predicted is None:
        return
    yield from _differs(
        "iteration_ms", predicted.iteration_ms, replayed.iteration_ms, rounding=INSTANT_MS
    )
    yield from _differs(
        "bubble_fraction",
        predicted.bubble_fraction,
        replayed.bubble_fraction,
        rounding=BUBBLE_ROUNDING,
    )
    if set(predicted.peak_memory_gb) != set(replayed.peak_memory_gb):
        yield "predicted.peak_memory_gb: does not name exactly the used devices"
    else:
        for name, need_gb in replayed.peak_memory_gb.items():
            claimed_gb = predicted.peak_memory_gb[name]
            path = f"peak_memory_gb[{name!r}]"
            yield from _differs(path, claimed_gb, need_gb, rounding=MEMORY_ROUNDING_GB)
    longest_ms = replayed.schedule_guarantee_ms
    if predicted.schedule_guarantee_ms is not None and plan.uses_families:
        yield (
            f"predicted.schedule_guarantee_ms: {predicted.schedule_guarantee_ms:g} has to be null:"
            " the theorem is about one stage a device and whole backwards"
        )
    elif predicted.schedule_guarantee_ms is not None and longest_ms is not None:
        claimed_ms = predicted.schedule_guarantee_ms
        yield from _differs("schedule_guarantee_ms", claimed_ms, longest_ms, rounding=INSTANT_MS)
        if replayed.iteration_ms > longest_ms * (1 + RELATIVE_TOLERANCE):
            yield (
                f"predicted.schedule_guarantee_ms: {longest_ms:.9g} is broken"
                f" by an iteration of {replayed.iteration_ms:.9g}"
            )
    yield from bound_errors(plan, predicted, replayed.iteration_ms)


def _differs(field: str, claimed: float, actual: float, *, rounding: float) -> Iterator[str]:
    if not math.isclose(claimed, actual, rel_tol=RELATIVE_TOLERANCE, abs_tol=rounding):
        yield f"predicted.{field}: says {claimed:.9g}, the replay {actual:.9g}"


def has_whole_samples(stage: Stage, microbatch_size: int) -> bool:
    """Whether each device of the stage takes a whole number of samples, at least one."""
    samples = [share * microbatch_size for share in stage.device_shares]
    return all(
        round(count) >= 1 and math.isclose(count, round(count), rel_tol=RELATIVE_TOLERANCE)
        for count in samples
    )
