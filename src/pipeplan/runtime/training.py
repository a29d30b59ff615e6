"""Synchronous pipeline training of one model by one plan, on the ranks of torch.distributed.

A step runs this rank's blocks in the plan's order::

    for each block:   wait for its input - post the next one's receive - compute - start to send
    then:             sum gradients - clip - optimizer - the batch's loss on every rank

What it computes is ordinary training with the whole batch on one device, to rounding.
"""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as store_types

from pipeplan.documents.files import read_plan
from pipeplan.errors import RuntimeMismatchError
from pipeplan.pipeline import Block, Kind, Plan
from pipeplan.runtime.agreement import BatchAgreement, Gave
from pipeplan.runtime.batches import as_call, select_rows
from pipeplan.runtime.exchange import Exchange, StepExchange
from pipeplan.runtime.execution import BlockSeeds, Function, LossTerms, StageRunner
from pipeplan.runtime.failing import failing_alone, failing_together, report_failure, setting_up
from pipeplan.runtime.geometry import Geometry, make_geometry
from pipeplan.runtime.gradients import GradientReducer
from pipeplan.runtime.parameters import (
    find_reductions,
    first_names,
    gather_state,
    make_tie_groups,
    materialise,
    share_initial_values,
    share_statistics,
)
from pipeplan.runtime.placement import find_placement
from pipeplan.runtime.scaling import LossScaler
from pipeplan.runtime.tracing import (
    ALL_REDUCE,
    CATEGORIES,
    WAIT,
    Event,
    RankTrace,
    block_name,
    write_trace,
)
from pipeplan.runtime.transports import make_transport
from pipeplan.runtime.updating import Updater
from pipeplan.runtime.watchdog import Watchdog, WatchdogOptions
from pipeplan.splitting import cut, holders, lay_out

__all__ = ["Pipeline"]

OptimizerFn = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What one step needs on one rank."""

    rows: tuple[tuple[int, ...], ...]
    """Of the batch, that this rank computes, by microbatch."""
    exchange: StepExchange | None
    """None on a rank that the plan leaves unused."""
    call: tuple[tuple[Any, ...], dict[str, Any]]
    targets: Any
    total_weight: float
    stats: torch.Tensor
    """The loss and the metrics, summed as they come."""


class Pipeline:
    """Trains one model by one plan; every rank makes one and calls `step` with the same batch."""

    def __init__(
        self,
        plan: Plan | str | Path,
        model: nn.Module,
        loss_fn: Function,
        optimizer_fn: OptimizerFn,
        *,
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
        watchdog: WatchdogOptions | None = None,
    ) -> None:
        """Take this rank's stage out of `model`; all else of the model is dropped.

        Args:
            plan: what runs where, and in which order; or the file that says so.
            model: the whole model, built alike on every rank; on the meta device with `init_fn`.
            loss_fn: from the model's output and targets to their mean loss over rows.
            optimizer_fn: from parameters to an optimizer of them.
            layers: a module name for each layer of the plan, where the plan has other names.
            init_fn: fills a model that was built on the meta device; gets this rank's part.
            loss_weight_fn: how much targets weigh if not by rows, such as tokens not ignored.
            metrics: means over rows (or weights) like the loss, by name; see `metrics`.
            clip_norm: the largest norm of all gradients together.
            amp_dtype: autocast to this type; float16 also scales the loss.
            seed: for dropout and other random numbers inside blocks.
            receive_ahead: how many receives are posted beyond that of the next block; by default
                as many as a tenth of the device's predicted memory has room for, at most 2.
            bucket_bytes: how much gradient one all-reduce takes.
            device_name: this rank's device of the plan, where hosts do not tell.
            real_hosts: the real name of each host of the plan, where they differ.
            watchdog: how patient ranks are with each other.

        Raises:
            RuntimeMismatchError: plan, model and ranks do not fit together.
        """
        if not dist.is_initialized():
            raise RuntimeMismatchError(
                "ranks: torch.distributed is not initialized; call init_process_group first"
            )
        if isinstance(plan, str | Path):
            plan = read_plan(plan)
        self.plan = plan
        self.rank = dist.get_rank()
        self._placement = find_placement(plan, device_name, real_hosts)
        stage_ranks = self._placement.ranks
        self._store = _make_store()
        watchdog_store = self._store.clone()  # a client that waits serves nobody else
        place = self._placement.find(self.rank)
        self.stage, self.replica = place if place else (-1, -1)
        """-1 for a rank that the plan leaves unused."""
        self._is_last = self.stage == plan.num_stages - 1
        self._order = plan.schedule[self.stage] if place else ()
        self._metric_names = tuple(metrics or {})
        self._loss = LossTerms(loss_fn=loss_fn, metrics=metrics or {}, weight_fn=loss_weight_fn)
        self._updater = Updater(
            clip_norm=clip_norm, scaler=LossScaler(enabled=amp_dtype is torch.float16)
        )
        self._agreement = BatchAgreement(self.rank, stage_ranks[0][0], is_last=self._is_last)
        self.num_steps = 0
        """Steps taken, those of a loaded checkpoint included."""
        self.metrics: dict[str, float] = {}
        """The metrics of the last step or evaluation."""
        self.iteration_ms = 0.0
        """How long the last step took on this rank."""
        self._geometries: dict[int, Geometry] = {}
        self._events: list[Event] = []
        self._watchdog = Watchdog(
            watchdog_store, self.rank, self._rank_names(), watchdog or WatchdogOptions()
        )
        with setting_up(self._watchdog):
            self._transport = make_transport(self._placement.local_index[self.rank], stage_ranks)
            self._groups = [
                dist.new_group(sorted(ranks)) if len(ranks) > 1 else None for ranks in stage_ranks
            ]
            self._take_part(model, layers, init_fn, optimizer_fn, bucket_bytes, receive_ahead)
            if self.model is not None:
                self._runner = StageRunner(
                    self._part,
                    self._transport.device,
                    seeds=BlockSeeds(seed=seed, stage=self.stage, replica=self.replica),
                    recompute=plan.stages[self.stage].recompute,
                    amp_dtype=amp_dtype,
                    loss=self._loss if self._is_last else None,
                )
            dist.barrier()
        self._zero_s = self._start_s = time.perf_counter()

    def _take_part(
        self,
        model: nn.Module,
        layers: Sequence[str] | None,
        init_fn: Callable[[nn.Module], None] | None,
        optimizer_fn: OptimizerFn,
        bucket_bytes: float,
        receive_ahead: int | None,
    ) -> None:
        """Cut this rank's part out of the model, with its parameters and channels."""
        plan = self.plan
        names = [layer.name for layer in plan.model.layers]
        if layers is not None and len(layers) != len(names):
            raise RuntimeMismatchError(
                f"layers: {len(layers)} names for the plan's {len(names)} layers; give one each"
            )
        cuts = [stage.layers.start for stage in plan.stages]
        layout = lay_out(model, layers if layers is not None else names, cuts)
        held_by = holders(model, layout, [stage.layers for stage in plan.stages])
        self.first_name_of = first_names(model)
        """The name by which the whole model knows each parameter first; tied ones have several."""
        tie_groups = make_tie_groups(held_by, self._placement.ranks)
        self._reducer = GradientReducer([], [])
        self._exchange: Exchange | None = None
        self.model: nn.Module | None = None
        """This rank's part of the model; None for an unused rank."""
        if self.stage < 0:
            return
        self._part = cut(model, layout, plan.stages[self.stage].layers)
        self.model = self._part.model
        materialise(self.model, self._transport.device, init_fn)
        self._exchange = Exchange(
            plan,
            (self.stage, self.replica),
            self._transport,
            self._store,
            receive_ahead,
            sum(parameter.nbytes for parameter in self.model.parameters()),
        )
        self._set_up_parameters(self.model, held_by, tie_groups, optimizer_fn, bucket_bytes)

    # ------------------------------------------------------------------ the step

    def step(self, batch: Any, targets: Any = None) -> float:
        """Train on one batch, and return its mean loss, the same on every rank.

        `batch` is what the model is called with: a tensor, a tuple by position or a dict by name.
        Ranks whose stage reads neither inputs nor targets may give None for both, but then always.
        """
        return self._together(lambda: self._train(batch, targets))

    def evaluate(self, batch: Any, targets: Any = None) -> float:
        """The mean loss of a batch without training on it; dropout is off, nothing changes."""
        return self._together(lambda: self._evaluate(batch, targets))

    def _together(self, run: Callable[[], float]) -> float:
        """Run what all ranks take part in, so that an error of one ends all."""
        try:
            with (
                failing_alone(self._watchdog),
                torch.random.fork_rng(devices=self._fork_devices()),
            ):
                return run()
        finally:
            self._watchdog.enter("outside")

    def _train(self, batch: Any, targets: Any) -> float:
        self._start_s = time.perf_counter()
        step = self._begin(batch, targets)
        if step.exchange is not None:
            self._reducer.begin()
            with self._runner.sharing_casts():
                self._run_blocks(step, step.exchange, self._order)
            reduce_s = time.perf_counter()
            self._watchdog.enter("waiting", "for the gradients' all-reduce")
            self._reducer.finish()
            self._events.append(Event(ALL_REDUCE, ALL_REDUCE, reduce_s, time.perf_counter()))
        self._watchdog.enter("waiting", "for the loss")
        self._updater.update(step.stats)
        loss = self._take_stats(step.stats)
        self._transport.synchronize()
        self.num_steps += 1
        self.iteration_ms = (time.perf_counter() - self._start_s) * 1e3
        return loss

    def _evaluate(self, batch: Any, targets: Any) -> float:
        step = self._begin(batch, targets, "evaluation ")
        if step.exchange is not None and self.model is not None:
            share_statistics(
                self.model, self._groups[self.stage], self._placement.ranks[self.stage]
            )
            with self._runner.evaluating():
                forwards = [block for block in self._order if block.kind is Kind.FORWARD]
                self._run_blocks(step, step.exchange, forwards)
        self._watchdog.enter("waiting", "for the loss")
        dist.all_reduce(step.stats)
        return self._take_stats(step.stats)

    def _begin(self, batch: Any, targets: Any, prefix: str = "") -> _Step:
        """What the ranks settle before the first block; a prefix tells apart what crosses cuts."""
        self._watchdog.enter("waiting", "for the start of the step")
        rows, key = self._agreement.settle(batch, targets, self._require_inputs)
        self._events = []
        geometry = exchange = None
        call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        if self._exchange is not None:
            geometry = self._geometry(rows)
            exchange = self._exchange.begin(geometry, prefix + key)
            call = as_call(batch) if self._part.needs_inputs else call
        return _Step(
            rows=geometry.rows if geometry is not None else (),
            exchange=exchange,
            call=call,
            targets=targets,
            total_weight=self._loss.weight(targets, rows) if self._is_last else 1.0,
            stats=torch.zeros(
                1 + len(self._metric_names), dtype=torch.float64, device=self._transport.device
            ),
        )

    def _take_stats(self, stats: torch.Tensor) -> float:
        loss, *numbers = stats.tolist()
        self.metrics = dict(zip(self._metric_names, numbers, strict=True))
        return float(loss)

    def _run_blocks(self, step: _Step, exchange: StepExchange, order: Sequence[Block]) -> None:
        order = [block for block in order if step.rows[block.microbatch]]
        clock, enter = time.perf_counter, self._watchdog.enter
        for block, following in zip(order, [*order[1:], None], strict=True):
            wait_s = clock()
            enter("waiting", block)
            arrived = exchange.take(block)
            if following is not None:
                exchange.post(following)
            run_s = clock()
            enter("computing", block)
            if block.kind is Kind.FORWARD:
                self._run_forward(step, exchange, block.microbatch, arrived)
            else:
                if following is None:
                    self._reducer.expect_last()
                gradients = self._runner.backward(block.microbatch, arrived)
                exchange.send_gradients(block.microbatch, gradients)
                del gradients
            del arrived  # what is done with must not wait for the next block to be let go
            self._events.append(Event(block_name(block), WAIT, wait_s, run_s))
            self._events.append(Event(block_name(block), CATEGORIES[block.kind], run_s, clock()))
        enter("waiting", "for sends to be taken")
        exchange.finish()

    def _run_forward(
        self,
        step: _Step,
        exchange: StepExchange,
        microbatch: int,
        carried: list[torch.Tensor],
    ) -> None:
        rows, inputs = step.rows[microbatch], step.call
        if self._part.needs_inputs:
            inputs = select_rows(step.call, rows, self._transport.device)
        call = (self.num_steps, microbatch, carried, exchange.template, inputs)
        if self._is_last:
            targets = step.targets
            if targets is not None:
                targets = select_rows(targets, rows, self._transport.device)
            weight = self._loss.weight(targets, len(rows))
            share = weight / step.total_weight if step.total_weight else 0.0
            scale = self._updater.scaler.scale
            step.stats.add_(self._runner.forward_last(*call, targets, share, scale))
            return
        tensors, shape = self._runner.forward(*call, learn=exchange.is_new)
        exchange.send_output(microbatch, tensors, shape)

    def _require_inputs(self, everyone: list[Gave]) -> None:
        """Refuse None where the batch or the targets are needed; by rank, who gave what."""
        if not everyone[self._placement.ranks[0][0]][0]:
            raise RuntimeMismatchError("batch: the first stage was given None; it needs the batch")
        if self.stage >= 0 and self._part.needs_inputs and not everyone[self.rank][0]:
            raise RuntimeMismatchError(
                f"batch: rank {self.rank} was given None, but its layers"
                f" ({self._part.layers_text}) read the model's inputs; give every rank the batch"
            )
        if self._is_last and self._loss.weight_fn is not None and not everyone[self.rank][1]:
            raise RuntimeMismatchError(
                f"targets: rank {self.rank} was given None; the last stage weighs them"
            )

    def _geometry(self, rows: int) -> Geometry:
        if rows not in self._geometries:
            self._geometries[rows] = make_geometry(
                self.plan.stages,
                self._placement.ranks,
                self.stage,
                self.replica,
                rows,
                self.plan.microbatches,
            )
        return self._geometries[rows]

    # ------------------------------------------------------------------ state

    def full_state_dict(self) -> dict[str, torch.Tensor] | None:
        """The whole model's parameters and buffers on rank 0, on the CPU; None elsewhere."""
        state = self.model.state_dict() if self.model is not None and not self.replica else {}
        with failing_together(self._watchdog):
            return gather_state(state, self._transport.device)

    def save(self, directory: str | Path, *, keep: int = 2) -> Path:
        """Write a checkpoint, each stage its part; it appears whole or not at all."""
        from pipeplan.runtime.checkpoints import save_checkpoint

        with failing_together(self._watchdog):
            return save_checkpoint(self, Path(directory), keep)

    def load(self, directory: str | Path) -> bool:
        """Go on from the newest checkpoint there, made by whatever plan; False if there is none."""
        from pipeplan.runtime.checkpoints import load_checkpoint

        with failing_together(self._watchdog):
            return load_checkpoint(self, Path(directory))

    def write_trace(self, path: str | Path) -> None:
        """Write a Chrome trace of the last step beside the predicted one.

        All ranks take part, rank 0 writes.
        """
        trace = RankTrace(
            rank=self.rank,
            stage=self.stage,
            replica=self.replica,
            zero_s=self._zero_s,
            start_s=self._start_s,
            events=tuple(self._events),
        )
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(trace, everyone if self.rank == 0 else None)
        if self.rank == 0:
            write_trace(self.plan, everyone, path)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """This rank's optimizer; None where it holds no parameters."""
        return self._updater.optimizer

    @property
    def gradient_norm(self) -> float | None:
        """Of all gradients of the last step, before clipping; None without `clip_norm`."""
        return self._updater.gradient_norm

    @property
    def loss_scale(self) -> float:
        """The factor on a float16 loss; 1 for other types."""
        return self._updater.scaler.scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        scaler = self._updater.scaler
        scaler.scale = scale if scaler.enabled else 1.0

    def close(self) -> None:
        """Stop the watchdog; the process group stays."""
        self._watchdog.close()
        self._reducer.close()
        if self._exchange is not None:
            self._exchange.close()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            report_failure(self._watchdog, error)
        self.close()

    # ------------------------------------------------------------------ setting up

    def _set_up_parameters(
        self,
        model: nn.Module,
        held_by: dict[str, set[int]],
        tie_groups: dict[frozenset[int], Any],
        optimizer_fn: OptimizerFn,
        bucket_bytes: float,
    ) -> None:
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        group = self._groups[self.stage]
        reductions = find_reductions(named, held_by, self.first_name_of, group, tie_groups)
        share_initial_values(model, group, self._placement.ranks[self.stage], reductions)
        parameters = list(named.values())
        self._reducer = GradientReducer(parameters, reductions, bucket_bytes)
        self._updater.parameters = parameters
        if not self.replica:
            # Each parameter counts once in the norm: by the first stage that holds it.
            counted = [p for n, p in named.items() if min(held_by[n]) == self.stage]
            self._updater.counted = counted
        if parameters:
            self._updater.optimizer = optimizer_fn(parameters)

    def _rank_names(self) -> list[str]:
        names = []
        for rank in range(dist.get_world_size()):
            device = self._placement.device_of.get(rank)
            place = self._placement.find(rank)
            names.append(f"stage {place[0]} on {device}" if place else "unused by the plan")
        return names

    def _fork_devices(self) -> list[int]:
        device = self._transport.device
        return [device.index or 0] if device.type == "cuda" else []


def _make_store() -> Any:
    """A client of the ranks' store, under a prefix of its own."""
    name: list[Any] = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, src=0)
    store: Any = dist.distributed_c10d._get_default_store()
    return store_types.PrefixStore(f"pipeplan/{name[0]}", store.clone())
