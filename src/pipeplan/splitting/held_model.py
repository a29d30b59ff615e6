"""What one rank holds of a model: the modules of its stages, and stand-ins for all others.

A rank with several stages has one model, so that weights which two of them use stay one tensor, and
names stay as they are. Each stage has stand-ins of its own for all layers that are not its own::

    between blocks       h.0     skip    h.2     skip      what is saved, counted and optimized
    while stage 0 runs   h.0     skip    skip    skip
    while stage 2 runs   skip    skip    h.2     skip

With one stage a rank the three are the same, and nothing is switched.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from pipeplan.splitting.stand_ins import SetAside, StandIn

__all__ = ["HeldModel"]

NOTHING = contextlib.nullcontext()
StandIns = Mapping[str, nn.Module]
"""By name, what stands in the place of a module."""


class _Switch(NamedTuple):
    """One module that differs between a stage's view and what stands there between blocks."""

    parent: nn.Module
    name: str
    inside: nn.Module
    between: nn.Module


class HeldModel:
    """One rank's modules of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.rest = SetAside()
        """The tensors of other ranks, until they are forgotten."""
        self.is_whole = False
        """Whether the model is as it was before the cut, for a while."""
        self._originals: dict[str, nn.Module] = {}
        self._between: dict[str, nn.Module] = {}
        """What stands in the place of modules of other ranks."""
        self._stand_ins: list[StandIns] = []
        self._switches: dict[int, list[_Switch]] = {}
        """For each stage, by its stand-ins."""
        self._shown: StandIns | None = None
        """Those of the stage that runs."""
        self._attached: dict[str, tuple[nn.Module, StandIns]] = {}

    def put_stand_ins(self, of_stages: Sequence[StandIns]) -> None:
        """Cut the model down to its stages; `of_stages` are the stand-ins of each."""
        self._stand_ins = list(of_stages)
        names = dict.fromkeys(name for stand_ins in of_stages for name in stand_ins)
        self._originals = {name: self.model.get_submodule(name) for name in names}
        self._between = {
            name: of_stages[0][name]
            for name in names
            if all(name in stand_ins for stand_ins in of_stages)
        }
        parents = {name: self.model.get_submodule(name.rpartition(".")[0]) for name in names}
        for stand_ins in of_stages:
            switches = []
            for name, original in self._originals.items():
                inside = stand_ins.get(name, original)
                between = self._between.get(name, original)
                if inside is not between:
                    last = name.rpartition(".")[2]
                    switches.append(_Switch(parents[name], last, inside, between))
            self._switches[id(stand_ins)] = switches
        for name, stand_in in self._between.items():
            self.model.set_submodule(name, stand_in)
        held = {id(module) for module in self.model.modules()}  # stand-ins hide their originals
        self.rest.take([self._originals[name] for name in self._between], held)
        for stand_ins in of_stages if len(of_stages) > 1 else ():
            with self.alone(stand_ins):
                seen = {id(module) for module in self.model.modules()}
            for stand_in in stand_ins.values():
                if isinstance(stand_in, StandIn):
                    stand_in.hide_from(seen)

    def alone(self, stand_ins: StandIns) -> contextlib.AbstractContextManager[Any]:
        """Inside, the model is what it is for the stage with these stand-ins."""
        if len(self._stand_ins) == 1 or self._shown is stand_ins:
            return NOTHING
        return self._alone(stand_ins)

    @contextlib.contextmanager
    def _alone(self, stand_ins: StandIns) -> Iterator[None]:
        assert self._shown is None  # one stage runs at a time
        switches = self._switches[id(stand_ins)]
        hidden = [name for name, (_, owner) in self._attached.items() if owner is not stand_ins]
        for switch in switches:
            switch.inside.training = switch.between.training  # programs see the latter alone
            setattr(switch.parent, switch.name, switch.inside)
        for name in hidden:
            delattr(self.model, name)
        self._shown = stand_ins
        try:
            yield
        finally:
            self._shown = None
            for switch in switches:
                setattr(switch.parent, switch.name, switch.between)
            for name in hidden:
                self.model.add_module(name, self._attached[name][0])

    @contextlib.contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """Inside, the model is as it was before the cut."""
        self.restore()
        try:
            yield self.model
        finally:
            self.apply()

    def restore(self) -> None:
        """Make the model whole again, as it was before the cut."""
        for name in self._attached:
            delattr(self.model, name)
        for name in self._between:
            self.model.set_submodule(name, self._originals[name])
        self.rest.put_back()
        self.is_whole = True

    def apply(self) -> None:
        """Cut the model again after `restore`."""
        self.is_whole = False
        self.rest.hide()
        for name, stand_in in self._between.items():
            self.model.set_submodule(name, stand_in)
        for name, (module, _) in self._attached.items():
            self.model.add_module(name, module)

    def attach(self, name: str, module: nn.Module, owner: StandIns) -> None:
        """Count a module's parameters as those of the stage with these stand-ins."""
        self._attached[name] = (module, owner)
        self.model.add_module(name, module)

    def standing(self, name: str) -> list[nn.Module]:
        """All modules that stand at a place of the model, now or while a stage runs."""
        found = [self.model.get_submodule(name), self._originals.get(name)]
        found += [stand_ins.get(name) for stand_ins in self._stand_ins]
        return list({id(module): module for module in found if module is not None}.values())

    def is_common(self, name: str) -> bool:
        """Whether a tensor or attribute of this name belongs to code that every stage runs."""
        return not any(name.startswith(f"{module}.") for module in self._originals)

    def place_stand_ins(self, device: torch.device) -> None:
        """Say where stand-ins make their tensors."""
        for stand_ins in self._stand_ins:
            for stand_in in stand_ins.values():
                if isinstance(stand_in, StandIn):
                    stand_in.device = device
