"""Which modules of a model are the layers of a profile.

Three kinds of model::

    nn.Sequential        0, 1, 2, ...                     each child is a layer
    a layer list         before, h.0, h.1, ..., behind    the modules in front of the list are one
                                                          layer, those behind it another
    named modules        embed, blocks.0, ..., head       called one after another; a tuple becomes
                                                          several arguments

A profile may leave out `before` and `behind`. They then belong to the first and the last layer of
the list. A profile may also name the modules there, such as `model.embed_tokens` and `lm_head`.
Several modules of one side run together. A cut between them makes all layers a chain. The layer
list is the `nn.ModuleList` or `nn.Sequential` with the most parameters. In transformers that is the
stack of blocks.
"""

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from torch import nn

from pipeplan.documents.text import nearest, printable
from pipeplan.errors import RuntimeMismatchError

__all__ = [
    "BEFORE",
    "BEHIND",
    "Layout",
    "LayoutKind",
    "argument_names",
    "find_sides",
    "lay_out",
]

BEFORE = "before"
"""Everything that runs in front of the layer list: embeddings, masks."""
BEHIND = "behind"
"""Everything that runs behind the layer list: the last norm, the head."""

FEWEST_LAYERS = 2
"""A list of fewer modules does not count as a layer list."""

LOSSES = tuple(kind for name, kind in sorted(vars(nn).items()) if name.endswith("Loss"))
"""The loss modules of torch."""

INERT = (nn.Identity, *LOSSES, nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Modules that a chain may leave out: without children, they do nothing."""

WRAPPERS = {
    "OptimizedModule": "torch.compile; give the model itself, and call .compile() of its layers",
    "DataParallel": "DataParallel; give the model itself: the plan says which stages have replicas",
    "DistributedDataParallel": "DistributedDataParallel; give the model itself: the plan says which"
    " stages have replicas, and the pipeline sums their gradients",
}
"""Modules that only call another one, by the name of their class, and what to do instead."""


class LayoutKind(StrEnum):
    """How the layers of a model are run."""

    SEQUENTIAL = "sequential"
    LAYER_LIST = "layer list"
    NAMED = "named modules"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layers of a model, each a range of atoms. Atoms are the smallest parts to cut between."""

    kind: LayoutKind
    names: tuple[str, ...]
    """The name of each layer, as in the profile."""
    atoms: tuple[str, ...]
    """Module names; with a layer list, `before` is the first and `behind` the last."""
    atoms_of: tuple[range, ...]
    """The atoms of each layer."""
    list_name: str = ""
    """The name of the layer list."""

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.names)

    @property
    def containers(self) -> tuple[str, ...]:
        """The modules around atoms, whose code and hooks run between them; "" is the root."""
        paths = (name.split(".") for name in self.atoms)
        return tuple(
            dict.fromkeys(
                ".".join(path[:depth]) for path in paths for depth in range(max(1, len(path)))
            )
        )

    def atoms_in(self, layers: range) -> range:
        """The atoms of consecutive layers."""
        return range(self.atoms_of[layers[0]].start, self.atoms_of[layers[-1]].stop)


def lay_out(
    model: nn.Module, names: Sequence[str] | None = None, cuts: Collection[int] = ()
) -> Layout:
    """The layers of `model`. With `names`, the layers that a profile calls so.

    `cuts` are the first layers of all stages, if they are known.

    Raises:
        RuntimeMismatchError: the names are not those of layers of this model.
    """
    if type(model).__name__ in WRAPPERS:
        raise RuntimeMismatchError(f"model: is wrapped by {WRAPPERS[type(model).__name__]}")
    if names is None:
        return _sequential(model) if isinstance(model, nn.Sequential) else _layer_list(model)
    candidates = []
    if isinstance(model, nn.Sequential):
        candidates.append(_sequential(model))
    else:
        found = _find_list(model)
        if found:
            candidates.append(_layer_list(model))
    for layout in candidates:
        matched = _match(model, layout, tuple(names))
        # A layer without atoms runs with its neighbour. No stage can begin with it.
        if matched is not None and all(matched.atoms_of[cut] for cut in cuts):
            return matched
    if isinstance(model, nn.Sequential):
        _require_order(model, tuple(names))
    return _named(model, tuple(names), candidates)


def _require_order(model: nn.Sequential, names: tuple[str, ...]) -> None:
    """Refuse names of children that leave one out or change their order."""
    children = _child_names(model)
    if names and set(names) <= set(children):
        raise RuntimeMismatchError(
            f"layers: are {_listed(names)}, but this nn.Sequential calls {_listed(children)};"
            " each of its children is a layer, in this order"
        )


def _listed(names: tuple[str, ...]) -> str:
    return printable(", ".join(names if len(names) <= 8 else (*names[:6], "...", names[-1])))


def _sequential(model: nn.Sequential) -> Layout:
    names = _child_names(model)
    if not names:
        raise RuntimeMismatchError("model: is an empty nn.Sequential; it needs a layer")
    return _one_each(LayoutKind.SEQUENTIAL, names)


def _child_names(module: nn.Module) -> tuple[str, ...]:
    """The names of all children; one module may have several names."""
    everything = module.named_modules(remove_duplicate=False)
    return tuple(name for name, _ in everything if name and "." not in name)


def _one_each(kind: LayoutKind, names: tuple[str, ...], list_name: str = "") -> Layout:
    return Layout(
        kind=kind,
        names=names,
        atoms=names,
        atoms_of=tuple(range(i, i + 1) for i in range(len(names))),
        list_name=list_name,
    )


def _layer_list(model: nn.Module) -> Layout:
    list_name = _find_list(model)
    if not list_name:
        raise RuntimeMismatchError(
            f"model: {type(model).__name__} is no nn.Sequential and has no list of at least"
            f" {FEWEST_LAYERS} layers; name its layers"
        )
    layers = model.get_submodule(list_name)
    names = _child_names(layers)
    if len(list(layers.children())) < len(names):
        raise RuntimeMismatchError(
            f"model: its layer list {list_name!r} holds one module several times, and cannot be"
            " entered between its calls; name its layers, or copy the module"
        )
    inside = [f"{list_name}.{name}" for name in names]
    return _one_each(LayoutKind.LAYER_LIST, (BEFORE, *inside, BEHIND), list_name)


def _find_list(model: nn.Module) -> str:
    """The name of the outermost list of layers with the most parameters; empty if there is none."""
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList | nn.Sequential) and len(module) >= FEWEST_LAYERS
        if name and is_list and not any(name.startswith(f"{outer}.") for outer in sizes):
            sizes[name] = sum(parameter.numel() for parameter in module.parameters())
    return max(sizes, key=lambda name: sizes[name]) if sizes else ""


def _match(model: nn.Module, layout: Layout, names: tuple[str, ...]) -> Layout | None:
    """The layout with these names; None if they do not fit.

    Each side of a layer list belongs to the first layer that is named there. If none is named, it
    belongs to the nearest layer of the list. Further layers of a side get no atoms, because the
    modules of a side need not be a chain.
    """
    if names == layout.names:
        return layout
    inside = layout.atoms[1:-1]
    if layout.kind is not LayoutKind.LAYER_LIST or inside[0] not in names:
        return None
    first = names.index(inside[0])
    last = first + len(inside)
    sides = {BEFORE: BEFORE, BEHIND: BEHIND, **find_sides(model, layout.list_name)}
    agrees = (
        names[first:last] == inside
        and all(_side_of(name, sides) == BEFORE for name in names[:first])
        and all(_side_of(name, sides) == BEHIND for name in names[last:])
    )
    if not agrees:
        return None
    end = len(layout.atoms)
    ranges = [range(1, 1)] * first + list(layout.atoms_of[1:-1])
    ranges += [range(end, end)] * (len(names) - last)
    ranges[0] = range(ranges[0].stop)
    holder = min(last, len(names) - 1)
    ranges[holder] = range(min(ranges[holder].start, end - 1), end)
    return Layout(
        kind=layout.kind,
        names=names,
        atoms=layout.atoms,
        atoms_of=tuple(ranges),
        list_name=layout.list_name,
    )


def find_sides(model: nn.Module, list_name: str) -> dict[str, str]:
    """For each module beside the layer list, whether it is before or behind the list.

    We assume that models register modules in the order of use. Running a stage notices if not.
    """
    sides = {}
    path = list_name.split(".")
    for depth, path_name in enumerate(path):
        prefix = "".join(f"{name}." for name in path[:depth])
        side = BEFORE
        for name, _ in model.get_submodule(prefix[:-1]).named_children():
            if name == path_name:
                side = BEHIND
            else:
                sides[prefix + name] = side
    return sides


def _side_of(name: str, sides: dict[str, str]) -> str:
    """The side of a module, or of the module that holds it; empty if it is on neither side."""
    for outer, side in sides.items():
        if name == outer or name.startswith(f"{outer}."):
            return side
    return ""


def _named(model: nn.Module, names: tuple[str, ...], candidates: list[Layout]) -> Layout:
    modules = dict(model.named_modules(remove_duplicate=False))
    expected = [name for layout in candidates for name in layout.names] or list(modules)[1:]
    for index, name in enumerate(names):
        if name in (BEFORE, BEHIND) and name in expected:
            raise RuntimeMismatchError(
                f"layers: {name!r} needs all layers of the list beside it, in their order:"
                f" {_listed(tuple(expected))}"
            )
        if name not in modules or not name:
            is_short = len(expected) <= 8
            hint = printable(nearest(name, expected) if is_short else _example(name, expected))
            raise RuntimeMismatchError(
                f"layers[{index}].name: {name!r} is no layer of this {type(model).__name__}{hint}"
            )
        for other in names[:index]:
            if name == other or name.startswith(f"{other}.") or other.startswith(f"{name}."):
                raise RuntimeMismatchError(
                    f"layers[{index}].name: {name!r} and {other!r} overlap; a module is one layer"
                )
    _require_all(model, names, candidates)
    return _one_each(LayoutKind.NAMED, names)


def _require_all(model: nn.Module, names: tuple[str, ...], candidates: list[Layout]) -> None:
    """Refuse a chain that leaves out a parameter, or a module that computes something."""
    remedy = "name the module that holds it"
    if candidates:
        remedy += f", or use {_listed(candidates[0].names)}"
    covered = {
        id(part)
        for name in names
        for module in model.get_submodule(name).modules()
        for part in (module, *module.parameters(recurse=False))
    }
    for name, parameter in model.named_parameters():
        if id(parameter) not in covered:
            raise RuntimeMismatchError(
                f"layers: the parameter {name!r} belongs to none of the {len(names)} layers; "
                + remedy
            )
    for name, module in model.named_modules():
        is_leaf = next(module.children(), None) is None and not isinstance(module, INERT)
        if is_leaf and id(module) not in covered:
            raise RuntimeMismatchError(
                f"layers: the module {name!r} belongs to none of the {len(names)} layers, which"
                f" are called one after another; {remedy}"
            )


def _example(name: str, expected: list[str]) -> str:
    """A hint: the nearest name, or the first and the last of many."""
    hint = nearest(name, expected) if name else ""
    if hint.startswith("; did"):
        return hint
    return f"; its layers are {', '.join(expected[:2])}, ..., {expected[-1]}"


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's arguments."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)
