"""`graph.txt` of PipeDream's profiler, which DAPPLE and its planner HPGO use too.

Each node has a line, and so has each edge::

    node2 -- Conv2d(3, 64) -- forward_compute_time=3.4, backward_compute_time=6.8,
             activation_size=[384000000.0; 4004.0], parameter_size=6835.000 -- stage_id=0
        node1 -- node2

(The node's line is broken here only.) Times are milliseconds, sizes bytes of one microbatch. An
activation of several tensors is a list. Input nodes (`Input`, `Input0`, ...) cost nothing.
"""

import math
import re
from dataclasses import replace

from pipeplan.documents.text import excerpt
from pipeplan.errors import InputError
from pipeplan.interop.dags import Edge, Node, chain_of
from pipeplan.interop.imported import Imported, ImportSettings
from pipeplan.interop.source_text import number_in
from pipeplan.profile import ModelProfile

__all__ = ["is_pipedream_graph", "read_pipedream_graph"]

SEPARATOR = " -- "
FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
INPUT = re.compile(r"Input[0-9]*", re.ASCII)


def is_pipedream_graph(text: str) -> bool:
    """Whether this looks like a `graph.txt`."""
    first = next(line for line in text.splitlines() if line.strip())
    return SEPARATOR in first and f"{SEPARATOR}{FIELDS[0]}=" in text  # edges may come first


def read_pipedream_graph(text: str, settings: ImportSettings) -> Imported:
    """The model whose graph a `graph.txt` holds."""
    nodes: dict[str, Node] = {}
    arrows: list[tuple[int, str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        tokens = line.strip().split(SEPARATOR)
        if not line.strip():
            continue
        if len(tokens) == 2:
            arrows.append((number, tokens[0].strip(), tokens[1].strip()))
            continue
        node = _node(tokens, f"line {number}")
        if node.label in nodes:
            raise InputError(f"line {number}: {excerpt(node.label)} is there already")
        nodes[node.label] = node
    if not nodes:
        raise InputError("there is no node; each has a line 'node1 -- NAME -- forward_compute_...'")
    free, dropped = _without_input_costs(nodes, {target for _, _, target in arrows})
    layers = chain_of(free, _edges(nodes, arrows))
    notes = []
    if dropped:
        notes.append(f"input nodes cost nothing: {', '.join(dropped)} had times or parameters")
    if settings.microbatch_size is None:
        notes.append("the file has no microbatch size, 1 is assumed; give --microbatch-size")
    model = ModelProfile(
        name=settings.name, microbatch_size=settings.microbatch_size or 1, layers=layers
    )
    return Imported(result=model, notes=tuple(notes))


def _node(tokens: list[str], where: str) -> Node:
    """The node that a line holds; a description may hold the separator, too."""
    numbers = next((i for i, token in enumerate(tokens) if token.startswith(f"{FIELDS[0]}=")), 0)
    if numbers < 2:
        raise InputError(f"{where}: is neither a node nor an edge; a node has {FIELDS[0]}=...")
    given = dict(part.partition("=")[::2] for part in tokens[numbers].split(", "))
    for field in FIELDS:
        if field not in given:
            raise InputError(f"{where}: {field} is missing")
    forward_ms, backward_ms, activation_bytes, parameter_bytes = (
        _sum_in(given[field], f"{where}: {field}") for field in FIELDS
    )
    return Node(
        label=tokens[0].strip(),
        name=SEPARATOR.join(tokens[1:numbers]).strip(),
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        parameter_bytes=parameter_bytes,
        activation_bytes=activation_bytes,
    )


def _sum_in(text: str, where: str) -> float:
    """A number, or the sum of a list `[1.0; 2.0]`."""
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        return math.fsum(number_in(part, where) for part in inner[1:-1].split(";"))
    return number_in(inner, where)


def _without_input_costs(nodes: dict[str, Node], targets: set[str]) -> tuple[list[Node], list[str]]:
    """The nodes, inputs without costs; the labels of those that had any."""
    free, dropped = [], []
    for node in nodes.values():
        is_input = INPUT.fullmatch(node.name) and node.label not in targets
        if is_input and (node.forward_ms or node.backward_ms or node.parameter_bytes):
            dropped.append(excerpt(node.label))
            node = replace(node, forward_ms=0.0, backward_ms=0.0, parameter_bytes=0.0)
        free.append(node)
    return free, dropped


def _edges(nodes: dict[str, Node], arrows: list[tuple[int, str, str]]) -> list[Edge]:
    index = {label: position for position, label in enumerate(nodes)}
    edges = []
    for number, source, target in arrows:
        for label in (source, target):
            if label not in index:
                raise InputError(f"line {number}: there is no node {excerpt(label)}")
        edges.append(
            Edge(
                source=index[source],
                target=index[target],
                num_bytes=nodes[source].activation_bytes,
            )
        )
    return edges
