"""Cuts a model down to one stage: only that stage's modules stay, and it runs from cut to cut.

A model with a layer list is run by its own forward. So its code between the layers (masks, rotary
positions, residual streams) needs no rewriting::

    stage 1 of 3:   before      h.0   h.1   h.2   h.3   behind
                    outlined    skip  skip  runs  runs  absent
                                      |           |
                       returns what arrived      its output leaves the forward

On later stages, modules before the list are outlined: they return NaN of the right shape, at no
cost, because the model's forward may ask for that shape. Skipped layers do the same. Modules
without parameters stay on all stages: their outputs (masks, rotary tensors) are computed again.

Only what a layer returns crosses a cut. `stand_in_check` refuses models that carry more.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pipeplan.documents.text import printable
from pipeplan.errors import RuntimeMismatchError
from pipeplan.splitting.layout import BEFORE, BEHIND, Layout, LayoutKind, find_sides
from pipeplan.splitting.nesting import map_tensors
from pipeplan.splitting.stand_in_check import StandInCheck
from pipeplan.splitting.stand_ins import Absent, ForwardState, Outline, Skip

__all__ = ["StageModule", "cut", "holders"]

CHAIN_NOTE = (
    "pipeplan: layers named one by one are a chain, each called with what the one before returns"
    " and with inputs of its arguments' names; a model that does more between its layers is cut"
    f" inside its layer list only: name {BEFORE!r}, the list's layers and {BEHIND!r}"
)


def holders(model: nn.Module, layout: Layout, stages: Sequence[range]) -> dict[str, set[int]]:
    """For every parameter, by name, the stages that hold it.

    A tensor with two names (tied weights) appears under both; both list the stages of both.
    """
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    atoms_of_stage = [layout.atoms_in(layers) for layers in stages]
    found: dict[str, set[int]] = {}
    for names in names_of.values():
        stages_of = {
            stage
            for stage, atoms in enumerate(atoms_of_stage)
            for name in names
            if _is_held(model, layout, atoms, name)
        }
        found.update(dict.fromkeys(names, stages_of))
    return found


def cut(model: nn.Module, layout: Layout, layers: range, *, drop: bool = True) -> "StageModule":
    """The stage of `model` that runs these layers. This changes the model: the rest is dropped.

    Without `drop`, a model without a layer list stays whole.
    """
    atoms = layout.atoms_in(layers)
    if layout.kind is LayoutKind.LAYER_LIST:
        return _ListStage(model, layout, atoms)
    return _ChainStage(model, layout, atoms, drop=drop)


class StageModule:
    """Consecutive layers of a model, called with what crosses the cut and the model's inputs."""

    def __init__(self, model: nn.Module, layout: Layout, atoms: range) -> None:
        self.model = model
        """The whole model without other stages' parameters; names stay as they are."""
        self.is_first = atoms.start == 0
        self.is_last = atoms.stop == len(layout.atoms)
        self.layers_text = printable(f"{layout.atoms[atoms[0]]}..{layout.atoms[atoms[-1]]}")
        """What messages call these layers."""

    needs_inputs: bool
    """Whether it reads the model's inputs as well as what crosses the cut."""

    def __call__(self, carried: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of these layers; `carried` is the output of the layers before."""
        raise NotImplementedError


def _is_held(model: nn.Module, layout: Layout, atoms: range, parameter_name: str) -> bool:
    for atom in atoms:
        if parameter_name.startswith(f"{layout.atoms[atom]}."):
            return True
    if layout.kind is not LayoutKind.LAYER_LIST:
        return False
    if parameter_name.startswith(f"{layout.list_name}."):
        return False
    for name, side in find_sides(model, layout.list_name).items():
        if parameter_name.startswith(f"{name}."):
            return (0 if side == BEFORE else len(layout.atoms) - 1) in atoms
    return True  # a parameter of the model itself: all stages hold it


class _ChainStage(StageModule):
    """Modules called one after another."""

    def __init__(self, model: nn.Module, layout: Layout, atoms: range, *, drop: bool) -> None:
        super().__init__(model, layout, atoms)
        self._spreads_tuples = layout.kind is LayoutKind.NAMED
        self._modules = [model.get_submodule(layout.atoms[atom]) for atom in atoms]
        self._keywords = [_keywords(module) for module in self._modules]
        self.needs_inputs = self.is_first or (self._spreads_tuples and any(self._keywords))
        for index, name in enumerate(layout.atoms):
            if drop and index not in atoms:
                module = model.get_submodule(name)
                # One module may be several layers, of this stage and of others.
                held = any(module is mine for mine in self._modules)
                model.set_submodule(name, Absent(name, module, drop=not held))

    def __call__(self, carried: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for index, (module, names) in enumerate(zip(self._modules, self._keywords, strict=True)):
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

    def __init__(self, model: nn.Module, layout: Layout, atoms: range) -> None:
        super().__init__(model, layout, atoms)
        self._arrived: Any = None
        config = getattr(model, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]  # only generation needs a cache
        self._state = ForwardState()
        is_whole = self.is_first and self.is_last
        self._check = StandInCheck(model, self._state, self.layers_text, is_needed=not is_whole)
        self._replace_sides(layout, 0 in atoms, len(layout.atoms) - 1 in atoms)
        for atom in range(1, len(layout.atoms) - 1):
            if atom not in atoms:
                module = model.get_submodule(layout.atoms[atom])
                action = self._leave if atom == atoms.stop else self._pass
                if atom == atoms.start - 1:
                    action = self._enter
                model.set_submodule(layout.atoms[atom], Skip(module, action))
        if atoms.start == 1:
            first = model.get_submodule(layout.atoms[1])
            first.register_forward_pre_hook(self._replace_input, with_kwargs=True)
        if not self.is_last and atoms[-1] != 0:
            model.get_submodule(layout.atoms[atoms[-1]]).register_forward_hook(_leave_with_output)

    def _replace_sides(self, layout: Layout, holds_before: bool, holds_behind: bool) -> None:
        """Put stand-ins in the place of other stages' modules beside the list."""
        for name, side in find_sides(self.model, layout.list_name).items():
            module = self.model.get_submodule(name)
            if isinstance(module, nn.Dropout):
                # Models may use one dropout on both sides. A stage of neither side needs none.
                if not (holds_before or holds_behind):
                    self.model.set_submodule(name, nn.Identity())
            elif next(module.parameters(), None) is None:
                continue
            elif side == BEFORE and not holds_before:
                self.model.set_submodule(name, Outline(name, module, self._state))
            elif side == BEHIND and not holds_behind:
                self.model.set_submodule(name, Absent(name, module))

    def __call__(self, carried: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._check.is_due:
            return self._check.run(self._run, carried, args, kwargs)
        return self._run(carried, args, kwargs)

    def _run(self, carried: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._arrived, self._state.inside_list = carried, False
        try:
            output = self.model(*args, **kwargs)
        except _Leave as left:
            return left.value
        finally:
            self._arrived = None
        if not self.is_last:
            raise RuntimeMismatchError(
                f"model: ends without calling the layers {self.layers_text};"
                " name its layers explicitly"
            )
        return output

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._state.inside_list = True
        return self._arrived

    def _pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Placeholders in the shape of what arrived; the last skipped layer uses `_enter`."""
        self._state.inside_list = True
        return map_tensors(self._arrived, lambda like: self._state.placeholder(like, like.device))

    def _leave(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise _Leave(_first_tensor(args, kwargs))

    def _replace_input(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the first tensor that the first layer is given by what arrived."""
        self._state.inside_list = True
        for index, argument in enumerate(args):
            if isinstance(argument, torch.Tensor):
                return (*args[:index], self._arrived, *args[index + 1 :]), kwargs
        name = next(name for name, value in kwargs.items() if isinstance(value, torch.Tensor))
        return args, {**kwargs, name: self._arrived}


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value
    raise RuntimeMismatchError("model: calls a layer of its list without any tensor")


class _Leave(BaseException):
    """Carries a value out of a model's forward; no `Exception`, so that no model catches it."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def _leave_with_output(module: nn.Module, args: Any, output: Any) -> None:
    raise _Leave(output)


def _keywords(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's arguments."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)
