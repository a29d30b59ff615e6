"""The three versioned file formats, read and written: model, cluster, plan (docs/formats.md).

Reading refuses what the formats do not allow, with the path to the field. Writing is atomic: an
interrupted run leaves the old file or the new one. What was read is written back in
the form it was given; a cluster in shorthand stays in shorthand.
"""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pipeplan.cluster import Cluster, Device, Duplex, HostGroup, Matrix, expand_hosts
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
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.spelling import nearest
from pipeplan.syntax import read_document, to_json, write_atomically

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

BLOCK_TEXT = re.compile(r"([FB])(0|[1-9][0-9]{0,8})")

T = TypeVar("T")


def read_model(path: str | Path) -> ModelProfile:
    """The model profile in a `pipeplan.model/1` file, JSON or YAML."""
    document = read_document(path, ProfileError)
    with _naming(path, ProfileError):
        return _parse_model(document)


def read_cluster(path: str | Path) -> Cluster:
    """The cluster in a `pipeplan.cluster/1` file, JSON or YAML, shorthand expanded."""
    document = read_document(path, ClusterError)
    with _naming(path, ClusterError):
        return _parse_cluster(document)


def read_plan(path: str | Path) -> Plan:
    """The plan in a `pipeplan.plan/1` file, with the inputs embedded in it."""
    document = read_document(path, PlanFileError)
    with _naming(path, PlanFileError):
        return _parse_plan(document)


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


# ---------------------------------------------------------------------------- reading


def _parse_model(document: Any) -> ModelProfile:
    fields = _require_format(document, MODEL_FORMAT, _file_fields(ModelProfile))
    _refuse_unknown_in_list(fields, "layers", _file_fields(LayerProfile))
    model = _convert(fields, ModelProfile)
    object.__setattr__(model, "document", document)
    return model


def _parse_cluster(document: Any) -> Cluster:
    shorthand = isinstance(document, dict) and "hosts" in document
    form = _Shorthand if shorthand else Cluster
    fields = _require_format(document, CLUSTER_FORMAT, _file_fields(form))
    if shorthand:
        _refuse_unknown_in_list(fields, "hosts", _file_fields(HostGroup))
        short = _convert(fields, _Shorthand)
        cluster = expand_hosts(
            short.name,
            short.hosts,
            between_hosts_gb_per_s=short.between_hosts_gb_per_s,
            latency_us=short.latency_us,
            duplex=short.duplex,
        )
    else:
        _refuse_unknown_in_list(fields, "devices", _file_fields(Device))
        cluster = _convert(fields, Cluster)
    object.__setattr__(cluster, "document", document)
    return cluster


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
    """A plan file without its two inputs."""

    microbatches: int
    stages: tuple[_StageFile, ...]
    schedule: tuple[tuple[str, ...], ...]
    planner: str
    predicted: _PredictedFile | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0
    version: str = ""


def _parse_plan(document: Any) -> Plan:
    known = (*_file_fields(_PlanFile), "model", "cluster")
    fields = _require_format(document, PLAN_FORMAT, known)
    for name in ("model", "cluster"):
        if name not in fields:
            raise PlanFileError(f"{name}: is missing; a plan embeds its inputs")
    model = _within("model", _parse_model, fields.pop("model"))
    cluster = _within("cluster", _parse_cluster, fields.pop("cluster"))
    _refuse_unknown_in_list(fields, "stages", _file_fields(_StageFile))
    if isinstance(fields.get("predicted"), dict):
        _refuse_unknown(fields["predicted"], _file_fields(_PredictedFile), "predicted.")
    file = _convert(fields, _PlanFile)
    if file.microbatches < 1:
        raise PlanFileError(f"microbatches: {file.microbatches} is not at least 1")
    if not file.stages:
        raise PlanFileError("stages: is empty; a plan has at least one stage")
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
                tuple(
                    _parse_block(text, stage, f"schedule[{stage}][{position}]")
                    for position, text in enumerate(order)
                )
                for stage, order in enumerate(file.schedule)
            )
        ),
        planner=file.planner,
        predicted=None if file.predicted is None else _parse_predicted(file.predicted),
        options=file.options,
        seed=file.seed,
        version=file.version,
    )


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
                f"{path}.devices[{position}]: {name!r} is not in the cluster"
                f"{nearest(name, list(index_of)[:1000])}"
            )
    if not file.devices:
        raise PlanFileError(f"{path}.devices: is empty; a stage runs on at least one device")
    return Stage(
        layers=range(first, end),
        devices=tuple(index_of[name] for name in file.devices),
        shares=file.shares,
        recompute=file.recompute,
    )


def _parse_block(text: str, stage: int, path: str) -> Block:
    match = BLOCK_TEXT.fullmatch(text)
    if not match:
        raise PlanFileError(f"{path}: {text[:20]!r} is no block; write F0 or B0")
    return Block(Kind(match[1]), stage, int(match[2]))


def _parse_predicted(file: _PredictedFile) -> Prediction:
    if (file.lower_bound_ms is None) != (file.bound_scope is None):
        raise PlanFileError("predicted: lower_bound_ms and bound_scope go together")
    return Prediction(
        iteration_ms=file.iteration_ms,
        bubble_fraction=file.bubble_fraction,
        peak_memory_gb=file.peak_memory_gb,
        schedule_guarantee_ms=file.schedule_guarantee_ms,
        bound=None
        if file.lower_bound_ms is None or file.bound_scope is None
        else Bound(lower_bound_ms=file.lower_bound_ms, scope=file.bound_scope),
    )


# ------------------------------------------------------------- errors with their path


def _convert(fields: dict[str, Any], kind: type[T]) -> T:
    """The noun that these fields make; errors say which field and which value."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise InputError(_explain(str(error), fields)) from None


def _explain(message: str, fields: dict[str, Any]) -> str:
    """`layers[3].forward_ms: -1 is negative`, from msgspec's message."""
    text, _, path = message.partition(" - at `$")
    path = path.removesuffix("`").removeprefix(".").replace("[...]", "")
    missing = re.fullmatch(r"Object missing required field `(\w+)`", text)
    if missing:
        return f"{_join(path, missing[1])}: is missing"
    if text.startswith(("Expected", "Invalid")):
        text = text.replace("`", "").replace("Expected", "expected").replace("Invalid", "invalid")
        value = _value_at(fields, path)
        return f"{path}: {text}" if value is None else f"{path}: {value} is wrong: {text}"
    return _join(path, text)


def _value_at(fields: Any, path: str) -> str | None:
    """The scalar at a path, as short text; None for what has no short text."""
    for key, index in re.findall(r"(\w+)|\[(\d+)\]", path):
        try:
            fields = fields[key] if key else fields[int(index)]
        except (KeyError, IndexError, TypeError):
            return None
    if isinstance(fields, dict | list):
        return None
    text = msgspec.json.encode(fields).decode()
    return text if len(text) <= 40 else f"{text[:37]}..."


def _require_format(document: Any, expected: str, known: tuple[str, ...]) -> dict[str, Any]:
    """The fields besides `format`, which has to be the expected one."""
    if not isinstance(document, dict):
        raise InputError(f"format: a file holds one object with format {expected!r}")
    if document.get("format") != expected:
        found = "is missing" if "format" not in document else f"{document['format']!r:.60}"
        raise InputError(f"format: {found}; this reader takes {expected!r}")
    fields = {name: value for name, value in document.items() if name != "format"}
    _refuse_unknown(fields, known, "")
    return fields


def _refuse_unknown_in_list(fields: dict[str, Any], name: str, known: tuple[str, ...]) -> None:
    entries = fields.get(name)
    if isinstance(entries, list):
        for index, entry in enumerate(entries):
            if isinstance(entry, dict):
                _refuse_unknown(entry, known, f"{name}[{index}].")


def _refuse_unknown(fields: dict[str, Any], known: tuple[str, ...], path: str) -> None:
    for name in fields:
        if name not in known:
            raise InputError(f"{path}{name[:60]}: is no known field{nearest(name, known)}")


def _file_fields(kind: Any) -> tuple[str, ...]:
    """The names that a file may use: all that the noun is made from."""
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)


def _within(path: str, parse: Callable[[Any], T], document: Any) -> T:
    """What `parse` makes of a part of the file; its errors get the path to that part."""
    try:
        return parse(document)
    except InputError as error:
        raise InputError(f"{path}.{error}") from None


class _naming:
    """Errors inside name the file, and are of the file's kind."""

    def __init__(self, path: str | Path, error: type[InputError]) -> None:
        self._path, self._error = path, error

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, problem: BaseException | None, traceback: Any) -> None:
        if isinstance(problem, InputError):
            raise self._error(f"{self._path}: {problem}") from None


def _join(path: str, rest: str) -> str:
    return f"{path}.{rest}" if path else rest


# ---------------------------------------------------------------------------- writing


def _without_defaults(noun: Any) -> dict[str, Any]:
    """The fields of a noun that differ from their defaults."""
    return {
        field.name: getattr(noun, field.name)
        for field in dataclasses.fields(noun)
        if field.init and getattr(noun, field.name) != field.default
    }
