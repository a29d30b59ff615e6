"""One end of a channel between two stages: an inbox and an outbox for one step.

Receives are posted ahead, in the order in which the other stage sends. Gloo moves data only after
a receive is posted, but each posted receive holds a buffer. So only a few are posted beyond the
one that is needed next. Several replicas fill slices of one buffer, so nothing is joined later.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipeplan.pipeline import Kind
from pipeplan.runtime.exchange.row_routing import RowRun
from pipeplan.runtime.exchange.sends import PendingSends
from pipeplan.runtime.exchange.transports import Transport

__all__ = ["Inbox", "Outbox", "TensorKind"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorKind:
    """A tensor that crosses a cut: all that is known of it except its number of rows."""

    shape: tuple[int, ...]
    """The shape of one row."""
    dtype: torch.dtype
    has_gradient: bool

    @property
    def row_bytes(self) -> int:
        """The size of one row."""
        return math.prod(self.shape) * self.dtype.itemsize


class Inbox:
    """Receives what arrives over one channel in one direction during one step."""

    def __init__(
        self,
        transport: Transport,
        channel: int,
        kind: Kind,
        tensor_kinds: Sequence[TensorKind],
        runs_of: Sequence[Sequence[RowRun]],
        order: Sequence[int],
        receive_ahead: int,
    ) -> None:
        self._transport, self._channel, self._kind = transport, channel, kind
        self._tensor_kinds, self._runs_of = tensor_kinds, runs_of
        self._order = [microbatch for microbatch in order if runs_of[microbatch]]
        self._position_of = {microbatch: i for i, microbatch in enumerate(self._order)}
        self._receive_ahead = receive_ahead
        self._num_posted = 0
        self._posted: dict[int, tuple[list[torch.Tensor], list[dist.Work]]] = {}

    def post(self, microbatch: int) -> None:
        """Post all receives up to this microbatch, and a few more."""
        stop = min(self._position_of[microbatch] + 1 + self._receive_ahead, len(self._order))
        while self._num_posted < stop:
            self._post_one(self._order[self._num_posted])
            self._num_posted += 1

    def take(self, microbatch: int) -> list[torch.Tensor]:
        """The tensors of a microbatch; waits until they have arrived."""
        self.post(microbatch)
        tensors, works = self._posted.pop(microbatch)
        for work in works:
            work.wait()
        return tensors

    def _post_one(self, microbatch: int) -> None:
        runs = self._runs_of[microbatch]
        num_rows = runs[-1].stop
        tensors, works = [], []
        for index, tensor_kind in enumerate(self._tensor_kinds):
            buffer = torch.empty(
                (num_rows, *tensor_kind.shape),
                dtype=tensor_kind.dtype,
                device=self._transport.device,
            )
            tag = _tag(microbatch, index, len(self._tensor_kinds), self._kind)
            for run in runs:
                piece = buffer if len(runs) == 1 else buffer[run.start : run.stop]
                works.append(
                    self._transport.receive(piece, run.rank, tag, self._channel, self._kind)
                )
            tensors.append(buffer)
        self._posted[microbatch] = (tensors, works)


class Outbox:
    """Sends what leaves over one channel in one direction during one step."""

    def __init__(
        self,
        transport: Transport,
        channel: int,
        kind: Kind,
        runs_of: Sequence[Sequence[RowRun]],
        pending: PendingSends,
    ) -> None:
        self._transport, self._channel, self._kind = transport, channel, kind
        self._runs_of, self._pending = runs_of, pending

    def send(self, microbatch: int, tensors: Sequence[torch.Tensor]) -> None:
        """Start to send its rows to each replica on the other side."""
        runs = self._runs_of[microbatch]
        works = []
        kept = [tensor.detach().contiguous() for tensor in tensors]
        for index, tensor in enumerate(kept):
            tag = _tag(microbatch, index, len(kept), self._kind)
            for run in runs:
                piece = tensor if len(runs) == 1 else tensor[run.start : run.stop]
                works.append(self._transport.send(piece, run.rank, tag, self._channel, self._kind))
        self._pending.keep(microbatch, kept, works)

    def confirm_arrival(self, microbatch: int) -> None:
        """Note that the answer to this microbatch has come, so its send is done."""
        self._pending.confirm_arrival(microbatch)

    def finish(self) -> None:
        """Wait until everything is sent."""
        self._pending.finish()


def _tag(microbatch: int, index: int, num_tensors: int, kind: Kind) -> int:
    """A number that tells apart all tensors that two ranks exchange in a step."""
    return 2 * (microbatch * num_tensors + index) + (kind is Kind.BACKWARD)
