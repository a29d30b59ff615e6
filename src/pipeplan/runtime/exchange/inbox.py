"""Where messages of another stage arrive in one step; `outbox` is the other end.

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

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from pipeplan.pipeline import Kind
from pipeplan.runtime.exchange.contents import (
    HEADER_BYTES,
    Contents,
    decode,
    read_header,
)
from pipeplan.runtime.exchange.forecasts import LaneForecasts
from pipeplan.runtime.exchange.joining import Received, join, require_agreement
from pipeplan.runtime.exchange.lanes import AHEAD, LATE, TEXT, Lane
from pipeplan.runtime.exchange.packing import Packing
from pipeplan.runtime.exchange.riding import Opening, Ride
from pipeplan.runtime.exchange.row_routing import RowRun
from pipeplan.runtime.exchange.transports import Transport

__all__ = ["Inbox"]


@dataclass(slots=True)
class _Incoming:
    """The message of one replica of the other stage, on its way."""

    run: RowRun
    ahead: Contents | None
    """What receives were posted for; None if only for the header."""
    packing: Packing | None
    """How header and tensors lie in the buffer; None if it holds the header only."""
    memory: bytearray
    """That of the buffer: Python reads a byte of it faster than torch does."""
    buffer: torch.Tensor
    header_work: dist.Work | Opening
    pieces: list[torch.Tensor] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)
    fillers: list[torch.Tensor] = field(default_factory=list)
    """What arrives in posted receives that turn out to be of no use."""
    contents: Contents | None = None

    @property
    def num_rows(self) -> int:
        return self.run.stop - self.run.start


class Inbox:
    """Receives what arrives over one lane during one step."""

    def __init__(
        self,
        transport: Transport,
        lane: Lane,
        receive_ahead: int,
        forecasts: LaneForecasts,
        ride: Ride | None = None,
    ) -> None:
        """`ride` is what rides with these messages; its opening is the first of them."""
        self._transport, self._lane, self._forecasts = transport, lane, forecasts
        self._ride, self._opening = ride, None
        if ride is not None and lane.kind is Kind.FORWARD:
            self._opening = ride.opening
        self._order, self._position_of = lane.order, lane.position_of
        self._receive_ahead = receive_ahead
        self._num_posted = self._num_opened = 0
        self._parts_of: dict[int, list[_Incoming]] = {}
        self._joined_of: dict[int, list[torch.Tensor]] = {}
        """Buffers that several replicas fill, by microbatch."""

    def post(self, microbatch: int) -> None:
        """Post all receives up to this microbatch, and a few more."""
        self._post_until(self._position_of[microbatch] + 1 + self._receive_ahead)

    def post_ahead(self) -> None:
        """Post the few receives behind the last message that was taken, whatever runs next."""
        self._post_until(self._num_opened + self._receive_ahead)

    def _post_until(self, stop: int) -> None:
        if self._num_posted >= stop:
            return  # as mostly
        order, stop = self._order, min(stop, len(self._order))
        if self._awaits_notice:
            stop = 1  # gloo would abort on sizes that turn out to be wrong
        while self._num_posted < stop:
            self._post_one(order[self._num_posted])
            self._num_posted += 1

    @property
    def is_all_posted(self) -> bool:
        """Whether nothing is left to post in this step."""
        return self._num_posted == len(self._order)

    def take(self, microbatch: int) -> Received:
        """The tensors of a microbatch and their contents; waits until they have arrived."""
        position = self._position_of[microbatch]
        # In the order of the sender: NCCL and texts are matched by order.
        while self._num_opened <= position:
            if self._num_posted <= position:
                self.post(microbatch)
            self._open(self._order[self._num_opened])
            self._num_opened += 1
        parts = self._parts_of.pop(microbatch)
        if self._ride is not None and microbatch == self._order[-1]:
            self._ride.take_sums(parts[0].memory, self._lane.kind)
        if len(parts) == 1:
            return self._take_part(parts[0])
        received = [self._take_part(part) for part in parts]
        return join(received, self._lane.kind, self._joined_of.pop(microbatch, None))

    def _take_part(self, part: _Incoming) -> Received:
        if part.works:
            for work in part.works:
                work.wait()
            self._transport.take_over(part.pieces)
        assert part.contents is not None  # it is open
        return Received(part.contents, part.pieces, part.num_rows)

    def _post_one(self, microbatch: int) -> None:
        """Post receives for the headers, and for tensors that can be forecast."""
        parts, tag = [], self._lane.header_tags[microbatch]
        has_separate = False
        for run in self._lane.runs_of[microbatch]:
            forecast = self._forecasts.get((microbatch, run.rank))
            ahead = packing = None
            if forecast is not None and forecast.is_stable and self._transport.posts_ahead:
                ahead, packing = forecast.contents, forecast.packing
                has_separate = has_separate or packing is None
            dtype = torch.uint8 if packing is None else packing.dtype
            if self._opening is not None and not self._num_posted:  # its receive is posted
                opening = self._opening
                buffer = opening.buffer.view(dtype)
                parts.append(_Incoming(run, ahead, packing, opening.memory, buffer, opening))
                continue
            memory = bytearray(HEADER_BYTES if packing is None else packing.num_bytes)
            buffer = torch.frombuffer(memory, dtype=dtype)
            work = self._transport.receive_header(buffer, run.rank, tag)
            parts.append(_Incoming(run, ahead, packing, memory, buffer, work))
        self._parts_of[microbatch] = parts
        if has_separate and not self._awaits_notice:
            self._receive_ahead_of_headers(microbatch)

    @property
    def _awaits_notice(self) -> bool:
        """Whether nothing is sure yet, since the step's notice comes with the first message."""
        return self._opening is not None and not self._num_opened

    def _receive_ahead_of_headers(self, microbatch: int) -> None:
        parts = self._parts_of[microbatch]
        ahead_of = [(part, part.ahead) for part in parts if part.ahead and not part.packing]
        self._receive(microbatch, ahead_of, AHEAD, is_all=len(ahead_of) == len(parts))

    def _open(self, microbatch: int) -> None:
        """Read the headers, and post receives for the tensors that have none yet."""
        parts = self._parts_of[microbatch]
        late = []
        for part in parts:
            part.header_work.wait()
            if self._ride is not None and self._awaits_notice:
                self._ride.take_notice(part.memory)  # before anything is made of the rest
                if part.ahead is not None and part.packing is None:
                    self._receive_ahead_of_headers(microbatch)
            if part.packing is not None and not part.memory[0]:
                part.contents, part.pieces = part.ahead, part.packing.unpack(part.buffer)
                continue
            contents = part.contents = self._read(microbatch, part)
            if part.ahead is None or not contents.has_layout_of(part.ahead):
                late.append((part, contents))
            elif part.packing is not None:  # only plain values differ
                part.pieces = part.packing.unpack(part.buffer)
        if len(parts) > 1 and self._lane.kind is Kind.FORWARD:
            require_agreement(
                [part.contents for part in parts if part.contents],
                [part.run.rank for part in parts],
                microbatch,
            )
        if late:
            self._joined_of.pop(microbatch, None)  # its slices stay, as pieces of their parts
            self._receive(microbatch, late, LATE, is_all=len(late) == len(parts))

    def _read(self, microbatch: int, part: _Incoming) -> Contents:
        slot = (microbatch, part.run.rank)
        is_expected, length, contents = read_header(part.memory)
        if is_expected:
            forecast = self._forecasts.get(slot)
            assert forecast is not None  # the sender has the same one
            if forecast.is_stable:
                return forecast.contents  # there is nothing to learn
            contents = forecast.contents
        elif contents is None:
            text = torch.empty(length, dtype=torch.uint8)
            tag = self._lane.tag(microbatch, TEXT)
            self._transport.receive_header(text, part.run.rank, tag).wait()
            contents = decode(bytes(text.tolist()))
        self._forecasts.note(slot, contents, part.num_rows)
        return contents

    def _receive(
        self,
        microbatch: int,
        parts: Sequence[tuple[_Incoming, Contents]],
        what: int,
        *,
        is_all: bool,
    ) -> None:
        """Post receives for tensors; into slices of shared buffers if all parts are alike."""
        new, lane = self._transport.new_buffer, self._lane
        first = parts[0][1]
        is_shared = len(parts) > 1 and is_all and all(c.has_layout_of(first) for _, c in parts)
        if is_shared:
            num_rows = parts[-1][0].run.stop
            shared = [new(kind.shape_for(num_rows), kind.dtype) for kind in first.kinds]
            self._joined_of[microbatch] = shared
        tag = lane.tag(microbatch, what)
        for part, contents in parts:
            part.fillers = part.pieces
            if is_shared:
                part.pieces = [buffer[part.run.start : part.run.stop] for buffer in shared]
            else:
                part.pieces = [
                    new(kind.shape_for(part.num_rows), kind.dtype) for kind in contents.kinds
                ]
            part.works += [
                self._transport.receive(piece, part.run.rank, tag, lane.channel, lane.kind)
                for piece in part.pieces
                if piece.numel()
            ]
