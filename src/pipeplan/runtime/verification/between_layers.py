"""Finds operations between the layers of a chain, whatever they do to the first batch.

Layers that are named one by one are called one after another, each with what the one before
returned. A model's own forward may do more between them. If that changes nothing yet (a mask
without padding, a clamp of small numbers, a temperature of 1), all values agree, and it would be
lost without a word later. So values do not count here. What enters a layer has to be the very
tensor that the layer before returned, or an input of the model, and no function may have worked on
it::

    a(x) -> y      y.clamp(-4, 4) -> z      b(z)       z is not y
    a(x) -> y      dropout(y, p=0) -> y     b(y)       y, but a function has returned it once more

A forward that `nn.Sequential` has itself does nothing between its layers, without hooks.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from pipeplan.documents.text import printable
from pipeplan.runtime.verification.same_randomness import SameRandomness
from pipeplan.runtime.verification.stage_calls import Sample, StageCalls
from pipeplan.splitting.layout import Layout
from pipeplan.splitting.nesting import tensors_in
from pipeplan.splitting.rehearsals import does_its_own
from pipeplan.splitting.tokens import HARMLESS
from pipeplan.splitting.torch_private import count_changes

__all__ = ["find_operation"]


def find_operation(stage: StageCalls, sample: Sample) -> str | None:
    """Name an operation between two layers of a chain; None if there is none.

    It looks in the modes that modules have, and in evaluation. The model has to be whole.
    """
    module = stage.module
    if not does_its_own(module.model, module.layout):
        return None
    modes = [(each, each.training) for each in stage.modules()]
    try:
        for trains in (True, False):
            if not trains:
                module.model.eval()
            watch = _Watch(module.layout)
            with contextlib.suppress(Exception):  # such as a gradient inside of the forward
                watch.run(module.model, sample.copied(), stage)
            if watch.problem is not None:
                return watch.problem
    finally:
        for each, training in modes:
            each.training = training
    return None


class _Calls(TorchFunctionMode):
    """Notes which tensors were returned by functions; it is on between layers only."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: dict[int, tuple[str, Any]] = {}
        """The function's name by the id of a tensor, and that tensor, so that its id stays its."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        changed = [args[0]] if name == "__setitem__" else tensors_in(output)
        given = {id(tensor) for tensor in tensors_in([args, kwargs or {}])}
        for tensor in changed:
            if name not in HARMLESS or id(tensor) not in given:
                self.returned[id(tensor)] = (name.strip("_"), tensor)
        return output


@dataclass(slots=True)
class _Watch:
    """One forward of the whole model."""

    layout: Layout
    calls: _Calls = field(default_factory=_Calls)
    problem: str | None = None
    _inputs: dict[int, tuple[int, torch.Tensor]] = field(default_factory=dict)
    """By id: how often each was changed in place."""
    _outputs: dict[int, tuple[int, torch.Tensor]] = field(default_factory=dict)
    """The same of what the layer before returned."""
    _before: str = "the model's input"
    _depth: int = 0
    _is_on: bool = False

    def run(self, model: nn.Module, sample: Sample, stage: StageCalls) -> None:
        """Call the model, and look at what passes between its layers."""
        args, kwargs = sample.call
        self._inputs = _marked([*args, *kwargs.values()])
        handles = self._attach(model)
        self._switch(True)
        try:
            with torch.no_grad(), SameRandomness(), stage.autocast():
                output = model(*args, **kwargs)
            self._switch(False)
            self._look([output], "the model's output", may_be_input=False)
        finally:
            self._switch(False)
            for handle in handles:
                handle.remove()

    def _attach(self, model: nn.Module) -> list[Any]:
        handles: list[Any] = []
        names_of: dict[int, list[str]] = {}
        for name in self.layout.atoms:
            names_of.setdefault(id(model.get_submodule(name)), []).append(name)
        for names in names_of.values():
            module = model.get_submodule(names[0])
            before, behind = self._make_hooks(f"layer {printable(names[0])!r}")
            # In front of the hooks of the user, and behind them: those belong to the layer.
            handles += [
                module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
                module.register_forward_hook(behind),
            ]
        return handles

    def _make_hooks(self, text: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self._depth += 1
            if self._depth == 1:
                self._switch(False)
                self._look([*args, *kwargs.values()], text, may_be_input=True)

        def behind(module: nn.Module, args: Any, output: Any) -> None:
            self._depth -= 1
            if not self._depth:
                self._outputs, self._before = _marked(output), text
                self._switch(True)

        return before, behind

    def _switch(self, is_on: bool) -> None:
        """Note functions from now on, or no more: layers may have been compiled without that."""
        if is_on and not self._is_on:
            self.calls.returned = {}
            self.calls.__enter__()  # type: ignore[no-untyped-call]
        elif self._is_on and not is_on:
            self.calls.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._is_on = is_on

    def _look(self, values: Sequence[Any], text: str, *, may_be_input: bool) -> None:
        known = self._outputs or self._inputs
        if may_be_input:  # layers get inputs by their names, too
            known = self._inputs | known
        for tensor in tensors_in(values):
            name = self.calls.returned.get(id(tensor), ("", None))[0]
            changes = known.get(id(tensor), (-1, None))[0]
            if self.problem is None and (name or changes != count_changes(tensor)):
                what = f"by {printable(name)!r}" if name else "by something else"
                self.problem = (
                    f"model: its forward works {what} on what passes from {self._before} to {text};"
                    " layers named one by one are a chain, each called with what the one before"
                    " returns, so that is lost, now or in a later step: put it into a layer"
                )


def _marked(value: Any) -> dict[int, tuple[int, torch.Tensor]]:
    return {id(tensor): (count_changes(tensor), tensor) for tensor in tensors_in(value)}
