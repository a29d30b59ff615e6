"""From a graph of operations to a chain of layers, which is what a model profile holds.

The chain is a topological order: of the nodes whose inputs are all there, the first in the file
comes next. A cut behind a layer is crossed by the outputs of all earlier nodes that a later node
needs, each counted once, however many later nodes need it::

    a ──► b ──► d        order a b c d
    └───► c ────┘        behind b: the outputs of a (for c) and b (for d)

O((nodes + edges) log nodes).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heapify, heappop, heappush

from pipeplan.documents.text import excerpt
from pipeplan.errors import InputError, ProfileError
from pipeplan.profile import LayerProfile

__all__ = ["Edge", "Node", "chain_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operation of a graph, and what it costs for one microbatch."""

    label: str
    """How the file calls it, for messages: `node7`."""
    name: str
    forward_ms: float
    backward_ms: float
    parameter_bytes: float
    activation_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One operation needs the output of another one; both are indices of nodes."""

    source: int
    target: int
    num_bytes: float


def chain_of(nodes: Sequence[Node], edges: Sequence[Edge]) -> tuple[LayerProfile, ...]:
    """The layers of the graph in topological order; a graph with a cycle is refused."""
    order = _topological_order(nodes, edges)
    crossing = _bytes_behind(order, edges)
    names = _unique(nodes[index].name or nodes[index].label for index in order)
    return tuple(
        _layer(nodes[index], name, num_bytes)
        for index, name, num_bytes in zip(order, names, crossing, strict=True)
    )


def _layer(node: Node, name: str, output_bytes: float) -> LayerProfile:
    try:
        return LayerProfile(
            name=name,
            forward_ms=node.forward_ms,
            backward_ms=node.backward_ms,
            output_bytes=output_bytes,
            parameter_bytes=node.parameter_bytes,
            activation_bytes=node.activation_bytes,
        )
    except ProfileError as problem:
        raise ProfileError(f"{excerpt(node.label)}: {problem}") from None


def _topological_order(nodes: Sequence[Node], edges: Sequence[Edge]) -> list[int]:
    targets: list[list[int]] = [[] for _ in nodes]
    num_missing = [0] * len(nodes)
    for edge in edges:
        targets[edge.source].append(edge.target)
        num_missing[edge.target] += 1
    ready = [index for index, missing in enumerate(num_missing) if not missing]
    heapify(ready)
    order = []
    while ready:
        index = heappop(ready)
        order.append(index)
        for target in targets[index]:
            num_missing[target] -= 1
            if not num_missing[target]:
                heappush(ready, target)
    if len(order) < len(nodes):
        raise InputError(f"edges: {_cycle(nodes, edges, set(order))} form a cycle; break it")
    return order


def _cycle(nodes: Sequence[Node], edges: Sequence[Edge], done: set[int]) -> str:
    """The nodes of one cycle, in words: walk backward among the nodes that never became ready."""
    source_of = {edge.target: edge.source for edge in edges if edge.source not in done}
    index = next(iter(sorted(source_of)))
    seen: dict[int, int] = {}
    while index not in seen:
        seen[index] = len(seen)
        index = source_of[index]
    circle = [node for node, position in seen.items() if position >= seen[index]][::-1]
    first = circle.index(min(circle))
    labels = [excerpt(nodes[node].label) for node in (*circle[first:], *circle[:first])]
    shown = labels if len(labels) <= 6 else [*labels[:5], f"{len(labels) - 5} more"]
    return ", ".join(shown)


def _bytes_behind(order: Sequence[int], edges: Iterable[Edge]) -> list[float]:
    """For each place in the order the bytes that cross a cut right behind it."""
    place = {index: position for position, index in enumerate(order)}
    uses: dict[int, list[tuple[int, Fraction]]] = {}
    for edge in edges:
        use = (place[edge.target], Fraction(edge.num_bytes))
        uses.setdefault(place[edge.source], []).append(use)
    # Exact numbers: what is added at one cut is subtracted at a later one.
    change = [Fraction(0)] * (len(order) + 1)
    for source, consumers in uses.items():
        largest = Fraction(0)
        for target, num_bytes in sorted(consumers, reverse=True):
            if num_bytes > largest:  # up to `target`, this many bytes more have to cross
                change[source] += num_bytes - largest
                change[target] -= num_bytes - largest
                largest = num_bytes
    crossing, total = [], Fraction(0)
    for position in range(len(order)):
        total += change[position]
        crossing.append(float(total))
    return crossing


def _unique(names: Iterable[str]) -> list[str]:
    """The names, with `#2`, `#3`, ... behind those that stand several times."""
    taken: set[str] = set()
    count: dict[str, int] = {}
    unique = []
    for name in names:
        number = count.get(name, 0) + 1
        fresh = name if number == 1 else f"{name}#{number}"
        while fresh in taken:
            number += 1
            fresh = f"{name}#{number}"
        count[name] = number
        taken.add(fresh)
        unique.append(fresh)
    return unique
