"""One rank's steps: agree on the batch, run the blocks, sum gradients, update, return the loss."""

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeplan.errors import RuntimeMismatchError
from pipeplan.pipeline import Block, Kind, Plan
from pipeplan.runtime.attribute_watch import AttributeWatch, require_alike
from pipeplan.runtime.batch_agreement import Agreed, BatchAgreement, Mode, Notice
from pipeplan.runtime.batches import as_call, mark_rows
from pipeplan.runtime.code_agreement import CodeAgreement
from pipeplan.runtime.device_timing import DeviceTiming
from pipeplan.runtime.exchange.rank_tree import make_sum
from pipeplan.runtime.exchange.riding import Ride, can_ride, open_step
from pipeplan.runtime.exchange.row_routing import RowRouter
from pipeplan.runtime.exchange.transports import Transport
from pipeplan.runtime.gathering import STEPPING, gather
from pipeplan.runtime.gradient_notes import GradientNotes
from pipeplan.runtime.loss_terms import LossTerms
from pipeplan.runtime.optimizer_trials import OptimizerTrials
from pipeplan.runtime.parameters import share_statistics
from pipeplan.runtime.placement import Placement
from pipeplan.runtime.replica_setup import Replica
from pipeplan.runtime.root_watch import RootWatch
from pipeplan.runtime.settings_agreement import OptionWatch
from pipeplan.runtime.stage_orders import group_of
from pipeplan.runtime.step_blocks import Arranged, StepBlocks, StepPart
from pipeplan.runtime.step_checks import SameModel, require_inputs, require_no_autocast
from pipeplan.runtime.supervision.status_board import State
from pipeplan.runtime.supervision.watchdog import Watchdog
from pipeplan.runtime.tracing import ReduceTimes, Times
from pipeplan.runtime.updating import NUM_ADDED, Updater
from pipeplan.runtime.verification.first_step import FirstStep

__all__ = ["Steps"]


class Steps:
    """Trains and evaluates; counts nothing and saves nothing."""

    def __init__(
        self,
        *,
        plan: Plan,
        rank: int,
        placement: Placement,
        replica: Replica | None,
        transport: Transport,
        loss: LossTerms,
        updater: Updater,
        watchdog: Watchdog,
        first_step: FirstStep,
        optimizer: torch.optim.Optimizer,
        trials: OptimizerTrials | None,
        compares_batches: bool,
        code: CodeAgreement,
    ) -> None:
        """`replica` is None for a rank that the plan does not use. All ranks have to call it."""
        self._plan, self._rank, self._replica, self._transport = plan, rank, replica, transport
        self._loss, self._updater, self._watchdog = loss, updater, watchdog
        self._first_step, self._code = first_step, code
        places = placement.places(rank)
        self._first, self._index = places[0] if places else (-1, -1)
        self._last = plan.num_stages - 1
        self._is_last = bool(places) and places[-1][0] == self._last
        self._order = tuple(plan.schedule[group_of(plan, self._first)]) if places else ()
        self.routers = {
            stage: RowRouter(plan, placement.ranks, stage, index) for stage, index in places
        }
        """By stage of this rank."""
        self._arranged: dict[tuple[int, int], Arranged] = {}
        """By the rows of a batch and the number of blocks."""
        self._agreement = BatchAgreement(
            rank, placement.ranks, dist.get_world_size(), compares_values=compares_batches
        )
        self._sum = make_sum(transport, placement.ranks)
        self._set_up_comparisons(placement)
        self._same_model = SameModel(replica, optimizer, trials)
        self._options = OptionWatch(optimizer)
        self.metrics: dict[str, float] = {}
        """The metrics of the last step or evaluation."""
        self.num_rows = 0
        """The rows of the last batch."""
        self.start_s, self.iteration_ms = time.perf_counter(), 0.0
        """When the last training step began, and how long it took."""
        self.times: list[Times] = []
        """When each block of the last step waited and ran."""

    def _set_up_comparisons(self, placement: Placement) -> None:
        """Find out what rides with messages, and which layers have replicas."""
        plan, replica, loss, transport = self._plan, self._replica, self._loss, self._transport
        num_ranks, num_sums = dist.get_world_size(), 3 + len(loss.metrics)
        self._can_ride = transport.carries_notes and can_ride(
            plan, placement.ranks, num_ranks, num_sums
        )
        self._rank_before = placement.ranks[self._first - 1][0] if self._first > 0 else -1
        self._is_doubted = False
        """Whether ranks have changed something that they may have of their own."""
        self._has_agreed = False
        """Whether a step has begun; the first one's notice comes ahead of its messages."""
        self._ride: Ride | None = None
        """What rides with the messages of this step, if anything does."""
        self._replicas = [ranks for ranks in placement.ranks if len(ranks) > 1]
        """The ranks of replicated stages."""
        self._root = RootWatch(_around_layers(replica))
        self._watch: AttributeWatch | None = None
        if replica is not None and len(replica.ranks) > 1:
            functions = [loss.loss_fn, *loss.metrics.values()] if self._is_last else []
            self._watch = AttributeWatch(replica.held.model, functions, replica.ranks)

    def train(self, batch: Any, targets: Any, number: int, *, update: bool) -> float:
        """Train on a batch, and return its mean loss; `number` batches came before."""
        self.start_s = time.perf_counter()
        mode = Mode.TRAINING if update else Mode.ACCUMULATION
        blocks, stats = self._begin(batch, targets, mode, number)
        weighs = blocks is not None and self._is_last and self._index == 0
        weight = blocks.total_weight if blocks is not None and weighs else 0.0
        carrier = self._carrier(mode)
        if carrier is not None:
            carrier.own = lambda: [*self._with_doubt(stats).tolist(), weight]
        else:
            self._sum.expect(len(stats) + NUM_ADDED)
        if blocks is not None:
            replica = blocks.replica
            replica.reducer.begin(keeps=self._updater.accumulation.num_batches > 0)
            with ExitStack() as casts:
                for part in replica.parts:
                    casts.enter_context(part.runner.sharing_casts())
                blocks.run(self._arrange(blocks, self._order))
        self._first_step.require_no_doubt(self._watchdog)
        if carrier is None:
            self._watchdog.enter(State.WAITING, "for the loss")
            self._updater.start_sums(self._with_doubt(stats), weight, self._sum)
        if blocks is not None and update:
            reduce_s = time.perf_counter()
            self._watchdog.enter(State.WAITING, "for the gradients' all-reduce")
            blocks.replica.reducer.finish()
            self.times.append(ReduceTimes(reduce_s, time.perf_counter()))
        self._watchdog.enter(State.WAITING, "for the loss")
        carried = carrier.totals(len(stats) + 1) if carrier is not None else None
        sums = self._updater.update(
            self._with_doubt(stats), weight, self._sum, applies=update, carried=carried
        )
        loss = self._take_sums(sums)
        self._recheck(batch, targets, number)
        self._transport.synchronize()
        self.iteration_ms = (time.perf_counter() - self.start_s) * 1e3
        return loss

    def evaluate(self, batch: Any, targets: Any, number: int) -> float:
        """The mean loss of a batch; forwards only."""
        blocks, stats = self._begin(batch, targets, Mode.EVALUATION, number)
        self._sum.expect(len(stats))
        if blocks is not None:
            replica = blocks.replica
            share_statistics(replica.held.model, replica.group, replica.ranks)
            with ExitStack() as evaluating:
                for part in replica.parts:
                    evaluating.enter_context(part.runner.evaluating())
                forwards = [block for block in self._order if block.kind is Kind.FORWARD]
                blocks.run(self._arrange(blocks, forwards))
        self._first_step.require_no_doubt(self._watchdog)
        self._watchdog.enter(State.WAITING, "for the loss")
        self._sum.start(self._with_doubt(stats))
        loss = self._take_sums(self._sum.finish())
        self._recheck(batch, targets, number)
        return loss

    def _begin(
        self, batch: Any, targets: Any, mode: Mode, number: int
    ) -> tuple[StepBlocks | None, torch.Tensor]:
        """The blocks of this rank, None if it has no stage; and where the loss is summed.

        Behind the loss and metrics, there is what replicas have changed, and a doubt at the end.
        """
        self._agreement.has_doubt = False
        self._watchdog.enter(State.WAITING, "for the start of the step")
        require_no_autocast(self._transport.device)
        require_inputs(self._rank, self._replica, batch, targets, self._loss)
        if mode is not Mode.EVALUATION:
            self._same_model.require(number)
        # Before the wait for the notice: the step before has just looked at the same objects.
        has_new_root = self._root.have_changed()
        changes = self._watch.look() if self._watch is not None else ()
        options = self._options.look()
        variables = -1  # a rank without layers knows nothing of their mode
        if self._replica is not None:
            training = self._replica.parts[0].module.model.training
            variables = self._code.changes(batch, targets, training)
        given = (batch, targets, mode, number)
        if self._can_ride and self._has_agreed:
            agreed = self._ride_along(*given, options, variables)
        else:
            agreed = self._agreement.agree(*given, self._transport, options, variables)
        self._has_agreed = True
        if has_new_root:
            self._agreement.has_doubt = True
        self._first_step.verify(batch, targets, agreed.rows, number, self._watchdog)
        if self._first_step.has_new_rows(batch, agreed.rows):
            self._agreement.has_doubt = True
        self._watchdog.note_batch(agreed.key)
        self.num_rows, self.times = agreed.rows, []
        num_stats = 1 + len(self._loss.metrics)
        stats = torch.zeros(
            num_stats + 1 + 3 * bool(self._replicas),
            dtype=torch.float64,
            device=self._transport.device,
        )
        for index, change in enumerate(changes, start=num_stats):
            if change:
                stats[index] = change
        if self._replica is None:
            return None, stats
        own = stats[:num_stats]
        return self._make_blocks(self._replica, batch, targets, agreed, number, own), stats

    def _carrier(self, mode: Mode) -> Ride | GradientNotes | None:
        """What brings the sums of this step to all ranks; None if they need messages."""
        if self._updater.needs_norm:
            return None  # it is known behind the gradients
        if self._ride is None and self._replica is not None and mode is Mode.TRAINING:
            return self._replica.notes
        return self._ride

    def _ride_along(
        self, batch: Any, targets: Any, mode: Mode, number: int, options: int, variables: int
    ) -> Agreed:
        """Let the notice come with the first message; what this rank knows without it.

        A rank that was given no batch has to wait for it.
        """
        opening = None
        if self._first > 0:
            opening = open_step(self._plan, self._first, self._rank_before, self._transport)
        own = self._agreement.describe(batch, targets, mode, number, options, variables)
        ride = self._ride = Ride(
            opening=opening,
            notice=own,
            compare=lambda notice: self._agreement.compare(own, Notice(*notice)),
            is_last=self._is_last,
        )
        if opening is None or own.rows:
            return own.agreed()
        opening.wait()
        ride.take_notice(opening.memory)
        return Notice(*ride.notice).agreed()

    def _make_blocks(
        self,
        replica: Replica,
        batch: Any,
        targets: Any,
        agreed: Agreed,
        number: int,
        stats: torch.Tensor,
    ) -> StepBlocks:
        """The blocks of a step, with what they need."""
        rows = agreed.rows
        call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        if replica.needs_inputs:
            call = as_call(mark_rows(batch, rows, "batch"))
        counts = self._updater.accumulation.num_batches > 0  # then added losses need it, too
        if targets is not None and (self._is_last or counts):
            targets = mark_rows(targets, rows, "targets")
        total_weight = 1.0
        if self._is_last or counts:
            total_weight = self._loss.total_weight(targets, rows)
            if not self._is_last and targets is None and self._loss.weight_fn is not None:
                total_weight = math.nan  # only the last stage knows
        return StepBlocks(
            step=number,
            reduces=agreed.mode is Mode.TRAINING,
            replica=replica,
            parts=self._make_parts(replica, agreed),
            device=self._transport.device,
            num_rows=rows,
            call=call,
            targets=targets,
            total_weight=total_weight,
            gradient_scale=self._updater.gradient_scale(total_weight),
            stats=stats,
            watchdog=self._watchdog,
            timing=DeviceTiming(self._transport.streams),
            times=self.times,
        )

    def _arrange(self, blocks: StepBlocks, order: Sequence[Block]) -> Arranged:
        """The blocks of a batch of so many rows."""
        key = (blocks.num_rows, len(order))
        if key not in self._arranged:
            self._arranged[key] = blocks.arrange(order)
        return self._arranged[key]

    def _make_parts(self, replica: Replica, agreed: Agreed) -> dict[int, StepPart]:
        """The stages of this rank, with what they exchange in this step."""
        found: dict[int, StepPart] = {}
        for part in replica.parts:
            routing = self.routers[part.stage].route(agreed.rows)
            found[part.stage] = StepPart(
                part=part,
                exchange=part.exchange.begin(routing, agreed.key, self._ride),
                rows=routing.ranges,
                loss=self._loss if part.stage == self._last else None,
            )
            if part.exchange.is_local_before:
                found[part.stage - 1].exchange.join(found[part.stage].exchange)
        return found

    def _take_sums(self, sums: list[float]) -> float:
        """The loss, of the sums over all ranks."""
        *sums, doubts = sums
        if self._replicas:
            *sums, plain, strict, local = sums
            if plain and strict and local:
                self._refuse_changes()
            doubts += bool(plain)
        self._is_doubted = bool(doubts)
        if self._watch is not None:
            self._watch.settle()
        if not doubts:
            self._code.end_step()
        loss, *numbers = sums
        self.metrics = dict(zip(self._loss.metrics, numbers, strict=True))
        return loss

    def _with_doubt(self, stats: torch.Tensor) -> torch.Tensor:
        """The sums of this rank, when it has compared its variables with those of others."""
        if self._agreement.has_doubt:
            stats[-1] = 1.0
        return stats

    def _recheck(self, batch: Any, targets: Any, number: int) -> None:
        """Compare what the ranks compute, if it is time or they are in doubt."""
        self._first_step.recheck(
            batch, targets, self.num_rows, number, self._watchdog, is_doubted=self._is_doubted
        )
        if self._is_doubted:
            self._code.clear_doubts()
            self._code.end_step()

    def _refuse_changes(self) -> None:
        """Say on all ranks what a program has changed on some replicas only."""
        changes = self._watch.changes if self._watch is not None else {}
        everyone = gather(changes, STEPPING)
        try:
            require_alike(everyone, self._replicas)
        except RuntimeMismatchError as error:  # all ranks raise it
            self._watchdog.report(error, is_mismatch=True)
            raise


def _around_layers(replica: Replica | None) -> list[nn.Module]:
    """The modules whose code calls the layers."""
    if replica is None:
        return []
    names = replica.parts[0].module.layout.containers
    return [replica.held.model.get_submodule(name) for name in names]
