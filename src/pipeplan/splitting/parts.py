"""A model cut down to one stage: only that stage's modules stay, and it runs from cut to cut.

A model with a layer list is run by its own forward, so that its glue (masks, rotary positions,
residual streams) needs no rewriting::

    stage 1 of 3:   before      h.0   h.1   h.2   h.3   behind
                    outlined    skip  skip  runs  runs  absent
                                      |           |
                       returns what arrived      its output leaves the forward

What stands before the list is outlined on later stages: it returns NaN of the shape that it would
return, at no cost, since the model's forward may ask for that shape. So do skipped layers. Modules
without parameters stay everywhere: their outputs (masks, rotary tensors) are computed again.

Nothing crosses a cut but what a layer returns. A model that carries more past its layers, such as
`x = block(x) + x0`, computes with what stands for values of other stages; that is noticed in the
first microbatch, which runs with other stand-ins too and has to return the same.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pipeplan.errors import RuntimeMismatchError
from pipeplan.splitting.layout import BEFORE, BEHIND, Layout, LayoutKind, find_sides
from pipeplan.splitting.nesting import map_tensors, tensors_in
from pipeplan.splitting.stands import Absent, Fill, Outline, Passage, Skip

__all__ = ["Part", "cut", "holders"]


COLLECTED = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Options of Hugging Face's models."""

CHAIN_NOTE = (
    "pipeplan: layers named one by one are a chain, each called with what the one before returns"
    " and with inputs of its arguments' names; a model that does more between its layers is cut"
    f" inside its layer list only: name {BEFORE!r}, the list's layers and {BEHIND!r}"
)


def holders(model: nn.Module, layout: Layout, stages: Sequence[range]) -> dict[str, set[int]]:
    """For every parameter, by name, the stages that hold it.

    A tensor with two names (tied weights) has both; each name lists the stages of both.
    """
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    atoms = [layout.atoms_in(layers) for layers in stages]
    found: dict[str, set[int]] = {}
    for names in names_of.values():
        stages_of = {
            stage
            for stage, mine in enumerate(atoms)
            for name in names
            if _is_held(model, layout, mine, name)
        }
        found.update(dict.fromkeys(names, stages_of))
    return found


def cut(model: nn.Module, layout: Layout, layers: range, *, drop: bool = True) -> "Part":
    """The part of `model` that runs these layers. The model is changed: all else is dropped.

    Without `drop` a model without a layer list stays whole.
    """
    atoms = layout.atoms_in(layers)
    if layout.kind is LayoutKind.LAYER_LIST:
        return _ListPart(model, layout, atoms)
    return _ChainPart(model, layout, atoms, drop=drop)


class Part:
    """Consecutive layers of a model, called with what crosses the cut and the model's inputs."""

    def __init__(self, model: nn.Module, layout: Layout, atoms: range) -> None:
        self.model = model
        """The whole model's skeleton; its parameters are this part's alone, by their names."""
        self.is_first = atoms.start == 0
        self.is_last = atoms.stop == len(layout.atoms)
        self.layers_text = f"{layout.atoms[atoms[0]]}..{layout.atoms[atoms[-1]]}"

    needs_inputs: bool
    """Whether it reads the model's inputs, and not only what crosses the cut."""

    def __call__(self, carried: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What leaves these layers; `carried` is what the layers before returned."""
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
    return True  # a parameter of the model itself, in nobody's keeping: all stages hold it


class _ChainPart(Part):
    """Modules called one after another."""

    def __init__(self, model: nn.Module, layout: Layout, atoms: range, *, drop: bool) -> None:
        super().__init__(model, layout, atoms)
        self._spread = layout.kind is LayoutKind.NAMED
        self._modules = [model.get_submodule(layout.atoms[atom]) for atom in atoms]
        self._keywords = [_keywords(module) for module in self._modules]
        self.needs_inputs = self.is_first or (self._spread and any(self._keywords))
        for index, name in enumerate(layout.atoms):
            if drop and index not in atoms:
                module = model.get_submodule(name)
                held = any(module is mine for mine in self._modules)  # it stands here as well
                model.set_submodule(name, Absent(name, module, drop=not held))

    def __call__(self, carried: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for index, (module, names) in enumerate(zip(self._modules, self._keywords, strict=True)):
            if index == 0 and self.is_first:
                pass
            elif self._spread and isinstance(carried, tuple):
                args = carried
            else:
                args = (carried,)
            taken = {name: kwargs[name] for name in names if name in kwargs} if kwargs else {}
            # The first layer takes the inputs by name; further ones have their first by position.
            if taken and not (index == 0 and self.is_first):
                for name in names[: len(args)]:
                    taken.pop(name, None)
            try:
                carried = module(*args, **taken)
            except Exception as error:
                if self._spread:
                    error.add_note(CHAIN_NOTE)
                raise
        return carried


class _ListPart(Part):
    """The model's own forward, entered and left at the cuts."""

    needs_inputs = True

    def __init__(self, model: nn.Module, layout: Layout, atoms: range) -> None:
        super().__init__(model, layout, atoms)
        self._arrived: Any = None
        config = getattr(model, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]  # a cache is for generation only
        self._checked_modes = {True, False} if self.is_first and self.is_last else set()
        """For training and evaluation, whether its first microbatch has been looked at."""
        self._passage = Passage()
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
        """Put something else where modules of other stages stood, beside the list."""
        for name, side in find_sides(self.model, layout.list_name).items():
            module = self.model.get_submodule(name)
            if isinstance(module, nn.Dropout):
                # Models use one on both sides; on stages of neither its input means nothing.
                if not (holds_before or holds_behind):
                    self.model.set_submodule(name, nn.Identity())
            elif next(module.parameters(), None) is None:
                continue
            elif side == BEFORE and not holds_before:
                self.model.set_submodule(name, Outline(name, module, self._passage))
            elif side == BEHIND and not holds_behind:
                self.model.set_submodule(name, Absent(name, module))

    def __call__(self, carried: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.model.training in self._checked_modes:
            return self._run(carried, args, kwargs)
        self._checked_modes.add(self.model.training)
        self._require_own_outputs(kwargs)
        call = map_tensors([carried, args, kwargs], _copy)
        devices = _cuda_devices(call)
        states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)]
        output = self._run(carried, args, kwargs)
        with torch.random.fork_rng(devices):
            others = []
            for fill in (Fill.ZERO, Fill.RANDOM):
                torch.set_rng_state(states[0])
                for device, state in zip(devices, states[1:], strict=True):
                    torch.cuda.set_rng_state(state, device)
                copies = map_tensors(call, _copy)
                others.append(self._run_with(fill, copies))
        if not all(_are_same(output, other) for other in others):
            raise RuntimeMismatchError(
                f"model: the layers {self.layers_text} use values of other stages that no layer"
                " returns, such as x0 in x = block(x) + x0, a mask made of embeddings, or a weight"
                " taken from another module; such values do not cross a cut: make it a chain of"
                " modules that return all that later ones need"
            )
        return output

    def _run_with(self, fill: Fill, call: list[Any]) -> Any:
        """What the same call returns with another fill, None if it fails; leaves no trace."""
        carried, args, kwargs = call
        kept = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        self._passage.fill = fill
        try:
            return self._run(carried, args, kwargs)
        except Exception:  # with the first fill it did not fail
            return None
        finally:
            self._passage.fill = Fill.NAN
            for buffer, value in kept:
                buffer.data.copy_(value)

    def _require_own_outputs(self, kwargs: dict[str, Any]) -> None:
        """Refuse options by which a model collects something of each of its layers."""
        config = getattr(self.model, "config", None)
        for name in COLLECTED:
            if kwargs.get(name) or getattr(config, name, False):
                raise RuntimeMismatchError(
                    f"model: {name} collects something of each layer, but a stage has only its"
                    " own; set it to False"
                )

    def _run(self, carried: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._arrived, self._passage.inside = carried, False
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
        self._passage.inside = True
        return self._arrived

    def _pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Like what a layer returns; the last skipped layer returns what arrived."""
        self._passage.inside = True
        return map_tensors(self._arrived, lambda like: self._passage.like(like, like.device))

    def _leave(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise _Leave(_first_tensor(args, kwargs))

    def _replace_input(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What arrived stands in for the first tensor that the first layer is given."""
        self._passage.inside = True
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
    """Carries a value out of a model's forward; no `Exception`, so that nothing swallows it."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def _leave_with_output(module: nn.Module, args: Any, output: Any) -> None:
    raise _Leave(output)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with a gradient where the original has one, and no leaf: layers may work in place."""
    return tensor.detach().requires_grad_(tensor.requires_grad).clone()


def _are_same(first: Any, second: Any) -> bool:
    """Whether two outputs are equal to rounding, NaN included."""
    pairs = list(zip(tensors_in(first), tensors_in(second), strict=False))
    if len(tensors_in(first)) != len(tensors_in(second)):
        return False
    return all(a.shape == b.shape and _are_close(a.detach(), b.detach()) for a, b in pairs)


def _are_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    finite = a[a.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4 * largest, equal_nan=True)


def _cuda_devices(value: Any) -> list[int]:
    found = {tensor.device.index for tensor in tensors_in(value) if tensor.is_cuda}
    return sorted(index for index in found if index is not None)


def _keywords(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's inputs."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)
