"""JSON Schemas of the three formats, made from the types that the readers convert to.

Editors complete and check files with them. A schema is weaker than a reader: whatever it refuses,
the reader refuses too, but a reader also looks at names, sums and sizes across fields.
"""

import dataclasses
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pipeplan.cluster import CLUSTER_FORMAT, Cluster
from pipeplan.documents.inputs import MODEL_FORMAT, Shorthand
from pipeplan.documents.plans import FAMILIES_FORMAT, NULLABLE, PLAN_FORMAT, PlanFile
from pipeplan.errors import InputError
from pipeplan.host_matrix import HostMatrix
from pipeplan.profile import ModelProfile
from pipeplan.validation import (
    BANDWIDTH_GB_PER_S,
    COUNT,
    LATENCY_US,
    MEMORY_GB,
    MICROBATCHES,
    NUM_BYTES,
    OPTIMIZER_RATIO,
    SHARE,
    SHARED_GB_PER_S,
    SPEED,
    TIME_MS,
    Limits,
)

__all__ = ["SCHEMA_KINDS", "json_schema"]

Schema = dict[str, Any]

SCHEMA_KINDS = ("model", "cluster", "plan")
DIALECT = "https://json-schema.org/draft/2020-12/schema"

LIMITS: dict[str, Limits] = {
    "bandwidth_gb_per_s": BANDWIDTH_GB_PER_S,
    "between_hosts_gb_per_s": BANDWIDTH_GB_PER_S,
    "count": COUNT,
    "devices": COUNT,  # of a host group; elsewhere a list
    "gb_per_s": SHARED_GB_PER_S,
    "in_gb_per_s": SHARED_GB_PER_S,
    "latency_us": LATENCY_US,
    "memory_gb": MEMORY_GB,
    "microbatch_size": COUNT,
    "microbatches": MICROBATCHES,
    "optimizer_bytes_per_parameter_byte": OPTIMIZER_RATIO,
    "shares": SHARE,
    "speed": SPEED,
    "uplink_gb_per_s": SHARED_GB_PER_S,
}
"""The limits of a field by its name; those of times and bytes go by the unit at its end."""
UNITS = {"_ms": TIME_MS, "_bytes": NUM_BYTES}
DIAGONAL_IGNORED = ("bandwidth_gb_per_s", "latency_us")
"""In a matrix of these, the diagonal may hold anything, so no number in it has limits."""
FIGURES = ("iteration_ms", "lower_bound_ms", "schedule_guarantee_ms")
"""What a plan predicts: any number that is not negative."""


def json_schema(kind: str) -> Schema:
    """The schema of a `model`, a `cluster` or a `plan` file."""
    if kind == "model":
        schema = _file(ModelProfile, MODEL_FORMAT)
    elif kind == "cluster":
        schema = _cluster()
    elif kind == "plan":
        schema = _plan()
    else:
        raise InputError(f"kind: {kind!r} is not known; known are {', '.join(SCHEMA_KINDS)}")
    return {"$schema": DIALECT, "title": f"pipeplan {kind}", **schema}


def _cluster() -> Schema:
    """Devices with a matrix, or hosts as a shorthand."""
    return {
        "type": "object",
        "if": {"required": ["hosts"]},
        "then": _file(Shorthand, CLUSTER_FORMAT),
        "else": _file(Cluster, CLUSTER_FORMAT),
    }


def _plan() -> Schema:
    schema = _file(PlanFile, PLAN_FORMAT, FAMILIES_FORMAT)
    schema["properties"]["model"] = _file(ModelProfile, MODEL_FORMAT)
    schema["properties"]["cluster"] = _cluster()
    block = {"type": "string", "pattern": "^(0|[1-9][0-9]*)?[FBIW](0|[1-9][0-9]*)$"}
    schema["properties"]["schedule"] = {
        "type": "array",
        "items": {"type": "array", "items": block},
    }
    return schema


def _file(kind: type, *formats: str) -> Schema:
    """The schema of a dataclass as a whole file."""
    schema = _object(kind)
    schema["properties"] = {"format": {"enum": list(formats)}, **schema["properties"]}
    schema["required"] = ["format", *schema["required"]]
    return schema


def _object(kind: Any) -> Schema:
    hints = get_type_hints(kind)
    missing = dataclasses.MISSING
    fields = [field for field in dataclasses.fields(kind) if field.init]
    return {
        "type": "object",
        "properties": {field.name: _field(field.name, hints[field.name]) for field in fields},
        "required": [
            field.name
            for field in fields
            if field.default is missing and field.default_factory is missing
        ],
        "additionalProperties": False,
    }


def _field(name: str, hint: Any) -> Schema:
    schema = _value(name, hint)
    return {"anyOf": [schema, {"type": "null"}]} if name in NULLABLE else schema


def _value(name: str, hint: Any) -> Schema:
    """The schema of a value; its field's name tells the limits of numbers in it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if origin in (Union, UnionType):
        kinds = [kind for kind in arguments if kind not in (NoneType, HostMatrix)]
        schemas = [_value(name, kind) for kind in kinds]
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    if origin is tuple and arguments[-1] is ...:
        return {"type": "array", "items": _entry(name, arguments[0])}
    if origin is tuple:
        return {
            "type": "array",
            "prefixItems": [_value(name, kind) for kind in arguments],
            "minItems": len(arguments),
            "maxItems": len(arguments),
        }
    if origin is dict:
        return {"type": "object", "additionalProperties": _value(name, arguments[1])}
    if dataclasses.is_dataclass(hint):
        return _object(hint)
    if issubclass(hint, StrEnum):
        return {"enum": [choice.value for choice in hint]}
    return _plain(name, hint)


def _entry(name: str, hint: Any) -> Schema:
    """An entry of a list; of a matrix, a row of numbers without limits."""
    if name in DIAGONAL_IGNORED:
        return {"type": "array", "items": {"type": "number"}}
    return _value(name, hint)


def _plain(name: str, hint: type) -> Schema:
    if hint is bool:
        return {"type": "boolean"}
    if hint is str:
        return {"type": "string"}
    schema: Schema = {"type": "integer" if hint is int else "number"}
    limits = LIMITS.get(name) or next(
        (limits for unit, limits in UNITS.items() if name.endswith(unit)), None
    )
    if limits is None or name in FIGURES:
        return schema
    within = {"minimum": limits.least, "maximum": limits.most}
    if limits.may_be_zero and limits.least > 0:
        return {**schema, "anyOf": [{"const": 0}, within]}
    return {**schema, **within}
