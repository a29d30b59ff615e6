"""What a step really did, as a Chrome trace (chrome://tracing, Perfetto).

A lane a rank: blocks as they ran, and the waits between them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeplan.syntax import write_atomically

__all__ = ["Event", "RankTrace", "write_trace"]

US_IN_S = 1e6


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
    lane: str
    zero_s: float
    events: tuple[Event, ...]


def write_trace(traces: Sequence[RankTrace], path: str | Path) -> None:
    """Write the traces of all ranks to one file."""
    records: list[dict[str, Any]] = []
    for trace in traces:
        common = {"pid": 0, "tid": trace.rank}
        records.append({"ph": "M", "name": "thread_name", "args": {"name": trace.lane}, **common})
        records += [
            {
                "ph": "X",
                "name": event.name,
                "cat": event.category,
                "ts": (event.start_s - trace.zero_s) * US_IN_S,
                "dur": (event.end_s - event.start_s) * US_IN_S,
                **common,
            }
            for event in trace.events
        ]
    document = {"traceEvents": records, "displayTimeUnit": "ms"}
    write_atomically(path, json.dumps(document).encode())
