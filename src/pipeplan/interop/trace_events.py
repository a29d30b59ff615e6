"""The events of a torch profiler trace, and which of them stand for the layers of a model."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pipeplan.documents.text import excerpt
from pipeplan.errors import InputError

__all__ = ["Event", "Span", "annotated_spans", "events_in", "module_spans"]

MODULE = "nn.Module: "
NOT_LAYERS = (
    "ProfilerStep#",
    "Optimizer.",
    "enumerate(DataLoader)",
    "## ",
    "PP:",
    "nccl:",
    "gloo:",
)
"""Annotations that torch makes itself."""
MAX_NUMBER = 1e15
CATEGORIES = {"cpu_op", "kernel", "user_annotation", "python_function"}


class _Arguments(msgspec.Struct):
    external_id: int | None = msgspec.field(default=None, name="External id")
    sequence: int | None = msgspec.field(default=None, name="Sequence number")
    dims: list[Any] | None = msgspec.field(default=None, name="Input Dims")
    types: list[Any] = msgspec.field(default_factory=list, name="Input type")


class _RawEvent(msgspec.Struct):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = ""
    tid: int | str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Trace(msgspec.Struct):
    events: list[_RawEvent] = msgspec.field(name="traceEvents")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event with a start and a length."""

    cat: str
    name: str
    thread: tuple[str, str]
    ts: float
    """When it starts, in microseconds."""
    dur: float
    external_id: int | None
    sequence: int | None
    shapes: tuple[tuple[int, ...], ...] | None
    types: tuple[str, ...]

    @property
    def end_us(self) -> float:
        """When it ends."""
        return self.ts + self.dur


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One run of one layer's forward."""

    name: str
    thread: tuple[str, str]
    start_us: float
    end_us: float


def events_in(text: str) -> list[Event]:
    """The events of a trace that matter, in the order of time, outer ones first."""
    try:
        trace = msgspec.json.decode(text.encode(), type=_Trace, strict=False)
        events = [_event(raw) for raw in trace.events if raw.ph == "X" and raw.cat in CATEGORIES]
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as problem:
        raise InputError(f"is no trace of torch's profiler: {problem}") from None
    events.sort(key=lambda event: (event.ts, -event.dur))
    return events


def _event(raw: _RawEvent) -> Event:
    for field, number in (("ts", raw.ts), ("dur", raw.dur)):
        if not 0 <= number <= MAX_NUMBER:
            raise InputError(
                f"event {excerpt(raw.name)}: {field}: {number:g} is not within 0..{MAX_NUMBER:g}"
            )
    wanted = raw.cat in ("cpu_op", "kernel")
    arguments = msgspec.json.decode(raw.args, type=_Arguments) if wanted else _Arguments()
    return Event(
        cat=raw.cat,
        name=raw.name,
        thread=(str(raw.pid), str(raw.tid)),
        ts=raw.ts,
        dur=raw.dur,
        external_id=arguments.external_id,
        sequence=arguments.sequence,
        shapes=None if arguments.dims is None else tuple(map(_shape, arguments.dims)),
        types=tuple(str(kind) for kind in arguments.types),
    )


def _shape(dims: Any) -> tuple[int, ...]:
    """The lengths of a tensor's axes; of a list of tensors, which has no one shape, none."""
    if not isinstance(dims, list) or not all(type(each) in (int, list) for each in dims):
        raise InputError(f"Input Dims: {excerpt(dims)} is no shape of a tensor")
    if not all(type(length) is int for length in dims):
        return ()
    if math.prod(map(abs, dims)) > MAX_NUMBER or any(length < 0 for length in dims):
        raise InputError(f"Input Dims: {excerpt(dims)} is no shape of a tensor")
    return tuple(dims)


def annotated_spans(events: Sequence[Event]) -> list[Span]:
    """The runs of the layers that somebody annotated; inner annotations do not count."""
    chosen = [
        event
        for event in events
        if event.cat == "user_annotation" and not event.name.startswith(NOT_LAYERS)
    ]
    return [_span(event, event.name) for event in _outermost(chosen)]


def module_spans(events: Sequence[Event]) -> list[Span]:
    """The runs of the modules that are taken for the layers."""
    modules = [e for e in events if e.cat == "python_function" and e.name.startswith(MODULE)]
    if not modules:
        raise InputError(
            "has neither annotations (record_function) nor modules;"
            " record the trace with with_stack=True, with_modules=True"
        )
    inside = _children(modules)
    roots = list(_outermost(modules))
    root = Counter(event.name for event in roots).most_common(1)[0][0]
    spans = []
    for event in roots:
        if event.name == root:
            children = inside[id(event)]
            spans += [e for child in children for e in _layers(child, inside)] or [event]
    return [_span(event, event.name.removeprefix(MODULE)) for event in spans]


def _children(modules: Sequence[Event]) -> dict[int, list[Event]]:
    """By the id of each event, the modules directly inside it."""
    inside: dict[int, list[Event]] = defaultdict(list)
    open_on: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in modules:
        stack = open_on[event.thread]
        while stack and stack[-1].end_us <= event.ts:
            stack.pop()
        if stack:
            inside[id(stack[-1])].append(event)
        stack.append(event)
    return inside


def _layers(event: Event, inside: dict[int, list[Event]]) -> list[Event]:
    """The module itself, or its children if several of them are blocks of one class."""
    to_visit, layers = [event], []
    while to_visit:
        module = to_visit.pop()
        children = inside[id(module)]
        blocks = Counter(_class_of(child) for child in children if inside[id(child)])
        if blocks and max(blocks.values()) > 1:
            to_visit.extend(reversed(children))
        else:
            layers.append(module)
    return layers


def _class_of(event: Event) -> str:
    """`Linear` of `nn.Module: Linear_3`."""
    return event.name.removeprefix(MODULE).rpartition("_")[0]


def _outermost(events: Sequence[Event]) -> Iterator[Event]:
    """The events of the thread with the most of them that lie in no other one."""
    if not events:
        return
    thread = Counter(event.thread for event in events).most_common(1)[0][0]
    end_us = -math.inf
    for event in events:
        if event.thread == thread and event.ts >= end_us:
            end_us = event.end_us
            yield event


def _span(event: Event, name: str) -> Span:
    return Span(name=name, thread=event.thread, start_us=event.ts, end_us=event.end_us)
