"""Runs the blocks of one step on one rank, in the plan's order."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from pipeplan.pipeline import Block, Kind
from pipeplan.runtime.batches import select_rows
from pipeplan.runtime.device_timing import DeviceTiming
from pipeplan.runtime.exchange.neighbours import Arrival, StepExchange
from pipeplan.runtime.loss_terms import LossTerms
from pipeplan.runtime.replica_setup import Replica
from pipeplan.runtime.supervision.status_board import State
from pipeplan.runtime.supervision.watchdog import Watchdog
from pipeplan.runtime.tracing import CATEGORIES, WAIT, Event, block_name

__all__ = ["StepBlocks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBlocks:
    """The blocks of one step, and what they need."""

    step: int
    """How many batches came before."""
    reduces: bool
    """Whether gradients are summed over replicas at the end, or kept for the next batch."""
    replica: Replica
    exchange: StepExchange
    device: torch.device
    rows: tuple[tuple[int, ...], ...]
    """The rows of the batch that this rank computes, by microbatch."""
    call: tuple[tuple[Any, ...], dict[str, Any]]
    """The arguments of the model."""
    targets: Any
    loss: LossTerms | None
    """None except on the last stage."""
    num_rows: int
    """The rows of the batch, on all ranks."""
    total_weight: float
    """The weight of all targets of the batch."""
    gradient_scale: float
    stats: torch.Tensor
    """Where the loss and the metrics are summed."""
    watchdog: Watchdog
    timing: DeviceTiming
    events: list[Event]
    """Where it is noted when each block waited and ran."""

    def run(self, order: Sequence[Block]) -> None:
        """Run these blocks; blocks without rows on this rank are left out."""
        order = [block for block in order if self.rows[block.microbatch]]
        exchange, enter, clock = self.exchange, self.watchdog.enter, time.perf_counter
        for block, following in zip_longest(order, order[1:]):
            wait_s = clock()
            enter(State.WAITING, block)
            arrival = exchange.take(block)
            if following is not None:
                exchange.post(following)
            run_s = clock()
            begun = self.timing.mark()
            enter(State.COMPUTING, block)
            if block.kind is Kind.FORWARD:
                self._run_forward(block.microbatch, arrival)
            else:
                self._run_backward(block.microbatch, arrival, is_last=following is None)
            del arrival  # free this before the next block
            if begun is None:
                self.events.append(Event(block_name(block), WAIT, wait_s, run_s))
                self.events.append(Event(block_name(block), CATEGORIES[block.kind], run_s, clock()))
            else:
                self.timing.note(block, begun)
        enter(State.WAITING, "for sends to be taken")
        exchange.finish()
        self.timing.follow(enter)
        self.events.extend(self.timing.events())

    def _run_forward(self, microbatch: int, arrival: Arrival) -> None:
        runner, rows, inputs = self.replica.runner, self.rows[microbatch], self.call
        if self.replica.module.needs_inputs:
            inputs = select_rows(self.call, rows, self.device)
        call = (self.step, microbatch, arrival.tensors, arrival.template, inputs)
        row_share = len(rows) / self.num_rows
        if self.loss is None:
            tensors, template = runner.forward(
                *call, row_share=row_share, gradient_scale=self.gradient_scale
            )
            self.stats[0] += runner.extra_loss
            have_gradient = runner.have_gradient(tensors)
            self.exchange.send_output(microbatch, tensors, have_gradient, template)
            return
        targets, weight = None, float(len(rows))
        if self.targets is not None:
            # Weigh targets where they are: on a GPU, the number would wait for the blocks before.
            chosen = select_rows(self.targets, rows, None)
            weight = self.loss.weight(chosen, len(rows))
            targets = select_rows(self.targets, rows, self.device)
        share = weight / self.total_weight if self.total_weight else 0.0
        self.stats.add_(
            runner.forward_last(*call, targets, share, self.gradient_scale, row_share=row_share)
        )
        self.stats[0] += runner.extra_loss

    def _run_backward(self, microbatch: int, arrival: Arrival, *, is_last: bool) -> None:
        self.replica.reducer.begin_backward(is_last=is_last and self.reduces)
        gradients = self.replica.runner.backward(microbatch, arrival.gradients)
        self.exchange.send_gradients(microbatch, gradients)
