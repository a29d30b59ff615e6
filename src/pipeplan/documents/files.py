"""The three versioned file formats, read and written: model, cluster, plan (docs/formats.md).

Reading refuses what the formats do not allow, with the path to the field. Writing is atomic: an
interrupted run leaves the old file or the new one. What was read is written back in
the form it was given; a cluster in shorthand stays in shorthand.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pipeplan.cluster import Cluster
from pipeplan.documents.inputs import cluster_document, model_document, parse_cluster, parse_model
from pipeplan.documents.json_text import to_json
from pipeplan.documents.plans import parse_plan, plan_document
from pipeplan.documents.syntax import read_document, require_readable_at
from pipeplan.documents.writing import STANDARD_STREAM, write_atomically
from pipeplan.errors import ClusterError, InputError, PlanFileError, ProfileError
from pipeplan.pipeline import GroupTimeline, Plan, Timeline
from pipeplan.profile import ModelProfile

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

T = TypeVar("T")


def read_model(path: str | Path) -> ModelProfile:
    """The model profile in a `pipeplan.model/1` file, JSON or YAML."""
    return _read(path, parse_model, ProfileError)


def read_cluster(path: str | Path) -> Cluster:
    """The cluster in a `pipeplan.cluster/1` file, JSON or YAML, shorthand expanded.

    Examples:
        >>> import pipeplan as pp
        >>> pp.write_cluster(pp.zoo.cluster("4x2-10g"), "mine.cluster.yaml")
        >>> pp.read_cluster("mine.cluster.yaml")
        <Cluster '4x2-10g': devices 8, hosts 4, shared links 4>
    """
    return _read(path, parse_cluster, ClusterError)


def read_plan(path: str | Path) -> Plan:
    """The plan in a `pipeplan.plan/1` or `/2` file, with the inputs embedded in it."""
    return _read(path, parse_plan, PlanFileError)


def write_model(model: ModelProfile, path: str | Path) -> None:
    """Write a model profile, in the form it was given if it was read."""
    _write(path, lambda: model_document(model))


def write_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster, in the form it was given if it was read."""
    _write(path, lambda: cluster_document(cluster))


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan together with its inputs.

    Examples:
        >>> import pipeplan as pp
        >>> plan = pp.plan(pp.zoo.model("vgg19"), pp.zoo.cluster("4x2-10g"), planner="spp")
        >>> pp.write_plan(plan, "vgg19.plan.json")
        >>> pp.read_plan("vgg19.plan.json") == plan
        True
    """
    _write(path, lambda: plan_document(plan))


def timeline_document(timeline: Timeline | GroupTimeline) -> dict[str, Any]:
    """A timeline for machines: every block, transfer and all-reduce with its times.

    That of a plan with groups says the part of each all-reduce, too.
    """
    all_reduces = [dataclasses.asdict(reduce) for reduce in timeline.all_reduces]
    if isinstance(timeline, Timeline):
        for reduce in all_reduces:
            del reduce["part"]
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
        "all_reduces": all_reduces,
    }


def _read(path: str | Path, parse: Callable[[Any], T], error: type[InputError]) -> T:
    """What `parse` makes of a file; errors name the file, and are of the file's kind."""
    document = read_document(path, error, pack_schedule=error is PlanFileError)
    try:
        return parse(document)
    except InputError as problem:
        raise error(f"{_name(path)}: {_short(str(problem))}") from None


def _write(path: str | Path, make_document: Callable[[], dict[str, Any]]) -> None:
    """Write a document, unless it is too large to be read again."""
    try:
        data = require_readable_at(path, to_json(make_document()))
    except UnicodeError:
        raise InputError(f"{path}: cannot be written: a name holds half a character") from None
    except InputError as problem:
        raise type(problem)(f"{path}: cannot be written: {_short(str(problem))}") from None
    write_atomically(path, data)


def _short(message: str) -> str:
    """A message that may quote names of any length."""
    return message if len(message) <= 400 else f"{message[:397]}..."


def _name(path: str | Path) -> str:
    return "standard input" if str(path) == STANDARD_STREAM else str(path)
