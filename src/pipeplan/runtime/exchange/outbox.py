"""From where messages go to another stage in one step; `inbox` says how they travel."""

from collections.abc import Callable, Sequence

import torch

from pipeplan.pipeline import Kind
from pipeplan.runtime.exchange.contents import (
    AS_FORECAST,
    Contents,
    encode_header,
    noted_header,
)
from pipeplan.runtime.exchange.forecasts import LaneForecasts
from pipeplan.runtime.exchange.lanes import AHEAD, HEADER, LATE, TEXT, Lane
from pipeplan.runtime.exchange.riding import Ride
from pipeplan.runtime.exchange.row_routing import RowRun
from pipeplan.runtime.exchange.sends import PendingSends, Works
from pipeplan.runtime.exchange.transports import Transport

__all__ = ["Outbox"]


class Outbox:
    """Sends what leaves over one lane during one step."""

    def __init__(
        self,
        transport: Transport,
        lane: Lane,
        choose_sends: Callable[[int], PendingSends],
        forecasts: LaneForecasts,
        ride: Ride | None = None,
    ) -> None:
        """`choose_sends` gets the bytes of the first message."""
        self._transport, self._lane, self._forecasts = transport, lane, forecasts
        self._choose_sends, self._ride = choose_sends, ride
        self._pending: PendingSends | None = None

    def send(self, microbatch: int, tensors: Sequence[torch.Tensor], contents: Contents) -> None:
        """Start to send its rows to each replica on the other side."""
        runs, note = self._lane.runs_of[microbatch], None
        if self._ride is not None:
            note = self._note(self._ride, microbatch)
        if len(runs) == 1 and self._send_as_forecast(
            microbatch, runs[0].rank, tensors, contents, note
        ):
            return
        dense = [_dense(tensor) for tensor in tensors]
        works, kept = Works(), []
        for run in runs:
            pieces = dense
            if len(runs) > 1:
                pieces = [tensor[run.start : run.stop] for tensor in dense]
            kept += self._send_one(microbatch, run, pieces, contents, works, note)
        self._keep(microbatch, kept, works, tensors)

    def _note(self, ride: Ride, microbatch: int) -> bytes | None:
        """What rides with the message of a microbatch."""
        order = self._lane.order
        is_last = microbatch == order[-1]
        if self._lane.kind is Kind.BACKWARD:
            return ride.note_gradients(is_last=is_last)
        return ride.note_output(is_first=microbatch == order[0], is_last=is_last)

    def _keep(
        self,
        microbatch: int,
        kept: list[torch.Tensor],
        works: Works,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        if self._pending is None:
            self._pending = self._choose_sends(sum(tensor.nbytes for tensor in tensors))
        self._pending.keep(microbatch, kept, works)

    def _send_as_forecast(
        self,
        microbatch: int,
        rank: int,
        tensors: Sequence[torch.Tensor],
        contents: Contents,
        note: bytes | None,
    ) -> bool:
        """Send what both ends expect, in one piece; False if that is not possible.

        Almost all small messages take this way. `_send_one` would send the same, but slower.
        """
        forecast = self._forecasts.get((microbatch, rank))
        if (
            forecast is None
            or forecast.contents is not contents
            or forecast.packing is None
            or not forecast.is_stable
            or not self._transport.posts_ahead
        ):
            return False
        header = AS_FORECAST if note is None else noted_header(note)
        buffer = forecast.packing.pack(tensors, header)
        tag = self._lane.header_tags[microbatch]
        work = self._transport.send_header(buffer, rank, tag)
        self._keep(microbatch, [buffer], Works([work], []), tensors)
        return True

    def _send_one(
        self,
        microbatch: int,
        run: RowRun,
        pieces: list[torch.Tensor],
        contents: Contents,
        works: Works,
        note: bytes | None,
    ) -> list[torch.Tensor]:
        """Send to one replica; returns the tensors that have to be kept."""
        slot = (microbatch, run.rank)
        forecast = self._forecasts.get(slot)
        header, text = AS_FORECAST if note is None else noted_header(note), None
        ahead = packing = None
        if forecast is not None and forecast.is_stable and self._transport.posts_ahead:
            ahead, packing = forecast.contents, forecast.packing
        is_expected = forecast is not None and forecast.contents == contents
        if not is_expected:
            header, text = encode_header(contents, note or b"")
        if forecast is None or not forecast.is_stable or not is_expected:
            self._forecasts.note(slot, contents, run.stop - run.start)
        is_right = ahead is not None and contents.has_layout_of(ahead)
        if packing is not None:
            buffer = packing.pack(pieces, header) if is_right else packing.fill(header)
            kept = [buffer]
            self._send_header(microbatch, run, HEADER, buffer, works)
        else:
            kept = [header]
            self._send_header(microbatch, run, HEADER, header, works)
            if ahead is not None and not is_right:
                num_rows = run.stop - run.start
                fillers = [torch.zeros(k.shape_for(num_rows), dtype=k.dtype) for k in ahead.kinds]
                kept += self._send_tensors(microbatch, run, fillers, AHEAD, works)
        if packing is None or not is_right:
            part = AHEAD if is_right else LATE
            kept += self._send_tensors(microbatch, run, pieces, part, works)
        if text is not None:
            self._send_header(microbatch, run, TEXT, text, works)
            kept.append(text)
        return kept

    def _send_header(
        self, microbatch: int, run: RowRun, part: int, header: torch.Tensor, works: Works
    ) -> None:
        tag = self._lane.tag(microbatch, part)
        works.headers.append(self._transport.send_header(header, run.rank, tag))

    def _send_tensors(
        self,
        microbatch: int,
        run: RowRun,
        tensors: list[torch.Tensor],
        part: int,
        works: Works,
    ) -> list[torch.Tensor]:
        lane, tag = self._lane, self._lane.tag(microbatch, part)
        works.tensors += [
            self._transport.send(tensor, run.rank, tag, lane.channel, lane.kind)
            for tensor in tensors
            if tensor.numel()
        ]
        return tensors

    def confirm_arrival(self, microbatch: int) -> None:
        """Note that the answer to this microbatch has come, so its send is done."""
        if self._pending is not None:
            self._pending.confirm_arrival(microbatch)

    def finish(self) -> None:
        """Wait until everything is sent."""
        if self._pending is not None:
            self._pending.finish()


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values, one after another in memory.

    A lazy conjugate or negative is a flag of the tensor, which bytes do not carry.
    """
    return tensor.detach().resolve_conj().resolve_neg().contiguous()
