"""What a step really did beside what was predicted, as a Chrome trace (chrome://tracing, Perfetto).

A process a device, with three tracks, all from the start of the step::

    predicted    F0 F1 .. B0 ...      the plan's simulation
    ran          F0  F1 .. B0 ...     blocks as they were
    waited          .   ..            for what a block needs, and for the all-reduce
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeplan.documents.syntax import write_atomically
from pipeplan.pipeline import Block, Kind, Plan
from pipeplan.replaying import simulate

__all__ = ["ALL_REDUCE", "CATEGORIES", "WAIT", "Event", "RankTrace", "block_name", "write_trace"]

US_IN_S, US_IN_MS = 1e6, 1e3
TRACKS = ("predicted", "ran", "waited")
PREDICTED, RAN, WAITED = range(3)
ALL_REDUCE, WAIT = "all-reduce", "wait"
CATEGORIES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward"}


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a rank did, by its own clock."""

    name: str
    category: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """One rank's events; all ranks' clocks showed `zero_s` at one moment."""

    rank: int
    stage: int
    """-1 for a rank that the plan leaves unused."""
    replica: int
    zero_s: float
    start_s: float
    """When the step began."""
    events: tuple[Event, ...]


def block_name(block: Block) -> str:
    """A block as tracks show it, which are of one stage anyway."""
    return f"{block.kind}{block.microbatch}"


def write_trace(plan: Plan, traces: Sequence[RankTrace], path: str | Path) -> None:
    """Write the traces of all ranks to one file, beside the plan's own."""
    used = [trace for trace in traces if trace.stage >= 0]
    start_s = min(trace.start_s - trace.zero_s for trace in used)
    records = [*_predicted(plan)]
    for trace in used:
        device = plan.stages[trace.stage].devices[trace.replica]
        name = f"{plan.cluster.devices[device].name} (stage {trace.stage}, rank {trace.rank})"
        records += _names(device, name, trace)
        for event in trace.events:
            track = WAITED if event.category in (WAIT, ALL_REDUCE) else RAN
            from_us = (event.start_s - trace.zero_s - start_s) * US_IN_S
            length_us = (event.end_s - event.start_s) * US_IN_S
            records.append(_slice(event.name, event.category, device, track, from_us, length_us))
    document = {"traceEvents": records, "displayTimeUnit": "ms"}
    write_atomically(path, json.dumps(document).encode())


def _predicted(plan: Plan) -> Iterator[dict[str, Any]]:
    timeline = simulate(plan)
    for stage, blocks, reduce in zip(
        plan.stages, timeline.blocks, timeline.all_reduces, strict=True
    ):
        spans = [
            (block_name(timed.block), CATEGORIES[timed.block.kind], timed.start_ms, timed.end_ms)
            for timed in blocks
        ]
        if stage.num_replicas > 1:
            spans.append((ALL_REDUCE, ALL_REDUCE, reduce.start_ms, reduce.end_ms))
        for device in stage.devices:
            for name, category, start_ms, end_ms in spans:
                from_us, length_us = start_ms * US_IN_MS, (end_ms - start_ms) * US_IN_MS
                yield _slice(name, category, device, PREDICTED, from_us, length_us)


def _names(device: int, name: str, trace: RankTrace) -> Iterator[dict[str, Any]]:
    order = {"sort_index": trace.stage * 1000 + trace.replica}
    yield {"ph": "M", "name": "process_name", "pid": device, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": device, "args": order}
    for track, title in enumerate(TRACKS):
        where = {"pid": device, "tid": track}
        yield {"ph": "M", "name": "thread_name", **where, "args": {"name": title}}
        yield {"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": track}}


def _slice(
    name: str, category: str, device: int, track: int, from_us: float, length_us: float
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": device,
        "tid": track,
        "ts": round(from_us, 3),
        "dur": round(length_us, 3),
    }
