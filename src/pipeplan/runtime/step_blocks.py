"""Runs the blocks of one step on one rank, in the plan's order."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pipeplan.errors import RuntimeMismatchError
from pipeplan.pipeline import Block, Kind
from pipeplan.runtime.batches import select_rows
from pipeplan.runtime.device_timing import DeviceTiming
from pipeplan.runtime.exchange.neighbours import Arrival, StepExchange
from pipeplan.runtime.loss_terms import LossTerms
from pipeplan.runtime.replica_setup import Part, Replica
from pipeplan.runtime.supervision.status_board import State
from pipeplan.runtime.supervision.watchdog import Watchdog
from pipeplan.runtime.tracing import BlockTimes, Times

__all__ = ["Arranged", "StepBlocks", "StepPart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """One of the rank's stages in one step."""

    part: Part
    exchange: StepExchange
    rows: tuple[Sequence[int], ...]
    """The rows of the batch that this rank computes there, by microbatch; a range if possible."""
    loss: LossTerms | None
    """None except on the last stage."""


class Turn(NamedTuple):
    """One block of an order."""

    block: Block
    following: Block | None
    """The next one whose input is a message."""
    is_last: bool
    """Whether no other block of its stage follows."""


class Arranged(NamedTuple):
    """An order that a rank runs."""

    turns: tuple[Turn, ...]
    kinds: dict[int, frozenset[Kind]]
    """By stage, the kinds of its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBlocks:
    """The blocks of one step, and what they need."""

    step: int
    """How many batches came before."""
    reduces: bool
    """Whether gradients are summed over replicas at the end, or kept for the next batch."""
    replica: Replica
    parts: dict[int, StepPart]
    """By stage."""
    device: torch.device
    call: tuple[tuple[Any, ...], dict[str, Any]]
    """The arguments of the model."""
    targets: Any
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

    def arrange(self, order: Sequence[Block]) -> "Arranged":
        """These blocks without those that have no rows on this rank; the same for equal batches."""
        parts = self.parts
        order = [block for block in order if parts[block.stage].rows[block.microbatch]]
        last_of = {block.stage: position for position, block in enumerate(order)}
        turns: list[Turn] = []
        following = None
        for position, block in reversed(list(enumerate(order))):
            turns.append(Turn(block, following, last_of[block.stage] == position))
            if parts[block.stage].exchange.receives(block):
                following = block
        kinds = {
            stage: frozenset(block.kind for block in order if block.stage == stage)
            for stage in parts
        }
        return Arranged(tuple(reversed(turns)), kinds)

    def run(self, arranged: "Arranged") -> None:
        """Run these blocks."""
        parts, enter, clock = self.parts, self.watchdog.enter, time.perf_counter
        for stage, part in parts.items():
            part.part.runner.begin_step()
            part.exchange.expect(arranged.kinds[stage])
        has_marks, wait_s = self.timing.is_needed, clock()
        for block, following, is_last in arranged.turns:
            part = parts[block.stage]
            if part.exchange.receives(block):
                enter(State.WAITING, block)
            arrival = part.exchange.take(block)
            if following is not None:
                parts[following.stage].exchange.post(following)
            if following is None or following.stage != block.stage:
                part.exchange.post_ahead()
            run_s, begun = clock(), self.timing.mark() if has_marks else None
            enter(State.COMPUTING, block)
            if block.kind is Kind.FORWARD:
                self._run_forward(part, block.microbatch, arrival)
            else:
                self._run_backward(part, block, arrival, is_last=is_last)
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
        for part in parts.values():
            part.exchange.finish()
        self.timing.follow(enter)
        self.times.extend(self.timing.times())

    def _run_forward(self, part: StepPart, microbatch: int, arrival: Arrival) -> None:
        runner, rows, inputs = part.part.runner, part.rows[microbatch], self.call
        if part.part.module.needs_inputs:
            inputs = select_rows(self.call, rows, self.device)
        call = (self.step, microbatch, arrival.tensors, arrival.template, inputs)
        row_share = len(rows) / self.num_rows
        if part.loss is None:
            tensors, template = runner.forward(
                *call, row_share=row_share, gradient_scale=self.gradient_scale
            )
            self._add_extra(runner.extra_loss)
            have_gradient = runner.have_gradient(tensors)
            part.exchange.send_output(microbatch, tensors, have_gradient, template)
            return
        targets, weight = None, float(len(rows))
        if self.targets is not None:
            if part.loss.weight_fn is not None:
                # Weigh targets where they are: on a GPU, the number would wait for blocks before.
                weight = part.loss.weight(select_rows(self.targets, rows, None), len(rows))
            targets = select_rows(self.targets, rows, self.device)
        share = weight / self.total_weight if self.total_weight else 0.0
        self.stats.add_(
            runner.forward_last(*call, targets, share, self.gradient_scale, row_share=row_share)
        )
        self._add_extra(runner.extra_loss)

    def _add_extra(self, loss: torch.Tensor | None) -> None:
        if loss is None:
            return
        if math.isnan(self.gradient_scale):
            raise RuntimeMismatchError(
                "add_loss: with loss_weight_fn, a loss that layers add counts by the weight of the"
                " targets when gradients are accumulated; give every rank the targets"
            )
        self.stats[0] += loss

    def _run_backward(
        self, part: StepPart, block: Block, arrival: Arrival, *, is_last: bool
    ) -> None:
        reducer, runner, microbatch = self.replica.reducer, part.part.runner, block.microbatch
        ends = is_last and self.reduces
        is_rest = block.kind is Kind.WEIGHT_GRADIENT
        rest = runner.weights_left(microbatch) if is_rest else None
        reducer.begin_backward(is_last=ends, stage=block.stage, rest=rest)
        if is_rest:
            runner.backward_weight(microbatch)
        else:
            halves = block.kind is Kind.INPUT_GRADIENT
            run = runner.backward_input if halves else runner.backward
            part.exchange.send_gradients(microbatch, run(microbatch, arrival.gradients))
        if ends and len(self.parts) > 1:
            reducer.end_stage(block.stage)
