"""Synchronous pipeline training of one model by one plan, on the ranks of torch.distributed.

A step runs this rank's blocks in the plan's order::

    for each block:   wait for its input - post the next one's receive - compute - start to send
    then:             sum gradients - clip - optimizer - the batch's loss on every rank

It computes what ordinary training with the whole batch on one device computes, up to rounding.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeplan.documents.files import read_plan
from pipeplan.errors import CheckpointError, NonFiniteLossError, RuntimeMismatchError
from pipeplan.pipeline import Kind, Plan
from pipeplan.runtime.batch_agreement import Agreed, BatchAgreement, Mode
from pipeplan.runtime.batches import as_call, mark_rows
from pipeplan.runtime.device_timing import DeviceTiming
from pipeplan.runtime.exchange.rank_tree import make_sum
from pipeplan.runtime.exchange.row_routing import RowRouter
from pipeplan.runtime.exchange.transports import Transport, make_transport
from pipeplan.runtime.loss_terms import Function, LossTerms
from pipeplan.runtime.optimizers import (
    OptimizerFn,
    ParameterGroups,
    ParamGroupsFn,
    make_optimizer,
    plan_groups,
    require_separate_updates,
)
from pipeplan.runtime.parameters import find_loss_module, first_names, share_statistics
from pipeplan.runtime.placement import find_placement
from pipeplan.runtime.random_state import keeping_random_state
from pipeplan.runtime.replica_setup import Replica, ReplicaSettings, set_up_replica
from pipeplan.runtime.saved_training import SavedTraining, SchedulerFn
from pipeplan.runtime.scaling import LossScaler
from pipeplan.runtime.step_blocks import StepBlocks
from pipeplan.runtime.step_checks import require_inputs, require_same_model
from pipeplan.runtime.step_results import StepResult, make_result
from pipeplan.runtime.streams import set_cuda_device
from pipeplan.runtime.supervision.error_policy import (
    blame_for_error,
    in_collective,
    in_set_up,
    in_step,
)
from pipeplan.runtime.supervision.meeting import confirm, meet
from pipeplan.runtime.supervision.status_board import State
from pipeplan.runtime.supervision.watchdog import WatchdogOptions
from pipeplan.runtime.tracing import RankTrace, ReduceTimes, Times, events_of, write_trace
from pipeplan.runtime.updating import Updater
from pipeplan.runtime.verification.first_step import FirstStep
from pipeplan.runtime.verification.verdict import can_verify

__all__ = ["Pipeline"]


class Pipeline(SavedTraining):
    """Trains one model by one plan; every rank makes one and calls `step` with the same batch.

    It takes this rank's stage out of `model`. The rest of the model is dropped.

    Args:
        plan: what runs where and in which order; or the file that says so.
        model: the whole model, built alike on every rank; on the meta device with `init_fn`.
        loss_fn: from the model's output and targets to their mean loss over rows.
        optimizer_fn: from parameters, or from groups with `param_groups_fn`, to their optimizer.
        param_groups_fn: from a parameter's name and the parameter to the options of its group, such
            as `{"weight_decay": 0.0}`. Parameters with equal options form one group.
        layers: a module name for each layer of the plan, if the plan has other names.
        init_fn: fills a model that was built on the meta device; gets this rank's part.
        loss_weight_fn: the weight of targets if it is not the number of rows, such as the number
            of tokens that are not ignored.
        metrics: means over rows (or weights) like the loss, by name; see `metrics`.
        clip_norm: the largest norm of all gradients together.
        amp_dtype: autocast to this type; float16 also scales the loss.
        seed: for dropout and other random numbers inside blocks.
        receive_ahead: how many receives are posted beyond that of the next block. By default as
            many as fit into a tenth of the device's predicted memory, at most 2.
        bucket_bytes: the bytes of gradients in one all-reduce.
        device_name: this rank's device in the plan, if hosts do not tell.
        real_hosts: the real name of each host of the plan, if they differ.
        compare_batches: refuse ranks that are given batches with different values. Turn it off only
            if ranks compute their batches on different kinds of devices, which round differently.
        watchdog: how patient the ranks are with each other.
        on_nan: what happens to a step whose loss is not finite: "report" warns, "skip" leaves the
            model as it is, "raise" raises `NonFiniteLossError` on every rank.
        on_step: is called with a `StepResult` after each step, on every rank.
        scheduler_fn: from the optimizer to a learning-rate scheduler, which steps after each update
            and is saved.
        verify: "first-step" compares each stage with the whole model before anything is trained, on
            a few rows of the first batch. Until then, the first replica of each stage keeps the
            whole model. "off" leaves that out.

    Raises:
        RuntimeMismatchError: plan, model and ranks do not fit together.
    """

    def __init__(
        self,
        plan: Plan | str | Path,
        model: nn.Module,
        loss_fn: Function,
        optimizer_fn: OptimizerFn,
        *,
        param_groups_fn: ParamGroupsFn | None = None,
        layers: Sequence[str] | None = None,
        init_fn: Callable[[nn.Module], None] | None = None,
        loss_weight_fn: Callable[[Any], Any] | None = None,
        metrics: Mapping[str, Function] | None = None,
        clip_norm: float | None = None,
        amp_dtype: torch.dtype | None = None,
        seed: int = 0,
        receive_ahead: int | None = None,
        bucket_bytes: float = 25e6,
        device_name: str | None = None,
        real_hosts: Mapping[str, str] | None = None,
        compare_batches: bool = True,
        watchdog: WatchdogOptions | None = None,
        on_nan: str = "report",
        on_step: Callable[[StepResult], None] | None = None,
        scheduler_fn: SchedulerFn | None = None,
        verify: str = "first-step",
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeMismatchError(
                "ranks: torch.distributed is not initialized; call init_process_group first"
            )
        self.plan = read_plan(plan) if isinstance(plan, str | Path) else plan
        self.rank = dist.get_rank()
        self._loss = LossTerms(loss_fn=loss_fn, metrics=metrics or {}, weight_fn=loss_weight_fn)
        settings = ReplicaSettings(
            layers=layers,
            init_fn=init_fn,
            loss=self._loss,
            amp_dtype=amp_dtype,
            seed=seed,
            receive_ahead=receive_ahead,
            bucket_bytes=bucket_bytes,
            verifies=can_verify(model, verify, self.rank),
        )
        scaler = LossScaler(enabled=amp_dtype is torch.float16)
        self._updater = Updater(clip_norm=clip_norm, scaler=scaler, on_nan=on_nan)
        self._on_step = on_step
        self._set_up_counters()
        if "nccl" in str(dist.get_backend()):
            set_cuda_device()  # before the first collective, which would use the first GPU
        meeting = meet(watchdog or WatchdogOptions())
        self._watchdog = meeting.watchdog
        with in_set_up(self._watchdog):
            confirm(meeting.gathering)
            self._take_place(device_name, real_hosts, compares_batches=compare_batches)
            groups = plan_groups(model, loss_fn, param_groups_fn)
            self._set_up_stage(model, settings)
            self._set_up_training(optimizer_fn, groups, settings)
            self._set_up_keeping(seed, scheduler_fn)
            dist.barrier()
        self._zero_s = self._start_s = time.perf_counter()

    def _set_up_counters(self) -> None:
        self.metrics: dict[str, float] = {}
        """The metrics of the last step or evaluation."""
        self.iteration_ms = 0.0
        """How long the last step took on this rank."""
        self._batch_rows = 0
        self._times: list[Times] = []
        self._frozen: dict[str, nn.Parameter] = {}

    def _take_place(
        self,
        device_name: str | None,
        real_hosts: Mapping[str, str] | None,
        *,
        compares_batches: bool,
    ) -> None:
        """Find out which device of the plan this rank is."""
        self._placement = find_placement(self.plan, device_name, real_hosts)
        self._watchdog.name_ranks(self._placement.rank_names(dist.get_world_size()))
        self.stage, self.replica = self._placement.find(self.rank) or (-1, -1)
        """-1 for a rank that the plan does not use."""
        self._is_last = self.stage == self.plan.num_stages - 1
        self._order = tuple(self.plan.schedule[self.stage]) if self.stage >= 0 else ()
        self._router = RowRouter(self.plan, self._placement.ranks, self.stage, self.replica)
        self._agreement = BatchAgreement(
            self.rank,
            self._placement.ranks,
            dist.get_world_size(),
            compares_values=compares_batches,
        )

    def _set_up_stage(self, model: nn.Module, settings: ReplicaSettings) -> None:
        """Cut this rank's stage out of the model, and connect it with its neighbours."""
        placement = self._placement
        self._transport = self._make_transport()
        self._sum = make_sum(self._transport, placement.ranks)
        self.first_name_of = first_names(model, find_loss_module(model, settings.loss.loss_fn))
        """The first name that the whole model has for each parameter; tied ones have several."""
        self._replica = set_up_replica(
            self.plan, model, placement, self._transport, self.first_name_of, settings
        )
        self.model: nn.Module | None = None
        """This rank's part of the model; None for a rank that the plan does not use."""
        if self._replica is not None:
            self.model = self._replica.module.model
            named = self.model.named_parameters()
            self._frozen = {name: p for name, p in named if not p.requires_grad}

    def _make_transport(self) -> Transport:
        placement = self._placement
        return make_transport(placement.local_index[self.rank], placement.ranks)

    def _set_up_training(
        self, optimizer_fn: OptimizerFn, groups: ParameterGroups | None, settings: ReplicaSettings
    ) -> None:
        """Make the optimizer, and what comes before the first step and after each one."""
        replica, first = self._replica, self.first_name_of
        named = {first[name]: p for name, p in (replica.named if replica else {}).items()}
        self.optimizer = make_optimizer(optimizer_fn, named, groups)
        require_separate_updates(self.optimizer, num_stages=self.plan.num_stages)
        """This rank's optimizer. A rank without parameters has one, too, so that learning-rate
        schedulers are alike everywhere."""
        self._updater.take_up(self.optimizer, replica)
        self._first_step = FirstStep(
            self.plan, self.rank, self._placement, replica, self.optimizer, first, settings
        )

    # ------------------------------------------------------------------ the step

    def step(self, batch: Any, targets: Any = None, *, update: bool = True) -> float:
        """Train on one batch, and return its mean loss, the same on every rank.

        `batch` holds the model's arguments: a tensor, a tuple by position or a dict by name.
        A rank whose stage reads neither inputs nor targets may give None.

        With `update=False` the gradients are kept. The next step with `update=True` trains on all
        these batches as on one larger batch.
        """
        self._keeper.warn_of_waiting()
        loss = self._run_with_others("step", lambda: self._train(batch, targets, update))
        self._updater.tell(self.num_steps + (not update))
        if self._on_step is not None:
            self._on_step(make_result(self, loss, self._batch_rows, is_update=update))
        if self.scheduler is not None and update:
            self.scheduler.step()
        return loss

    def evaluate(self, batch: Any, targets: Any = None) -> float:
        """The mean loss of a batch without training on it; dropout is off, nothing changes."""
        return self._run_with_others("evaluate", lambda: self._evaluate(batch, targets))

    def _run_with_others(self, name: str, run: Callable[[], float]) -> float:
        """Run something that all ranks take part in; an error of one rank ends all."""
        device = self._transport.device
        with in_step(self._watchdog, name), keeping_random_state(device):
            return run()

    def _train(self, batch: Any, targets: Any, update: bool) -> float:
        self._start_s = time.perf_counter()
        mode = Mode.TRAINING if update else Mode.ACCUMULATION
        blocks, stats = self._begin(batch, targets, mode)
        if blocks is not None:
            replica = blocks.replica
            replica.reducer.begin(keeps=self._updater.accumulation.num_batches > 0)
            with replica.runner.sharing_casts():
                blocks.run(self._order)
        if blocks is not None and update:
            reduce_s = time.perf_counter()
            self._watchdog.enter(State.WAITING, "for the gradients' all-reduce")
            blocks.replica.reducer.finish()
            self._times.append(ReduceTimes(reduce_s, time.perf_counter()))
        self._first_step.require_no_doubt(self._watchdog)
        self._watchdog.enter(State.WAITING, "for the loss")
        weighs = self._is_last and self.replica == 0
        weight = blocks.total_weight if blocks is not None and weighs else 0.0
        loss = self._take_sums(self._updater.update(stats, weight, self._sum, applies=update))
        self._transport.synchronize()
        self._count(self._batch_rows, is_step=update)
        self.iteration_ms = (time.perf_counter() - self._start_s) * 1e3
        return loss

    def _evaluate(self, batch: Any, targets: Any) -> float:
        blocks, stats = self._begin(batch, targets, Mode.EVALUATION)
        if blocks is not None:
            replica = blocks.replica
            share_statistics(replica.module.model, replica.group, replica.ranks)
            with replica.runner.evaluating():
                blocks.run([block for block in self._order if block.kind is Kind.FORWARD])
        self._first_step.require_no_doubt(self._watchdog)
        self._watchdog.enter(State.WAITING, "for the loss")
        self._sum.start(stats)
        return self._take_sums(self._sum.finish())

    def _begin(
        self, batch: Any, targets: Any, mode: Mode
    ) -> tuple[StepBlocks | None, torch.Tensor]:
        """The blocks of this rank, None if it has no stage; and where the loss is summed."""
        self._watchdog.enter(State.WAITING, "for the start of the step")
        require_inputs(self.rank, self.stage, self._replica, batch, targets, self._loss)
        if mode is not Mode.EVALUATION:
            require_same_model(self._frozen, self._replica)
        agreed = self._agreement.agree(batch, targets, mode, self.num_batches, self._transport)
        self._first_step.verify(batch, targets, agreed.rows, self.num_batches, self._watchdog)
        self._watchdog.note_batch(agreed.key)
        self._batch_rows, self._times = agreed.rows, []
        stats = torch.zeros(
            1 + len(self._loss.metrics), dtype=torch.float64, device=self._transport.device
        )
        if self._replica is None:
            return None, stats
        return self._make_blocks(self._replica, batch, targets, agreed, stats), stats

    def _make_blocks(
        self, replica: Replica, batch: Any, targets: Any, agreed: Agreed, stats: torch.Tensor
    ) -> StepBlocks:
        """The blocks of a step, with what they need."""
        rows, routing = agreed.rows, self._router.route(agreed.rows)
        call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        if replica.module.needs_inputs:
            call = as_call(mark_rows(batch, rows, "batch"))
        if self._is_last and targets is not None:
            targets = mark_rows(targets, rows, "targets")
        total_weight = self._loss.total_weight(targets, rows) if self._is_last else 1.0
        return StepBlocks(
            step=self.num_batches,
            reduces=agreed.mode is Mode.TRAINING,
            replica=replica,
            exchange=replica.exchange.begin(routing, agreed.key),
            device=self._transport.device,
            rows=routing.ranges,
            num_rows=rows,
            call=call,
            targets=targets,
            loss=self._loss if self._is_last else None,
            total_weight=total_weight,
            gradient_scale=self._updater.gradient_scale(total_weight),
            stats=stats,
            watchdog=self._watchdog,
            timing=DeviceTiming(self._transport.streams),
            times=self._times,
        )

    def _take_sums(self, sums: list[float]) -> float:
        """The loss, of the sums over all ranks."""
        loss, *numbers = sums
        self.metrics = dict(zip(self._loss.metrics, numbers, strict=True))
        return loss

    # ------------------------------------------------------------------ the rest

    def write_trace(self, path: str | Path) -> None:
        """Write a Chrome trace of the last step beside the predicted one.

        All ranks have to call it. Rank 0 writes.
        """
        trace = RankTrace(
            rank=self.rank,
            stage=self.stage,
            replica=self.replica,
            zero_s=self._zero_s,
            start_s=self._start_s,
            events=events_of(self._times),
        )
        everyone: list[Any] = [None] * dist.get_world_size()
        with in_collective(self._watchdog, "write_trace"):
            dist.gather_object(trace, everyone if self.rank == 0 else None)
        if self.rank == 0:
            write_trace(self.plan, everyone, path)

    def close(self) -> None:
        """Stop the watchdog; the process group stays."""
        self._watchdog.close()
        if self._replica is not None:
            self._replica.reducer.close()
            self._replica.exchange.close()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, CheckpointError | NonFiniteLossError):
            self._watchdog.report(error, is_mismatch=True)  # all ranks raise it, each by itself
        elif error is not None and not (isinstance(error, SystemExit) and not error.code):
            blame_for_error(self._watchdog, error)
        self.close()
