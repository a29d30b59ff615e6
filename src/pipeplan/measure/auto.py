"""Everything in the training script: measure the model and the links, plan, and train by the plan.

::

    every rank   times the model, all at once, as they will compute
    all ranks    measure the links between them
    rank 0       plans within memory; keeps model, cluster and plan in a folder
    every rank   makes a Pipeline of that plan

With the same model, ranks and hosts, the next start reads the plan from the folder.
"""

import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from pipeplan.cluster import Cluster
from pipeplan.errors import InputError, PipeplanError
from pipeplan.measure.agreement import from_first, gather, on_all, require_same
from pipeplan.measure.all_links import measure_links
from pipeplan.measure.kept_inputs import KeptInputs, digest
from pipeplan.measure.profiling import profile as measure_profile
from pipeplan.pipeline import Plan
from pipeplan.planning.global_batch import plan_global_batch
from pipeplan.profile import ModelProfile
from pipeplan.report.units import humanise_ms
from pipeplan.runtime.batches import find_leaves, num_rows
from pipeplan.runtime.streams import set_cuda_device
from pipeplan.runtime.supervision.ending import print_line
from pipeplan.runtime.supervision.error_policy import in_set_up
from pipeplan.runtime.supervision.launching import join_ranks
from pipeplan.runtime.supervision.meeting import keep_for_pipeline, meet
from pipeplan.runtime.supervision.watchdog import WatchdogOptions
from pipeplan.runtime.training import Pipeline
from pipeplan.version import VERSION

if TYPE_CHECKING:
    from pipeplan.calibration.door import Calibration

__all__ = ["auto"]

FOLDER = "pipeplan-auto"
LINK_SECONDS = 20.0
SAME_SPEED = 0.1
"""Ranks whose times differ by less than this part count as equally fast: clocks are not better."""
SPEED_DIGITS = 3


def auto(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    optimizer_fn: Callable[[Any], torch.optim.Optimizer],
    example_batch: Any,
    *,
    global_batch: int,
    example_targets: Any = None,
    folder: str | Path = FOLDER,
    profile: ModelProfile | None = None,
    cluster: Cluster | None = None,
    at: Sequence[int] | None = None,
    repeats: int | None = None,
    link_seconds: float = LINK_SECONDS,
    planning: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **options: Any,
) -> Pipeline:
    """A pipeline with a plan of its own for this model, these ranks and their links.

    Call it on every rank that torchrun starts, with the same model; it joins the ranks if the
    script has not.

    Args:
        model: the whole model, built alike on every rank.
        loss_fn: from the model's output and targets to their mean loss over rows.
        optimizer_fn: from parameters to their optimizer.
        example_batch: what the model is called with, for a few rows: a tensor, a tuple by position
            or a dict by name. Its values do not matter.
        global_batch: the rows of each step's batch, of all ranks together.
        example_targets: targets of these rows; with them the loss is measured, too.
        folder: where rank 0 keeps the profile, the cluster and the plan.
        profile: a profile made before, such as an estimate; then the model is not measured.
        cluster: a cluster file's content made before; then links are not measured.
        at: further microbatch sizes to measure; by default one row.
        repeats: runs of each layer; by default as many as take a few seconds.
        link_seconds: how long measuring links may take, about.
        planning: options of `pipeplan.plan`, such as `{"effort": 3, "keep_tied": True}`.
        quiet: do not say on stderr what takes time.
        options: those of `Pipeline`. With `replan_after`, a better plan that is found then is kept
            for the next start.

    Raises:
        InputError, RuntimeMismatchError: on every rank; ranks differ, or the model cannot be
            measured.
        InfeasibleError: no plan fits.
    """
    if not dist.is_initialized():
        join_ranks()
    inputs = _Inputs(
        model=model,
        batch=example_batch,
        loss_fn=None if example_targets is None else loss_fn,
        targets=example_targets,
        layers=options.get("layers"),
        amp_dtype=options.get("amp_dtype"),
        at=at,
        repeats=repeats,
        link_seconds=link_seconds,
    )
    wishes = {"global_batch": global_batch, **(planning or {})}
    meeting = meet(options.get("watchdog") or WatchdogOptions())
    found = _Folder(KeptInputs(folder), wishes, say=_Speaker(quiet=quiet))
    with in_set_up(meeting.watchdog, "auto", PipeplanError):
        plan = found.plan(inputs, profile, cluster)
    keep_for_pipeline(meeting)
    options.setdefault("on_replan", found.keep)
    return Pipeline(plan, model, loss_fn, optimizer_fn, **options)


class _Folder:
    """The plan of an earlier start, or a new one, which is kept."""

    def __init__(self, kept: KeptInputs, wishes: dict[str, Any], say: "_Speaker") -> None:
        self._kept, self._wishes, self._say = kept, wishes, say
        self._keys = ("", "")

    def plan(
        self, inputs: "_Inputs", profile: ModelProfile | None, cluster: Cluster | None
    ) -> Plan:
        """The plan; the same on every rank."""
        kept, say = self._kept, self._say
        facts = {**inputs.facts(), "profile": repr(profile), "cluster": repr(cluster)}
        wished = {"planning": repr(self._wishes)}
        require_same({**facts, **wished})
        self._keys = digest(facts), digest(wished)
        plan = from_first(lambda: kept.read_plan(*self._keys))
        if plan is not None:
            say(f"uses the plan in {kept.plan_path}, made for this model and these ranks")
            return plan
        found = from_first(lambda: kept.read_inputs(self._keys[0]))
        model, devices = found or inputs.measure(say, profile, cluster)
        rows = self._wishes["global_batch"]
        say(f"plans a batch of {rows} rows on {devices.num_devices} devices")
        return from_first(lambda: self._make_plan(model, devices))

    def _make_plan(self, model: ModelProfile, cluster: Cluster) -> Plan:
        made = plan_global_batch(model, cluster, **self._wishes)
        self._kept.write(*self._keys, model, cluster, made)
        self._say(
            f"{made.num_stages} stages, {made.microbatches} microbatches of"
            f" {made.model.microbatch_size}: {humanise_ms(made.iteration_ms)} a step predicted;"
            f" kept in {self._kept.folder}"
        )
        return made

    def keep(self, found: "Calibration") -> None:
        """Keep what a run has corrected, with its new plan, for the next start; on rank 0."""
        if found.replanned is None or found.is_kept_best:
            return
        self._kept.write(*self._keys, found.model, found.cluster, found.replanned)
        self._say(f"the next start uses the new plan, kept in {self._kept.folder}")


class _Speaker:
    """Says on rank 0 what takes time."""

    def __init__(self, *, quiet: bool) -> None:
        self._is_heard = not quiet and dist.get_rank() == 0

    def __call__(self, message: str) -> None:
        if self._is_heard:
            print_line(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """What is measured, and how."""

    model: nn.Module
    batch: Any
    loss_fn: Callable[[Any, Any], Any] | None
    targets: Any
    layers: Sequence[str] | None
    amp_dtype: torch.dtype | None
    at: Sequence[int] | None
    repeats: int | None
    link_seconds: float

    def facts(self) -> dict[str, str]:
        """All that a measurement depends on, the same on every rank."""
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        shapes = [
            (name, tuple(t.shape), str(t.dtype), getattr(t, "requires_grad", False))
            for name, t in tensors
        ]
        return {
            "model": repr(shapes) + repr(self.model),
            "batch": repr(_shapes(self.batch)) + repr(_shapes(self.targets)),
            "how": repr([self.layers, str(self.amp_dtype), self.at]),
            "ranks": repr(gather([socket.gethostname(), str(dist.get_backend()), _device_name()])),
            "versions": f"{VERSION} {torch.__version__}",
        }

    def measure(
        self, say: Callable[[str], None], profile: ModelProfile | None, cluster: Cluster | None
    ) -> tuple[ModelProfile, Cluster]:
        """The profile and the cluster, as far as they are not given; the same on every rank."""
        speeds = [1.0] * dist.get_world_size()
        if profile is None:
            say("measures the model on every rank")
            dist.barrier()
            profiles = on_all(self._profile)
            totals_ms = [sum(x.forward_ms + x.backward_ms for x in p.layers) for p in profiles]
            middle = sorted(range(len(totals_ms)), key=lambda rank: totals_ms[rank])
            reference = middle[(len(middle) - 1) // 2]
            profile = profiles[reference]
            speeds = [_speed(totals_ms[reference] / total_ms) for total_ms in totals_ms]
        if cluster is None:
            say("measures the links between all ranks")
            links = on_all(lambda: measure_links(name="measured", seconds=self.link_seconds))
            cluster = _with_speeds(links[0].cluster, speeds)
        return profile, cluster

    def _profile(self) -> ModelProfile:
        rows = num_rows(self.batch, "example_batch")
        at = self.at if self.at is not None else ([1] if rows > 1 else [])
        home = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        if home.type == "meta":
            raise InputError(
                "model: is on the meta device and cannot be measured; give auto a profile, such as"
                " that of pipeplan profile --estimate"
            )
        device = set_cuda_device() if dist.get_backend() == "nccl" else None
        try:
            return measure_profile(
                self.model if device is None else self.model.to(device),
                self.batch,
                layers=self.layers,
                loss_fn=self.loss_fn,
                targets=self.targets,
                at=at,
                repeats=self.repeats,
                amp_dtype=self.amp_dtype,
            )
        finally:
            if device is not None:
                self.model.to(home)


def _speed(ratio: float) -> float:
    """A rank's speed from its times; small differences are noise."""
    return 1.0 if abs(ratio - 1) < SAME_SPEED else round(ratio, SPEED_DIGITS)


def _with_speeds(cluster: Cluster, speed_of_rank: Sequence[float]) -> Cluster:
    """The cluster with the ranks' speeds; its devices are the ranks of each host in turn."""
    hosts: list[str] = gather(socket.gethostname())
    order = sorted(range(len(hosts)), key=lambda rank: hosts.index(hosts[rank]))
    devices = tuple(
        replace(device, speed=speed_of_rank[rank])
        for device, rank in zip(cluster.devices, order, strict=True)
    )
    return replace(cluster, devices=devices)


def _device_name() -> str:
    if dist.get_backend() == "nccl":
        device = set_cuda_device()
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.get_num_threads()}"


def _shapes(batch: Any) -> list[Any]:
    """The shapes and types in a batch; values do not matter."""
    return [
        (path, tuple(leaf.shape), str(leaf.dtype)) if hasattr(leaf, "shape") else (path, repr(leaf))
        for path, leaf in find_leaves(batch)
    ]
