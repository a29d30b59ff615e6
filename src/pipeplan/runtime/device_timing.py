"""When a device ran its blocks, and which block it runs now.

On a CPU, a call that has returned is done, and the clock of the host tells. A GPU runs behind its
host. There, marks in the stream tell::

    host     take F0, begin F0, end F0, take F1, ...     (much earlier)
    stream   --wait for input--|begin|----F0----|end|--wait--|begin|----F1----|end|

The host has queued everything long before the device is done. Then it follows the device from mark
to mark, and tells the watchdog which block the device waits for or runs.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeplan.pipeline import Block
from pipeplan.runtime.streams import Mark, Streams
from pipeplan.runtime.supervision.status_board import State
from pipeplan.runtime.tracing import BlockTimes

__all__ = ["DeviceTiming"]


@dataclass(frozen=True, slots=True)
class _Span:
    block: Block
    begun: Mark
    ended: Mark


class DeviceTiming:
    """The marks of one step."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._start_s = time.perf_counter()
        self._start = streams.mark()
        self._spans: list[_Span] = []

    @property
    def is_needed(self) -> bool:
        """Whether the device runs behind its host."""
        return self._start is not None

    def mark(self) -> Mark | None:
        """Mark this place of the computing stream; None on a CPU."""
        return self._streams.mark()

    def note(self, block: Block, begun: Mark) -> None:
        """Note that the work queued since then is this block's."""
        ended = self._streams.mark()
        assert ended is not None  # there was a mark before
        self._spans.append(_Span(block, begun, ended))

    def follow(self, enter: Callable[[State, Any], None]) -> None:
        """Wait for the device block by block, and tell what it does."""
        for span in self._spans:
            enter(State.WAITING, span.block)
            span.begun.wait()
            enter(State.COMPUTING, span.block)
            span.ended.wait()

    def times(self) -> list[BlockTimes]:
        """What the device did, by the clock of the host."""
        found: list[BlockTimes] = []
        if self._start is None:
            return found
        last_s = self._start_s
        for span in self._spans:
            begun_s = self._start_s + span.begun.seconds_since(self._start)
            ended_s = self._start_s + span.ended.seconds_since(self._start)
            found.append(BlockTimes(span.block, last_s, begun_s, ended_s))
            last_s = ended_s
        return found
