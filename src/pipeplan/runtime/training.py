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
from pipeplan.pipeline import Plan
from pipeplan.runtime.code_agreement import agree_on_code
from pipeplan.runtime.exchange.transports import Transport, make_transport
from pipeplan.runtime.loss_terms import Function, LossTerms
from pipeplan.runtime.optimizer_shards import find_shards
from pipeplan.runtime.optimizers import (
    OptimizerFn,
    Options,
    ParameterGroups,
    ParamGroupsFn,
    find_options,
    make_optimizer,
    make_separate_optimizer,
    make_trials,
    plan_groups,
)
from pipeplan.runtime.parameters import find_loss_module, first_names
from pipeplan.runtime.placement import find_placement
from pipeplan.runtime.random_state import keeping_random_state
from pipeplan.runtime.replanning import OnReplan, Replanning
from pipeplan.runtime.replica_setup import ReplicaSettings, set_up_replica
from pipeplan.runtime.saved_training import SavedTraining, SchedulerFn
from pipeplan.runtime.scaling import LossScaler
from pipeplan.runtime.settings_agreement import (
    find_other_values,
    require_same_options,
    require_same_settings,
)
from pipeplan.runtime.step_results import StepResult, make_result
from pipeplan.runtime.steps import Steps
from pipeplan.runtime.streams import set_cuda_device
from pipeplan.runtime.supervision.error_policy import (
    blame_for_error,
    in_collective,
    in_set_up,
    in_step,
)
from pipeplan.runtime.supervision.gathering import Gathering
from pipeplan.runtime.supervision.meeting import confirm, meet
from pipeplan.runtime.supervision.watchdog import WatchdogOptions
from pipeplan.runtime.tracing import RankTrace, events_of, write_trace
from pipeplan.runtime.updating import Updater
from pipeplan.runtime.verification.first_step import FirstStep
from pipeplan.runtime.verification.verdict import can_verify

__all__ = ["Pipeline"]


class Pipeline(SavedTraining):
    """Trains one model by one plan; every rank makes one and calls `step` with the same batch.

    It takes this rank's stages out of `model`. The rest of the model is dropped.

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
        replan_after: after this many steps, compare what all ranks did with the prediction, and say
            on rank 0 what a new plan would win.
        on_replan: is called with that `Calibration` on rank 0; it holds the new plan.
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
        replan_after: int | None = None,
        on_replan: OnReplan | None = None,
    ) -> None:
        _require_process_group()
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
        self._updater = Updater(LossScaler(enabled=amp_dtype is torch.float16), clip_norm, on_nan)
        self._on_step, self._replanning = on_step, Replanning(replan_after, on_replan)
        gathering = self._meet_others(watchdog or WatchdogOptions())
        with in_set_up(self._watchdog):
            confirm(gathering)
            more = {"clip_norm": clip_norm, "on_nan": on_nan, "replan_after": replan_after}
            made = {"scheduler_fn": scheduler_fn, "param_groups_fn": param_groups_fn}
            require_same_settings(self.plan, model, settings, more, made)
            if settings.verifies:
                self._other_values = find_other_values(model, loss_fn)
            self._code = agree_on_code(model, self._loss, self.rank)
            self._take_place(device_name, real_hosts)
            groups = plan_groups(model, loss_fn, param_groups_fn)
            options = find_options(model, loss_fn, optimizer_fn, groups)
            require_same_options(options)
            self._set_up_stage(model, settings)
            self._set_up_training(
                optimizer_fn, groups, options, settings, compares_batches=compare_batches
            )
            self._set_up_keeping(seed, scheduler_fn)
        self._zero_s = time.perf_counter()

    def _meet_others(self, patience: WatchdogOptions) -> Gathering:
        """Wait for all ranks, and begin to watch over each other."""
        meeting = meet(patience)
        self._watchdog = meeting.watchdog
        self.metrics: dict[str, float] = {}
        """The metrics of the last step or evaluation."""
        self.iteration_ms = 0.0
        """How long the last step took on this rank."""
        return meeting.gathering

    def _take_place(self, device_name: str | None, real_hosts: Mapping[str, str] | None) -> None:
        """Find out which device of the plan this rank is."""
        self._placement = find_placement(self.plan, device_name, real_hosts)
        self._watchdog.name_ranks(self._placement.rank_names(dist.get_world_size()))
        self.stage, self.replica = self._placement.find(self.rank) or (-1, -1)
        """The first stage of this rank, and which of its replicas this is; -1 for a rank that the
        plan does not use."""
        self.stages = tuple(stage for stage, _ in self._placement.places(self.rank))
        """All stages of this rank."""

    def _set_up_stage(self, model: nn.Module, settings: ReplicaSettings) -> None:
        """Cut this rank's stage out of the model, and connect it with its neighbours."""
        placement = self._placement
        self._transport = self._make_transport()
        self.first_name_of = first_names(model, find_loss_module(model, settings.loss.loss_fn))
        """The first name that the whole model has for each parameter; tied ones have several."""
        self._replica = set_up_replica(
            self.plan, model, placement, self._transport, self.first_name_of, settings
        )
        self.model: nn.Module | None = None
        """This rank's part of the model; None for a rank that the plan does not use."""
        if self._replica is not None:
            self.model = self._replica.held.model

    def _make_transport(self) -> Transport:
        placement = self._placement
        return make_transport(placement.local_index[self.rank], placement.ranks)

    def _set_up_training(
        self,
        optimizer_fn: OptimizerFn,
        groups: ParameterGroups | None,
        options: Options | None,
        settings: ReplicaSettings,
        *,
        compares_batches: bool,
    ) -> None:
        """Make the optimizer, and what comes before the first step and after each one."""
        replica, first = self._replica, self.first_name_of
        named = {first[name]: p for name, p in (replica.named if replica else {}).items()}
        shards = find_shards(self.plan, replica, first)
        is_apart = len(self.plan.groups) > 1 or self.plan.shard_optimizer
        trials = make_trials(optimizer_fn, groups) if is_apart else None
        whole = make_optimizer(optimizer_fn, named, groups) if shards is not None else None
        own = named if shards is None else shards.own()
        self._optimizer = make_separate_optimizer(optimizer_fn, own, groups, options, trials)
        self._updater.take_up(self.optimizer, replica, shards)
        self._is_sharded = shards is not None
        self._steps = Steps(
            plan=self.plan,
            rank=self.rank,
            placement=self._placement,
            replica=replica,
            transport=self._transport,
            loss=self._loss,
            updater=self._updater,
            watchdog=self._watchdog,
            first_step=FirstStep(
                self.plan,
                self.rank,
                self._placement,
                replica,
                whole or self.optimizer,
                first,
                settings,
            ),
            optimizer=self.optimizer,
            trials=trials if settings.verifies else None,
            compares_batches=compares_batches,
            code=self._code,
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
            self._on_step(make_result(self, loss, self._steps.num_rows, is_update=update))
        self._step_scheduler(loss, is_update=update)
        if update and self._replanning.is_due(self.num_steps):
            traces = self._gather_traces("step")
            if self.rank == 0:
                self._replanning.look(self.plan, traces)
        return loss

    def evaluate(self, batch: Any, targets: Any = None) -> float:
        """The mean loss of a batch without training on it; dropout is off, nothing changes."""
        return self._run_with_others(
            "evaluate", lambda: self._steps.evaluate(batch, targets, self.num_batches)
        )

    def _run_with_others(self, name: str, run: Callable[[], float]) -> float:
        """Run something that all ranks take part in; an error of one rank ends all."""
        device = self._transport.device
        with in_step(self._watchdog, name), keeping_random_state(device):
            self._require_same_values()
            loss = run()
        self.metrics = self._steps.metrics
        return loss

    def _train(self, batch: Any, targets: Any, update: bool) -> float:
        loss = self._steps.train(batch, targets, self.num_batches, update=update)
        self._count(self._steps.num_rows, is_step=update)
        self.iteration_ms = self._steps.iteration_ms
        return loss

    # ------------------------------------------------------------------ the rest

    def write_trace(self, path: str | Path) -> None:
        """Write a Chrome trace of the last step beside the predicted one.

        All ranks have to call it. Rank 0 writes.
        """
        everyone = self._gather_traces("write_trace")
        if self.rank == 0:
            write_trace(self.plan, everyone, path)

    def _gather_traces(self, name: str) -> list[Any]:
        """What each rank did in the last step; on rank 0."""
        trace = RankTrace(
            rank=self.rank,
            stages=self.stages,
            replica=self.replica,
            zero_s=self._zero_s,
            start_s=self._steps.start_s,
            events=events_of(self._steps.times, tells_stage=len(self.stages) > 1),
        )
        everyone: list[Any] = [None] * dist.get_world_size()
        with in_collective(self._watchdog, name):
            dist.gather_object(trace, everyone if self.rank == 0 else None)
        return everyone

    def close(self) -> None:
        """Stop the watchdog; the process group stays."""
        self._watchdog.close()
        if self._replica is not None:
            self._replica.reducer.close()
            for part in self._replica.parts:
                part.exchange.close()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, CheckpointError | NonFiniteLossError):
            self._watchdog.report(error, is_mismatch=True)  # all ranks raise it, each by itself
        elif error is not None and not (isinstance(error, SystemExit) and not error.code):
            blame_for_error(self._watchdog, error)
        self.close()


def _require_process_group() -> None:
    """Refuse to begin without one; with NCCL, take this rank's GPU before the first collective."""
    if not dist.is_initialized():
        raise RuntimeMismatchError(
            "ranks: torch.distributed is not initialized; call init_process_group first"
        )
    if "nccl" in str(dist.get_backend()):
        set_cuda_device()  # the first collective would use the first GPU
