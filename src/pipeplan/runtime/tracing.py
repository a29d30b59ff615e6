"""What a step really did beside what was predicted, as a trace for Perfetto or chrome://tracing.

A process is a device. It has three tracks, all from the start of the step::

    predicted    F0 F1 .. B0 ...      the plan's simulation
    ran          F0  F1 .. B0 ...     blocks as they were
    waited          .   ..            for what a block needs, and for the all-reduce
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from pipeplan.documents.syntax import write_atomically
from pipeplan.pipeline import Block, Kind, Plan
from pipeplan.replaying import simulate
from pipeplan.report.trace_events import (
    Metadata,
    Slice,
    encode_trace,
    make_slice,
    name_process,
    name_track,
)
from pipeplan.runtime.placement import name_stages

__all__ = [
    "BlockTimes",
    "Event",
    "RankTrace",
    "ReduceTimes",
    "Times",
    "events_of",
    "write_trace",
]

MS_IN_S = 1e3
TRACKS = ("predicted", "ran", "waited")
PREDICTED, RAN, WAITED = range(3)
ALL_REDUCE, WAIT = "all-reduce", "wait"
CATEGORIES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input gradient",
    Kind.WEIGHT_GRADIENT: "weight gradient",
}


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a rank did, by its own clock."""

    name: str
    category: str
    start_s: float
    end_s: float


class BlockTimes(NamedTuple):
    """When a block waited and ran; cheaper to make than its events."""

    block: Block
    wait_s: float
    run_s: float
    end_s: float

    def events(self, *, tells_stage: bool) -> tuple[Event, Event]:
        """Its waiting and its running."""
        name = block_name(self.block, tells_stage=tells_stage)
        return (
            Event(name, WAIT, self.wait_s, self.run_s),
            Event(name, CATEGORIES[self.block.kind], self.run_s, self.end_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """One rank's events; all ranks' clocks showed `zero_s` at one moment."""

    rank: int
    stages: tuple[int, ...]
    """Empty for a rank that the plan leaves unused."""
    replica: int
    zero_s: float
    start_s: float
    """When the step began."""
    events: tuple[Event, ...]


class ReduceTimes(NamedTuple):
    """When the gradients of a step were summed."""

    start_s: float
    end_s: float

    def events(self, *, tells_stage: bool) -> tuple[Event]:
        """The all-reduce."""
        return (Event(ALL_REDUCE, ALL_REDUCE, self.start_s, self.end_s),)


Times = BlockTimes | ReduceTimes


def events_of(times: Iterable[Times], *, tells_stage: bool) -> tuple[Event, ...]:
    """The events of a step; `tells_stage` says whether names of blocks tell their stages."""
    return tuple(chain.from_iterable(each.events(tells_stage=tells_stage) for each in times))


def block_name(block: Block, *, tells_stage: bool) -> str:
    """A block as tracks show it, which mostly are of one stage."""
    return str(block) if tells_stage else f"{block.kind}{block.microbatch}"


def write_trace(plan: Plan, traces: Sequence[RankTrace], path: str | Path) -> None:
    """Write the traces of all ranks to one file, beside the plan's own."""
    used = [trace for trace in traces if trace.stages]
    start_s = min(trace.start_s - trace.zero_s for trace in used)
    ran = (event for trace in used for event in _ran(plan, trace, start_s))
    write_atomically(path, encode_trace(chain(_predicted(plan), ran)))


def _predicted(plan: Plan) -> Iterator[Slice]:
    timeline = simulate(plan)
    for group, blocks in zip(plan.groups, timeline.blocks, strict=True):
        tells_stage = len(group.stages) > 1
        spans = [
            (
                block_name(timed.block, tells_stage=tells_stage),
                CATEGORIES[timed.block.kind],
                timed.start_ms,
                timed.end_ms,
            )
            for timed in blocks
        ]
        spans += [
            (ALL_REDUCE, ALL_REDUCE, reduce.start_ms, reduce.end_ms)
            for reduce in timeline.all_reduces
            if reduce.stage in group.stages and group.num_replicas > 1
        ]
        for device in group.devices:
            for name, category, start_ms, end_ms in spans:
                yield make_slice(name, category, device, PREDICTED, start_ms, end_ms)


def _ran(plan: Plan, trace: RankTrace, start_s: float) -> Iterator[Metadata | Slice]:
    """The names of one rank's tracks, and what it did; times begin at `start_s`."""
    first = trace.stages[0]
    device = plan.stages[first].devices[trace.replica]
    stages = name_stages(trace.stages)
    name = f"{plan.cluster.devices[device].name} ({stages}, rank {trace.rank})"
    yield from name_process(device, name, first * 1000 + trace.replica)
    for track, title in enumerate(TRACKS):
        yield from name_track(device, track, title)
    zero_s = trace.zero_s + start_s
    for event in trace.events:
        track = WAITED if event.category in (WAIT, ALL_REDUCE) else RAN
        from_ms, until_ms = (event.start_s - zero_s) * MS_IN_S, (event.end_s - zero_s) * MS_IN_S
        yield make_slice(event.name, event.category, device, track, from_ms, until_ms)
