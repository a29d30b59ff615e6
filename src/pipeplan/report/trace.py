"""A plan's iteration as trace events, for Perfetto and chrome://tracing.

A process a device, a track a stream: compute, what it sends and receives in each direction, and
the all-reduce, so that slices on one track never overlap. Each microbatch is a flow through the
stages and back; memory is a counter.

Reference:
    The Trace Event Format of Chromium's tracing, JSON object form: complete events (`X`), flows
    (`s`, `t`, `f`), counters (`C`), metadata (`M`). Times are microseconds there.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from pipeplan.documents.syntax import write_atomically
from pipeplan.pipeline import Kind, Plan
from pipeplan.report.drawing import NOTHING, Drawing

__all__ = ["trace_document", "write_trace"]

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
"""By their number; towards the next stage before towards the previous one."""


def write_trace(plan: Plan, path: str | Path) -> None:
    """Write the trace of a plan's simulated iteration."""
    from pipeplan.replaying import simulate

    document = trace_document(Drawing(plan, simulate(plan)))
    write_atomically(path, msgspec.json.encode(document))


def trace_document(drawing: Drawing) -> dict[str, Any]:
    """The trace as the file holds it."""
    events = [
        *_names(drawing),
        *_blocks(drawing),
        *_transfers(drawing),
        *_all_reduces(drawing),
        *_flows(drawing),
        *_memory(drawing),
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _us(ms: float) -> float:
    """Microseconds in whole nanoseconds: rounded ends of one slice and the next stay in order."""
    return round(ms * 1e6) / 1e3


def _slice(
    name: str, category: str, device: int, track: int, start_ms: float, end_ms: float, **args: Any
) -> dict[str, Any]:
    start_us = _us(start_ms)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": device,
        "tid": track,
        "ts": start_us,
        "dur": round((_us(end_ms) - start_us) * 1e3) / 1e3,
        "args": args,
    }


def _names(drawing: Drawing) -> Iterator[dict[str, Any]]:
    plan, last = drawing.plan, drawing.num_stages - 1
    position = 0
    for index, stage in enumerate(plan.stages):
        has = [True, index < last, index < last, index > 0, index > 0, stage.num_replicas > 1]
        for device in stage.devices:
            name = f"{plan.cluster.devices[device].name} (stage {index})"
            yield {"ph": "M", "name": "process_name", "pid": device, "args": {"name": name}}
            yield {
                "ph": "M",
                "name": "process_sort_index",
                "pid": device,
                "args": {"sort_index": position},
            }
            position += 1
            for track, title in enumerate(TRACKS):
                if has[track]:
                    where = {"pid": device, "tid": track}
                    yield {"ph": "M", "name": "thread_name", **where, "args": {"name": title}}
                    yield {
                        "ph": "M",
                        "name": "thread_sort_index",
                        **where,
                        "args": {"sort_index": track},
                    }


def _blocks(drawing: Drawing) -> Iterator[dict[str, Any]]:
    for number in range(drawing.first_transfer):
        kind, stage, microbatch, start_ms, end_ms = drawing.items[number]
        category = "forward" if kind is Kind.FORWARD else "backward"
        waited = drawing.waited_for[number]
        for device, pace in zip(
            drawing.plan.stages[stage].devices, drawing.device_paces[stage], strict=True
        ):
            yield _slice(
                f"{kind}{microbatch}",
                category,
                device,
                COMPUTE,
                start_ms,
                start_ms + (end_ms - start_ms) * pace,
                microbatch=microbatch,
                waited_for=drawing.name_of(waited) if waited != NOTHING else "nothing",
            )


def _transfers(drawing: Drawing) -> Iterator[dict[str, Any]]:
    for number in range(drawing.first_transfer, drawing.first_all_reduce):
        kind, channel, microbatch, start_ms, end_ms = drawing.items[number]
        is_forward = kind is Kind.FORWARD
        # On the side of stage `channel`, then on that of the stage behind it.
        tracks = (1, 3) if is_forward else (2, 4)
        for side, track in enumerate(tracks):
            for device in drawing.plan.stages[channel + side].devices:
                yield _slice(
                    f"{kind}{microbatch}",
                    "activations" if is_forward else "gradients",
                    device,
                    track,
                    start_ms,
                    end_ms,
                    microbatch=microbatch,
                    waited_for=drawing.name_of(drawing.waited_for[number]),
                )


def _all_reduces(drawing: Drawing) -> Iterator[dict[str, Any]]:
    for reduce in drawing.timeline.all_reduces:
        stage = drawing.plan.stages[reduce.stage]
        if stage.num_replicas > 1:
            for device in stage.devices:
                yield _slice(
                    "all-reduce",
                    "all-reduce",
                    device,
                    ALL_REDUCE,
                    reduce.start_ms,
                    reduce.end_ms,
                    replicas=stage.num_replicas,
                )


def _flows(drawing: Drawing) -> Iterator[dict[str, Any]]:
    """Each microbatch from its first forward through all stages to its last backward."""
    middle_us: dict[tuple[int, Kind | None, int], float] = {}
    for kind, stage, microbatch, start_ms, end_ms in drawing.items[: drawing.first_transfer]:
        pace = drawing.device_paces[stage][0]
        middle_us[stage, kind, microbatch] = _us(start_ms + (end_ms - start_ms) * pace / 2)
    forth = [(stage, Kind.FORWARD) for stage in range(drawing.num_stages)]
    back = [(stage, Kind.BACKWARD) for stage in reversed(range(drawing.num_stages))]
    steps = [*forth, *back]
    for microbatch in range(drawing.plan.microbatches):
        for position, (stage, kind) in enumerate(steps):
            phase = "s" if position == 0 else "f" if position == len(steps) - 1 else "t"
            yield {
                "ph": phase,
                "name": "microbatch",
                "cat": "microbatch",
                "id": microbatch,
                "pid": drawing.plan.stages[stage].devices[0],
                "tid": COMPUTE,
                "ts": middle_us[stage, kind, microbatch],
                "bp": "e",
            }


def _memory(drawing: Drawing) -> Iterator[dict[str, Any]]:
    for stage, memory in zip(drawing.plan.stages, drawing.memory, strict=True):
        steps = list(zip(memory.times_ms, memory.in_flight, strict=True))
        # Of several changes at one instant the last one stands.
        settled = [
            step for step, after in pairwise([*steps, (-1.0, 0)]) if _us(step[0]) != _us(after[0])
        ]
        for position, device in enumerate(stage.devices):
            base_gb = memory.base_gb[position]
            per_microbatch_gb = memory.per_microbatch_gb[position]
            for ms, in_flight in settled:
                yield {
                    "ph": "C",
                    "name": "memory",
                    "pid": device,
                    "ts": _us(ms),
                    "args": {"GB": base_gb + in_flight * per_microbatch_gb},
                }
