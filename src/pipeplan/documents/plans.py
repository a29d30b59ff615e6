"""Plans as documents: from the fields of a file to a plan with its inputs, and back."""

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any, TypeVar

from pipeplan.documents.conversion import convert
from pipeplan.documents.inputs import (
    cluster_document,
    fields_of,
    model_document,
    parse_cluster,
    parse_model,
)
from pipeplan.documents.limits import MAX_DEPTH
from pipeplan.documents.orders import block_texts, parse_group_orders, parse_stage_orders
from pipeplan.documents.text import excerpt, nearest
from pipeplan.errors import InputError, PlanFileError
from pipeplan.pipeline import (
    Bound,
    BoundLimit,
    BoundScope,
    Plan,
    Prediction,
    Schedule,
    Stage,
    groups_of,
)
from pipeplan.profile import ModelProfile
from pipeplan.validation import MAX_BLOCKS, MICROBATCHES, require_count, require_plan_size

__all__ = ["PlanFile", "parse_plan", "plan_document"]

PLAN_FORMAT = "pipeplan.plan/1"
FAMILIES_FORMAT = "pipeplan.plan/2"
NULLABLE = ("lower_bound_ms", "bound_scope", "schedule_guarantee_ms")
"""The predicted figures that a planner may leave open."""
MAX_OPTION_BITS = 3000
"""Of whole numbers in the options; readers take about 1,000 digits."""

T = TypeVar("T")


def plan_document(plan: Plan) -> dict[str, Any]:
    """The plan as the file holds it; one that no file can hold is refused."""
    require_plan_size(len(plan.stages), plan.microbatches)
    _require_few_blocks(plan.schedule)
    _require_json_options(plan.options)
    uses_families = plan.uses_families
    names = [device.name for device in plan.cluster.devices]
    document: dict[str, Any] = {
        "format": FAMILIES_FORMAT if uses_families else PLAN_FORMAT,
        "planner": plan.planner,
        "options": plan.options,
        "seed": plan.seed,
        "version": plan.version,
        "microbatches": plan.microbatches,
        "stages": [_stage_document(stage, names) for stage in plan.stages],
        **({"shard_optimizer": True} if plan.shard_optimizer else {}),
        "schedule": block_texts(plan.schedule, plan.groups),
    }
    if plan.predicted is not None:
        predicted, bound = plan.predicted, plan.predicted.bound
        document["predicted"] = {
            "iteration_ms": predicted.iteration_ms,
            "lower_bound_ms": bound and bound.lower_bound_ms,
            "bound_scope": bound and _written_scope(bound.scope, uses_families),
            **({"bound_limits": list(bound.limits)} if bound and bound.limits else {}),
            "schedule_guarantee_ms": predicted.schedule_guarantee_ms,
            "bubble_fraction": predicted.bubble_fraction,
            "peak_memory_gb": predicted.peak_memory_gb,
        }
    document["model"] = model_document(plan.model)
    document["cluster"] = cluster_document(plan.cluster)
    return document


def _written_scope(scope: BoundScope, uses_families: bool) -> BoundScope:
    """The scope in the words of the plan's version.

    Version 1 does not know families. What holds for them holds for the plans with even shares that
    it knows.
    """
    if scope is BoundScope.FAMILIES and not uses_families:
        return BoundScope.EVEN_SHARES
    return scope


def _require_few_blocks(schedule: Schedule) -> None:
    if schedule.num_blocks > MAX_BLOCKS:
        raise PlanFileError(
            f"schedule: {schedule.num_blocks:,} blocks are more than the {MAX_BLOCKS:,} that a plan"
            " may have; use fewer microbatches or whole backwards"
        )


def _require_json_options(options: dict[str, Any]) -> None:
    """Refuse options that a file cannot hold, or not as they are."""
    level: list[Any] = [options]
    for _ in range(MAX_DEPTH - 1):  # the plan itself is the outermost level
        inner: dict[int, Any] = {}  # by identity: the same list may stand in many places
        for container in level:
            if isinstance(container, dict):
                _require_text_keys(container)
                container = container.values()
            for entry in container:
                if isinstance(entry, dict | list | tuple):
                    inner[id(entry)] = entry
                else:
                    _require_json_value(entry)
        level = list(inner.values())
    if level:
        raise PlanFileError(f"options: is nested deeper than a file may be, {MAX_DEPTH} levels")


def _require_text_keys(options: dict[Any, Any]) -> None:
    for key in options:
        if not isinstance(key, str):
            raise PlanFileError(f"options: the key {excerpt(key)} is not text")


def _require_json_value(value: Any) -> None:
    if value is None or isinstance(value, str | bool):
        return
    if isinstance(value, numbers.Integral):
        if int(value).bit_length() > MAX_OPTION_BITS:
            raise PlanFileError("options: holds a number with too many digits")
    elif not isinstance(value, numbers.Real):
        raise PlanFileError(f"options: holds {excerpt(value)}, which JSON cannot say")
    elif not math.isfinite(value):
        raise PlanFileError("options: holds a number that is not finite")


def _stage_document(stage: Stage, names: list[str]) -> dict[str, Any]:
    document: dict[str, Any] = {
        "layers": [stage.layers.start, stage.layers.stop],
        "devices": [names[device] for device in stage.devices],
    }
    if stage.shares is not None:
        document["shares"] = stage.shares
    if stage.recompute:
        document["recompute"] = True
    if stage.gradient_buckets > 1:
        document["gradient_buckets"] = stage.gradient_buckets
    return document


# ---------------------------------------------------------------------------- reading


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageFile:
    layers: tuple[int, int]
    devices: tuple[str, ...]
    shares: tuple[float, ...] | None = None
    recompute: bool = False
    gradient_buckets: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PredictedFile:
    iteration_ms: float
    bubble_fraction: float
    peak_memory_gb: dict[str, float]
    lower_bound_ms: float | None = None
    bound_scope: BoundScope | None = None
    bound_limits: tuple[BoundLimit, ...] = ()
    schedule_guarantee_ms: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A plan file; its two inputs and its schedule have readers of their own."""

    model: Any
    cluster: Any
    microbatches: int
    stages: tuple[StageFile, ...]
    schedule: Any
    planner: str
    predicted: PredictedFile | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0
    version: str = ""
    shard_optimizer: bool = False


def parse_plan(document: Any) -> Plan:
    """The plan that a document holds, with the inputs embedded in it."""
    fields = fields_of(document, PLAN_FORMAT, FAMILIES_FORMAT)
    if document["format"] == PLAN_FORMAT:
        _require_version_1(fields)
    file = convert(fields, PlanFile, may_be_null=NULLABLE)
    model = _within("model", parse_model, file.model)
    cluster = _within("cluster", parse_cluster, file.cluster)
    require_count(PlanFileError, "microbatches", file.microbatches, MICROBATCHES)
    if not file.stages:
        raise PlanFileError("stages: is empty; a plan has at least one stage")
    require_plan_size(len(file.stages), file.microbatches)
    _require_json_options(file.options)
    index_of = {device.name: index for index, device in enumerate(cluster.devices)}
    stages = tuple(
        _parse_stage(stage, f"stages[{index}]", model, index_of)
        for index, stage in enumerate(file.stages)
    )
    if document["format"] == PLAN_FORMAT:
        _require_sets_once(stages, names=[device.name for device in cluster.devices])
        schedule = parse_stage_orders(file.schedule, file.microbatches)
    else:
        _require_groups(file.stages)
        schedule = parse_group_orders(file.schedule, file.microbatches, groups_of(stages))
    _require_few_blocks(schedule)
    return Plan(
        model=model,
        cluster=cluster,
        microbatches=file.microbatches,
        stages=stages,
        schedule=schedule,
        planner=file.planner,
        predicted=None if file.predicted is None else _parse_predicted(file.predicted),
        options=file.options,
        seed=file.seed,
        version=file.version,
        shard_optimizer=file.shard_optimizer,
    )


def _require_version_1(fields: dict[str, Any]) -> None:
    """Refuse what only the second version of plans has, and say so."""
    found = ["shard_optimizer"] if "shard_optimizer" in fields else []
    stages, predicted = fields.get("stages"), fields.get("predicted")
    for index, stage in enumerate(stages if isinstance(stages, list) else []):
        if isinstance(stage, dict) and "gradient_buckets" in stage:
            found.append(f"stages[{index}].gradient_buckets")
    if isinstance(predicted, dict) and predicted.get("bound_scope") == BoundScope.FAMILIES:
        found.append("predicted.bound_scope: 'families'")
    if found:
        raise PlanFileError(
            f"{found[0]}: is not part of {PLAN_FORMAT!r}; the format that has it is"
            f" {FAMILIES_FORMAT!r}"
        )


def _require_groups(stages: tuple[StageFile, ...]) -> None:
    """Refuse stages that have some devices in common, but not all."""
    stage_of: dict[str, int] = {}
    for index, stage in enumerate(stages):
        for name in stage.devices:
            first = stage_of.setdefault(name, index)
            if first != index and set(stages[first].devices) != set(stage.devices):
                raise PlanFileError(
                    f"stages[{index}].devices: {excerpt(name)} also serves stages[{first}], but"
                    " not all devices of the two are the same; give both the same set, or two"
                    " without a common device"
                )


def _require_sets_once(stages: tuple[Stage, ...], names: list[str]) -> None:
    """Refuse two stages on one set of devices, which only the second version allows."""
    first_on: dict[frozenset[int], int] = {}
    for index, stage in enumerate(stages):
        first = first_on.setdefault(frozenset(stage.devices), index)
        if first != index:
            raise PlanFileError(
                f"stages[{index}].devices: {excerpt(names[stage.devices[0]])} already serves"
                f" stage {first}; several stages a device need format {FAMILIES_FORMAT!r}"
            )


def _within(path: str, parse: Callable[[Any], T], document: Any) -> T:
    """What `parse` makes of a part of the file; its errors get the path to that part."""
    try:
        return parse(document)
    except InputError as error:
        raise InputError(f"{path}.{error}") from None


def _parse_stage(
    file: StageFile, path: str, model: ModelProfile, index_of: dict[str, int]
) -> Stage:
    first, end = file.layers
    if not 0 <= first < end <= model.num_layers:
        raise PlanFileError(
            f"{path}.layers: [{first}, {end}] is no range within 0..{model.num_layers}"
        )
    seen: set[str] = set()
    for position, name in enumerate(file.devices):
        if name not in index_of:
            raise PlanFileError(
                f"{path}.devices[{position}]: {excerpt(name)} is not in the cluster"
                f"{nearest(name, list(index_of)[:1000])}"
            )
        if name in seen:
            raise PlanFileError(
                f"{path}.devices: {excerpt(name)} stands twice; a device already serves its stage"
            )
        seen.add(name)
    if not file.devices:
        raise PlanFileError(f"{path}.devices: is empty; a stage runs on at least one device")
    try:
        return Stage(
            layers=range(first, end),
            devices=tuple(index_of[name] for name in file.devices),
            shares=file.shares,
            recompute=file.recompute,
            gradient_buckets=file.gradient_buckets,
        )
    except InputError as problem:
        raise PlanFileError(f"{path}.{problem}") from None


def _parse_predicted(file: PredictedFile) -> Prediction:
    bound = None
    try:
        if file.lower_bound_ms is not None and file.bound_scope is not None:
            bound = Bound(
                lower_bound_ms=file.lower_bound_ms,
                scope=file.bound_scope,
                limits=file.bound_limits,
            )
        elif (file.lower_bound_ms, file.bound_scope) != (None, None):
            raise PlanFileError("lower_bound_ms and bound_scope go together")
        elif file.bound_limits:
            raise PlanFileError("bound_limits: are those of a bound, but lower_bound_ms is null")
        return Prediction(
            iteration_ms=file.iteration_ms,
            bubble_fraction=file.bubble_fraction,
            peak_memory_gb=file.peak_memory_gb,
            schedule_guarantee_ms=file.schedule_guarantee_ms,
            bound=bound,
        )
    except PlanFileError as problem:
        raise PlanFileError(f"predicted.{problem}") from None
