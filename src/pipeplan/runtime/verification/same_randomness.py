"""Makes random operations draw the same numbers in the whole model and in its stages.

Dropout and other random operations draw in another order if a model is cut. Here, what an operation
draws depends only on its name and on the shapes of its arguments. Each one is noted, so that a
dropout which a cut loses or repeats is found even if it drops nothing.
"""

import functools
import math
import random
import sys
import zlib
from collections.abc import Collection
from typing import Any

import torch

from pipeplan.splitting.checkpoint_frames import is_inside_checkpoint
from pipeplan.splitting.nesting import tensors_in
from pipeplan.splitting.torch_private import QuickDispatchMode

__all__ = ["Draw", "SameRandomness", "seed_python"]

OWN_GENERATOR = " (own generator)"

Draw = tuple[str, str]
"""Where in the model a random operation was called, and which one."""


class SameRandomness(QuickDispatchMode):
    """Inside, equal random operations draw equal numbers.

    With `owned`, what is drawn at other places of the model becomes NaN. A stage repeats what the
    model does in front of its layers, but it would draw other numbers there than other stages.
    """

    def __init__(self, owned: Collection[str] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owned = owned
        self.draws: list[Draw] = []
        """The random operations so far, those of a backward excepted."""
        self.position = ""
        """Where in the model we are."""
        self.is_noting = False
        self.repeats = False
        """Whether a backward may draw again, inside of an activation checkpoint."""
        self._states: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    @property
    def uses_own_generator(self) -> bool:
        """Whether an operation has drawn from a generator that the model made itself."""
        return any(text.endswith(OWN_GENERATOR) for _, text in self.draws)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation; if it is a random one, seed its generator and note it."""
        if not _is_random(func):
            return func(*args, **(kwargs or {}))
        return self._draw(func, args, kwargs or {})

    def _draw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        generators = [
            value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)
        ]
        text = _describe(func, args, kwargs) + (OWN_GENERATOR if generators else "")
        if self.is_noting:
            is_hidden = not torch.is_grad_enabled() or is_inside_checkpoint()
            self.repeats = self.repeats or is_hidden
            self.draws.append((self.position, text))
        self._seed(zlib.crc32(text.encode()), generators, [*args, *kwargs.values()])
        output = func(*args, **kwargs)
        if self.is_noting and self._owned is not None and self.position not in self._owned:
            for tensor in tensors_in(output):
                tensor.fill_(math.nan if tensor.is_floating_point() else 0)
        return output

    def __exit__(self, *error: Any) -> None:
        """Give generators of the model the state that they had."""
        super().__exit__(*error)
        for generator, state in self._states.values():
            generator.set_state(state)

    def _seed(self, seed: int, generators: list[torch.Generator], values: list[Any]) -> None:
        for generator in generators:
            if id(generator) not in self._states:
                self._states[id(generator)] = (generator, generator.get_state())
            generator.manual_seed(seed)
        if not generators:
            torch.default_generator.manual_seed(seed)
            if torch.cuda.is_available() and any(tensor.is_cuda for tensor in tensors_in(values)):
                torch.cuda.manual_seed(seed)


@functools.cache
def _is_random(func: Any) -> bool:
    """Whether an operation draws; this is asked for all of them."""
    return torch.Tag.nondeterministic_seeded in func.tags


def seed_python(position: str) -> None:
    """Seed the generators of Python and numpy by a place in the model."""
    seed = zlib.crc32(position.encode())
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _describe(func: Any, args: Any, kwargs: dict[str, Any]) -> str:
    """The operation and the shapes of its arguments."""
    parts = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            parts.append(str(list(value.shape)))
        elif isinstance(value, bool | int | float | list | tuple):
            parts.append(str(value))
    name = str(func).removeprefix("aten.").partition(".")[0]
    return f"{name}({', '.join(parts)})"
