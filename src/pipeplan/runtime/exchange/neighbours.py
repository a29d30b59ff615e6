"""What one rank exchanges with the stage before and the stage behind.

While a block computes, the input of the next block is on its way::

    blocks     wait F1 | F1            | B0            | F2
    receives            [ gradient 0 ]  [   input 2   ]   posted before the block in front begins
    sends                               [ output 1 ]

Two things hold memory that the plan's prediction does not count. Receives beyond that of the next
block smooth an uneven flow. Sent tensors stay until somebody waits for them. Both together may take
a tenth of the predicted memory, in four equal parts. Where that is too little, only the next
block's receive is posted, and a thread frees tensors as soon as they are sent.

The first forward with a new shape of batch shows what kinds of tensors cross the cut. The stage
tells them to the stage behind through the store.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from pipeplan.cost import BYTES_IN_GB, CostModel
from pipeplan.errors import RuntimeMismatchError
from pipeplan.pipeline import Block, Kind, Plan
from pipeplan.runtime.exchange.channels import Inbox, Outbox, TensorKind
from pipeplan.runtime.exchange.row_routing import RowRouting
from pipeplan.runtime.exchange.sends import LazySends, PendingSends, ThreadedSends
from pipeplan.runtime.exchange.transports import Transport

__all__ = ["Exchange", "StepExchange"]

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


class Exchange:
    """The channels of one rank, over all steps."""

    def __init__(
        self,
        plan: Plan,
        place: tuple[int, int],
        transport: Transport,
        store: Any,
        receive_ahead: int | None,
        parameter_bytes: int = 0,
    ) -> None:
        self.plan, self.transport, self._store = plan, transport, store
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
        self._kinds_in: dict[str, tuple[list[TensorKind], Any]] = {}
        self.kinds_out: dict[str, list[TensorKind]] = {}
        """For each shape of batch, what leaves the stage."""

    def begin(self, routing: RowRouting, key: str) -> "StepExchange":
        """The exchange of one step; may wait until the stage before says what it sends."""
        return StepExchange(self, routing, key)

    def close(self) -> None:
        """Free threads; no step will follow."""
        for sends in self._sends.values():
            sends.close()

    def kinds_in(self, key: str) -> tuple[list[TensorKind], Any]:
        """The tensors that the stage before sends, and the template that joins them."""
        if key not in self._kinds_in:
            kinds, template = json.loads(self._store.get(f"kinds/{self.stage - 1}/{key}"))
            self._kinds_in[key] = ([_kind_from(entry) for entry in kinds], template)
        return self._kinds_in[key]

    def announce(
        self,
        key: str,
        tensors: Sequence[torch.Tensor],
        template: Any,
        num_rows: int,
        *,
        aloud: bool,
    ) -> None:
        """Remember what leaves this stage; if `aloud`, also tell the stage behind."""
        kinds = []
        for tensor in tensors:
            if not tensor.ndim or tensor.shape[0] != num_rows:
                raise RuntimeMismatchError(
                    f"stage {self.stage}: its last layer returns a tensor of shape"
                    f" {tuple(tensor.shape)} for {num_rows} rows; what crosses a cut has the"
                    " microbatch's rows as its first dimension"
                )
            kinds.append(
                TensorKind(
                    shape=tuple(tensor.shape[1:]),
                    dtype=tensor.dtype,
                    has_gradient=tensor.requires_grad,
                )
            )
        self.kinds_out[key] = kinds
        if aloud:
            entries = [[list(k.shape), str(k.dtype), k.has_gradient] for k in kinds]
            self._store.set(f"kinds/{self.stage}/{key}", json.dumps([entries, template]))

    def num_ahead(self, kinds: Sequence[TensorKind], num_rows: int) -> int:
        """The number of receives of one direction to post beyond that of the next block."""
        if self._receive_ahead is not None:
            return self._receive_ahead
        return min(MOST_AHEAD, self._num_fitting(kinds, num_rows))

    def sends(self, kind: Kind, kinds: Sequence[TensorKind], num_rows: int) -> PendingSends:
        """The pending sends of one direction; made on first use.

        All outputs may be open at once, but only as many gradients as fit. The stage before
        receives in the order of the sends, so waiting for them cannot deadlock.
        """
        if kind not in self._sends:
            num_fitting = self._num_fitting(kinds, num_rows)
            on_cpu = self.transport.device.type == "cpu"
            if kind is Kind.FORWARD:
                is_lazy = num_fitting >= self._in_flight or not on_cpu
                self._sends[kind] = LazySends() if is_lazy else ThreadedSends()
            else:
                is_lazy = num_fitting >= FEWEST_LAZY or not on_cpu
                most_open = max(1, num_fitting)
                self._sends[kind] = LazySends(most_open) if is_lazy else ThreadedSends(most_open)
        return self._sends[kind]

    def _num_fitting(self, kinds: Sequence[TensorKind], num_rows: int) -> int:
        """How many microbatches' tensors fit into one of the four parts of the margin."""
        each_bytes = num_rows * sum(kind.row_bytes for kind in kinds)
        return int(self._bytes_per_use // each_bytes) if each_bytes else sys.maxsize


class StepExchange:
    """What one rank exchanges in one step."""

    def __init__(self, channels: Exchange, routing: RowRouting, key: str) -> None:
        self._channels, self._routing, self._key = channels, routing, key
        self._inboxes: dict[Kind, Inbox] = {}
        self.template: Any = None
        """Joins the tensors that arrive into one value; None on the first stage."""
        self._num_rows = max(map(len, routing.rows))
        self._kinds: list[TensorKind] = []
        self._outboxes: dict[Kind, Outbox] = {}
        if channels.stage and self._num_rows:
            self._kinds, self.template = channels.kinds_in(key)
            self._open_channel(channels.stage - 1, self._kinds)
        if not self.is_new:
            self._open_channel(channels.stage, channels.kinds_out[key])

    @property
    def is_new(self) -> bool:
        """Whether it is not known yet what leaves the stage."""
        return self._key not in self._channels.kinds_out

    def post(self, block: Block) -> None:
        """Post the receive of the block's input, if the channel is open."""
        inbox = self._inboxes.get(block.kind)
        if inbox is not None:
            inbox.post(block.microbatch)

    def take(self, block: Block) -> list[torch.Tensor]:
        """The block's input from its neighbours; waits until it has arrived."""
        inbox = self._inboxes.get(block.kind)
        if inbox is None:
            return []
        tensors = inbox.take(block.microbatch)
        if block.kind is Kind.BACKWARD:
            self._outboxes[Kind.FORWARD].confirm_arrival(block.microbatch)
            return tensors
        for tensor, kind in zip(tensors, self._kinds, strict=True):
            if kind.has_gradient:
                tensor.requires_grad_()
        return tensors

    def send_output(self, microbatch: int, tensors: Sequence[torch.Tensor], template: Any) -> None:
        """Start to send a microbatch to the stage behind."""
        if self.is_new:
            num_rows = len(self._routing.rows[microbatch])
            aloud = self._routing.announces
            self._channels.announce(self._key, tensors, template, num_rows, aloud=aloud)
            self._open_channel(self._channels.stage, self._channels.kinds_out[self._key])
        self._outboxes[Kind.FORWARD].send(microbatch, tensors)

    def send_gradients(self, microbatch: int, gradients: Sequence[torch.Tensor]) -> None:
        """Start to send gradients to the stage before."""
        if Kind.BACKWARD in self._outboxes:
            self._outboxes[Kind.BACKWARD].send(microbatch, gradients)

    def finish(self) -> None:
        """Wait until everything is sent."""
        for outbox in self._outboxes.values():
            outbox.finish()

    def _open_channel(self, channel: int, kinds: Sequence[TensorKind]) -> None:
        """Open the channel to the stage before or behind: one inbox and one outbox."""
        is_behind = channel == self._channels.stage
        sender_order = self._channels.plan.schedule[channel + is_behind]
        runs_of = self._routing.runs_out if is_behind else self._routing.runs_in
        kinds_with_gradient = [kind for kind in kinds if kind.has_gradient]
        incoming, outgoing = (Kind.BACKWARD, Kind.FORWARD) if is_behind else tuple(Kind)
        kinds_of = {Kind.FORWARD: kinds, Kind.BACKWARD: kinds_with_gradient}
        transport, num_rows = self._channels.transport, self._num_rows
        self._inboxes[incoming] = Inbox(
            transport,
            channel,
            incoming,
            kinds_of[incoming],
            runs_of,
            [block.microbatch for block in sender_order if block.kind is incoming],
            self._channels.num_ahead(kinds_of[incoming], num_rows),
        )
        pending = self._channels.sends(outgoing, kinds_of[outgoing], num_rows)
        self._outboxes[outgoing] = Outbox(transport, channel, outgoing, runs_of, pending)


def _kind_from(entry: Any) -> TensorKind:
    shape, dtype, has_gradient = entry
    return TensorKind(
        shape=tuple(shape),
        dtype=getattr(torch, dtype.removeprefix("torch.")),
        has_gradient=has_gradient,
    )
