"""What one stage of a rank exchanges with the stage before and the stage behind.

While a block computes, the input of the next block is on its way::

    blocks     wait F1 | F1            | B0            | F2
    receives            [ gradient 0 ]  [   input 2   ]   posted before the block in front begins
    sends                               [ output 1 ]

Two things hold memory that the plan's prediction does not count. Receives beyond that of the next
block smooth an uneven flow. Sent tensors stay until somebody waits for them. Both together may take
a tenth of the predicted memory, in four equal parts; half of that where backwards are split, since
the temporary tensors of a first half come on top of what it keeps. Where that is too little, only
the next block's receive is posted, and a thread frees tensors as soon as they are sent. The stages
of a rank share all this.

A neighbour on the same ranks gets tensors without a message, as copies: layers may change what they
are given, and recomputation needs it unchanged.

Outputs and gradients are messages of the same kind. A message of gradients says which tensors have
one: a tensor that had no influence on the loss has none, and zeros are not the same. Weight decay
would move parameters that ordinary training leaves alone.
"""

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from pipeplan.cost import BYTES_IN_GB, CostModel
from pipeplan.group_memory import group_memory_parts
from pipeplan.pipeline import Block, Kind, Plan
from pipeplan.runtime.exchange.contents import describe, parse_template
from pipeplan.runtime.exchange.forecasts import Forecasts
from pipeplan.runtime.exchange.inbox import Inbox
from pipeplan.runtime.exchange.lanes import Lane
from pipeplan.runtime.exchange.outbox import Outbox
from pipeplan.runtime.exchange.riding import Ride
from pipeplan.runtime.exchange.row_routing import RowRouting
from pipeplan.runtime.exchange.sends import LazySends, PendingSends, PolledSends, ThreadedSends
from pipeplan.runtime.exchange.transports import Transport
from pipeplan.runtime.stage_orders import group_of, splits_backward, stage_order

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


RECEIVERS = frozenset((Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT))
"""Kinds of blocks that need something of a neighbour."""
BACKWARDS = RECEIVERS - {Kind.FORWARD}


class Arrival(NamedTuple):
    """The input of a block, from its neighbours."""

    tensors: list[torch.Tensor]
    """For a forward."""
    template: Any
    """Joins these tensors into one value; None on the first stage."""
    gradients: list[torch.Tensor | None]
    """For a backward: the gradient of each output, None for an output that has none."""


NOTHING = Arrival([], None, [])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lanes:
    """The lanes of one channel, for batches of one size."""

    incoming: Lane
    outgoing: Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    """The lanes of one rank, for batches of one size."""

    before: _Lanes | None
    """To the stage before."""
    behind: _Lanes | None
    num_rows: tuple[int, ...]
    """The rows of this rank, by microbatch."""


class Exchange:
    """The channels of one stage of a rank, over all steps."""

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
        number = group_of(plan, self.stage)
        group = plan.groups[number]
        first = plan.stages[group.stages[0]]
        device = plan.stages[self.stage].devices[replica]
        parts = group_memory_parts(
            CostModel(plan.model, plan.cluster),
            plan.stages,
            group,
            plan.schedule.group_codes(number),
            shard_optimizer=plan.shard_optimizer,
        )
        predicted_gb = parts[first.devices.index(device)].total_gb
        self._in_flight = _most_in_flight(stage_order(plan, self.stage))
        self._is_chain = len(plan.groups) == plan.num_stages
        """Whether no two stages are on the same ranks."""
        # A profile without sizes predicts nothing, but the parameters still take memory.
        held_bytes = max(predicted_gb * BYTES_IN_GB, parameter_bytes)
        splits = any(splits_backward(plan, stage) for stage in group.stages)
        spare_bytes = max(SMALL_BYTES, (MARGIN / 2 if splits else MARGIN) * held_bytes)
        self._bytes_per_use = spare_bytes / NUM_USES / len(group.stages)
        self.is_local_before = self._is_local(self.stage - 1)
        """Whether the stage before is on the same ranks."""
        self.is_local_behind = self._is_local(self.stage + 1)
        self.is_divided_before = self._is_divided(self.stage - 1)
        """Whether replicas divide or join what the stage before sends, by its rows."""
        self.is_divided_behind = self._is_divided(self.stage + 1)
        self._sends: dict[Kind, PendingSends] = {}
        self._routes: dict[int, _Route] = {}
        """By the rows of the batch."""
        self.forecasts = {self.stage - 1: Forecasts(), self.stage: Forecasts()}
        """By channel, so that both of its ends forget alike."""

    def _is_local(self, neighbour: int) -> bool:
        stages = self.plan.stages
        if not 0 <= neighbour < len(stages):
            return False
        return set(stages[neighbour].devices) == set(stages[self.stage].devices)

    def _is_divided(self, neighbour: int) -> bool:
        stages = self.plan.stages
        if not 0 <= neighbour < len(stages) or self._is_local(neighbour):
            return False
        return max(stages[neighbour].num_replicas, stages[self.stage].num_replicas) > 1

    def begin(self, routing: RowRouting, key: int, ride: Ride | None = None) -> "StepExchange":
        """The exchange of one step; the key is the same on all ranks."""
        route = self._routes.get(routing.num_rows)
        if route is None:
            route = self._routes[routing.num_rows] = self._make_route(routing)
        return StepExchange(self, route, key, ride)

    def _make_route(self, routing: RowRouting) -> _Route:
        has_before = self.stage > 0 and not self.is_local_before
        has_behind = self.stage + 1 < self.plan.num_stages and not self.is_local_behind
        return _Route(
            before=self._make_lanes(routing, is_behind=False) if has_before else None,
            behind=self._make_lanes(routing, is_behind=True) if has_behind else None,
            num_rows=tuple(map(len, routing.rows)),
        )

    def _make_lanes(self, routing: RowRouting, *, is_behind: bool) -> _Lanes:
        """The lanes to the stage before or behind."""
        channel = self.stage if is_behind else self.stage - 1
        runs_of = routing.runs_out if is_behind else routing.runs_in
        incoming, outgoing = (Kind.BACKWARD, Kind.FORWARD)[:: 1 if is_behind else -1]
        other, own = stage_order(self.plan, channel + is_behind), stage_order(self.plan, self.stage)
        sent_there = [block.microbatch for block in other if _sends(block.kind, incoming)]
        sent_here = [block.microbatch for block in own if _sends(block.kind, outgoing)]
        return _Lanes(
            incoming=Lane.of(channel, incoming, runs_of, sent_there),
            outgoing=Lane.of(channel, outgoing, runs_of, sent_here),
        )

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
        receives in the order of the sends, so waiting for them cannot deadlock. If ranks have
        several stages it could: the rank before may wait for another block of this rank. Then
        nobody waits, and if not all gradients fit, a thread frees them.
        """
        num_fitting = self._num_fitting(each_bytes)
        enough, most_open = self._in_flight, sys.maxsize
        if kind is not Kind.FORWARD:
            enough = FEWEST_LAZY if self._is_chain else self.plan.microbatches
            most_open = max(1, num_fitting) if self._is_chain else sys.maxsize
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


def _sends(kind: Kind, direction: Kind) -> bool:
    """Whether blocks of a kind send something in this direction."""
    if direction is Kind.FORWARD:
        return kind is Kind.FORWARD
    return kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT)


def _most_in_flight(order: Sequence[Block]) -> int:
    """The most microbatches of a stage between F and B or I."""
    steps = [1 if block.kind is Kind.FORWARD else -1 for block in order if block.kind in RECEIVERS]
    return max(accumulate(steps), default=0)


@dataclass(slots=True)
class _Handover:
    """What two neighbouring stages on the same rank give each other in a step, by microbatch."""

    outputs: dict[int, tuple[list[torch.Tensor], Any]] = field(default_factory=dict)
    """Tensors, and what joins them into one value."""
    gradients: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)


class StepExchange:
    """What one stage of a rank exchanges in one step."""

    def __init__(
        self, channels: Exchange, route: _Route, key: int, ride: Ride | None = None
    ) -> None:
        self._channels, self._num_rows, self._ride = channels, route.num_rows, ride
        self._inputs, self._gradients_out = self._open(route.before, key)
        self._gradients_in, self._outputs = self._open(route.behind, key)
        self._num_sent: dict[int, int] = {}
        """How many tensors each microbatch sent to the stage behind."""
        self._inboxes: list[Inbox] = []
        """Where something arrives in this step."""
        self._local_before: _Handover | None = None
        self._local_behind: _Handover | None = None

    def join(self, behind: "StepExchange") -> None:
        """Hand over to the stage behind, which is on this rank, without messages."""
        self._local_behind = behind._local_before = _Handover()

    def expect(self, kinds: Collection[Kind]) -> None:
        """Post the first receives of both directions; `kinds` are those of this step's blocks."""
        forward, backward = Kind.FORWARD in kinds, not BACKWARDS.isdisjoint(kinds)
        used = [(self._inputs, forward), (self._gradients_in, backward)]
        self._inboxes = [inbox for inbox, is_used in used if inbox is not None and is_used]
        self.post_ahead()

    def post_ahead(self) -> None:
        """Post a few receives of both directions: gloo moves nothing before.

        A gradient may come while forwards are still to run, long before a backward is next.
        """
        for inbox in self._inboxes:
            inbox.post_ahead()
            if inbox.is_all_posted:
                self._inboxes = [each for each in self._inboxes if each is not inbox]

    def post(self, block: Block) -> None:
        """Post the receive of the block's input, and a few of both directions behind it."""
        inbox = self._inputs if block.kind is Kind.FORWARD else self._gradients_in
        if inbox in self._inboxes and inbox is not None:
            inbox.post(block.microbatch)
        if self._inboxes:
            self.post_ahead()

    def receives(self, block: Block) -> bool:
        """Whether a message brings the block's input."""
        if block.kind is Kind.FORWARD:
            return self._inputs is not None
        return block.kind in RECEIVERS and self._gradients_in is not None

    def take(self, block: Block) -> Arrival:
        """The block's input from its neighbours; waits until it has arrived."""
        if block.kind is Kind.FORWARD:
            return self._take_input(block.microbatch)
        if block.kind is Kind.WEIGHT_GRADIENT:
            return NOTHING
        return self._take_gradients(block.microbatch)

    def _take_input(self, microbatch: int) -> Arrival:
        if self._local_before is not None:
            tensors, template = self._local_before.outputs.pop(microbatch)
            return Arrival(tensors, template, [])
        if self._inputs is None:
            return Arrival([], None, [])
        received = self._inputs.take(microbatch)
        for tensor, kind in zip(received.tensors, received.contents.kinds, strict=True):
            if kind.has_gradient:
                tensor.requires_grad_()
        return Arrival(received.tensors, received.template, [])

    def _take_gradients(self, microbatch: int) -> Arrival:
        if self._local_behind is not None:
            return Arrival([], None, self._local_behind.gradients.pop(microbatch))
        if self._gradients_in is None or self._outputs is None:
            return Arrival([], None, [])
        received = self._gradients_in.take(microbatch)
        self._outputs.confirm_arrival(microbatch)
        gradients: list[torch.Tensor | None] = [None] * self._num_sent.pop(microbatch)
        for index, gradient in zip(received.template, received.tensors, strict=True):
            gradients[index] = gradient
        return Arrival([], None, gradients)

    def send_output(
        self,
        microbatch: int,
        tensors: Sequence[torch.Tensor],
        have_gradient: Sequence[bool],
        template: Any,
    ) -> None:
        """Start to send a microbatch to the stage behind."""
        num_rows = self._num_rows[microbatch]
        stage, is_divided = self._channels.stage, self._channels.is_divided_behind
        contents = describe(
            tensors, have_gradient, template, num_rows, stage, is_divided=is_divided
        )
        if self._local_behind is not None:
            copies = [tensor.detach().clone() for tensor in tensors]
            for copy, has_gradient in zip(copies, have_gradient, strict=True):
                copy.requires_grad_(has_gradient)
            outputs = copies, parse_template(contents.template)
            self._local_behind.outputs[microbatch] = outputs
            return
        assert self._outputs is not None  # the last stage sends none
        self._num_sent[microbatch] = len(tensors)
        self._outputs.send(microbatch, tensors, contents)

    def send_gradients(self, microbatch: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Start to send to the stage before the gradient of each tensor that came from it."""
        if self._local_before is not None:
            self._local_before.gradients[microbatch] = list(gradients)
            return
        if self._gradients_out is None:
            return
        indices = [i for i, gradient in enumerate(gradients) if gradient is not None]
        tensors = [gradient for gradient in gradients if gradient is not None]
        num_rows, no_gradient = self._num_rows[microbatch], [False] * len(indices)
        stage, is_divided = self._channels.stage, self._channels.is_divided_before
        contents = describe(tensors, no_gradient, indices, num_rows, stage, is_divided=is_divided)
        self._gradients_out.send(microbatch, tensors, contents)

    def finish(self) -> None:
        """Wait until everything is sent."""
        for outbox in (self._gradients_out, self._outputs):
            if outbox is not None:
                outbox.finish()

    def _open(self, lanes: _Lanes | None, key: int) -> tuple[Inbox | None, Outbox | None]:
        """Open the channel to the stage before or behind: one inbox and one outbox."""
        if lanes is None:
            return None, None
        channels, incoming, outgoing = self._channels, lanes.incoming, lanes.outgoing
        forecasts = channels.forecasts[incoming.channel].begin(key)
        expected = forecasts.of(incoming.kind)
        num_ahead = channels.num_ahead(max(self._num_rows) * expected.largest_row_bytes)
        inbox = Inbox(channels.transport, incoming, num_ahead, expected, self._ride)
        outbox = Outbox(
            channels.transport,
            outgoing,
            lambda each_bytes: channels.sends(outgoing.kind, each_bytes),
            forecasts.of(outgoing.kind),
            self._ride,
        )
        return inbox, outbox
