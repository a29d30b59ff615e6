"""Numbers that ride in the headers of a step's messages, so that they need none of their own.

In a chain of stages with one rank each, every rank gets a first message from the stage before, and
a last one from the stage behind. So the notice of the step (`batch_agreement`) and the sums of loss
and metrics go with them::

    stage 0 --- first output: notice ---> stage 1 --- first output: notice ---> stage 2
    stage 0 --- last output: sums of 0 -> stage 1 --- last output: of 0, 1 ---> stage 2
    stage 0 <-- last gradients: totals -- stage 1 <-- last gradients: totals -- stage 2

By its last gradients, a stage has run all of its forwards, so its sums are complete. A rank reads
the notice before anything else of a step. It may have been given another batch than the stage
before, with other sizes, on which gloo would abort. So the receive of the first message is large
enough for any message that is sent in one piece. The others are posted when the notice has come.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from pipeplan.pipeline import Kind, Plan
from pipeplan.runtime.exchange.contents import HEADER_BYTES, NOTE_START
from pipeplan.runtime.exchange.lanes import HEADER, message_tag
from pipeplan.runtime.exchange.packing import MOST_BYTES
from pipeplan.runtime.exchange.transports import Transport
from pipeplan.runtime.stage_orders import stage_order

__all__ = ["Opening", "Ride", "can_ride", "open_step"]

NUM_WORDS = 8
"""Of the notice, and of the sums."""
NOTE = struct.Struct(f"<{NUM_WORDS}q{NUM_WORDS}d")
NOTICE, SUMS = struct.Struct(f"<{NUM_WORDS}q"), struct.Struct(f"<{NUM_WORDS}d")
assert NOTE.size == HEADER_BYTES - NOTE_START
NO_NOTICE, NO_SUMS = (0,) * NUM_WORDS, (0.0,) * NUM_WORDS
FIRST_MICROBATCH = 0


def can_ride(
    plan: Plan, stage_ranks: Sequence[Sequence[int]], num_ranks: int, num_sums: int
) -> bool:
    """Whether each rank is a stage of its own, and gets microbatch 0 first.

    In any batch, microbatch 0 has rows.
    """
    ranks = [rank for each in stage_ranks for rank in each]
    is_chain = len(stage_ranks) == len(ranks) == num_ranks == len(set(ranks)) > 1
    return (
        is_chain
        and num_sums <= NUM_WORDS
        and all(
            next(b.microbatch for b in stage_order(plan, stage) if b.kind is Kind.FORWARD)
            == FIRST_MICROBATCH
            for stage in range(plan.num_stages)
        )
    )


@dataclass(slots=True)
class Opening:
    """The receive of a step's first message, which is posted before its size is known."""

    memory: bytearray
    buffer: torch.Tensor
    """The same memory."""
    work: dist.Work
    _has_come: bool = False

    def wait(self) -> None:
        """Wait for the message; a second time, too, where gloo would wait for ever."""
        if not self._has_come:
            self.work.wait()
            self._has_come = True


def open_step(plan: Plan, stage: int, rank_before: int, transport: Transport) -> Opening:
    """Post the receive of the first message from the stage before."""
    memory = bytearray(MOST_BYTES)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    first = (stage - 1) * plan.microbatches + FIRST_MICROBATCH
    tag = message_tag(first, HEADER, Kind.FORWARD)
    return Opening(memory, buffer, transport.receive_header(buffer, rank_before, tag))


@dataclass(slots=True, kw_only=True)
class Ride:
    """What rides on the messages of one rank in one step."""

    opening: Opening | None
    """None on the first stage."""
    notice: Sequence[int]
    """Of the step; until the first message has come, what this rank itself says."""
    compare: Callable[[Sequence[int]], None]
    """Refuses a notice that does not fit what this rank was given."""
    is_last: bool
    """Whether this is the last stage."""
    own: Callable[[], list[float]] | None = None
    """The sums of this rank so far; None if sums do not ride in this step."""
    _before: Sequence[float] = field(default=NO_SUMS)
    """Those of the stages before."""
    _totals: Sequence[float] = field(default=NO_SUMS)

    def take_notice(self, header: bytearray) -> None:
        """Read the first message's header, and refuse it if this rank was given something else."""
        self.notice = NOTICE.unpack_from(header, NOTE_START)
        self.compare(self.notice)

    def take_sums(self, header: bytearray, kind: Kind) -> None:
        """Read the last message of a direction."""
        sums = SUMS.unpack_from(header, NOTE_START + NOTICE.size)
        if kind is Kind.FORWARD:
            self._before = sums
        else:
            self._totals = sums

    def note_output(self, *, is_first: bool, is_last: bool) -> bytes | None:
        """What goes with an output to the stage behind; None if it is neither."""
        if not (is_first or is_last):
            return None
        sums = self._sum_up() if is_last else NO_SUMS
        return NOTE.pack(*(self.notice if is_first else NO_NOTICE), *sums)

    def note_gradients(self, *, is_last: bool) -> bytes | None:
        """What goes with gradients to the stage before."""
        return NOTE.pack(*NO_NOTICE, *self._all()) if is_last and self.own is not None else None

    def totals(self, count: int) -> list[float]:
        """The sums over all ranks, after the last block."""
        return list(self._all()[:count])

    def _all(self) -> Sequence[float]:
        return self._sum_up() if self.is_last else self._totals

    def _sum_up(self) -> Sequence[float]:
        if self.own is None:
            return NO_SUMS
        own = self.own()
        found = [mine + before for mine, before in zip(own, self._before, strict=False)]
        return (*found, *NO_SUMS[len(own) :])
