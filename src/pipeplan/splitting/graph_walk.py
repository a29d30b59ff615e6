"""Which nodes of autograd's graph lead to what enters a stage, and which to its weights alone."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

__all__ = ["GraphWalk", "Leaves", "walk"]

Leaves = dict[Node, None]
"""Nodes that add to the gradients of weights; an ordered set."""


@dataclass(slots=True)
class GraphWalk:
    """The graph behind some roots; `split_backward` explains carriers and junctions.

    Nodes are kept in dicts, whose order does not depend on addresses.
    """

    children_of: dict[Node, list[tuple[Node, int]]] = field(default_factory=dict)
    """For each node the ones that get its gradients, and as which of their inputs."""
    carriers: set[Node] = field(default_factory=set)
    junctions: list[Node] = field(default_factory=list)
    """Carriers with an edge to a node that is none, in the order in which a backward runs."""
    ends: dict[Node, None] = field(default_factory=dict)
    """Carriers without carriers behind them, where nothing enters; they run in W only."""
    inputs_of: dict[Node, list[int]] = field(default_factory=dict)
    """For each end the inputs that are used."""
    branches_of: dict[Node, list[Leaves]] = field(default_factory=dict)
    """For each junction and end, and each of its edges to nodes that are no carriers: the weights
    that this edge leads to."""
    root_branches: list[Leaves] = field(default_factory=list)
    """The weights behind each root that is no carrier."""

    def branches(self) -> Iterator[tuple[Node | None, list[Leaves]]]:
        """All of these; None stands for the roots."""
        yield from self.branches_of.items()
        yield None, self.root_branches


def walk(roots: Sequence[GradientEdge], entering: Sequence[torch.Tensor]) -> GraphWalk:
    """The graph behind these roots, seen from what enters."""
    graph = GraphWalk()
    order = _children_first(roots, graph)
    targets = {get_gradient_edge(tensor).node for tensor in entering}
    if targets:
        for node in order:
            if node in targets or any(c in graph.carriers for c, _ in graph.children_of[node]):
                graph.carriers.add(node)
    else:
        _find_shared(order, graph)
    for node in reversed(order):
        if node not in graph.carriers or node in targets:
            continue
        others = [child for child, _ in graph.children_of[node] if child not in graph.carriers]
        is_end = len(others) == len(graph.children_of[node])
        if is_end and not targets:
            graph.ends[node] = None
        elif others:
            graph.junctions.append(node)
        if others:
            graph.branches_of[node] = [_leaves(child, graph) for child in others]
    _note_inputs(roots, graph)
    outside = dict.fromkeys(edge.node for edge in roots if edge.node not in graph.carriers)
    graph.root_branches = [_leaves(node, graph) for node in outside]
    return graph


def _children_first(roots: Sequence[GradientEdge], graph: GraphWalk) -> list[Node]:
    """All nodes behind the roots, each after those that it leads to."""
    order: list[Node] = []
    stack = [(edge.node, False) for edge in reversed(roots)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in graph.children_of:
            children = [(child, index) for child, index in node.next_functions if child is not None]
            graph.children_of[node] = children
            stack.append((node, True))
            stack += [(child, False) for child, _ in children if child not in graph.children_of]
    return order


def _find_shared(order: Iterable[Node], graph: GraphWalk) -> None:
    """Take those nodes for carriers from which two weights can be reached."""
    few: dict[Node, frozenset[Node]] = {}
    for node in order:
        children = graph.children_of[node]
        found = frozenset({node}) if not children else frozenset()
        for child, _ in children:
            found |= few[child]
        few[node] = found if len(found) < 2 else frozenset(list(found)[:2])
        if len(found) > 1:
            graph.carriers.add(node)


def _leaves(node: Node, graph: GraphWalk) -> Leaves:
    """The weights behind a node that is no carrier."""
    found: Leaves = {}
    stack, seen = [node], {node}
    while stack:
        node = stack.pop()
        children = graph.children_of[node]
        if not children and hasattr(node, "variable"):
            found[node] = None
        for child, _ in children:
            if child not in seen:
                seen.add(child)
                stack.append(child)
    return found


def _note_inputs(roots: Sequence[GradientEdge], graph: GraphWalk) -> None:
    if not graph.ends:
        return
    used: dict[Node, set[int]] = {node: set() for node in graph.ends}
    for edge in roots:
        if edge.node in used:
            used[edge.node].add(edge.output_nr)
    for node in graph.carriers:
        for child, index in graph.children_of[node]:
            if child in used:
                used[child].add(index)
    graph.inputs_of = {node: sorted(indices) for node, indices in used.items()}
