"""The three versioned file formats, read and written: model, cluster, plan (docs/formats.md).

Reading refuses what the formats do not allow, with the path to the field. Writing is atomic: an
interrupted run leaves the old file or the new one. What was read is written back in
the form it was given; a cluster in shorthand stays in shorthand.
"""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pipeplan.cluster import Cluster, Duplex, HostGroup, Matrix, expand_hosts
from pipeplan.documents.syntax import convert, read_document, to_json, write_atomically
from pipeplan.documents.text import excerpt, nearest
from pipeplan.errors import ClusterError, InputError, PlanFileError, ProfileError
from pipeplan.pipeline import (
    Block,
    Bound,
    BoundScope,
    Kind,
    Plan,
    Prediction,
    Schedule,
    Stage,
    Timeline,
)
from pipeplan.profile import ModelProfile
from pipeplan.validation import require_magnitude

__all__ = [
    "cluster_document",
    "model_document",
    "plan_document",
    "read_cluster",
    "read_model",
    "read_plan",
    "timeline_document",
    "write_cluster",
    "write_model",
    "write_plan",
]

MODEL_FORMAT = "pipeplan.model/1"
CLUSTER_FORMAT = "pipeplan.cluster/1"
PLAN_FORMAT = "pipeplan.plan/1"

NULLABLE = ("lower_bound_ms", "bound_scope", "schedule_guarantee_ms")
"""The predicted figures that a planner may leave open."""

BLOCK_TEXT = re.compile(r"([FB])(0|[1-9][0-9]{0,8})")

T = TypeVar("T")


def read_model(path: str | Path) -> ModelProfile:
    """The model profile in a `pipeplan.model/1` file, JSON or YAML."""
    return _read(path, _parse_model, ProfileError)


def read_cluster(path: str | Path) -> Cluster:
    """The cluster in a `pipeplan.cluster/1` file, JSON or YAML, shorthand expanded."""
    return _read(path, _parse_cluster, ClusterError)


def read_plan(path: str | Path) -> Plan:
    """The plan in a `pipeplan.plan/1` file, with the inputs embedded in it."""
    return _read(path, _parse_plan, PlanFileError)


def write_model(model: ModelProfile, path: str | Path) -> None:
    """Write a model profile, in the form it was given if it was read."""
    write_atomically(path, to_json(model_document(model)))


def write_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster, in the form it was given if it was read."""
    write_atomically(path, to_json(cluster_document(cluster)))


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan together with its inputs."""
    write_atomically(path, to_json(plan_document(plan)))


def model_document(model: ModelProfile) -> dict[str, Any]:
    """The model profile as the file holds it."""
    if model.document is not None:
        return model.document
    document = {"format": MODEL_FORMAT, **_without_defaults(model)}
    document["layers"] = [
        {
            name: value
            for name, value in _without_defaults(layer).items()
            if name not in ("gradient_bytes", "activation_bytes") or value != layer.output_bytes
        }
        for layer in model.layers
    ]
    return document


def cluster_document(cluster: Cluster) -> dict[str, Any]:
    """The cluster as the file holds it."""
    if cluster.document is not None:
        return cluster.document
    document = {"format": CLUSTER_FORMAT, **_without_defaults(cluster)}
    document["devices"] = [
        {
            name: value
            for name, value in _without_defaults(device).items()
            if name != "host" or value != device.name
        }
        for device in cluster.devices
    ]
    return document


def plan_document(plan: Plan) -> dict[str, Any]:
    """The plan as the file holds it."""
    names = [device.name for device in plan.cluster.devices]
    document: dict[str, Any] = {
        "format": PLAN_FORMAT,
        "planner": plan.planner,
        "options": plan.options,
        "seed": plan.seed,
        "version": plan.version,
        "microbatches": plan.microbatches,
        "stages": [_stage_document(stage, names) for stage in plan.stages],
        "schedule": [[f"{b.kind}{b.microbatch}" for b in order] for order in plan.schedule],
    }
    if plan.predicted is not None:
        predicted, bound = plan.predicted, plan.predicted.bound
        document["predicted"] = {
            "iteration_ms": predicted.iteration_ms,
            "lower_bound_ms": bound and bound.lower_bound_ms,
            "bound_scope": bound and bound.scope,
            "schedule_guarantee_ms": predicted.schedule_guarantee_ms,
            "bubble_fraction": predicted.bubble_fraction,
            "peak_memory_gb": predicted.peak_memory_gb,
        }
    document["model"] = model_document(plan.model)
    document["cluster"] = cluster_document(plan.cluster)
    return document


def timeline_document(timeline: Timeline) -> dict[str, Any]:
    """A timeline for machines: every block, transfer and all-reduce with its times."""
    return {
        "iteration_ms": timeline.iteration_ms,
        "blocks": [
            {
                "stage": timed.block.stage,
                "block": f"{timed.block.kind}{timed.block.microbatch}",
                "start_ms": timed.start_ms,
                "end_ms": timed.end_ms,
            }
            for blocks in timeline.blocks
            for timed in blocks
        ],
        "transfers": [dataclasses.asdict(transfer) for transfer in timeline.transfers],
        "all_reduces": [dataclasses.asdict(reduce) for reduce in timeline.all_reduces],
    }


def _stage_document(stage: Stage, names: list[str]) -> dict[str, Any]:
    document: dict[str, Any] = {
        "layers": [stage.layers.start, stage.layers.stop],
        "devices": [names[device] for device in stage.devices],
    }
    if stage.shares is not None:
        document["shares"] = stage.shares
    if stage.recompute:
        document["recompute"] = True
    return document


def _without_defaults(noun: Any) -> dict[str, Any]:
    """The fields of a noun that differ from their defaults."""
    return {
        field.name: getattr(noun, field.name)
        for field in dataclasses.fields(noun)
        if field.init and getattr(noun, field.name) != field.default
    }


# ---------------------------------------------------------------------------- reading


def _read(path: str | Path, parse: Callable[[Any], T], error: type[InputError]) -> T:
    """What `parse` makes of a file; errors name the file, and are of the file's kind."""
    document = read_document(path, error)
    try:
        return parse(document)
    except InputError as problem:
        message = str(problem)  # may quote a name from the file, of any length
        short = message if len(message) <= 400 else f"{message[:397]}..."
        raise error(f"{path}: {short}") from None


def _parse_model(document: Any) -> ModelProfile:
    model = convert(_fields_of(document, MODEL_FORMAT), ModelProfile)
    object.__setattr__(model, "document", document)
    return model


def _parse_cluster(document: Any) -> Cluster:
    fields = _fields_of(document, CLUSTER_FORMAT)
    if "hosts" not in fields:
        cluster = convert(fields, Cluster)
    else:
        for name in ("devices", "bandwidth_gb_per_s"):
            if name in fields:
                raise ClusterError(f"{name}: stands beside hosts, its shorthand; keep one of them")
        short = convert(fields, _Shorthand)
        cluster = expand_hosts(
            short.name,
            short.hosts,
            between_hosts_gb_per_s=short.between_hosts_gb_per_s,
            latency_us=short.latency_us,
            duplex=short.duplex,
        )
    object.__setattr__(cluster, "document", document)
    return cluster


def _fields_of(document: Any, expected: str) -> dict[str, Any]:
    """The fields besides `format`, which has to be the expected one."""
    if not isinstance(document, dict):
        raise InputError(f"format: is missing; a file holds one object with format {expected!r}")
    if "format" not in document:
        raise InputError(f"format: is missing; this reader takes {expected!r}")
    if document["format"] != expected:
        raise InputError(f"format: {excerpt(document['format'])}; this reader takes {expected!r}")
    return {name: value for name, value in document.items() if name != "format"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Shorthand:
    """A cluster file in shorthand."""

    name: str
    hosts: tuple[HostGroup, ...]
    between_hosts_gb_per_s: float | None = None
    latency_us: float | Matrix = 0.0
    duplex: Duplex = Duplex.FULL


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _StageFile:
    layers: tuple[int, int]
    devices: tuple[str, ...]
    shares: tuple[float, ...] | None = None
    recompute: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _PredictedFile:
    iteration_ms: float
    bubble_fraction: float
    peak_memory_gb: dict[str, float]
    lower_bound_ms: float | None = None
    bound_scope: BoundScope | None = None
    schedule_guarantee_ms: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _PlanFile:
    """A plan file; its two inputs have readers of their own."""

    model: Any
    cluster: Any
    microbatches: int
    stages: tuple[_StageFile, ...]
    schedule: tuple[tuple[str, ...], ...]
    planner: str
    predicted: _PredictedFile | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0
    version: str = ""


def _parse_plan(document: Any) -> Plan:
    file = convert(_fields_of(document, PLAN_FORMAT), _PlanFile, may_be_null=NULLABLE)
    model = _within("model", _parse_model, file.model)
    cluster = _within("cluster", _parse_cluster, file.cluster)
    if file.microbatches < 1:
        raise PlanFileError(f"microbatches: {excerpt(file.microbatches)} is not at least 1")
    if not file.stages:
        raise PlanFileError("stages: is empty; a plan has at least one stage")
    try:
        json.dumps(file.options, allow_nan=False)
    except ValueError:
        raise PlanFileError("options: holds a number that is not finite") from None
    index_of = {device.name: index for index, device in enumerate(cluster.devices)}
    return Plan(
        model=model,
        cluster=cluster,
        microbatches=file.microbatches,
        stages=tuple(
            _parse_stage(stage, f"stages[{index}]", model, index_of)
            for index, stage in enumerate(file.stages)
        ),
        schedule=Schedule(
            tuple(
                _parse_order(order, stage, file.microbatches)
                for stage, order in enumerate(file.schedule)
            )
        ),
        planner=file.planner,
        predicted=None if file.predicted is None else _parse_predicted(file.predicted),
        options=file.options,
        seed=file.seed,
        version=file.version,
    )


def _within(path: str, parse: Callable[[Any], T], document: Any) -> T:
    """What `parse` makes of a part of the file; its errors get the path to that part."""
    try:
        return parse(document)
    except InputError as error:
        raise InputError(f"{path}.{error}") from None


def _parse_stage(
    file: _StageFile, path: str, model: ModelProfile, index_of: dict[str, int]
) -> Stage:
    first, end = file.layers
    if not 0 <= first < end <= model.num_layers:
        raise PlanFileError(
            f"{path}.layers: [{first}, {end}] is no range within 0..{model.num_layers}"
        )
    for position, name in enumerate(file.devices):
        if name not in index_of:
            raise PlanFileError(
                f"{path}.devices[{position}]: {excerpt(name)} is not in the cluster"
                f"{nearest(name, list(index_of)[:1000])}"
            )
    if not file.devices:
        raise PlanFileError(f"{path}.devices: is empty; a stage runs on at least one device")
    for position, share in enumerate(file.shares or ()):
        require_magnitude(PlanFileError, f"{path}.shares[{position}]", share)
    return Stage(
        layers=range(first, end),
        devices=tuple(index_of[name] for name in file.devices),
        shares=file.shares,
        recompute=file.recompute,
    )


def _parse_order(order: tuple[str, ...], stage: int, num_microbatches: int) -> tuple[Block, ...]:
    # Judging an order takes as long as the microbatches are many, so they have to be there. Which
    # of a few are missing is for the checker to say.
    if len(order) < num_microbatches:
        raise PlanFileError(
            f"schedule[{stage}]: has {len(order)} blocks for {excerpt(num_microbatches)}"
            " microbatches; each runs once forward and once backward"
        )
    blocks = []
    for position, text in enumerate(order):
        match = BLOCK_TEXT.fullmatch(text)
        if not match:
            raise PlanFileError(
                f"schedule[{stage}][{position}]: {excerpt(text)} is no block; write F0 or B0"
            )
        blocks.append(Block(Kind(match[1]), stage, int(match[2])))
    return tuple(blocks)


def _parse_predicted(file: _PredictedFile) -> Prediction:
    # 1 - busy / all may round to just below zero, so the bubble's sign is left to the checker.
    for name, number in (
        ("iteration_ms", file.iteration_ms),
        ("lower_bound_ms", file.lower_bound_ms),
        ("schedule_guarantee_ms", file.schedule_guarantee_ms),
        ("bubble_fraction", abs(file.bubble_fraction)),
        *((f"peak_memory_gb[{excerpt(name)}]", gb) for name, gb in file.peak_memory_gb.items()),
    ):
        if number is not None:
            require_magnitude(PlanFileError, f"predicted.{name}", number)
    bound = None
    if file.lower_bound_ms is not None and file.bound_scope is not None:
        bound = Bound(lower_bound_ms=file.lower_bound_ms, scope=file.bound_scope)
    elif (file.lower_bound_ms, file.bound_scope) != (None, None):
        raise PlanFileError("predicted: lower_bound_ms and bound_scope go together")
    return Prediction(
        iteration_ms=file.iteration_ms,
        bubble_fraction=file.bubble_fraction,
        peak_memory_gb=file.peak_memory_gb,
        schedule_guarantee_ms=file.schedule_guarantee_ms,
        bound=bound,
    )
