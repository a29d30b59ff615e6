"""The smallest parts of a model that can be cut, each with what it is called with.

One run of the whole model records the inputs of each layer of a layer list. The modules before and
behind the list are stages of their own, cut out of the model as the runtime cuts them, and put back
after each use::

    before            h.0     h.1     ...     behind
    stage (cut)       module  module          stage (cut)

In other models each atom gets what the one before returned. Inputs remember whether they need a
gradient in the whole model: the first layer's do not.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeplan.documents.text import printable
from pipeplan.errors import RuntimeMismatchError
from pipeplan.splitting.holding import holders
from pipeplan.splitting.layout import Layout, LayoutKind
from pipeplan.splitting.nesting import map_tensors, tensors_in
from pipeplan.splitting.stage_modules import StageModule, cut

__all__ = ["Atom", "AtomParameters", "Call", "atom_layout", "make_atoms", "parameters_of"]

Run = Callable[[Any], Any]
AtomParameters = tuple[tuple[nn.Parameter, ...], ...]


@dataclass(frozen=True, slots=True)
class Call:
    """What a model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def of(self, model: nn.Module) -> Any:
        """The model's output."""
        return model(*self.args, **self.kwargs)


@dataclass(slots=True)
class Atom:
    """A part of a model that can be called alone."""

    name: str
    parameters: tuple[nn.Parameter, ...]
    run: Run
    """From inputs to the output."""
    inputs: Any
    """Set by the run of the atom before, or recorded; those that need a gradient say so."""
    ready: Callable[[], contextlib.AbstractContextManager[Any]]
    """Inside, `run` may be called."""
    stage: StageModule | None = None
    """The stage that `run` calls, if it is cut out of the model."""

    def call_on_enter(self, begin: Callable[[], None] | None) -> None:
        """Have `begin` called when the atom's own work begins.

        A stage behind a layer list first runs what the model computes in front of the list. All
        layers of a stage share that work, so it is none of the atom's.
        """
        if self.stage is not None:
            self.stage.on_enter = begin

    def enter(self) -> tuple[Any, list[torch.Tensor]]:
        """Fresh inputs, and those among their leaves that need a gradient.

        Inputs are copies: a layer may change its input in place, but never a leaf.
        """
        leaves: list[torch.Tensor] = []

        def fresh(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            leaves.append(tensor.detach().requires_grad_())
            return leaves[-1].clone()

        return map_tensors(self.inputs, fresh), leaves


def atom_layout(layout: Layout) -> Layout:
    """The same model with each atom as a layer."""
    return Layout(
        kind=layout.kind,
        names=layout.atoms,
        atoms=layout.atoms,
        atoms_of=tuple(range(i, i + 1) for i in range(len(layout.atoms))),
        list_name=layout.list_name,
    )


def parameters_of(model: nn.Module, layout: Layout) -> AtomParameters:
    """The parameters of each atom; tied ones belong to all that use them.

    A parameter of the model itself is held by every stage. It counts as the first atom's.
    """
    num_atoms = len(layout.atoms)
    single = [range(i, i + 1) for i in range(num_atoms)]
    atoms_of_name = holders(model, atom_layout(layout), single)
    found: list[dict[int, nn.Parameter]] = [{} for _ in range(num_atoms)]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        is_models_own = "." not in name and layout.kind is LayoutKind.LAYER_LIST
        for atom in {0} if is_models_own else atoms_of_name[name]:
            found[atom][id(parameter)] = parameter
    return tuple(tuple(each.values()) for each in found)


def make_atoms(
    model: nn.Module, layout: Layout, call: Call, parameters: AtomParameters
) -> Iterator[Atom]:
    """The atoms in their order; the inputs of one are set when the one before has been `run`."""
    single = atom_layout(layout)
    is_list = layout.kind is LayoutKind.LAYER_LIST
    seen = _record_inputs(model, layout, call) if is_list else {}
    for index, name in enumerate(layout.atoms):
        if name in seen:
            module = model.get_submodule(name)
            yield Atom(
                name=name,
                parameters=parameters[index],
                run=_caller(module),
                inputs=seen.pop(name),
                ready=contextlib.nullcontext,
            )
            continue
        stage = cut(model, single, range(index, index + 1), drop=is_list, keep_whole=True)
        stage.restore()
        yield Atom(
            name=name,
            parameters=parameters[index],
            run=_stage_caller(stage, call),
            inputs=None,
            ready=_applying(stage) if is_list else contextlib.nullcontext,
            stage=stage,
        )


def _caller(module: nn.Module) -> Run:
    return lambda entered: module(*entered[0], **entered[1])


def _stage_caller(stage: StageModule, call: Call) -> Run:
    return lambda entered: stage(entered, call.args, call.kwargs)


def _applying(stage: StageModule) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    @contextlib.contextmanager
    def applied() -> Iterator[None]:
        stage.apply()
        try:
            yield
        finally:
            stage.restore()

    return applied


def keep(value: Any) -> Any:
    """A copy of what an atom is given; tensors that need a gradient are leaves that say so."""
    return map_tensors(
        value,
        lambda tensor: (
            tensor.detach().clone().requires_grad_() if tensor.requires_grad else tensor.detach()
        ),
    )


def _record_inputs(model: nn.Module, layout: Layout, call: Call) -> dict[str, Any]:
    """The arguments of each layer of a list, by its name, in a run of the whole model."""
    seen: dict[str, Any] = {}
    num_calls = Counter[str]()

    def make_hook(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            seen[name] = keep((args, kwargs))
            num_calls[name] += 1

        return hook

    handles = [
        model.get_submodule(name).register_forward_pre_hook(make_hook(name), with_kwargs=True)
        for name in layout.atoms[1:-1]
    ]
    try:
        call.of(model)
    finally:
        for handle in handles:
            handle.remove()
    for name in layout.atoms[1:-1]:
        if name not in seen:
            raise RuntimeMismatchError(
                f"model: its forward does not call the layer {printable(name)!r} of its list;"
                " name its layers explicitly"
            )
    places = Counter(id(model.get_submodule(name)) for name in layout.atoms[1:-1])
    for name, count in num_calls.items():
        if count > places[id(model.get_submodule(name))]:
            raise RuntimeMismatchError(
                f"model: calls the layer {printable(name)!r} more than once; a stage calls each of"
                " its layers once, so name layers that run once explicitly"
            )
    return seen


def carry(output: Any) -> Any:
    """What an atom returned, as the input of the next."""
    is_nested = isinstance(output, torch.Tensor | tuple | list | dict)
    return keep(output) if is_nested and tensors_in(output) else output
