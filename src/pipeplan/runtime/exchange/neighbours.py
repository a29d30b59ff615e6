"""What one rank exchanges with the stage before and the stage behind.

While a block computes, the input of the next block is on its way::

    blocks     wait F1 | F1            | B0            | F2
    receives            [ gradient 0 ]  [   input 2   ]   posted before the block in front begins
    sends                               [ output 1 ]

Two things hold memory that the plan's prediction does not count. Receives beyond that of the next
block smooth an uneven flow. Sent tensors stay until somebody waits for them. Both together may take
a tenth of the predicted memory, in four equal parts. Where that is too little, only the next
block's receive is posted, and a thread frees tensors as soon as they are sent.

Outputs and gradients are messages of the same kind. A message of gradients says which tensors have
one: a tensor that had no influence on the loss has none, and zeros are not the same. Weight decay
would move parameters that ordinary training leaves alone.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pipeplan.cost import BYTES_IN_GB, CostModel
from pipeplan.pipeline import Block, Kind, Plan
from pipeplan.runtime.exchange.channels import Inbox, Outbox
from pipeplan.runtime.exchange.contents import describe
from pipeplan.runtime.exchange.forecasts import Forecasts
from pipeplan.runtime.exchange.row_routing import RowRouting
from pipeplan.runtime.exchange.sends import LazySends, PendingSends, PolledSends, ThreadedSends
from pipeplan.runtime.exchange.transports import Transport

__all__ = ["Arrival", "Exchange", "StepExchange"]

MARGIN = 0.1
"""The part of a device's predicted memory that buffers may take in addition."""
SMALL_BYTES = 16_384
"""Always allowed: such small tensors cost time, not memory."""
NUM_USES = 4
"""The margin has four uses: receives ahead and open sends, each in two directions."""
MOST_AHEAD = 2
"""The most receives posted beyond that of the next block, in each direction."""
FEWEST_LAZY = 2
"""Gradients are sent without a thread if at least this many fit into the margin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The input of a block, from its neighbours."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    """For a forward."""
    template: Any = None
    """Joins these tensors into one value; None on the first stage."""
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    """For a backward: the gradient of each output, None for an output that has none."""


class Exchange:
    """The channels of one rank, over all steps."""

    def __init__(
        self,
        plan: Plan,
        place: tuple[int, int],
        transport: Transport,
        receive_ahead: int | None,
        parameter_bytes: int = 0,
    ) -> None:
        self.plan, self.transport = plan, transport
        self.stage, replica = place
        self._receive_ahead = receive_ahead
        cost = CostModel(plan.model, plan.cluster)
        self._in_flight = plan.schedule.most_in_flight(self.stage)
        predicted_gb = cost.memory_gb(plan.stages[self.stage], self._in_flight)[replica]
        # A profile without sizes predicts nothing, but the parameters still take memory.
        held_bytes = max(predicted_gb * BYTES_IN_GB, parameter_bytes)
        spare_bytes = max(SMALL_BYTES, MARGIN * held_bytes)
        self._bytes_per_use = spare_bytes / NUM_USES
        self._sends: dict[Kind, PendingSends] = {}
        self.forecasts = {self.stage - 1: Forecasts(), self.stage: Forecasts()}
        """By channel, so that both of its ends forget alike."""

    def begin(self, routing: RowRouting, key: int) -> "StepExchange":
        """The exchange of one step; the key is the same on all ranks."""
        return StepExchange(self, routing, key)

    def close(self) -> None:
        """Free threads; no step will follow."""
        for sends in self._sends.values():
            sends.close()

    def num_ahead(self, each_bytes: int) -> int:
        """The number of receives of one direction to post beyond that of the next block."""
        if self._receive_ahead is not None:
            return self._receive_ahead
        return min(MOST_AHEAD, self._num_fitting(each_bytes))

    def sends(self, kind: Kind, each_bytes: int) -> PendingSends:
        """The pending sends of one direction, for messages of so many bytes.

        All outputs may be open at once, but only as many gradients as fit. The stage before
        receives in the order of the sends, so waiting for them cannot deadlock.
        """
        num_fitting = self._num_fitting(each_bytes)
        enough = self._in_flight if kind is Kind.FORWARD else FEWEST_LAZY
        most_open = sys.maxsize if kind is Kind.FORWARD else max(1, num_fitting)
        make: type[PendingSends] = LazySends if num_fitting >= enough else ThreadedSends
        if not self.transport.posts_ahead:
            make = PolledSends
        found = self._sends.get(kind)
        if type(found) is not make:
            if found is not None:
                found.close()  # the step before has finished with it
            found = self._sends[kind] = make()
        found.most_open = most_open
        return found

    def _num_fitting(self, each_bytes: int) -> int:
        """How many microbatches' tensors fit into one of the four parts of the margin."""
        return int(self._bytes_per_use // each_bytes) if each_bytes else sys.maxsize


class StepExchange:
    """What one rank exchanges in one step."""

    def __init__(self, channels: Exchange, routing: RowRouting, key: int) -> None:
        self._channels, self._routing, self._key = channels, routing, key
        self._num_rows = max(map(len, routing.rows))
        self._inboxes: dict[Kind, Inbox] = {}
        self._outboxes: dict[Kind, Outbox] = {}
        self._num_sent: dict[int, int] = {}
        """How many tensors each microbatch sent to the stage behind."""
        if channels.stage:
            self._open_channel(channels.stage - 1)
        if channels.stage + 1 < channels.plan.num_stages:
            self._open_channel(channels.stage)

    def post(self, block: Block) -> None:
        """Post the receive of the block's input."""
        inbox = self._inboxes.get(block.kind)
        if inbox is not None:
            inbox.post(block.microbatch)

    def take(self, block: Block) -> Arrival:
        """The block's input from its neighbours; waits until it has arrived."""
        inbox = self._inboxes.get(block.kind)
        if inbox is None:
            return Arrival()
        received = inbox.take(block.microbatch)
        if block.kind is Kind.BACKWARD:
            self._outboxes[Kind.FORWARD].confirm_arrival(block.microbatch)
            gradients: list[torch.Tensor | None] = [None] * self._num_sent.pop(block.microbatch)
            for index, gradient in zip(received.template, received.tensors, strict=True):
                gradients[index] = gradient
            return Arrival(gradients=gradients)
        for tensor, kind in zip(received.tensors, received.contents.kinds, strict=True):
            if kind.has_gradient:
                tensor.requires_grad_()
        return Arrival(tensors=received.tensors, template=received.template)

    def send_output(
        self,
        microbatch: int,
        tensors: Sequence[torch.Tensor],
        have_gradient: Sequence[bool],
        template: Any,
    ) -> None:
        """Start to send a microbatch to the stage behind."""
        num_rows = len(self._routing.rows[microbatch])
        contents = describe(tensors, have_gradient, template, num_rows, self._channels.stage)
        self._num_sent[microbatch] = len(tensors)
        self._outboxes[Kind.FORWARD].send(microbatch, tensors, contents)

    def send_gradients(self, microbatch: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Start to send to the stage before the gradient of each tensor that came from it."""
        outbox = self._outboxes.get(Kind.BACKWARD)
        if outbox is None:
            return
        found = {i: gradient for i, gradient in enumerate(gradients) if gradient is not None}
        num_rows = len(self._routing.rows[microbatch])
        tensors, no_gradient = list(found.values()), [False] * len(found)
        contents = describe(tensors, no_gradient, list(found), num_rows, self._channels.stage)
        outbox.send(microbatch, tensors, contents)

    def finish(self) -> None:
        """Wait until everything is sent."""
        for outbox in self._outboxes.values():
            outbox.finish()

    def _open_channel(self, channel: int) -> None:
        """Open the channel to the stage before or behind: one inbox and one outbox."""
        is_behind = channel == self._channels.stage
        sender_order = self._channels.plan.schedule[channel + is_behind]
        runs_of = self._routing.runs_out if is_behind else self._routing.runs_in
        incoming, outgoing = (Kind.BACKWARD, Kind.FORWARD) if is_behind else tuple(Kind)
        transport = self._channels.transport
        forecasts = self._channels.forecasts[channel].begin(self._key)
        self._inboxes[incoming] = Inbox(
            transport,
            channel,
            incoming,
            runs_of,
            [block.microbatch for block in sender_order if block.kind is incoming],
            self._channels.num_ahead(self._num_rows * forecasts.largest_row_bytes[incoming]),
            forecasts,
        )
        self._outboxes[outgoing] = Outbox(
            transport,
            channel,
            outgoing,
            runs_of,
            lambda each_bytes: self._channels.sends(outgoing, each_bytes),
            forecasts,
        )
