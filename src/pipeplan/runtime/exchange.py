"""What one rank exchanges with the stages before and behind it.

While a block computes, what the next block needs is on its way::

    blocks     wait F1 | F1            | B0            | F2
    receives            [ gradient 0 ]  [   input 2   ]   posted before the block in front begins
    sends                               [ output 1 ]

Some of this holds memory that the plan's prediction does not count: receives beyond that of the
next block, which smooth an uneven flow, and tensors that are sent but not yet waited for. They are
allowed as far as they fit into a tenth of the prediction, in four equal parts; where they do not
fit, only the next block's receive is posted, and a thread lets tensors go as soon as they are sent.

What kinds of tensors cross a cut is seen in the first forward of a shape of batch, and told to the
stage behind through the store.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from pipeplan.cost import BYTES_IN_GB, CostModel
from pipeplan.errors import RuntimeMismatchError
from pipeplan.pipeline import Block, Kind, Plan
from pipeplan.runtime.channels import Inbox, Outbox, TensorKind
from pipeplan.runtime.geometry import Geometry
from pipeplan.runtime.sends import LazySends, Sends, ThreadedSends
from pipeplan.runtime.transports import Transport

__all__ = ["Exchange", "StepExchange"]

MARGIN = 0.1
"""How much of a device's predicted memory buffers may take beside it."""
SMALL_BYTES = 16_384
"""What may be taken in any case: tensors so small cost time, not memory."""
NUM_USES = 4
"""Of the margin: receives ahead and open sends, in two directions."""
MOST_AHEAD = 2
"""Receives posted beyond that of the next block, in each direction."""
FEWEST_LAZY = 2
"""Gradients that have to fit for being sent without a thread."""


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
        # A profile without sizes predicts nothing; the parameters are there all the same.
        held_bytes = max(predicted_gb * BYTES_IN_GB, parameter_bytes)
        spare_bytes = max(SMALL_BYTES, MARGIN * held_bytes)
        self._use_bytes = spare_bytes / NUM_USES
        self._sends: dict[Kind, Sends] = {}
        self._kinds_in: dict[str, tuple[list[TensorKind], Any]] = {}
        self.kinds_out: dict[str, list[TensorKind]] = {}
        """By the shape of a batch, what leaves the stage."""

    def begin(self, geometry: Geometry, key: str) -> "StepExchange":
        """The exchange of one step; may wait for the stage before to tell what comes."""
        return StepExchange(self, geometry, key)

    def close(self) -> None:
        """No step will come any more."""
        for sends in self._sends.values():
            sends.close()

    def kinds_in(self, key: str) -> tuple[list[TensorKind], Any]:
        """What the stage before sends, and how it goes together."""
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
        """Learn what leaves this stage, and tell the stage behind."""
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
        """How many receives of one direction go beyond that of the next block."""
        if self._receive_ahead is not None:
            return self._receive_ahead
        return min(MOST_AHEAD, self._num_fitting(kinds, num_rows))

    def sends(self, kind: Kind, kinds: Sequence[TensorKind], num_rows: int) -> Sends:
        """What keeps the tensors of one direction that are under way; made at the first use.

        Outputs may all be open, gradients only as many as fit. The stage before receives in the
        order of the sends, so waiting for them cannot deadlock.
        """
        if kind not in self._sends:
            fitting = self._num_fitting(kinds, num_rows)
            on_cpu = self.transport.device.type == "cpu"
            if kind is Kind.FORWARD:
                lazy = fitting >= self._in_flight or not on_cpu
                self._sends[kind] = LazySends() if lazy else ThreadedSends()
            else:
                lazy = fitting >= FEWEST_LAZY or not on_cpu
                most_open = max(1, fitting)
                self._sends[kind] = LazySends(most_open) if lazy else ThreadedSends(most_open)
        return self._sends[kind]

    def _num_fitting(self, kinds: Sequence[TensorKind], num_rows: int) -> int:
        """How many microbatches' tensors fit into one use's part of the margin."""
        each_bytes = num_rows * sum(kind.row_bytes for kind in kinds)
        return int(self._use_bytes // each_bytes) if each_bytes else sys.maxsize


class StepExchange:
    """What one rank exchanges in one step."""

    def __init__(self, channels: Exchange, geometry: Geometry, key: str) -> None:
        self._channels, self._geometry, self._key = channels, geometry, key
        self._inboxes: dict[Kind, Inbox] = {}
        self.template: Any = None
        """How the tensors that arrive go together; None on the first stage."""
        self._num_rows = max(map(len, geometry.rows))
        self._kinds: list[TensorKind] = []
        self._outboxes: dict[Kind, Outbox] = {}
        if channels.stage and self._num_rows:
            self._kinds, self.template = channels.kinds_in(key)
            self._open_channel(channels.stage - 1, self._kinds)
        if not self.is_new:
            self._open_channel(channels.stage, channels.kinds_out[key])

    @property
    def is_new(self) -> bool:
        """Whether it is still to be seen what leaves the stage."""
        return self._key not in self._channels.kinds_out

    def post(self, block: Block) -> None:
        """Post the receive of what this block needs, where that is known."""
        inbox = self._inboxes.get(block.kind)
        if inbox is not None:
            inbox.post(block.microbatch)

    def take(self, block: Block) -> list[torch.Tensor]:
        """What the block needs of its neighbours, once it is there."""
        inbox = self._inboxes.get(block.kind)
        if inbox is None:
            return []
        tensors = inbox.take(block.microbatch)
        if block.kind is Kind.BACKWARD:
            self._outboxes[Kind.FORWARD].has_arrived(block.microbatch)
            return tensors
        for tensor, kind in zip(tensors, self._kinds, strict=True):
            if kind.has_gradient:
                tensor.requires_grad_()
        return tensors

    def send_output(self, microbatch: int, tensors: Sequence[torch.Tensor], template: Any) -> None:
        """Start to send a microbatch to the stage behind."""
        if self.is_new:
            num_rows = len(self._geometry.rows[microbatch])
            aloud = self._geometry.announces
            self._channels.announce(self._key, tensors, template, num_rows, aloud=aloud)
            self._open_channel(self._channels.stage, self._channels.kinds_out[self._key])
        self._outboxes[Kind.FORWARD].send(microbatch, tensors)

    def send_gradients(self, microbatch: int, gradients: Sequence[torch.Tensor]) -> None:
        """Start to send gradients to the stage before."""
        if Kind.BACKWARD in self._outboxes:
            self._outboxes[Kind.BACKWARD].send(microbatch, gradients)

    def finish(self) -> None:
        """Wait until all is sent."""
        for outbox in self._outboxes.values():
            outbox.finish()

    def _open_channel(self, channel: int, kinds: Sequence[TensorKind]) -> None:
        """Both directions of the channel with the stage before or behind: one in, one out."""
        behind = channel == self._channels.stage
        sent = self._channels.plan.schedule[channel + behind]
        runs_of = self._geometry.runs_out if behind else self._geometry.runs_in
        returning = [kind for kind in kinds if kind.has_gradient]
        incoming, outgoing = (Kind.BACKWARD, Kind.FORWARD) if behind else tuple(Kind)
        kinds_of = {Kind.FORWARD: kinds, Kind.BACKWARD: returning}
        transport, num_rows = self._channels.transport, self._num_rows
        self._inboxes[incoming] = Inbox(
            transport,
            channel,
            incoming,
            kinds_of[incoming],
            runs_of,
            [block.microbatch for block in sent if block.kind is incoming],
            self._channels.num_ahead(kinds_of[incoming], num_rows),
        )
        sends = self._channels.sends(outgoing, kinds_of[outgoing], num_rows)
        self._outboxes[outgoing] = Outbox(transport, channel, outgoing, runs_of, sends)


def _kind_from(entry: Any) -> TensorKind:
    shape, dtype, has_gradient = entry
    return TensorKind(
        shape=tuple(shape),
        dtype=getattr(torch, dtype.removeprefix("torch.")),
        has_gradient=has_gradient,
    )
