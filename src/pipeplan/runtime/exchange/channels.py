"""One end of a channel between two stages: an inbox and an outbox for one step.

Each message begins with a header that says what it carries (see `contents`). A receive for it is
posted ahead, and so are receives for the tensors, if both ends can forecast them::

    right forecast, small     | header and tensors |                     one message
    right forecast, large     | header | tensor | tensor |
    other shapes              | header | filler ... | tensor | tensor |  posted receives get filler
    no forecast               | header | tensor | tensor |               received after the header

So every message may differ from the one before, in any order, and no receive is left over. Gloo
moves data only after a receive is posted, but each posted receive holds a buffer. So only a few
are posted beyond the one that is needed next. Where possible, several replicas fill slices of one
buffer.

NCCL matches messages in order, so nothing is posted before its header. Headers go from host to
host, over gloo. A host runs ahead of its GPU, so the header is there long before the tensors. No
stream waits for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
import torch.distributed as dist

from pipeplan.pipeline import Kind
from pipeplan.runtime.exchange.contents import (
    AS_FORECAST,
    HEADER_BYTES,
    Contents,
    decode,
    encode_header,
    read_header,
)
from pipeplan.runtime.exchange.forecasts import StepForecasts
from pipeplan.runtime.exchange.joining import Received, join, require_agreement
from pipeplan.runtime.exchange.packing import fits_in_one, pack, packed_bytes, unpack
from pipeplan.runtime.exchange.row_routing import RowRun
from pipeplan.runtime.exchange.sends import PendingSends, Works
from pipeplan.runtime.exchange.transports import Transport

__all__ = ["Inbox", "Outbox"]


class Part(IntEnum):
    """The parts of a message. Those of one part arrive in the order in which they are sent."""

    HEADER = 0
    TEXT = 1
    AHEAD = 2
    """Tensors, or filler, whose receives were posted before the header came."""
    LATE = 3


@dataclass(slots=True)
class _Incoming:
    """The message of one replica of the other stage, on its way."""

    run: RowRun
    ahead: Contents | None
    """What receives were posted for; None if only for the header."""
    buffer: torch.Tensor
    """The header; for a small message, the tensors as well."""
    is_packed: bool
    header_work: dist.Work
    pieces: list[torch.Tensor] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)
    fillers: list[torch.Tensor] = field(default_factory=list)
    """What arrives in posted receives that turn out to be of no use."""
    contents: Contents | None = None

    @property
    def num_rows(self) -> int:
        return self.run.stop - self.run.start


class Inbox:
    """Receives what arrives over one channel in one direction during one step."""

    def __init__(
        self,
        transport: Transport,
        channel: int,
        kind: Kind,
        runs_of: Sequence[Sequence[RowRun]],
        order: Sequence[int],
        receive_ahead: int,
        forecasts: StepForecasts,
    ) -> None:
        self._transport, self._channel, self._kind = transport, channel, kind
        self._runs_of, self._forecasts = runs_of, forecasts
        self._order = [microbatch for microbatch in order if runs_of[microbatch]]
        self._position_of = {microbatch: i for i, microbatch in enumerate(self._order)}
        self._receive_ahead = receive_ahead
        self._num_posted = self._num_opened = 0
        self._parts_of: dict[int, list[_Incoming]] = {}
        self._joined_of: dict[int, list[torch.Tensor]] = {}
        """Buffers that several replicas fill, by microbatch."""

    def post(self, microbatch: int) -> None:
        """Post all receives up to this microbatch, and a few more."""
        stop = min(self._position_of[microbatch] + 1 + self._receive_ahead, len(self._order))
        while self._num_posted < stop:
            self._post_one(self._order[self._num_posted])
            self._num_posted += 1

    def take(self, microbatch: int) -> Received:
        """The tensors of a microbatch and their contents; waits until they have arrived."""
        self.post(microbatch)
        # In the order of the sender: NCCL and texts are matched by order.
        while self._num_opened <= self._position_of[microbatch]:
            self._open(self._order[self._num_opened])
            self._num_opened += 1
        parts, joined = self._parts_of.pop(microbatch), self._joined_of.pop(microbatch, None)
        for part in parts:
            for work in part.works:
                work.wait()
        received = []
        for part in parts:
            assert part.contents is not None  # it is open
            self._transport.take_over(part.pieces)
            received.append(Received(part.contents, part.pieces, part.num_rows))
        return join(received, self._kind, joined)

    def _post_one(self, microbatch: int) -> None:
        """Post receives for the headers, and for tensors that can be forecast."""
        parts = []
        for run in self._runs_of[microbatch]:
            forecast = self._forecasts.get((self._kind, microbatch, run.rank))
            ahead = None
            if forecast is not None and forecast.is_stable and self._transport.posts_ahead:
                ahead = forecast.contents
            num_rows = run.stop - run.start
            is_packed = ahead is not None and fits_in_one(ahead, num_rows)
            size = HEADER_BYTES
            if ahead is not None and is_packed:
                size = packed_bytes(ahead, num_rows)
            buffer = torch.empty(size, dtype=torch.uint8)
            tag = _tag(microbatch, Part.HEADER, self._kind)
            work = self._transport.receive_header(buffer, run.rank, tag)
            parts.append(_Incoming(run, ahead, buffer, is_packed, work))
        self._parts_of[microbatch] = parts
        ahead_of = [(part, part.ahead) for part in parts if part.ahead and not part.is_packed]
        self._receive(microbatch, ahead_of, Part.AHEAD, is_all=len(ahead_of) == len(parts))

    def _open(self, microbatch: int) -> None:
        """Read the headers, and post receives for the tensors that have none yet."""
        parts = self._parts_of[microbatch]
        late = []
        for part in parts:
            part.header_work.wait()
            contents = part.contents = self._read(microbatch, part)
            if part.ahead is None or not contents.has_layout_of(part.ahead):
                late.append((part, contents))
            elif part.is_packed:
                part.pieces = unpack(part.buffer, contents, part.num_rows)
        if len(parts) > 1 and self._kind is Kind.FORWARD:
            require_agreement(
                [part.contents for part in parts if part.contents],
                [part.run.rank for part in parts],
                microbatch,
            )
        if late:
            self._joined_of.pop(microbatch, None)  # its slices stay, as pieces of their parts
            self._receive(microbatch, late, Part.LATE, is_all=len(late) == len(parts))

    def _read(self, microbatch: int, part: _Incoming) -> Contents:
        slot = (self._kind, microbatch, part.run.rank)
        is_as_forecast, length, contents = read_header(part.buffer)
        if is_as_forecast:
            forecast = self._forecasts.get(slot)
            assert forecast is not None  # the sender has the same one
            if forecast.is_stable:
                return forecast.contents  # there is nothing to learn
            contents = forecast.contents
        elif contents is None:
            text = torch.empty(length, dtype=torch.uint8)
            tag = _tag(microbatch, Part.TEXT, self._kind)
            self._transport.receive_header(text, part.run.rank, tag).wait()
            contents = decode(bytes(text.tolist()))
        self._forecasts.note(slot, contents)
        return contents

    def _receive(
        self,
        microbatch: int,
        parts: Sequence[tuple[_Incoming, Contents]],
        what: Part,
        *,
        is_all: bool,
    ) -> None:
        """Post receives for tensors; into slices of shared buffers if all parts are alike."""
        if not parts:
            return
        new = self._transport.new_buffer
        first = parts[0][1]
        is_shared = len(parts) > 1 and is_all and all(c.has_layout_of(first) for _, c in parts)
        if is_shared:
            num_rows = parts[-1][0].run.stop
            shared = [new((num_rows, *kind.shape), kind.dtype) for kind in first.kinds]
            self._joined_of[microbatch] = shared
        tag = _tag(microbatch, what, self._kind)
        for part, contents in parts:
            part.fillers = part.pieces
            if is_shared:
                part.pieces = [buffer[part.run.start : part.run.stop] for buffer in shared]
            else:
                part.pieces = [
                    new((part.num_rows, *kind.shape), kind.dtype) for kind in contents.kinds
                ]
            part.works += [
                self._transport.receive(piece, part.run.rank, tag, self._channel, self._kind)
                for piece in part.pieces
                if piece.numel()
            ]


class Outbox:
    """Sends what leaves over one channel in one direction during one step."""

    def __init__(
        self,
        transport: Transport,
        channel: int,
        kind: Kind,
        runs_of: Sequence[Sequence[RowRun]],
        choose_sends: Callable[[int], PendingSends],
        forecasts: StepForecasts,
    ) -> None:
        """`choose_sends` gets the bytes of the first message."""
        self._transport, self._channel, self._kind = transport, channel, kind
        self._runs_of, self._forecasts = runs_of, forecasts
        self._choose_sends = choose_sends
        self._pending: PendingSends | None = None

    def send(self, microbatch: int, tensors: Sequence[torch.Tensor], contents: Contents) -> None:
        """Start to send its rows to each replica on the other side."""
        runs = self._runs_of[microbatch]
        # A lazy conjugate or negative is a flag of the tensor, which bytes do not carry.
        dense = [t.detach().resolve_conj().resolve_neg().contiguous() for t in tensors]
        works, kept = Works(), []
        for run in runs:
            pieces = dense
            if len(runs) > 1:
                pieces = [tensor[run.start : run.stop] for tensor in dense]
            kept += self._send_one(microbatch, run, pieces, contents, works)
        if self._pending is None:
            self._pending = self._choose_sends(sum(tensor.nbytes for tensor in tensors))
        self._pending.keep(microbatch, kept, works)

    def _send_one(
        self,
        microbatch: int,
        run: RowRun,
        pieces: list[torch.Tensor],
        contents: Contents,
        works: Works,
    ) -> list[torch.Tensor]:
        """Send to one replica; returns the tensors that have to be kept."""
        slot, num_rows = (self._kind, microbatch, run.rank), run.stop - run.start
        forecast = self._forecasts.get(slot)
        header, text = AS_FORECAST, None
        ahead = None
        if forecast is not None and forecast.is_stable and self._transport.posts_ahead:
            ahead = forecast.contents
        if forecast is None or forecast.contents != contents:
            header, text = encode_header(contents)
        if forecast is None or not forecast.is_stable or header is not AS_FORECAST:
            self._forecasts.note(slot, contents)
        is_right = ahead is not None and contents.has_layout_of(ahead)
        if ahead is not None and is_right and fits_in_one(ahead, num_rows):
            kept = [pack(header, pieces)]
            self._send_header(microbatch, run, Part.HEADER, kept[0], works)
        else:
            kept = [*pieces, *self._send_filler(microbatch, run, header, ahead, is_right, works)]
            part = Part.AHEAD if is_right else Part.LATE
            self._send_tensors(microbatch, run, pieces, part, works)
        if text is not None:
            self._send_header(microbatch, run, Part.TEXT, text, works)
            kept.append(text)
        return kept

    def _send_filler(
        self,
        microbatch: int,
        run: RowRun,
        header: torch.Tensor,
        ahead: Contents | None,
        is_right: bool,
        works: Works,
    ) -> list[torch.Tensor]:
        """Send the header, and filler if receives wait for other tensors; returns all of it."""
        num_rows, fillers = run.stop - run.start, []
        if ahead is not None and not is_right:
            if fits_in_one(ahead, num_rows):
                filled = torch.zeros(packed_bytes(ahead, num_rows), dtype=torch.uint8)
                filled[:HEADER_BYTES] = header
                header = filled
            else:
                fillers = [torch.zeros((num_rows, *k.shape), dtype=k.dtype) for k in ahead.kinds]
        self._send_header(microbatch, run, Part.HEADER, header, works)
        self._send_tensors(microbatch, run, fillers, Part.AHEAD, works)
        return [header, *fillers]

    def _send_header(
        self,
        microbatch: int,
        run: RowRun,
        part: Part,
        header: torch.Tensor,
        works: Works,
    ) -> None:
        tag = _tag(microbatch, part, self._kind)
        works.headers.append(self._transport.send_header(header, run.rank, tag))

    def _send_tensors(
        self,
        microbatch: int,
        run: RowRun,
        tensors: Sequence[torch.Tensor],
        part: Part,
        works: Works,
    ) -> None:
        tag = _tag(microbatch, part, self._kind)
        works.tensors += [
            self._transport.send(tensor, run.rank, tag, self._channel, self._kind)
            for tensor in tensors
            if tensor.numel()
        ]

    def confirm_arrival(self, microbatch: int) -> None:
        """Note that the answer to this microbatch has come, so its send is done."""
        if self._pending is not None:
            self._pending.confirm_arrival(microbatch)

    def finish(self) -> None:
        """Wait until everything is sent."""
        if self._pending is not None:
            self._pending.finish()


def _tag(microbatch: int, part: Part, kind: Kind) -> int:
    """A number that tells apart what two ranks exchange in a step."""
    return 2 * (len(Part) * microbatch + part) + (kind is Kind.BACKWARD)
