"""What every device of a plan really did in one iteration, from a trace or from the ranks.

Traces are those of `Pipeline.write_trace`, `pipeplan.run --trace` and `pipeplan testbed --trace`: a
process is a device, its track `ran` has the blocks, and `waited` the all-reduce.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipeplan.blocks import KINDS
from pipeplan.documents.syntax import read_document
from pipeplan.errors import InputError
from pipeplan.pipeline import Block, Kind, Plan

__all__ = ["MeasuredRun", "Span", "make_run", "read_run"]

MS_IN_US = 1e-3
NAME = re.compile(r"(\d{1,9})?([FBIW])(\d{1,9})")
RAN, WAITED = "ran", "waited"


class Span(NamedTuple):
    """Something that a device did; times in ms from the start of the iteration."""

    device: int
    name: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One iteration as it was."""

    blocks: dict[tuple[int, Block], tuple[float, float]]
    """By device and block, its start and its end."""
    iteration_ms: float


def read_run(path: str | Path, plan: Plan) -> MeasuredRun:
    """The iteration in a trace file.

    Raises:
        InputError: it is no trace, or not one of this plan.
    """
    document = read_document(path, InputError)
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise InputError(f"{path}: is no trace: it has no list 'traceEvents'")
    try:
        return make_run(plan, _spans(events))
    except InputError as problem:
        raise InputError(f"{path}: {problem}") from None


def _spans(events: list[Any]) -> Iterable[Span]:
    """The slices of the tracks `ran` and `waited`."""
    shown = set()
    for event in events:
        if isinstance(event, dict) and event.get("name") == "thread_name":
            title = event.get("args", {}).get("name")
            if title in (RAN, WAITED):
                shown.add((event.get("pid"), event.get("tid")))
    if not shown:
        raise InputError(
            f"has no track {RAN!r}, so it is not of a run; pipeplan.run --trace and pipeplan"
            " testbed --trace write such traces"
        )
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "X":
            place = (event.get("pid"), event.get("tid"))
            if place in shown and event.get("cat") != "wait":
                yield _span(event)


def _span(event: dict[str, Any]) -> Span:
    device, start_us, length_us = event["pid"], event.get("ts"), event.get("dur")
    if not isinstance(start_us, int | float) or not isinstance(length_us, int | float):
        raise InputError("traceEvents: a slice has no time 'ts' or no length 'dur'")
    if not isinstance(device, int) or not length_us >= 0 or not abs(start_us) < 1e18:
        raise InputError("traceEvents: a slice has an impossible 'pid', 'ts' or 'dur'")
    start_ms = start_us * MS_IN_US
    return Span(device, str(event.get("name")), start_ms, start_ms + length_us * MS_IN_US)


def make_run(plan: Plan, spans: Iterable[Span]) -> MeasuredRun:
    """The iteration in which devices of the plan did this.

    Raises:
        InputError: a block of the plan is missing, or there is one that is not the plan's.
    """
    stages_of: dict[int, list[int]] = {}
    for stage, each in enumerate(plan.stages):
        for device in each.devices:
            stages_of.setdefault(device, []).append(stage)
    expected = {
        (device, block)
        for row in plan.schedule
        for block in row
        for device in plan.stages[block.stage].devices
    }
    blocks: dict[tuple[int, Block], tuple[float, float]] = {}
    last_ms, first_ms = 0.0, float("inf")
    for span in spans:
        last_ms, first_ms = max(last_ms, span.end_ms), min(first_ms, span.start_ms)
        match = NAME.fullmatch(span.name)
        if match is None:
            continue  # an all-reduce
        own = stages_of.get(span.device, [])
        stage = int(match[1]) if match[1] else own[0] if len(own) == 1 else -1
        block = Block(Kind(match[2]), stage, int(match[3]))
        if (span.device, block) not in expected:
            raise InputError(
                f"the trace has a block {span.name} of device {span.device}, which the plan does"
                " not have; give the plan of this trace"
            )
        blocks[span.device, block] = (span.start_ms, span.end_ms)
    if blocks.keys() != expected:
        device, block = min(expected - blocks.keys(), key=_place)
        name = plan.cluster.devices[device].name
        raise InputError(f"the trace lacks {block} of {name!r}; give the plan of this trace")
    if not any(end_ms > start_ms for start_ms, end_ms in blocks.values()):
        raise InputError("all blocks of the trace have length 0, so it measures nothing")
    return MeasuredRun(blocks, last_ms - min(first_ms, 0.0))


def _place(pair: tuple[int, Block]) -> tuple[int, ...]:
    device, block = pair
    return device, KINDS.index(block.kind), block.stage, block.microbatch
