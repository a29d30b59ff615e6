"""Modules that take the place of other stages' modules in a stage.

::

    Outline   a module before the layer list: returns placeholder tensors of the original's shape
    Skip      a layer of the list: does what the stage tells it
    Absent    a module that must not be called: refuses

Each passes on attributes of the original, because models ask for them (`self.embed.weight.dtype`).
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from pipeplan.errors import RuntimeMismatchError
from pipeplan.splitting.checkpoint_frames import is_inside_checkpoint
from pipeplan.splitting.nesting import map_tensors, take_tensors
from pipeplan.splitting.placeholders import Placeholder

__all__ = ["Absent", "ForwardState", "Outline", "SetAside", "Skip", "StandIn"]


@dataclass(slots=True)
class ForwardState:
    """What the stand-ins of one stage share during a forward."""

    inside_list: bool = False
    """Whether the forward has reached the layer list."""
    is_running: bool = False
    """Whether the stage runs the model's forward; else somebody calls the model itself."""

    def require_running(self) -> None:
        """Refuse a call of the model by somebody else; a checkpoint may run it in the backward."""
        if not (self.is_running or is_inside_checkpoint()):
            raise RuntimeMismatchError(
                "model: a pipeline has cut it, so it can only be run by the pipeline; call"
                " pipeline.evaluate, or load pipeline.full_state_dict() into another model"
            )


class StandIn(nn.Module):
    """Takes the place of another module, without its parameters."""

    def __init__(self, original: nn.Module, state: ForwardState | None = None) -> None:
        super().__init__()
        # In __dict__ and in a list, so that torch does not count its parameters as this module's.
        self.__dict__["_state"] = state or ForwardState()
        self.__dict__["_original"] = [original]
        self.device = torch.device("cpu")
        """Device of the placeholder tensors."""
        self.training = original.training
        self.hides_tensors = False
        """Whether the rank holds the original, for another of its stages."""

    def hide_from(self, modules: Collection[int]) -> None:
        """Hide the original's tensors from a stage with these modules (by id), unless it is one."""
        self.hides_tensors = id(self.__dict__["_original"][0]) not in modules

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_original" not in self.__dict__:
                raise
            value = getattr(self.__dict__["_original"][0], name)
            if isinstance(value, torch.Tensor) and (value.is_meta or self.hides_tensors):
                # The model uses this weight directly.
                return Placeholder.like(value, self.device)
            return value


class SetAside:
    """Tensors of other stages, taken out of their modules; they can be put back."""

    def __init__(self) -> None:
        self._taken: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._placeholders: list[torch.Tensor] = []
        self._separated: set[int] = set()

    def take(self, originals: Iterable[nn.Module], held: Collection[int]) -> None:
        """Take the tensors of these modules, except for modules that the stage holds (by id)."""
        modules = {id(m): m for original in originals for m in original.modules()}
        for module in modules.values():
            if id(module) in held:
                continue
            named = [
                *module.named_parameters(recurse=False, remove_duplicate=False),
                *module.named_buffers(recurse=False, remove_duplicate=False),
            ]
            for name, tensor in named:
                empty: torch.Tensor = torch.empty_like(tensor, device="meta", requires_grad=False)
                if isinstance(tensor, nn.Parameter):
                    empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                self._taken.append((module, name, tensor))
                self._placeholders.append(empty)
        self.hide()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What was taken; empty after `forget`."""
        return [tensor for _, _, tensor in self._taken]

    def separate(self, held: Collection[int]) -> set[int]:
        """Copy tensors that the rank holds itself (by id); returns the ids of those.

        After that, gradients of a tied weight tell this stage's use from that of other stages.
        """
        copies: dict[int, torch.Tensor] = {}
        for index, (module, name, tensor) in enumerate(self._taken):
            if id(tensor) in held:
                copy = tensor.detach().clone()
                if isinstance(tensor, nn.Parameter):
                    copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
                copies.setdefault(id(tensor), copy)
                self._taken[index] = (module, name, copies[id(tensor)])
        self._separated |= copies.keys()
        return self._separated

    def put_back(self) -> None:
        """Put the tensors back into their modules."""
        for module, name, tensor in self._taken:
            setattr(module, name, tensor)

    def hide(self) -> None:
        """Take them out again."""
        for (module, name, _), empty in zip(self._taken, self._placeholders, strict=True):
            setattr(module, name, empty)

    def forget(self) -> None:
        """Free the tensors."""
        self._taken, self._placeholders = [], []


class Skip(StandIn):
    """A layer of another stage, in the layer list."""

    def __init__(
        self, original: nn.Module, state: ForwardState, action: Callable[..., Any]
    ) -> None:
        super().__init__(original, state)
        self.__dict__["_action"] = action

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the stage tells."""
        self.__dict__["_state"].require_running()
        return self.__dict__["_action"](args, kwargs)


class Absent(StandIn):
    """A module of another stage that this stage must not call."""

    def __init__(
        self,
        name: str,
        original: nn.Module,
        state: ForwardState | None = None,
        leave: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(original, state)
        self.__dict__.update(_name=name, _leave=leave)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse, unless the stage is done: then leave the model's forward."""
        self.__dict__["_state"].require_running()
        if self.__dict__["_leave"] is not None:
            self.__dict__["_leave"]()
        raise RuntimeMismatchError(
            f"model: calls {self.__dict__['_name']!r} in front of its layer list, although it is"
            " registered behind it; register modules in the order of use, or name all layers"
        )


class Outline(StandIn):
    """Returns placeholder tensors of the original's shape; finds the shape once."""

    def __init__(self, name: str, original: nn.Module, state: ForwardState) -> None:
        super().__init__(original, state)
        self.__dict__.update(_name=name, _output_of={})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Placeholder tensors of the original's shape."""
        state = self.__dict__["_state"]
        state.require_running()
        if state.inside_list:
            raise RuntimeMismatchError(
                f"model: calls {self.__dict__['_name']!r} behind the begin of its layer list,"
                " although it is registered before it; register modules in the order of use, or"
                " name all layers"
            )
        tensors, template = take_tensors([args, kwargs], "model")
        key = (
            *(str(template), torch.is_grad_enabled(), self.training),
            *((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors),
        )
        output_of = self.__dict__["_output_of"]
        if key not in output_of:
            meta_args, meta_kwargs = map_tensors(
                [args, kwargs], lambda tensor: _on_meta(tensor).clone()
            )
            original = self.__dict__["_original"][0]
            with _in_mode(original, trains=self.training):
                output = functional_call(original, _own_on_meta(original), meta_args, meta_kwargs)
            output_of[key] = map_tensors(output, _on_meta)
        return map_tensors(output_of[key], lambda like: Placeholder.like(like, self.device))


@contextlib.contextmanager
def _in_mode(module: nn.Module, *, trains: bool) -> Iterator[None]:
    """Inside, a module that is not in the model has the mode that its stand-in was given."""
    modes = [(each, each.training) for each in module.modules()]
    if module.training != trains:
        module.train(trains)
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training


def _own_on_meta(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's tensors on the meta device; this stage may hold some of them elsewhere."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: _on_meta(tensor) for name, tensor in named if not tensor.is_meta}


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """The same without values, as a leaf."""
    return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)
