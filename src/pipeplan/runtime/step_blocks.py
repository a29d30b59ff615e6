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
from pipeplan.runtime.tracing import BlockTimes, Times

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
    rows: tuple[Sequence[int], ...]
    """The rows of the batch that this rank computes, by microbatch; a range if possible."""
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
    times: list[Times]
    """Where it is noted when each block waited and ran."""

    def run(self, order: Sequence[Block]) -> None:
        """Run these blocks; blocks without rows on this rank are left out."""
        order = [block for block in order if self.rows[block.microbatch]]
        exchange, enter, clock = self.exchange, self.watchdog.enter, time.perf_counter
        exchange.expect(order)
        has_marks, wait_s = self.timing.is_needed, clock()
        for block, following in zip_longest(order, order[1:]):
            enter(State.WAITING, block)
            arrival = exchange.take(block)
            if following is not None:
                exchange.post(following)
            run_s, begun = clock(), self.timing.mark() if has_marks else None
            enter(State.COMPUTING, block)
            if block.kind is Kind.FORWARD:
                self._run_forward(block.microbatch, arrival)
            else:
                self._run_backward(block.microbatch, arrival, is_last=following is None)
            del arrival  # free this before the next block
            end_s = clock()
            if begun is None:
                self.times.append(BlockTimes(block, wait_s, run_s, end_s))
            else:
                self.timing.note(block, begun)
            wait_s = end_s
        if self.reduces:
            # Before waiting for sends: the stage before may take a while to receive them.
            self.replica.reducer.start_rest()
        enter(State.WAITING, "for sends to be taken")
        exchange.finish()
        self.timing.follow(enter)
        self.times.extend(self.timing.times())

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
            self._add_extra(runner.extra_loss)
            have_gradient = runner.have_gradient(tensors)
            self.exchange.send_output(microbatch, tensors, have_gradient, template)
            return
        targets, weight = None, float(len(rows))
        if self.targets is not None:
            if self.loss.weight_fn is not None:
                # Weigh targets where they are: on a GPU, the number would wait for blocks before.
                weight = self.loss.weight(select_rows(self.targets, rows, None), len(rows))
            targets = select_rows(self.targets, rows, self.device)
        share = weight / self.total_weight if self.total_weight else 0.0
        self.stats.add_(
            runner.forward_last(*call, targets, share, self.gradient_scale, row_share=row_share)
        )
        self._add_extra(runner.extra_loss)

    def _add_extra(self, loss: torch.Tensor | None) -> None:
        if loss is not None:
            self.stats[0] += loss

    def _run_backward(self, microbatch: int, arrival: Arrival, *, is_last: bool) -> None:
        self.replica.reducer.begin_backward(is_last=is_last and self.reduces)
        gradients = self.replica.runner.backward(microbatch, arrival.gradients)
        self.exchange.send_gradients(microbatch, gradients)
