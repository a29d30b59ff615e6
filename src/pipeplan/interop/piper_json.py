"""The JSON input of Piper (Tarnawski et al. 2021): a graph of layers with times in seconds.

Of each node's `TMPCs` (ways to run it) the first one without tensor parallelism, `"1"`, counts.
Piper gives one time for forward and backward together; a third of it is taken for the forward.
"""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from pipeplan.documents.text import excerpt
from pipeplan.errors import InputError
from pipeplan.interop.dags import Edge, Node, chain_of
from pipeplan.interop.imported import Imported, ImportSettings
from pipeplan.interop.source_text import json_in
from pipeplan.profile import ModelProfile
from pipeplan.validation import require_figure

__all__ = ["read_piper_json"]

DIGITS = Decimal("1e-9")
"""Forward times are rounded to this, so that forward and backward sum to the file's time."""
SPLIT_NOTE = "the file has one time for forward and backward, a third is taken for the forward"


def read_piper_json(text: str, settings: ImportSettings) -> Imported:
    """The model that one of Piper's inputs holds; its devices and bandwidth are left out."""
    document = json_in(text)
    if not isinstance(document, dict):
        raise InputError("holds no object with nodes and edges")
    index: dict[str, int] = {}
    nodes = []
    for position, entry in enumerate(_list_in(document, "nodes", "")):
        path = f"nodes[{position}]"
        label = _identity(_entry(entry, "id", path), f"{path}.id")
        if label in index:
            raise InputError(f"{path}.id: {excerpt(label)} is taken by nodes[{index[label]}]")
        index[label] = position
        nodes.append(_node(entry, label, path))
    if not nodes:
        raise InputError("nodes: is empty; a model has at least one layer")
    edges = [
        _edge(entry, index, f"edges[{position}]")
        for position, entry in enumerate(_list_in(document, "edges", ""))
    ]
    notes = [SPLIT_NOTE]
    if settings.microbatch_size is None:
        notes.append("times are taken to be of one sample; else give --microbatch-size")
    elif settings.microbatch_size > 1:
        notes.append(
            f"times and sizes are taken to be of {settings.microbatch_size} samples together, as"
            " they stand in the file: timePerSample is not multiplied"
        )
    model = ModelProfile(
        name=settings.name,
        microbatch_size=settings.microbatch_size or 1,
        layers=chain_of(nodes, edges),
    )
    return Imported(result=model, notes=tuple(notes))


def _node(entry: Any, label: str, path: str) -> Node:
    ways = _entry(entry, "TMPCs", path)
    alone = _list_in(ways, "1", f"{path}.TMPCs")
    if not alone:
        raise InputError(f"{path}.TMPCs.1: is empty; give the layer without tensor parallelism")
    way, path = alone[0], f"{path}.TMPCs.1[0]"
    total_ms = Decimal(repr(_number(way, "timePerSample", path))) * 1000
    forward_ms = (total_ms / 3).quantize(DIGITS) if total_ms < 10**15 else total_ms / 3
    return Node(
        label=f"node {label}",
        name=str(entry.get("name", "")) or f"node{label}",
        forward_ms=float(forward_ms),
        backward_ms=float(total_ms - forward_ms),
        parameter_bytes=_number(way, "parameterSize", path),
        activation_bytes=_number(way, "memoryUsageA", path),
    )


def _edge(entry: Any, index: Mapping[str, int], path: str) -> Edge:
    ends = []
    for field in ("sourceId", "destId"):
        label = _identity(_entry(entry, field, path), f"{path}.{field}")
        if label not in index:
            raise InputError(f"{path}.{field}: there is no node {excerpt(label)}")
        ends.append(index[label])
    num_bytes = _number(entry, "communicationCost", path)
    return Edge(source=ends[0], target=ends[1], num_bytes=num_bytes)


def _entry(holder: Any, field: str, path: str) -> Any:
    """One field of an object, which has to be there."""
    where = f"{path}.{field}" if path else field
    if not isinstance(holder, dict):
        raise InputError(f"{path or 'the file'}: is not an object")
    if field not in holder:
        raise InputError(f"{where}: is missing")
    return holder[field]


def _list_in(holder: Any, field: str, path: str) -> list[Any]:
    value = _entry(holder, field, path)
    if not isinstance(value, list):
        raise InputError(f"{path}.{field}: is not a list" if path else f"{field}: is not a list")
    return value


def _number(holder: Any, field: str, path: str) -> float:
    value = _entry(holder, field, path)
    require_figure(InputError, f"{path}.{field}", value)
    try:
        return float(value)
    except OverflowError:
        raise InputError(f"{path}.{field}: is too large a number") from None


def _identity(value: Any, path: str) -> str:
    """A node's id, a number or a text, as text."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InputError(f"{path}: {excerpt(value)} is neither a whole number nor text")
    return excerpt(value) if isinstance(value, int) else value
