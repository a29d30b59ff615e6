"""Cuts a model down to one stage: only that stage's modules stay, and it runs from cut to cut.

A model with a layer list is run by its own forward. So its code between the layers (masks, rotary
positions, residual streams) needs no rewriting::

    stage 1 of 3:   before      h.0   h.1   h.2   h.3   behind
                    outlined    skip  skip  runs  runs  absent
                                      |           |
                       returns what arrived      its output leaves the forward

On later stages, modules before the list are outlined: they return tensors of the right shape but
without values, because the model's forward may ask for that shape. Skipped layers do the same.
Modules without parameters stay on all stages: their outputs (masks, rotary tensors) are computed
again.

Only what a layer returns crosses a cut. A model that carries more is refused, in whatever step it
does so: its output would have no values. See `placeholders`.

A rank may hold several stages of one model. Then each has stand-ins of its own, which stand in the
model only while it runs (`held_model`).
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pipeplan.documents.text import printable
from pipeplan.errors import RuntimeMismatchError
from pipeplan.splitting.checkpoint_frames import is_inside_checkpoint
from pipeplan.splitting.held_model import HeldModel
from pipeplan.splitting.layout import BEFORE, BEHIND, Layout, LayoutKind, argument_names
from pipeplan.splitting.layout import find_sides as sides_of
from pipeplan.splitting.nesting import first_argument, map_tensors, tensors_in, with_argument
from pipeplan.splitting.placeholders import CARRIED_PAST, Placeholder, has_placeholder
from pipeplan.splitting.rehearsals import Rehearsal
from pipeplan.splitting.stand_ins import Absent, ForwardState, Outline, SetAside, Skip
from pipeplan.splitting.torch_private import call_hooks, count_changes

__all__ = ["StageModule", "cut", "cut_all"]

CHAIN_NOTE = (
    "pipeplan: layers named one by one are a chain, each called with what the one before returns"
    " and with inputs of its arguments' names; a model that does more between its layers is cut"
    f" inside its layer list only: name {BEFORE!r}, the list's layers and {BEHIND!r}"
)


def cut(
    model: nn.Module,
    layout: Layout,
    layers: range,
    *,
    drop: bool = True,
    keep_whole: bool = False,
) -> "StageModule":
    """The stage of `model` that runs these layers. This changes the model: the rest is dropped.

    Without `drop`, a model without a layer list stays whole. With `keep_whole`, the rest is kept
    aside until `forget_rest`.
    """
    (stage,) = cut_all(model, layout, [layers], drop=drop, keep_whole=keep_whole)
    return stage


def cut_all(
    model: nn.Module,
    layout: Layout,
    stages: Sequence[range],
    *,
    drop: bool = True,
    keep_whole: bool = False,
) -> "tuple[StageModule, ...]":
    """The same for all stages of one rank, each of which runs these layers."""
    held = HeldModel(model)
    found: list[StageModule] = []
    for layers in stages:
        atoms = layout.atoms_in(layers)
        if layout.kind is LayoutKind.LAYER_LIST:
            found.append(_ListStage(held, layout, atoms))
        else:
            found.append(_ChainStage(held, layout, atoms, drop=drop))
    held.put_stand_ins([stage.stand_ins for stage in found])
    if not keep_whole:
        held.rest.forget()
    return tuple(found)


COLLECTING_OPTIONS = ("output_hidden_states", "output_attentions", "output_router_logits")


class StageModule:
    """Consecutive layers of a model, called with what crosses the cut and the model's inputs."""

    def __init__(self, held: HeldModel, layout: Layout, atoms: range) -> None:
        self.held = held
        self.model = held.model
        """The whole model without other ranks' parameters; names stay as they are."""
        self.is_first = atoms.start == 0
        self.is_last = atoms.stop == len(layout.atoms)
        self.layout, self.atoms = layout, atoms
        self.layers_text = printable(f"{layout.atoms[atoms[0]]}..{layout.atoms[atoms[-1]]}")
        """What messages call these layers."""
        self.stand_ins: dict[str, nn.Module] = {}
        """By name, what stands in the place of other stages' modules while this stage runs."""
        self.on_enter: Callable[[], None] | None = None
        """Is called when the model's forward takes over what arrived; a chain does so at once."""
        self.rehearsal: Rehearsal | None = None
        """Looks at what a chain's own forward does between its layers, on the first stage."""
        self._state = ForwardState()

    needs_inputs: bool
    """Whether it reads the model's inputs as well as what crosses the cut."""

    def __call__(self, carried: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of these layers; `carried` is the output of the layers before."""
        raise NotImplementedError

    @property
    def rest(self) -> SetAside:
        """The tensors of other ranks, until `forget_rest`."""
        return self.held.rest

    def whole(self) -> contextlib.AbstractContextManager[nn.Module]:
        """Inside, `model` is whole again, as it was before the cut."""
        return self.held.whole()

    def alone(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, `model` is what it would be if this stage were the only one of its rank."""
        return self.held.alone(self.stand_ins)

    def restore(self) -> None:
        """Make `model` whole again, as it was before the cut."""
        self.held.restore()

    def apply(self) -> None:
        """Cut the model again after `restore`."""
        self.held.apply()

    def require_same_layers(self) -> None:
        """Refuse layers that were put into the model after it was cut."""

    def own_modules(self) -> list[nn.Module]:
        """The modules whose code this stage runs; the model has to be cut."""
        return list(self.model.modules())

    def attach(self, name: str, module: nn.Module) -> None:
        """Count a module's parameters as the stage's; the stage does not call it."""
        self.held.attach(name, module, self.stand_ins)

    def forget_rest(self) -> None:
        """Free the tensors of other ranks."""
        self.held.rest.forget()


class _ChainStage(StageModule):
    """Modules called one after another."""

    def __init__(self, held: HeldModel, layout: Layout, atoms: range, *, drop: bool) -> None:
        super().__init__(held, layout, atoms)
        model = held.model
        self._spreads_tuples = layout.kind is LayoutKind.NAMED
        self._calls = [model.get_submodule(layout.atoms[atom]) for atom in atoms]
        self._keywords = [argument_names(module) for module in self._calls]
        self.needs_inputs = self.is_first or (self._spreads_tuples and any(self._keywords))
        for index, name in enumerate(layout.atoms):
            if drop and index not in atoms:
                self.stand_ins[name] = Absent(name, model.get_submodule(name), self._state)
        self._hooks = [
            (name, table)
            for name in layout.containers
            for table in call_hooks(model.get_submodule(name))
        ]
        self._num_hooks = self._count_hooks()

    def own_modules(self) -> list[nn.Module]:
        """The modules whose code this stage runs, which is only that of its layers."""
        found = {id(m): m for module in self._calls for m in module.modules()}
        return list(found.values())

    def _count_hooks(self) -> list[int]:
        return [len(table) for _, table in self._hooks]

    def require_same_layers(self) -> None:
        """Refuse layers that were put into the model after it was cut."""
        for atom, module in zip(self.atoms, self._calls, strict=True):
            name = self.layout.atoms[atom]
            if self.model.get_submodule(name) is not module:
                raise RuntimeMismatchError(
                    f"model: its layer {printable(name)!r} was replaced after the pipeline was"
                    " made; change the model before that, or make a new Pipeline"
                )
        num_hooks = self._count_hooks()
        if num_hooks != self._num_hooks:
            pairs = zip(num_hooks, self._num_hooks, strict=True)
            place = next(place for place, (now, then) in enumerate(pairs) if now != then)
            name = self._hooks[place][0]
            raise RuntimeMismatchError(
                f"model: its {f'module {printable(name)!r}' if name else 'root'} has got or lost a"
                " hook after the pipeline was made; a chain calls its layers alone, so that hook"
                " never runs: register it on a layer"
            )

    def __call__(self, carried: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._state.is_running = True
        try:
            return self._call(carried, args, kwargs)
        finally:
            self._state.is_running = False

    def _call(self, carried: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for index, (module, names) in enumerate(zip(self._calls, self._keywords, strict=True)):
            if index == 0 and self.is_first:
                pass
            elif self._spreads_tuples and isinstance(carried, tuple):
                args = carried
            else:
                args = (carried,)
            taken = {name: kwargs[name] for name in names if name in kwargs} if kwargs else {}
            # The first layer takes its inputs by name. Later ones get theirs by position.
            if taken and not (index == 0 and self.is_first):
                for name in names[: len(args)]:
                    taken.pop(name, None)
            try:
                carried = module(*args, **taken)
            except Exception as error:
                if self._spreads_tuples:
                    error.add_note(CHAIN_NOTE)
                raise
        return carried


class _ListStage(StageModule):
    """The model's own forward; it is entered and left at the cuts."""

    needs_inputs = True

    def __init__(self, held: HeldModel, layout: Layout, atoms: range) -> None:
        super().__init__(held, layout, atoms)
        model = held.model
        self._arrived: Any = None
        self._has_entered = True
        self._leaving: tuple[Any, list[int]] | None = None
        """What to leave with, and how often its tensors were changed until then."""
        config = getattr(model, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]  # only generation needs a cache
        self._replace_sides(layout, 0 in atoms, len(layout.atoms) - 1 in atoms)
        for atom in range(1, len(layout.atoms) - 1):
            if atom not in atoms:
                module = model.get_submodule(layout.atoms[atom])
                action = self._leave if atom == atoms.stop else self._pass
                if atom == atoms.start - 1:
                    action = self._enter
                self.stand_ins[layout.atoms[atom]] = Skip(module, self._state, action)
        if atoms.start == 1:
            first = model.get_submodule(layout.atoms[1])
            first.register_forward_pre_hook(_untraced(self._replace_input), with_kwargs=True)
        if not self.is_last and atoms[-1] != 0:
            last = model.get_submodule(layout.atoms[atoms[-1]])
            last.register_forward_hook(_untraced(self._leave_with_output))

    def _replace_sides(self, layout: Layout, holds_before: bool, holds_behind: bool) -> None:
        """Put stand-ins in the place of other stages' modules beside the list."""
        for name, side in sides_of(self.model, layout.list_name).items():
            module = self.model.get_submodule(name)
            if isinstance(module, nn.Dropout):
                # Models may use one dropout on both sides. A stage of neither side needs none.
                if not (holds_before or holds_behind):
                    self.stand_ins[name] = nn.Identity()
            elif next(module.parameters(), None) is None:
                continue
            elif side == BEFORE and not holds_before:
                self.stand_ins[name] = Outline(name, module, self._state)
            elif side == BEHIND and not holds_behind:
                self.stand_ins[name] = Absent(name, module, self._state, self._leave_if_done)

    def __call__(self, carried: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._require_own_outputs(kwargs)
        self._arrived, self._state.inside_list = carried, False
        self._has_entered, self._state.is_running, self._leaving = self.is_first, True, None
        try:
            with self.alone():
                output = self.model(*args, **kwargs)
                self._leave_if_done()
        except _Leave as left:
            output = left.value
        else:
            if not self.is_last:
                raise RuntimeMismatchError(
                    f"model: ends without calling the layers {self.layers_text};"
                    " name its layers explicitly"
                )
        finally:
            self._arrived, self._leaving, self._state.is_running = None, None, False
        if not self._has_entered:
            raise RuntimeMismatchError(
                f"model: its forward skips the layer in front of {self.layers_text}, so that what"
                " the stage before sends is not used; a layer that is left out at random has to"
                " decide so inside its own forward"
            )
        if has_placeholder(output):
            remedy = "; a loss that layers return is added by pipeplan.runtime.add_loss"
            raise RuntimeMismatchError(
                f"layers {self.layers_text}: {CARRIED_PAST}{remedy if self.is_last else ''}"
            )
        return output

    def _require_own_outputs(self, kwargs: dict[str, Any]) -> None:
        """Refuse options by which a model collects something of each of its layers."""
        config = getattr(self.model, "config", None)
        for name in COLLECTING_OPTIONS if not (self.is_first and self.is_last) else ():
            if kwargs.get(name) or getattr(config, name, False):
                raise RuntimeMismatchError(
                    f"model: {name} collects something of each layer, but a stage has only its"
                    " own; set it to False (routers may call pipeplan.runtime.add_loss in a hook)"
                )

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._state.inside_list = self._has_entered = True
        if self.on_enter is not None:
            self.on_enter()
        return self._arrived

    def _pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Placeholders in the shape of what arrived; the last skipped layer uses `_enter`."""
        self._state.inside_list = True
        return map_tensors(self._arrived, lambda like: Placeholder.like(like, like.device))

    def _leave(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._leave_if_done()
        place = _place_of_input(args, kwargs)
        raise _Leave(kwargs[place] if isinstance(place, str) else args[place])

    def _leave_if_done(self) -> None:
        if self._leaving is None:
            return
        output, num_changes = self._leaving
        if [count_changes(tensor) for tensor in tensors_in(output)] != num_changes:
            raise RuntimeMismatchError(
                f"model: changes the output of the layers {self.layers_text} in place, and"
                " checkpoints their activations; write x = x + y instead of x += y between layers"
            )
        raise _Leave(output)

    def _leave_with_output(self, module: nn.Module, args: Any, output: Any) -> None:
        """Leave behind the stage's last layer.

        If the model checkpoints its activations, that layer runs again in the backward. Then the
        stage leaves a little later, from outside of the checkpoint.
        """
        if self.held.is_whole or not self._state.is_running:  # or again in the backward
            return
        if not is_inside_checkpoint():
            raise _Leave(output)
        self._leaving = (output, [count_changes(tensor) for tensor in tensors_in(output)])

    def _replace_input(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace what the first layer gets from the model before it by what arrived."""
        if self.held.is_whole or not self._state.is_running:
            return args, kwargs
        if is_inside_checkpoint():
            raise RuntimeMismatchError(
                f"model: checkpoints the activations of {self.layers_text}, so a cut in front of"
                " its layer list is not possible; put the first layer on the same stage, or use"
                " recompute of the plan instead"
            )
        self._state.inside_list = self._has_entered = True
        return with_argument(args, kwargs, _place_of_input(args, kwargs), self._arrived)


def _untraced(hook: Any) -> Any:
    """A hook that torch's compiler leaves alone, though a compiled layer calls it.

    Whoever has compiled a layer has loaded the compiler. Loading it takes a second.
    """
    if "torch._dynamo" not in sys.modules:
        return hook
    return torch.compiler.disable(hook)  # type: ignore[no-untyped-call]


def _place_of_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str:
    place = first_argument(args, kwargs)
    if place is None:
        raise RuntimeMismatchError("model: calls a layer of its list without any tensor")
    return place


class _Leave(BaseException):
    """Carries a value out of a model's forward; no `Exception`, so that no model catches it."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value
