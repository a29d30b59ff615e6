"""The records of a trace file for Perfetto and chrome://tracing, and their one rule of rounding.

A process is a device; a track of it is one stream of slices that do not overlap.

Reference:
    The Trace Event Format of Chromium's tracing, JSON object form: complete events (`X`), flows
    (`s`, `t`, `f`), counters (`C`), metadata (`M`). Times are microseconds there.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

__all__ = [
    "Counter",
    "Event",
    "FlowEnd",
    "FlowStart",
    "FlowStep",
    "Metadata",
    "Slice",
    "encode_trace",
    "make_slice",
    "name_process",
    "name_track",
    "to_us",
]

NS_IN_MS, NS_IN_US = 1e6, 1e3
EVENTS_AT_ONCE = 20_000


class Slice(msgspec.Struct, frozen=True, tag_field="ph", tag="X"):
    """Something with a start and a length on one track."""

    name: str
    cat: str
    pid: int
    tid: int
    ts: float
    dur: float
    args: dict[str, Any] | UnsetType = UNSET


class Metadata(msgspec.Struct, frozen=True, tag_field="ph", tag="M"):
    """The name or the position of a process or of one of its tracks."""

    name: str
    pid: int
    args: dict[str, Any]
    tid: int | UnsetType = UNSET


class _Flow(msgspec.Struct, frozen=True, tag_field="ph", tag="t"):
    """One step of something that goes through several slices."""

    name: str
    cat: str
    id: int
    pid: int
    tid: int
    ts: float
    bp: str = "e"
    """The step belongs to the slice around it."""


class FlowStart(_Flow, frozen=True, tag_field="ph", tag="s"):
    """The first step of a flow."""


class FlowStep(_Flow, frozen=True, tag_field="ph", tag="t"):
    """A step between the first and the last."""


class FlowEnd(_Flow, frozen=True, tag_field="ph", tag="f"):
    """The last step of a flow."""


class Counter(msgspec.Struct, frozen=True, tag_field="ph", tag="C"):
    """A value that holds from a time on."""

    name: str
    pid: int
    ts: float
    args: dict[str, float]


Event = Slice | Metadata | FlowStart | FlowStep | FlowEnd | Counter


def to_us(ms: float) -> float:
    """Microseconds in whole nanoseconds: rounded ends of one slice and the next stay in order."""
    return round(ms * NS_IN_MS) / NS_IN_US


def make_slice(
    name: str,
    category: str,
    device: int,
    track: int,
    start_ms: float,
    end_ms: float,
    args: dict[str, Any] | UnsetType = UNSET,
) -> Slice:
    """A slice whose start and end are rounded by the one rule."""
    start_us = to_us(start_ms)
    length_us = round((to_us(end_ms) - start_us) * NS_IN_US) / NS_IN_US
    return Slice(name, category, device, track, start_us, length_us, args)


def name_process(device: int, name: str, position: int) -> Iterator[Metadata]:
    """What the process of a device is called, and where it stands among the others."""
    yield Metadata("process_name", device, {"name": name})
    yield Metadata("process_sort_index", device, {"sort_index": position})


def name_track(device: int, track: int, name: str) -> Iterator[Metadata]:
    """What a track is called; tracks stand in the order of their numbers."""
    yield Metadata("thread_name", device, {"name": name}, track)
    yield Metadata("thread_sort_index", device, {"sort_index": track}, track)


def encode_trace(events: Iterable[Event]) -> bytes:
    """The bytes of a trace file; few events are in memory at once."""
    encoder, rest = msgspec.json.Encoder(), iter(events)
    parts = []
    while batch := list(islice(rest, EVENTS_AT_ONCE)):
        parts.append(encoder.encode(batch)[1:-1])
    return b'{"traceEvents":[' + b",".join(parts) + b'],"displayTimeUnit":"ms"}'
