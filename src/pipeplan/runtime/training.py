"""Synchronous pipeline training of one model by one plan, on the ranks of torch.distributed.

A step runs this rank's blocks in the plan's order::

    for each block:   wait for its input - compute - start to send - post further receives
    then:             sum gradients - clip - optimizer - the batch's loss on every rank

What it computes is ordinary training with the whole batch on one device, to rounding.
"""

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as store_types

from pipeplan.pipeline import Kind, Plan
from pipeplan.runtime.batches import as_call, num_rows, select_rows, signature
from pipeplan.runtime.channels import Inbox, Outbox, Reaper, TensorKind
from pipeplan.runtime.errors import RuntimeMismatchError
from pipeplan.runtime.execution import BlockSeeds, Function, LossTerms, StageRunner
from pipeplan.runtime.geometry import Geometry, make_geometry
from pipeplan.runtime.gradients import GradientReducer, Reduction
from pipeplan.runtime.parameters import gather_state, materialise, share_initial_values
from pipeplan.runtime.placement import find_placement
from pipeplan.runtime.scaling import LossScaler
from pipeplan.runtime.tracing import Event, RankTrace, write_trace
from pipeplan.runtime.transports import make_transport
from pipeplan.runtime.watchdog import Watchdog, WatchdogOptions
from pipeplan.splitting import cut, holders, lay_out

__all__ = ["Pipeline"]

OptimizerFn = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

MOST_OPEN_SENDS = 2
"""Gradients under way to the stage before; each one holds a tensor."""


@dataclass(slots=True, kw_only=True)
class _Step:
    """What one step needs on one rank."""

    geometry: Geometry
    key: str
    """Of the shapes that cross cuts."""
    call: tuple[tuple[Any, ...], dict[str, Any]]
    targets: Any
    total_weight: float
    stats: torch.Tensor
    """The loss and the metrics, summed as they come."""
    arrivals: Inbox | None
    """From the stage before."""
    sends_forward: Outbox
    sends_backward: Outbox
    returns: Inbox | None = None
    """Gradients from the stage behind; from the first forward on, which shows their kinds."""


class Pipeline:
    """Trains one model by one plan; every rank makes one and calls `step` with the same batch."""

    def __init__(
        self,
        plan: Plan,
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
        receive_ahead: int = 2,
        bucket_bytes: float = 25e6,
        device_name: str | None = None,
        real_hosts: Mapping[str, str] | None = None,
        watchdog: WatchdogOptions | None = None,
    ) -> None:
        """Take this rank's stage out of `model`; all else of the model is dropped.

        Args:
            plan: what runs where, and in which order.
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
            receive_ahead: how many receives are posted beyond the one needed next.
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
        self.plan = plan
        self.rank = dist.get_rank()
        self._placement = find_placement(plan, device_name, real_hosts)
        stage_ranks = self._placement.ranks
        self._store = _make_store()
        watchdog_store = self._store.clone()  # a client that waits serves nobody else
        self._transport = make_transport(self._placement.local_index[self.rank], stage_ranks)
        place = self._placement.find(self.rank)
        self.stage, self.replica = place if place else (-1, -1)
        """-1 for a rank that the plan leaves unused."""
        self._groups = [
            dist.new_group(sorted(ranks)) if len(ranks) > 1 else None for ranks in stage_ranks
        ]

        names = [layer.name for layer in plan.model.layers]
        if layers is not None and len(layers) != len(names):
            raise RuntimeMismatchError(
                f"layers: {len(layers)} names for the plan's {len(names)} layers; give one each"
            )
        layout = lay_out(model, layers if layers is not None else names)
        held_by = holders(model, layout, [stage.layers for stage in plan.stages])
        self.first_name_of = _first_names(model)
        """The name by which the whole model knows each parameter first; tied ones have several."""
        tie_groups = self._make_tie_groups(held_by)
        self._is_last = self.stage == plan.num_stages - 1
        self._order = plan.schedule[self.stage] if place else ()
        self._receive_ahead = receive_ahead
        self._parts_metrics = tuple(metrics or {})
        self._clip_norm = clip_norm
        self._scaler = LossScaler(enabled=amp_dtype is torch.float16)
        self._loss = LossTerms(loss_fn=loss_fn, metrics=metrics or {}, weight_fn=loss_weight_fn)
        self.optimizer: torch.optim.Optimizer | None = None
        self.model: nn.Module | None = None
        self._reducer = GradientReducer([], [])
        self._counted: list[nn.Parameter] = []
        self._reaper: Reaper | None = None
        if place:
            self._part = cut(model, layout, plan.stages[self.stage].layers)
            self.model = self._part.model
            materialise(self.model, self._transport.device, init_fn)
            self._runner = StageRunner(
                self._part,
                self._transport.device,
                seeds=BlockSeeds(seed=seed, stage=self.stage, replica=self.replica),
                recompute=plan.stages[self.stage].recompute,
                amp_dtype=amp_dtype,
                loss=self._loss if self._is_last else None,
            )
            if plan.stages[self.stage].recompute and self._transport.device.type == "cpu":
                self._reaper = Reaper()
            self._set_up_parameters(held_by, tie_groups, optimizer_fn, bucket_bytes)
        self.num_steps = 0
        """Steps taken, those of a loaded checkpoint included."""
        self.metrics: dict[str, float] = {}
        """The metrics of the last step."""
        self.gradient_norm: float | None = None
        """Of the last step, before clipping; None without `clip_norm`."""
        self.iteration_ms = 0.0
        """How long the last step took on this rank."""
        self._geometries: dict[int, Geometry] = {}
        self._kinds: dict[str, tuple[list[TensorKind], Any]] = {}
        self._kinds_out: dict[str, list[TensorKind]] = {}
        self._needs_header: bool | None = None
        self._gave: tuple[bool, bool] = (True, True)
        self._events: list[Event] = []
        dist.barrier()
        self._zero_s = time.perf_counter()
        self._watchdog = Watchdog(
            watchdog_store, self.rank, self._rank_names(), watchdog or WatchdogOptions()
        )

    # ------------------------------------------------------------------ the step

    def step(self, batch: Any, targets: Any = None) -> float:
        """Train on one batch, and return its mean loss, the same on every rank.

        `batch` is what the model is called with: a tensor, a tuple by position or a dict by name.
        Ranks whose stage reads neither inputs nor targets may give None for both, but then always.
        """
        try:
            with torch.random.fork_rng(devices=self._fork_devices()):
                return self._step(batch, targets)
        except Exception as error:
            self._report(error)
            raise
        finally:
            self._watchdog.enter("outside")

    def _step(self, batch: Any, targets: Any) -> float:
        start_s = time.perf_counter()
        self._watchdog.enter("waiting", "for the start of the step")
        rows, key = self._agree_on_shape(batch, targets)
        self._events = []
        stats = torch.zeros(
            1 + len(self._parts_metrics), dtype=torch.float64, device=self._transport.device
        )
        if self.stage >= 0:
            self._run_blocks(self._geometry(rows), key, batch, targets, stats)
            reduce_s = time.perf_counter()
            self._watchdog.enter("waiting", "for the gradients' all-reduce")
            self._reducer.finish()
            self._events.append(Event("reduce", "reduce", reduce_s, time.perf_counter()))
        self._watchdog.enter("waiting", "for the loss")
        self._update(stats)
        numbers = stats.tolist()
        self._transport.synchronize()
        self.num_steps += 1
        self.metrics = dict(zip(self._parts_metrics, numbers[1:], strict=False))
        self.iteration_ms = (time.perf_counter() - start_s) * 1e3
        return float(numbers[0])

    def _run_blocks(
        self, geometry: Geometry, key: str, batch: Any, targets: Any, stats: torch.Tensor
    ) -> None:
        order = [block for block in self._order if geometry.rows[block.microbatch]]
        step = self._begin_step(geometry, key, batch, targets, stats)
        self._reducer.begin()
        clock, enter = time.perf_counter, self._watchdog.enter
        for position, block in enumerate(order):
            wait_s = clock()
            enter("waiting", block)
            if block.kind is Kind.FORWARD:
                arrived = step.arrivals.take(block.microbatch) if step.arrivals else []
            else:
                arrived = step.returns.take(block.microbatch) if step.returns else []
            run_s = clock()
            enter("computing", block)
            if block.kind is Kind.FORWARD:
                self._run_forward(step, block.microbatch, arrived)
            else:
                if position == len(order) - 1:
                    self._reducer.expect_last()
                self._run_backward(step, block.microbatch, arrived)
            del arrived  # what is done with must not wait for the next block to be let go
            self._events.append(Event(str(block), "wait", wait_s, run_s))
            self._events.append(Event(str(block), str(block.kind), run_s, clock()))
            if position + 1 < len(order):
                following = order[position + 1]
                inbox = step.arrivals if following.kind is Kind.FORWARD else step.returns
                if inbox is not None:
                    inbox.post(following.microbatch)
        enter("waiting", "for sends to be taken")
        step.sends_forward.finish()
        step.sends_backward.finish()

    def _begin_step(
        self, geometry: Geometry, key: str, batch: Any, targets: Any, stats: torch.Tensor
    ) -> "_Step":
        has_work = any(geometry.rows)
        forward, backward, transport = Kind.FORWARD, Kind.BACKWARD, self._transport
        most_open = self.plan.microbatches  # a forward's sends are done once its gradient is back
        return _Step(
            geometry=geometry,
            key=key,
            call=as_call(batch) if self._part.needs_inputs else ((), {}),
            targets=targets,
            total_weight=self._loss.weight(targets, geometry.num_rows) if self._is_last else 1.0,
            stats=stats,
            arrivals=self._forward_inbox(geometry, key) if self.stage and has_work else None,
            sends_forward=Outbox(
                transport, self.stage, forward, geometry.runs_out, most_open, self._reaper
            ),
            sends_backward=Outbox(
                transport, self.stage - 1, backward, geometry.runs_in, MOST_OPEN_SENDS
            ),
        )

    def _run_forward(self, step: "_Step", microbatch: int, carried: list[torch.Tensor]) -> None:
        template, rows = None, step.geometry.rows[microbatch]
        if step.arrivals is not None:
            kinds, template = self._kinds[step.key]
            for tensor, kind in zip(carried, kinds, strict=True):
                if kind.has_gradient:
                    tensor.requires_grad_()
        inputs = step.call
        if self._part.needs_inputs:
            inputs = select_rows(step.call, rows, self._transport.device)
        if self._is_last:
            targets = step.targets
            if targets is not None:
                targets = select_rows(targets, rows, self._transport.device)
            weight = self._loss.weight(targets, len(rows))
            share = weight / step.total_weight if step.total_weight else 0.0
            call = (self.num_steps, microbatch, carried, template, inputs)
            step.stats += self._runner.forward_last(*call, targets, share, self._scaler.scale)
            return
        learn = step.key not in self._kinds_out
        tensors, shape = self._runner.forward(
            self.num_steps, microbatch, carried, template, inputs, learn=learn
        )
        if learn:
            self._announce(step.key, tensors, shape, step.geometry)
        step.sends_forward.send(microbatch, tensors)
        if step.returns is None:
            step.returns = self._backward_inbox(step.geometry, step.key)

    def _run_backward(self, step: "_Step", microbatch: int, arrived: list[torch.Tensor]) -> None:
        if step.returns is not None:
            step.sends_forward.finish(microbatch)
        gradients = self._runner.backward(microbatch, arrived)
        if self.stage:
            step.sends_backward.send(microbatch, gradients)

    def _update(self, stats: torch.Tensor) -> None:
        """Sum the loss over ranks, clip, and let the optimizer work."""
        if self._clip_norm is None and not self._scaler.enabled:
            work = dist.all_reduce(stats, async_op=True)
            if self.optimizer is not None:
                self.optimizer.step()
            if work is not None:
                work.wait()
            return
        self._scaler.unscale(self._reducer.parameters)
        squares = [
            parameter.grad.detach().double().square().sum()
            for parameter in self._counted
            if parameter.grad is not None
        ]
        total = torch.stack(squares).sum() if squares else stats.new_zeros(())
        joined = torch.cat([stats, total.reshape(1)])
        dist.all_reduce(joined)
        stats.copy_(joined[:-1])
        norm = float(joined[-1].sqrt())
        self.gradient_norm = norm
        if not self._scaler.take(norm):
            return
        if self._clip_norm is not None:
            # The same small number as in torch.nn.utils.clip_grad_norm_.
            factor = self._clip_norm / (norm + 1e-6)
            if factor < 1:
                for parameter in self._reducer.parameters:
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)
        if self.optimizer is not None:
            self.optimizer.step()

    # ------------------------------------------------------------------ shapes

    def _agree_on_shape(self, batch: Any, targets: Any) -> tuple[int, str]:
        """The batch's number of rows, and a key for the shapes of what crosses cuts."""
        gave = (batch is not None, targets is not None)
        if self._needs_header is None:
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, gave)
            self._gave = gave
            self._require_inputs(everyone)
            self._needs_header = not all(given for given, _ in everyone)
        elif gave != self._gave:
            raise RuntimeMismatchError(
                f"batch: rank {self.rank} gave {_said(self._gave)} in the first step and"
                f" {_said(gave)} now; give the same kinds in every step"
            )
        if batch is not None:
            rows = num_rows(batch, "batch")
            text = f"{rows}:{signature(batch)}"
        if self._needs_header:
            source = self._placement.ranks[0][0]
            header: list[Any] = [text if batch is not None else None]
            dist.broadcast_object_list(header, src=source)
            text = header[0]
            rows = int(text.partition(":")[0])
        if self._is_last and targets is not None and num_rows(targets, "targets") != rows:
            raise RuntimeMismatchError(
                f"targets: have {num_rows(targets, 'targets')} rows for the batch's {rows}"
            )
        return rows, text

    def _require_inputs(self, everyone: list[Any]) -> None:
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

    def _forward_inbox(self, geometry: Geometry, key: str) -> Inbox:
        if key not in self._kinds:
            self._watchdog.enter("waiting", "for the stage before")
            kinds, template = json.loads(self._store.get(f"kinds/{self.stage - 1}/{key}"))
            self._kinds[key] = ([_kind_from(entry) for entry in kinds], template)
        order = [
            block.microbatch
            for block in self.plan.schedule[self.stage - 1]
            if block.kind is Kind.FORWARD
        ]
        inbox = Inbox(
            self._transport,
            self.stage - 1,
            Kind.FORWARD,
            self._kinds[key][0],
            geometry.runs_in,
            order,
            self._receive_ahead,
        )
        first = next(block for block in self._order if geometry.rows[block.microbatch])
        inbox.post(first.microbatch)
        return inbox

    def _backward_inbox(self, geometry: Geometry, key: str) -> Inbox:
        order = [
            block.microbatch
            for block in self.plan.schedule[self.stage + 1]
            if block.kind is Kind.BACKWARD
        ]
        inbox = Inbox(
            self._transport,
            self.stage,
            Kind.BACKWARD,
            [kind for kind in self._kinds_out[key] if kind.has_gradient],
            geometry.runs_out,
            order,
            self._receive_ahead,
        )
        first = next(
            block
            for block in self._order
            if block.kind is Kind.BACKWARD and geometry.rows[block.microbatch]
        )
        inbox.post(first.microbatch)
        return inbox

    def _announce(
        self, key: str, tensors: list[torch.Tensor], template: Any, geometry: Geometry
    ) -> None:
        """Tell the stage behind what to expect, once for each shape of batch."""
        kinds = []
        for tensor in tensors:
            if not tensor.ndim or not tensor.shape[0]:
                raise RuntimeMismatchError(
                    f"layers {self._part.layers_text}: return a tensor without rows;"
                    " what crosses a cut has the microbatch's rows as its first dimension"
                )
            kinds.append(
                TensorKind(
                    shape=tuple(tensor.shape[1:]),
                    dtype=tensor.dtype,
                    has_gradient=tensor.requires_grad,
                )
            )
        self._kinds_out[key] = kinds
        if geometry.announces:
            entries = [[list(k.shape), str(k.dtype), k.has_gradient] for k in kinds]
            self._store.set(f"kinds/{self.stage}/{key}", json.dumps([entries, template]))

    # ------------------------------------------------------------------ state

    def full_state_dict(self) -> dict[str, torch.Tensor] | None:
        """The whole model's parameters and buffers on rank 0, on the CPU; None elsewhere."""
        state = self.model.state_dict() if self.model is not None and not self.replica else {}
        with self._failing_together():
            return gather_state(state, self._transport.device)

    def save(self, directory: str | Path, *, keep: int = 2) -> Path:
        """Write a checkpoint, each stage its part; it appears whole or not at all."""
        from pipeplan.runtime.checkpoints import save_checkpoint

        with self._failing_together():
            return save_checkpoint(self, Path(directory), keep)

    def load(self, directory: str | Path) -> bool:
        """Go on from the newest checkpoint there, made by whatever plan; False if there is none."""
        from pipeplan.runtime.checkpoints import load_checkpoint

        with self._failing_together():
            return load_checkpoint(self, Path(directory))

    def write_trace(self, path: str | Path) -> None:
        """Write a Chrome trace of the last step; all ranks take part, rank 0 writes."""
        trace = RankTrace(
            rank=self.rank,
            lane=f"rank {self.rank}: {self._rank_names()[self.rank]}",
            zero_s=self._zero_s,
            events=tuple(self._events),
        )
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(trace, everyone if self.rank == 0 else None)
        if self.rank == 0:
            write_trace(everyone, path)

    @property
    def loss_scale(self) -> float:
        """The factor on a float16 loss; 1 for other types."""
        return self._scaler.scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._scaler.scale = scale if self._scaler.enabled else 1.0

    def close(self) -> None:
        """Stop the watchdog; the process group stays."""
        self._watchdog.close()
        self._reducer.close()
        if self._reaper is not None:
            self._reaper.close()
            self._reaper = None

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception):
            self._report(error)
        self.close()

    # ------------------------------------------------------------------ setting up

    def _make_tie_groups(self, held_by: dict[str, set[int]]) -> dict[frozenset[int], Any]:
        """A group of ranks for each set of stages that share a parameter."""
        sets = sorted({tuple(sorted(stages)) for stages in held_by.values() if len(stages) > 1})
        return {
            frozenset(stages): dist.new_group(
                sorted(rank for stage in stages for rank in self._placement.ranks[stage])
            )
            for stages in sets
        }

    def _set_up_parameters(
        self,
        held_by: dict[str, set[int]],
        tie_groups: dict[frozenset[int], Any],
        optimizer_fn: OptimizerFn,
        bucket_bytes: float,
    ) -> None:
        if self.model is None:
            raise AssertionError("an unused rank has no parameters")
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        own = [p for n, p in named if len(held_by[n]) == 1]
        reductions = []
        if len(self._placement.ranks[self.stage]) > 1 and own:
            reductions.append(Reduction(parameters=own, group=self._groups[self.stage]))
        tied = [(frozenset(held_by[n]), n, p) for n, p in named if len(held_by[n]) > 1]
        for stages in sorted({stages for stages, _, _ in tied}, key=sorted):
            # Stages know a shared tensor by different names: its first name orders them alike.
            shared = {self.first_name_of[n]: p for s, n, p in tied if s == stages}
            ordered = [shared[first_name] for first_name in sorted(shared)]
            reductions.append(Reduction(parameters=ordered, group=tie_groups[stages]))
        share_initial_values(
            self.model, self._groups[self.stage], self._placement.ranks[self.stage], reductions
        )
        self._reducer = GradientReducer([p for _, p in named], reductions, bucket_bytes)
        if not self.replica:
            # Each parameter counts once in the norm: by the first stage that holds it.
            self._counted = [p for n, p in named if min(held_by[n]) == self.stage]
        if named:
            self.optimizer = optimizer_fn([p for _, p in named])

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

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """What all ranks do outside of a step: an error is most likely another rank's end."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit, RuntimeMismatchError):
            raise
        except BaseException as error:  # torch's CheckpointException is no Exception
            if self._watchdog.failure is None:
                self._watchdog.await_verdict()
                self._watchdog.report(error)
            raise

    def _report(self, error: Exception) -> None:
        """Tell the others, unless it is another rank's end that this one stumbles over."""
        if self._watchdog.failure is None:
            if self._is_connection_error(error):
                self._watchdog.await_verdict()
            self._watchdog.report(error)

    def _is_connection_error(self, error: Exception) -> bool:
        """Whether another rank's end is the likely reason."""
        text = str(error).lower()
        words = ("gloo", "connection", "nccl", "socket", "broken pipe")
        return isinstance(error, RuntimeError | OSError) and any(word in text for word in words)


def _make_store() -> Any:
    """A client of the ranks' store, under a prefix of its own."""
    name: list[Any] = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, src=0)
    store: Any = dist.distributed_c10d._get_default_store()
    return store_types.PrefixStore(f"pipeplan/{name[0]}", store.clone())


def _first_names(model: nn.Module) -> dict[str, str]:
    """For every name of a parameter the first name of the same tensor."""
    first_of: dict[int, str] = {}
    return {
        name: first_of.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _kind_from(entry: Any) -> TensorKind:
    shape, dtype, has_gradient = entry
    return TensorKind(
        shape=tuple(shape),
        dtype=getattr(torch, dtype.removeprefix("torch.")),
        has_gradient=has_gradient,
    )


def _said(gave: tuple[bool, bool]) -> str:
    batch, targets = ("a value" if given else "None" for given in gave)
    return f"{batch} as batch and {targets} as targets"
