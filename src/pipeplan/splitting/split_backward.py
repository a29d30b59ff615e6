"""A backward in two halves: I, the gradients of what enters, and W, those of the weights.

::

    loss <- linear2 <- gelu <- linear1 <- x        I runs the chain, and keeps g2 and g1
               |                  |
            w2, b2             w1, b1              W runs linear2 with g2 and linear1 with g1 again,
                                                   each for its weights alone

The graph is autograd's own. *Carriers* are nodes from which what enters can be reached. Where
nothing enters (the first stage), they are nodes from which two weights can be reached. A *junction*
is a carrier with an edge to something else, which leads to weights. I runs the carriers. Autograd
computes only what is asked for, so a junction leaves its weights out. What arrives at a junction is
kept. W runs each junction by itself, for the weights that no other junction leads to.

Exact for every graph, because whatever does not fit into that is computed with I:

- weights that several junctions lead to: a second use in the same stage;
- weights behind a function written in Python, which may not survive that it runs twice;
- all of them, where the graph holds a compiled function or a re-entrant checkpoint, which run once,
  or where a hook would see a gradient twice.

Memory: carriers that are no junctions have done their work in I. What autograd has saved for them
is freed as soon as they have run, by boxes into which it is packed while the forward runs. A box
counts changes, as autograd does: who changes a saved tensor in place gets an error.

Reference:
    Qi et al. 2024, "Zero Bubble Pipeline Parallelism", ICLR, section 2: the two halves.
    Differs: by nodes of the graph instead of layers, so that any module can be split.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from pipeplan.errors import RuntimeMismatchError
from pipeplan.splitting.checkpoint_frames import CheckpointFinder
from pipeplan.splitting.graph_walk import GraphWalk, Leaves, walk
from pipeplan.splitting.torch_private import count_changes, gradient_hooks, saves_tensors

__all__ = ["Box", "Root", "SavedBoxes", "WeightHalf", "run_input_half", "take_gradients"]

RUN_ONCE = ("CheckpointFunctionBackward", "CompiledFunctionBackward")
"""Functions that autograd cannot run for some of their inputs, or not twice."""

Root = tuple[GradientEdge, torch.Tensor]
"""Where a backward begins, and with which gradient."""


class Box:
    """One tensor that autograd has saved for one node."""

    __slots__ = ("__weakref__", "num_changes", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: an output that holds its own node would never be freed.
        self.tensor: torch.Tensor | None = tensor.detach()
        self.num_changes = count_changes(tensor)


class SavedBoxes:
    """What autograd saves in the forwards of one stage, in boxes that can be emptied."""

    pack: Callable[[torch.Tensor], Box] = Box

    def __init__(self) -> None:
        self._local = threading.local()
        self._done: list[tuple[int, Box]] | None = None
        """Boxes that nobody needs after this I, with their threads; None while none runs."""
        self._finder: CheckpointFinder | None = None

    @property
    def meets_checkpoints(self) -> bool:
        """Whether layers compute activations again in the backward, which W would do each time.

        The first forward tells.
        """
        return self._finder is not None and self._finder.has_found

    @contextmanager
    def packing(self) -> Iterator[None]:
        """Inside, autograd saves into boxes."""
        pack = self.pack
        with ExitStack() as stack:
            if self._finder is None:
                self._finder = CheckpointFinder()
                stack.enter_context(self._finder.looking())
                pack = self._look_and_pack
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, self._open))
            yield

    def _look_and_pack(self, tensor: torch.Tensor) -> Box:
        """The same in a first forward: a checkpoint saves what it is given, in its own code."""
        assert self._finder is not None
        self._finder.look()
        return self.pack(tensor)

    def _open(self, box: Box) -> torch.Tensor:
        tensor = box.tensor
        if tensor is None:
            raise RuntimeMismatchError(
                "model: a saved tensor is needed in both halves of a backward; if layers use"
                " torch.utils.checkpoint, use it from the first step on, or plan with"
                " --no-split-backward"
            )
        if count_changes(tensor) != box.num_changes:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an"
                f" inplace operation: a tensor of shape {tuple(tensor.shape)} was changed"
                f" {count_changes(tensor) - box.num_changes} times after it was saved"
            )
        if self._done is not None and not getattr(self._local, "is_junction", False):
            self._done.append((threading.get_ident(), box))
        return tensor

    def enter_junction(self) -> None:
        """What is opened from now on, in this thread, is needed by W too."""
        self.empty_opened()
        self._local.is_junction = True

    def empty_opened(self, *_: Any) -> None:
        """Empty what this thread has opened: the nodes that needed it have run."""
        own, done = threading.get_ident(), self._done or []
        while done and done[-1][0] == own:
            done.pop()[1].tensor = None

    def leave_junction(self) -> None:
        """The junction has run."""
        self._local.is_junction = False

    @contextmanager
    def emptying(self) -> Iterator[None]:
        """Empty afterwards what carriers open inside that are no junctions."""
        self._done = []
        try:
            yield
        finally:
            done, self._done = self._done, None
        for _, box in done:
            box.tensor = None


@dataclass(slots=True)
class _Junction:
    """A node that runs again for its weights."""

    node: Node
    leaves: list[torch.Tensor]
    gradients: tuple[torch.Tensor | None, ...] | None = None
    """What arrived there in I."""

    def run(self) -> None:
        """Add the gradients of its weights."""
        gradients = self.gradients
        if gradients is None or not self.leaves:
            return
        # A hook of the tensor that the node has made has seen this gradient already.
        handle = self.node.register_prehook(lambda given: _padded(gradients, len(given)))
        try:
            found = [
                (GradientEdge(self.node, index), gradient)
                for index, gradient in enumerate(gradients)
                if gradient is not None
            ]
            _backward(found, self.leaves)
        finally:
            handle.remove()


@dataclass(slots=True)
class WeightHalf:
    """What is left to do after I; empty if I has done everything."""

    junctions: list[_Junction] = field(default_factory=list)
    roots: list[Root] = field(default_factory=list)
    """Roots that lead to weights without a carrier between; empty if there are none."""
    root_leaves: list[torch.Tensor] = field(default_factory=list)
    """The weights behind these roots."""

    def run(self) -> None:
        """Add the gradients of all weights that are left, and free what they needed."""
        if self.root_leaves:
            _backward(self.roots, self.root_leaves)
        for position, junction in enumerate(self.junctions):
            junction.run()
            self.junctions[position] = _Junction(junction.node, [])  # frees its gradients
        self.junctions, self.roots, self.root_leaves = [], [], []

    @property
    def weights(self) -> list[torch.Tensor]:
        """The weights whose gradients are left, if a gradient has arrived there."""
        arrived = [junction for junction in self.junctions if junction.gradients is not None]
        return [*self.root_leaves, *(leaf for junction in arrived for leaf in junction.leaves)]

    @property
    def gradient_tensors(self) -> list[torch.Tensor]:
        """The gradients that are kept until W."""
        noted = [gradient for junction in self.junctions for gradient in junction.gradients or ()]
        noted += [gradient for _, gradient in self.roots]
        return [gradient for gradient in noted if gradient is not None]


def _padded(gradients: tuple[torch.Tensor | None, ...], length: int) -> tuple[Any, ...]:
    return (*gradients, *[None] * (length - len(gradients)))


def _backward(roots: Sequence[Root], leaves: Sequence[torch.Tensor]) -> None:
    edges, gradients = [edge for edge, _ in roots], [gradient for _, gradient in roots]
    torch.autograd.backward(edges, gradients, inputs=list(leaves))


def run_input_half(
    roots: Sequence[Root], entering: Sequence[torch.Tensor], boxes: SavedBoxes
) -> tuple[list[torch.Tensor | None], WeightHalf]:
    """Run I: the gradient of each tensor that enters, and what W has to do.

    `entering` are leaves. The forward has run inside of `boxes.packing()`.
    """
    graph = walk([edge for edge, _ in roots], [t for t in entering if t.requires_grad])
    early = None if _runs_once(graph) else _find_early(graph)
    if early is None:
        edges, gradients = [edge for edge, _ in roots], [gradient for _, gradient in roots]
        if roots:
            torch.autograd.backward(edges, gradients)
        return take_gradients(entering), WeightHalf()
    half = WeightHalf(
        junctions=[
            _Junction(node, leaves)
            for node in (*graph.junctions, *graph.ends)
            if (leaves := _variables(graph.branches_of[node], early))
        ],
        root_leaves=_variables(graph.root_branches, early),
    )
    if half.root_leaves:
        half.roots = list(roots)
    asked = [tensor for tensor in entering if tensor.requires_grad]
    with boxes.emptying():
        found = _run_carriers(roots, asked, half, graph, _variables([early]), boxes)
    of_tensor = dict(zip(map(id, asked), found, strict=True))
    return [of_tensor.get(id(tensor)) for tensor in entering], half


def _run_carriers(
    roots: Sequence[Root],
    asked: Sequence[torch.Tensor],
    half: WeightHalf,
    graph: GraphWalk,
    early: Sequence[torch.Tensor],
    boxes: SavedBoxes,
) -> list[torch.Tensor | None]:
    """The gradients of what enters; junctions note what arrives at them."""
    at_end = {junction.node: junction for junction in half.junctions if junction.node in graph.ends}
    ends = [GradientEdge(node, index) for node in at_end for index in graph.inputs_of[node]]
    inputs: list[Any] = [*asked, *ends, *early]
    if not roots or not inputs:
        return [None] * len(asked)
    runs_again = {junction.node for junction in half.junctions}
    handles = [
        node.register_hook(boxes.empty_opened)
        for node in graph.children_of
        if node in graph.carriers and node not in runs_again and saves_tensors(node)
    ]
    for junction in half.junctions:
        before, behind = _make_hooks(junction, boxes)
        handles += [junction.node.register_prehook(before), junction.node.register_hook(behind)]
    try:
        found = torch.autograd.grad(
            [edge for edge, _ in roots],
            inputs,
            [gradient for _, gradient in roots],
            retain_graph=True,
            allow_unused=True,
        )
    finally:
        for handle in handles:
            handle.remove()
    for end, gradient in zip(ends, found[len(asked) :], strict=False):
        _note_at_end(at_end[end.node], end.output_nr, gradient)
    behind = zip(early, found[len(asked) + len(ends) :], strict=True)
    known = [(tensor, gradient) for tensor, gradient in behind if gradient is not None]
    if known:
        _backward(
            [(torch.autograd.graph.get_gradient_edge(t), gradient) for t, gradient in known],
            [tensor for tensor, _ in known],
        )
    return list(found[: len(asked)])


def _make_hooks(junction: _Junction, boxes: SavedBoxes) -> tuple[Any, Any]:
    def before(gradients: tuple[torch.Tensor | None, ...]) -> None:
        junction.gradients = gradients
        boxes.enter_junction()

    def behind(*_: Any) -> None:
        boxes.leave_junction()

    return before, behind


def _note_at_end(junction: _Junction, index: int, gradient: torch.Tensor | None) -> None:
    gradients = list(junction.gradients or ())
    gradients += [None] * (index + 1 - len(gradients))
    gradients[index] = gradient
    junction.gradients = tuple(gradients)


def _runs_once(graph: GraphWalk) -> bool:
    """Whether the graph holds a function that cannot run in two halves."""
    return any(
        isinstance(node, BackwardCFunction) and node.name().startswith(RUN_ONCE)
        for node in graph.children_of
    )


def _find_early(graph: GraphWalk) -> Leaves | None:
    """The weights that are computed with I; None if one of them has a hook.

    Its hook would see the gradient in I, and again when the gradient is stored.
    """
    early: Leaves = {}
    first_of: dict[Node, Node | None] = {}
    for node, branches in graph.branches():
        is_early = isinstance(node, BackwardCFunction) and node not in graph.ends
        for leaf in (leaf for leaves in branches for leaf in leaves):
            if is_early or first_of.setdefault(leaf, node) is not node:
                early[leaf] = None
    # Nothing between a junction and its weights runs in both halves.
    is_growing = bool(early)
    while is_growing:
        is_growing = False
        for _, branches in graph.branches():
            for leaves in branches:
                if leaves.keys() & early.keys() and not leaves.keys() <= early.keys():
                    early |= leaves
                    is_growing = True
    if any(gradient_hooks(variable)[0] for variable in _variables([early])):
        return None
    return early


def _variables(branches: Sequence[Leaves], without: Leaves | None = None) -> list[torch.Tensor]:
    """The weights of these leaves, each once."""
    found = dict.fromkeys(leaf for leaves in branches for leaf in leaves)
    return [leaf.variable for leaf in found if not without or leaf not in without]  # type: ignore[attr-defined]


def take_gradients(entering: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients that a whole backward has left in leaves; takes them away from there."""
    found = []
    for tensor in entering:
        found.append(tensor.grad)
        tensor.grad = None
    return found
