"""One end of a channel between two stages: what arrives, posted ahead, and what leaves.

Receives are posted in the order in which the other stage sends, up to a few beyond the one that
is needed next: gloo moves data only once a receive is posted, and each one holds a buffer. A
tensor arrives from several replicas in slices of one buffer, so nothing is put together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipeplan.pipeline import Kind
from pipeplan.runtime.sends import Sends
from pipeplan.runtime.transports import Transport

__all__ = ["Inbox", "Outbox", "Run", "TensorKind"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorKind:
    """What is known of a tensor that crosses a cut, besides its number of rows."""

    shape: tuple[int, ...]
    """Of one row."""
    dtype: torch.dtype
    has_gradient: bool

    @property
    def row_bytes(self) -> int:
        """The size of one row."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Consecutive rows that one pair of ranks carries."""

    rank: int
    start: int
    stop: int


class Inbox:
    """What arrives over one channel in one direction during one step."""

    def __init__(
        self,
        transport: Transport,
        channel: int,
        kind: Kind,
        kinds: Sequence[TensorKind],
        runs_of: Sequence[Sequence[Run]],
        order: Sequence[int],
        receive_ahead: int,
    ) -> None:
        self._transport, self._channel, self._kind = transport, channel, kind
        self._kinds, self._runs_of = kinds, runs_of
        self._order = [microbatch for microbatch in order if runs_of[microbatch]]
        self._position_of = {microbatch: i for i, microbatch in enumerate(self._order)}
        self._ahead = receive_ahead
        self._num_posted = 0
        self._waiting: dict[int, tuple[list[torch.Tensor], list[dist.Work]]] = {}

    def post(self, microbatch: int) -> None:
        """Post all receives up to this microbatch's, and a few more."""
        stop = min(self._position_of[microbatch] + 1 + self._ahead, len(self._order))
        while self._num_posted < stop:
            self._post_one(self._order[self._num_posted])
            self._num_posted += 1

    def take(self, microbatch: int) -> list[torch.Tensor]:
        """The tensors of a microbatch, once they are there."""
        self.post(microbatch)
        tensors, works = self._waiting.pop(microbatch)
        for work in works:
            work.wait()
        return tensors

    def _post_one(self, microbatch: int) -> None:
        runs = self._runs_of[microbatch]
        num_rows = runs[-1].stop
        tensors, works = [], []
        for index, kind in enumerate(self._kinds):
            buffer = torch.empty(
                (num_rows, *kind.shape), dtype=kind.dtype, device=self._transport.device
            )
            tag = _tag(microbatch, index, len(self._kinds), self._kind)
            for run in runs:
                piece = buffer if len(runs) == 1 else buffer[run.start : run.stop]
                works.append(
                    self._transport.receive(piece, run.rank, tag, self._channel, self._kind)
                )
            tensors.append(buffer)
        self._waiting[microbatch] = (tensors, works)


class Outbox:
    """What leaves over one channel in one direction during one step."""

    def __init__(
        self,
        transport: Transport,
        channel: int,
        kind: Kind,
        runs_of: Sequence[Sequence[Run]],
        sends: Sends,
    ) -> None:
        self._transport, self._channel, self._kind = transport, channel, kind
        self._runs_of, self._sends = runs_of, sends

    def send(self, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        """Start to send each replica on the other side its rows."""
        runs = self._runs_of[microbatch]
        works = []
        kept = [tensor.detach().contiguous() for tensor in tensors]
        for index, tensor in enumerate(kept):
            tag = _tag(microbatch, index, len(kept), self._kind)
            for run in runs:
                piece = tensor if len(runs) == 1 else tensor[run.start : run.stop]
                works.append(self._transport.send(piece, run.rank, tag, self._channel, self._kind))
        self._sends.take(microbatch, kept, works)

    def has_arrived(self, microbatch: int) -> None:
        """Its answer is here, so it is surely sent."""
        self._sends.has_arrived(microbatch)

    def finish(self) -> None:
        """Wait until all is sent."""
        self._sends.finish()


def _tag(microbatch: int, index: int, num_tensors: int, kind: Kind) -> int:
    return 2 * (microbatch * num_tensors + index) + (kind is Kind.BACKWARD)
