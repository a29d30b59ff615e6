"""Tries out whether an optimizer updates each parameter by itself, as stages need it.

Small optimizers of the same kind are made: one of all small parameters, and one for each of them
alone. A parameter that steps otherwise with the others than alone depends on them: by a norm, by
their number, by one step size for all. Each stage has only its own parameters, so it would be
trained otherwise than the whole model.

An optimizer may do so only later, behind a warm-up or as its step size grows. So the trials go on
later from where the real optimizer is: they take over its numbers (learning rates, counters).
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["OptimizerTrials"]

SHAPES = ((2, 3), (2, 2), (3, 1), (1, 4), (3, 3))
"""The small parameters."""
NUM_STEPS = 8
RELATIVE = 1e-6
"""By how much of their largest change parameters may differ."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """A small optimizer with its parameters."""

    optimizer: torch.optim.Optimizer
    parameters: Sequence[nn.Parameter]

    def step(self, seed: int) -> list[torch.Tensor]:
        """Go some steps from the same values as all trials; what has changed in each parameter."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.copy_(_first_values(parameter.shape))
        for number in range(NUM_STEPS):
            for parameter in self.parameters:
                slope = (parameter.detach() * (number + 1)).cos()
                parameter.grad = slope * len(parameter.flatten())
            self.optimizer.step()
        return [p.detach() - _first_values(p.shape) for p in self.parameters]

    def place_of(self, index: int) -> int | None:
        """The group that a parameter is in; None if the optimizer leaves it out."""
        wanted = id(self.parameters[index])
        found = enumerate(self.optimizer.param_groups)
        return next((p for p, group in found if wanted in map(id, group["params"])), None)

    def take_over(self, numbers: "_Numbers", place: int | None = None) -> None:
        """Continue from the numbers of another optimizer of this kind.

        Its group at `place` is that of this trial's only parameter: there may be one for each.
        """
        _put(vars(self.optimizer), numbers.own)
        for index, group in enumerate(self.optimizer.param_groups):
            source = index if place is None or not group["params"] else place
            if source < len(numbers.of_groups):
                _put(group, numbers.of_groups[source])
        for state in self.optimizer.state.values():
            _put(state, numbers.of_states)


class OptimizerTrials:
    """The small optimizers; nothing can be said where they do not work."""

    def __init__(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        """`make` makes an optimizer of some parameters, as for a stage."""
        self._together: Sequence[_Trial] = ()
        self._alone: list[_Trial] = []

        def try_out(*shapes: tuple[int, int]) -> _Trial:
            parameters = [nn.Parameter(_first_values(shape)) for shape in shapes]
            return _Trial(make(parameters), parameters)

        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                together = [try_out(*SHAPES) for _ in range(2)]
                self._alone = [try_out(shape) for shape in SHAPES]
                self._together = together
            except Exception:
                return

    def find_mixing(self, now: torch.optim.Optimizer | None = None) -> bool:
        """Whether parameters step otherwise together than each by itself, hooks included.

        With `now`, the trials go on from the numbers of this optimizer.
        """
        if not self._together:
            return False
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                if now is not None:
                    numbers = _Numbers.of(now)
                    for trial in self._together:
                        trial.take_over(numbers)
                    for index, trial in enumerate(self._alone):
                        trial.take_over(numbers, self._together[0].place_of(index))
                together, again = (trial.step(seed) for seed, trial in enumerate(self._together))
                alone = [trial.step(0)[0] for trial in self._alone]
            except Exception:
                self._together = ()
                return False
        draws = not all(map(torch.equal, together, again))
        return not draws and not all(map(_are_close, together, alone))


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The numbers of an optimizer: its own, those of its groups, and those of its parameters."""

    own: Mapping[str, float]
    of_groups: Sequence[Mapping[str, float]]
    of_states: Mapping[str, float]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> "_Numbers":
        states: dict[str, float] = {}
        for state in optimizer.state.values():
            for key, number in _numbers_in(state):
                states[key] = max(number, states.get(key, number))
        return cls(
            own=dict(_numbers_in(vars(optimizer))),
            of_groups=[dict(_numbers_in(group)) for group in optimizer.param_groups],
            of_states=states,
        )


def _numbers_in(found: Any) -> Iterable[tuple[str, float]]:
    if isinstance(found, Mapping):
        for key, value in found.items():
            if _is_number(value):
                yield key, float(value)


def _put(place: Any, numbers: Mapping[str, float]) -> None:
    """Replace numbers that are there already."""
    for key, number in numbers.items():
        value = place.get(key)
        if isinstance(value, torch.Tensor) and _is_number(value):
            value.fill_(number)
        elif _is_number(value):
            place[key] = type(value)(number)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not value.is_complex()
    return isinstance(value, int | float)


def _first_values(shape: Sequence[int]) -> torch.Tensor:
    count = math.prod(shape)
    return torch.linspace(-1.0, 2.0, count, dtype=torch.float64).view(*shape)


def _are_close(together: torch.Tensor, alone: torch.Tensor) -> bool:
    """Compares changes, since small learning rates change values by less than their rounding."""
    largest = max(float(together.abs().max()), float(alone.abs().max()))
    difference = float((together - alone).abs().max())
    return difference <= RELATIVE * largest + 1e-14
