"""What a stage is at the moment, so that other ranks can put it into their whole model for a while.

A rank keeps the modules of all layers, but the tensors of its own ones only. To run the whole model
once more, it gets tensors, modes and plain attributes of the other stages from the ranks that hold
them. What is code (functions, classes, hooks) stays the rank's own: that is what is compared.
"""

import contextlib
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from pipeplan.runtime.module_state import OF_EVERY_MODULE
from pipeplan.splitting.stand_ins import StandIn

__all__ = [
    "CodeMarks",
    "StageState",
    "filled",
    "filled_loss",
    "give_remembered",
    "give_settings",
    "take_settings",
    "take_state",
]

PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, np.ndarray)
MOST_DEPTH = 4


@dataclass(frozen=True, slots=True)
class _Kept:
    """Stands for a value that each rank has of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """What changes while a stage is trained, on the host."""

    tensors: dict[str, tuple[torch.Tensor, bool]] = field(default_factory=dict)
    """Parameters and buffers by name, and whether they are trained."""
    modes: dict[str, bool] = field(default_factory=dict)
    """By module: whether it is in training."""
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By module: numbers, texts and containers of them."""

    def add(self, other: "StageState") -> None:
        """Take over the state of another stage."""
        self.tensors.update(other.tensors)
        self.modes.update(other.modes)
        self.attributes.update(other.attributes)

    def only(self, names: Collection[str]) -> "StageState":
        """What has these names."""
        return StageState(
            tensors={name: each for name, each in self.tensors.items() if name in names},
            attributes={
                path: {key: each for key, each in found.items() if _joined(path, key) in names}
                for path, found in self.attributes.items()
            },
        )


def take_state(model: nn.Module, only: Collection[str] | None = None) -> StageState:
    """The state of all modules that this rank holds; or `only` what has these names."""
    modules = {name: m for name, m in model.named_modules() if not isinstance(m, StandIn)}
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    state = StageState(
        tensors={n: (t.detach().cpu(), t.requires_grad) for n, t in named if not t.is_meta},
        modes={name: module.training for name, module in modules.items()},
        attributes={name: _plain_attributes(module) for name, module in modules.items()},
    )
    return state if only is None else state.only(only)


def take_settings(model: nn.Module) -> StageState:
    """The modes and plain attributes of all modules that this rank holds."""
    modules = {name: m for name, m in model.named_modules() if not isinstance(m, StandIn)}
    plain = (bool, int, float, str, type(None))
    return StageState(
        modes={name: module.training for name, module in modules.items()},
        attributes={
            name: {
                key: value
                for key, value in vars(module).items()
                if key not in OF_EVERY_MODULE and type(value) in plain
            }
            for name, module in modules.items()
        },
    )


def give_settings(model: nn.Module, own: Collection[int], state: StageState) -> None:
    """Give these to all modules of a whole model but a rank's `own` ones (by id)."""
    for path, module in model.named_modules():
        if id(module) not in own:
            module.training = state.modes.get(path, module.training)
            vars(module).update(state.attributes.get(path, {}))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    found = {
        name: _packed(value) for name, value in vars(module).items() if name not in OF_EVERY_MODULE
    }
    return {name: value for name, value in found.items() if not isinstance(value, _Kept)}


def _packed(value: Any, depth: int = 0) -> Any:
    """The value without anything that is code; `_Kept` if nothing of it is data."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().cpu() if not value.is_meta else _Kept()
    kind = type(value)
    if depth < MOST_DEPTH and kind in (list, tuple, set, deque, dict):
        entries = value.items() if kind is dict else value
        packed = [_packed(entry, depth + 1) for entry in entries]
        if any(_holds_kept(entry) for entry in packed):
            return _Kept()
        return deque(packed, value.maxlen) if kind is deque else kind(packed)
    return _Kept()


def _holds_kept(value: Any) -> bool:
    return isinstance(value, _Kept) or (isinstance(value, tuple) and any(map(_holds_kept, value)))


@contextlib.contextmanager
def filled(model: nn.Module, own: Collection[int], state: StageState) -> Iterator[None]:
    """Inside, a whole model has this state in all modules but its `own` ones (by id)."""
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    put: list[tuple[nn.Module, str, torch.Tensor]] = []
    for path, module in model.named_modules():
        if id(module) in own:
            continue
        module.training = state.modes.get(path, module.training)
        vars(module).update(state.attributes.get(path, {}))
        for name, empty in _own_tensors(module):
            found = state.tensors.get(_joined(path, name))
            if found is None or not empty.is_meta:
                continue
            value, is_trained = found[0].to(device), found[1]
            is_parameter = isinstance(empty, nn.Parameter)
            setattr(module, name, nn.Parameter(value, is_trained) if is_parameter else value)
            put.append((module, name, empty))
    try:
        yield
    finally:
        for module, name, empty in put:
            setattr(module, name, empty)


@contextlib.contextmanager
def filled_loss(loss_fn: Any, prefix: str, state: StageState) -> Iterator[None]:
    """Inside, a loss module has the weights that the last stage has trained."""
    put: list[tuple[torch.Tensor, torch.Tensor, bool]] = []
    if isinstance(loss_fn, nn.Module):
        for name, tensor in [*loss_fn.named_parameters(prefix), *loss_fn.named_buffers(prefix)]:
            if name in state.tensors:
                put.append((tensor, tensor.data, tensor.requires_grad))
                value, is_trained = state.tensors[name]
                tensor.data = value.to(tensor.device)
                tensor.requires_grad_(is_trained)
    try:
        yield
    finally:
        for tensor, value, was_trained in put:
            tensor.data, tensor.grad = value, None
            tensor.requires_grad_(was_trained)


def give_remembered(model: nn.Module, state: StageState) -> None:
    """Give modules of this rank what forwards have changed on the first replica."""
    tensors = dict(model.named_buffers(remove_duplicate=False))
    for name, (value, _) in state.tensors.items():
        if name in tensors:
            tensors[name].data.copy_(value)
    for path, module in model.named_modules():
        vars(module).update(state.attributes.get(path, {}))


def _own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        *module.named_parameters(recurse=False, remove_duplicate=False),
        *module.named_buffers(recurse=False, remove_duplicate=False),
    ]


class CodeMarks:
    """Notices that a program has replaced code of its layers, which other ranks cannot get."""

    def __init__(self, model: nn.Module) -> None:
        self._marks = self._look(model)

    def are_same(self, model: nn.Module) -> bool:
        """Whether all layers have the functions and hooks that they had."""
        return self._look(model) == self._marks

    def _look(self, model: nn.Module) -> list[Any]:
        found: list[Any] = []
        for module in model.modules():
            if isinstance(module, StandIn):
                continue
            found.append(type(module))
            for name, value in vars(module).items():
                if name in OF_EVERY_MODULE:
                    is_hooks = isinstance(value, dict) and name.endswith("hooks")
                    found += [(name, len(value))] if is_hooks else []
                elif isinstance(_packed(value), _Kept):
                    found.append((name, id(value)))
        return found
