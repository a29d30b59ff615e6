"""Records what enters and leaves each layer of a model, and the gradients of what leaves.

It works in the same way in the whole model and in a stage. Layers of other stages only move the
position.

In the whole model, what crosses a cut of the stage is replaced by a copy. So its gradient is that
of the layers behind the cut alone. What else a layer does with its output (such as a loss of its
own) is part of the layer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipeplan.runtime.verification.same_randomness import SameRandomness, seed_python
from pipeplan.splitting.layout import Layout, LayoutKind
from pipeplan.splitting.nesting import first_argument, map_tensors, tensors_in, with_argument

__all__ = ["LayerCall", "LayerRecorder", "Noted", "note"]


@dataclass(slots=True)
class Noted:
    """A value that passed by: its copy, and the gradients of its tensors once they are known."""

    value: Any
    """The value itself, with copies instead of its tensors, if it can cross a cut."""
    tensors: list[torch.Tensor]
    needs_gradient: list[bool]
    gradients: list[torch.Tensor | None]
    live: list[torch.Tensor]
    """The tensors themselves, until the backward begins."""
    watched: list[bool]
    is_complete: bool = False
    """Whether all gradients are there; nodes may run again for weights alone."""
    is_early: bool = False
    """Whether the forward still runs: gradients that layers compute there are their own."""


@dataclass(slots=True)
class LayerCall:
    """One call of a layer."""

    first_input: Noted | None
    """What it was given by the layer before."""
    inputs: list[tuple[str, torch.Tensor]]
    output: Noted | None = None


@dataclass(slots=True)
class LayerRecorder:
    """The calls of one microbatch."""

    layout: Layout
    randomness: SameRandomness
    cuts: tuple[int, ...] = ()
    """Atoms in front of which a stage begins, where gradients are those of layers behind alone."""
    calls: dict[int, LayerCall] = field(default_factory=dict)
    """By atom."""
    again: list[str] = field(default_factory=list)
    """Layers that were called once more, or out of order."""
    _open: list[int | None] = field(default_factory=list)
    _last: int = -1
    _is_on: bool = False
    _handles: list[Any] = field(default_factory=list)

    def attach(self, model: nn.Module) -> None:
        """Watch the layers of a model, whole or cut."""
        atoms_of: dict[int, list[int]] = {}
        for atom, name in enumerate(self.layout.atoms):
            is_side = self.layout.kind is LayoutKind.LAYER_LIST and (
                atom in (0, len(self.layout.atoms) - 1)
            )
            if not is_side:
                atoms_of.setdefault(id(model.get_submodule(name)), []).append(atom)
        for atoms in atoms_of.values():
            module = model.get_submodule(self.layout.atoms[atoms[0]])
            before, behind = self._make_hooks(atoms)
            self._handles += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(behind),  # behind the hooks of the user
            ]

    def detach(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def begin(self) -> None:
        """Begin with a forward."""
        self.calls, self._open, self._last, self._is_on = {}, [], -1, True
        self.randomness.is_noting = True
        self.move("start")

    def end(self) -> None:
        """The forward is over: what runs from now on is a backward."""
        self._is_on = self.randomness.is_noting = False
        for call in self.calls.values():
            for noted in (call.first_input, call.output):
                if noted is not None:
                    noted.is_early = False
                    _watch(noted)
                    noted.live = []

    def move(self, position: str) -> None:
        """Say where in the model we are."""
        self.randomness.position = position
        seed_python(position)

    def _make_hooks(self, atoms: list[int]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not self._is_on:  # in a backward that runs layers again
                seed_python(f"in {atoms[0]}")
                return None
            if self._open:  # a layer inside of another one
                self._open.append(None)
                return None
            atom = next((atom for atom in atoms if atom > self._last), None)
            if atom is None:
                self.again.append(self.layout.atoms[atoms[0]])
                self._open.append(None)
                return None
            self._last = atom
            self._open.append(atom)
            self.move(f"in {atom}")
            place, first = first_argument(args, kwargs), None
            if place is not None:
                first = kwargs[place] if isinstance(place, str) else args[place]
                if atom == 1 and self._enters_list(atom):
                    first = map_tensors(first, lambda tensor: tensor.clone())
                    args, kwargs = with_argument(args, kwargs, place, first)
            named = [(f"argument {i}", value) for i, value in enumerate(args)]
            named += [(repr(name), value) for name, value in kwargs.items()]
            self.calls[atom] = LayerCall(
                first_input=None if place is None else note(first, is_early=True),
                inputs=[
                    (name, tensor.detach().clone())
                    for name, value in named
                    for tensor in tensors_in(value)
                ],
            )
            return args, kwargs

        def behind(module: nn.Module, args: Any, output: Any) -> Any:
            if not self._is_on or not self._open:
                seed_python(f"after {atoms[0]}")
                return None
            atom = self._open.pop()
            if atom is not None:
                if atom + 1 in self.cuts:
                    output = map_tensors(output, lambda tensor: tensor.clone())
                self.calls[atom].output = note(output, is_early=True)
                self.move(f"after {atom}")
            return output

        return before, behind

    def _enters_list(self, atom: int) -> bool:
        """Whether a stage begins with the first layer of a list."""
        return self.layout.kind is LayoutKind.LAYER_LIST and atom in self.cuts


def note(value: Any, *, is_early: bool = False) -> Noted:
    """A copy of a value; its gradients are filled in by the backward."""
    live = tensors_in(value)
    noted = Noted(
        value=map_tensors(value, lambda tensor: tensor.detach().clone()),
        tensors=[tensor.detach().clone() for tensor in live],
        needs_gradient=[tensor.requires_grad for tensor in live],
        gradients=[None] * len(live),
        live=live,
        watched=[False] * len(live),
        is_early=is_early,
    )
    _watch(noted)
    return noted


def _watch(noted: Noted) -> None:
    """Ask autograd for gradients.

    A re-entrant checkpoint gives its outputs a gradient only after the layer's hooks. So this is
    tried twice.
    """
    for index, tensor in enumerate(noted.live):
        if tensor.requires_grad and not noted.watched[index] and torch.is_grad_enabled():
            noted.watched[index] = noted.needs_gradient[index] = True

            def keep(gradient: torch.Tensor, index: int = index) -> None:
                if noted.is_complete or noted.is_early:
                    return
                before = noted.gradients[index]
                copy = gradient.detach().clone()
                noted.gradients[index] = copy if before is None else before + copy

            tensor.register_hook(keep)  # type: ignore[no-untyped-call]
