"""A plan's iteration as trace events, for Perfetto and chrome://tracing.

A process is a device. Its tracks are compute, what it sends and receives in each direction, and the
all-reduce, so that slices on one track never overlap. Each microbatch is a flow through the stages
and back; memory is a counter. Shared links are one more process, with a counter for each direction.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from pipeplan.documents.syntax import write_atomically
from pipeplan.errors import InputError
from pipeplan.pipeline import Plan
from pipeplan.report.analysis.items import BACKWARD, FORWARD, INPUT, LETTERS, NOTHING, WEIGHT
from pipeplan.report.analysis.plan_analysis import PlanAnalysis, analyse
from pipeplan.report.analysis.shared_links import MAX_USE_CHANGES
from pipeplan.report.trace_events import (
    Counter,
    Event,
    FlowEnd,
    FlowStart,
    FlowStep,
    Metadata,
    Slice,
    encode_trace,
    make_slice,
    name_process,
    name_track,
    to_us,
)

__all__ = ["MAX_EVENTS", "count_events", "trace_document", "write_trace"]

MAX_EVENTS = 1_000_000
"""About 150 MB; with more, viewers take minutes or do not open the file."""
COMPUTE = 0
ALL_REDUCE = 5
TRACKS = (
    "compute",
    "send activations",
    "receive gradients",
    "receive activations",
    "send gradients",
    "all-reduce",
)
"""By their number; those of the next stage before those of the previous one."""
TRANSFER_TRACKS = {FORWARD: (1, 3), BACKWARD: (2, 4)}
"""On the side of the channel's first stage, and on that of its second."""
CATEGORIES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT: "input gradient",
    WEIGHT: "weight gradient",
}
CONTENTS = {FORWARD: "activations", BACKWARD: "gradients"}


def write_trace(plan: Plan, path: str | Path, *, warn: Callable[[str], None] | None = None) -> None:
    """Write the trace of a plan's simulated iteration.

    Args:
        plan: the plan.
        path: where to write it; `-` is the standard output.
        warn: is told of stale figures in the plan.

    Examples:
        >>> import pipeplan as pp
        >>> plan = pp.plan(pp.zoo.model("vgg19"), pp.zoo.cluster("4x2-10g"), planner="spp")
        >>> pp.write_trace(plan, "vgg19.trace.json")
    """
    num_events = count_events(plan)
    if num_events > MAX_EVENTS:
        raise InputError(
            f"trace: {num_events / 1e6:.1f} million events are more than the"
            f" {MAX_EVENTS / 1e6:g} million that trace viewers open; take fewer microbatches, or"
            " write a report, which summarises a large plan"
        )
    write_atomically(path, encode_trace(_events(analyse(plan, warn))))


def count_events(plan: Plan) -> int:
    """At most how many events the trace of a plan has, by the sizes in the plan alone."""
    replicas = [stage.num_replicas for stage in plan.stages] or [0]
    num_devices = sum(replicas)
    inner = 2 * num_devices - replicas[0] - replicas[-1]  # devices by the channels that they touch
    per_microbatch = 2 * num_devices + 2 * inner + 2 * len(replicas) + 2 * num_devices
    if plan.uses_families:  # three blocks where backwards are cut, two counters for each
        per_microbatch += 5 * num_devices
        num_devices += sum(stage.gradient_buckets * stage.num_replicas for stage in plan.stages)
    on_links = MAX_USE_CHANGES if plan.cluster.links else 0
    return plan.microbatches * per_microbatch + (3 + 2 * len(TRACKS) + 1) * num_devices + on_links


def trace_document(analysis: PlanAnalysis) -> dict[str, Any]:
    """The trace as the file holds it."""
    events = [msgspec.to_builtins(event) for event in _events(analysis)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(analysis: PlanAnalysis) -> Iterator[Event]:
    yield from _names(analysis)
    yield from _blocks(analysis)
    yield from _transfers(analysis)
    yield from _all_reduces(analysis)
    yield from _flows(analysis)
    yield from _memory(analysis)
    yield from _shared_links(analysis)


def _names(analysis: PlanAnalysis) -> Iterator[Metadata]:
    if analysis.has_groups:
        yield from _group_names(analysis)
        return
    plan, last = analysis.plan, analysis.num_stages - 1
    position = 0
    for index, stage in enumerate(plan.stages):
        has = [True, index < last, index < last, index > 0, index > 0, stage.num_replicas > 1]
        for device in stage.devices:
            name = f"{plan.cluster.devices[device].name} (stage {index})"
            yield from name_process(device, name, position)
            position += 1
            for track, title in enumerate(TRACKS):
                if has[track]:
                    yield from name_track(device, track, title)


def _group_names(analysis: PlanAnalysis) -> Iterator[Metadata]:
    """With groups a device has a track for all that it sends to another one, or gets from it."""
    peers: list[set[int]] = [set() for _ in analysis.groups]
    for before, behind in pairwise(analysis.items.group_of_S.tolist()):
        if before != behind:
            peers[before].add(behind)
            peers[behind].add(before)
    position = 0
    for index, group in enumerate(analysis.groups):
        for device in group.devices:
            stages = ", ".join(map(str, group.stages))
            name = f"{analysis.plan.cluster.devices[device].name} (group {index}: stages {stages})"
            yield from name_process(device, name, position)
            position += 1
            yield from name_track(device, COMPUTE, TRACKS[COMPUTE])
            for peer in sorted(peers[index]):
                yield from name_track(device, _group_track(peer, 0), f"send to group {peer}")
                yield from name_track(device, _group_track(peer, 1), f"receive from group {peer}")
            if group.num_replicas > 1:
                yield from name_track(device, _reduce_track(analysis), TRACKS[ALL_REDUCE])


def _group_track(peer: int, side: int) -> int:
    return 1 + 2 * peer + side


def _reduce_track(analysis: PlanAnalysis) -> int:
    return 1 + 2 * len(analysis.groups) if analysis.has_groups else ALL_REDUCE


def _transfer_track(analysis: PlanAnalysis, kind: int, channel: int, side: int) -> int:
    """The track of a transfer on the devices before (0) or behind (1) its cut."""
    if not analysis.has_groups:
        return TRANSFER_TRACKS[kind][side]
    is_receiver = side == 1 if kind == FORWARD else side == 0
    return _group_track(analysis.group_of(channel + 1 - side), int(is_receiver))


def _blocks(analysis: PlanAnalysis) -> Iterator[Slice]:
    items = analysis.items
    several = [len(analysis.groups[group].stages) > 1 for group in items.group_of_S.tolist()]
    for number in range(items.first_transfer):
        kind, stage, microbatch, start_ms, end_ms = items[number]
        name = f"{stage if several[stage] else ''}{LETTERS[kind]}{microbatch}"
        category = CATEGORIES[kind]
        waited = int(analysis.waited_for[number])
        args = {
            "microbatch": microbatch,
            "waited_for": "nothing" if waited == NOTHING else items.name_of(waited),
            **_slowed(analysis, waited),
        }
        devices = analysis.plan.stages[stage].devices
        for device, pace in zip(devices, analysis.device_paces[stage], strict=True):
            until_ms = start_ms + (end_ms - start_ms) * pace
            yield make_slice(name, category, device, COMPUTE, start_ms, until_ms, args)


def _transfers(analysis: PlanAnalysis) -> Iterator[Slice]:
    items = analysis.items
    for number in range(items.first_transfer, items.first_all_reduce):
        kind, channel, microbatch, start_ms, end_ms = items[number]
        name, category = f"{LETTERS[kind]}{microbatch}", CONTENTS[kind]
        args = {
            "microbatch": microbatch,
            "waited_for": items.name_of(int(analysis.waited_for[number])),
            **_slowed(analysis, number),
        }
        for side in (0, 1):
            track = _transfer_track(analysis, kind, channel, side)
            for device in analysis.plan.stages[channel + side].devices:
                yield make_slice(name, category, device, track, start_ms, end_ms, args)


def _all_reduces(analysis: PlanAnalysis) -> Iterator[Slice]:
    items = analysis.items
    track = _reduce_track(analysis)
    for index, stage in enumerate(analysis.plan.stages):
        parts = items.parts_of(index)
        for number in range(parts.start, parts.stop) if stage.num_replicas > 1 else ():
            args = {"replicas": stage.num_replicas, **_slowed(analysis, number)}
            name = items.name_of(number) if analysis.has_groups else "all-reduce"
            item = items[number]
            for device in stage.devices:
                yield make_slice(
                    name, "all-reduce", device, track, item.start_ms, item.end_ms, args
                )


def _slowed(analysis: PlanAnalysis, number: int) -> dict[str, Any]:
    """What slowed a transfer or an all-reduce on a shared link, if something did."""
    found = analysis.shared_use.slowed.get(number)
    if found is None:
        return {}
    link = analysis.shared_use.links[found.link]
    return {
        "slowed_by": analysis.items.name_of(found.by),
        "slowed_on": f"{link.name} ({link.direction})",
        "slowed_ms": found.more_ms,
    }


def _flows(analysis: PlanAnalysis) -> Iterator[FlowStart | FlowStep | FlowEnd]:
    """Each microbatch from its first forward through all stages to its last backward."""
    items = analysis.items
    forth = [(FORWARD, stage) for stage in range(analysis.num_stages)]
    steps = [*forth, *((BACKWARD, stage) for _, stage in reversed(forth))]
    for microbatch in range(analysis.plan.microbatches):
        for position, (kind, stage) in enumerate(steps):
            item = items[int(items.block_number_2SM[kind, stage, microbatch])]
            pace = analysis.device_paces[stage][0]
            middle_us = to_us(item.start_ms + (item.end_ms - item.start_ms) * pace / 2)
            is_last = position == len(steps) - 1
            make = FlowStart if position == 0 else FlowEnd if is_last else FlowStep
            device = analysis.plan.stages[stage].devices[0]
            yield make("microbatch", "microbatch", microbatch, device, COMPUTE, middle_us)


def _memory(analysis: PlanAnalysis) -> Iterator[Counter]:
    for memory in analysis.memory:
        times_us = [to_us(ms) for ms in memory.times_ms.tolist()]
        steps = list(zip(times_us, memory.in_flight.tolist(), strict=True))
        # Of several changes at one instant only the last one counts.
        settled = [step for step, after in pairwise([*steps, (-1.0, 0)]) if step[0] != after[0]]
        for device, base_gb, per_microbatch_gb in zip(
            memory.devices, memory.base_gb, memory.per_microbatch_gb, strict=True
        ):
            for at_us, in_flight in settled:
                held_gb = base_gb + in_flight * per_microbatch_gb
                yield Counter("memory", device, at_us, {"GB": held_gb})


def _shared_links(analysis: PlanAnalysis) -> Iterator[Metadata | Counter]:
    """A process for all shared links: for each direction of each the GB/s in use."""
    links = analysis.shared_use.busiest(MAX_USE_CHANGES)
    if not links:
        return
    process = analysis.plan.cluster.num_devices
    yield from name_process(process, "shared links", process)
    for link in links:
        name = f"{link.name} ({link.direction})"
        for ms, used in zip(link.times_ms.tolist(), link.used.tolist(), strict=True):
            yield Counter(name, process, to_us(ms), {"GB/s": used * link.gb_per_s})
