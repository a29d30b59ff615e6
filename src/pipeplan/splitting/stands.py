"""What stands in a stage's part of a model where modules of other stages were.

::

    Outline   before the list: returns nothing of the right shape
    Skip      a layer of the list: does what the part says
    Absent    must not be reached

Each lets the original's attributes through, which models ask for (`self.embed.weight.dtype`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from pipeplan.errors import RuntimeMismatchError
from pipeplan.splitting.nesting import map_tensors, take_tensors

__all__ = ["Absent", "Fill", "Outline", "Passage", "Skip", "Stand"]


class Fill(Enum):
    """Values that stand for those of other stages; nothing may depend on which."""

    NAN = auto()
    ZERO = auto()
    RANDOM = auto()


@dataclass(slots=True)
class Passage:
    """How a part's forward goes past what is not its own."""

    fill: Fill = Fill.NAN
    """What stands for values of other stages."""
    inside: bool = False
    """Whether it has come to the layer list."""

    def like(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A tensor of that shape and type, which takes no memory except when it is random."""
        if self.fill is Fill.RANDOM:
            generator = torch.Generator().manual_seed(tensor.numel())
            values = torch.randn(tensor.shape, generator=generator)
            made = values if tensor.is_floating_point() else values > 0
            return made.to(device, tensor.dtype)
        value = math.nan if self.fill is Fill.NAN and tensor.is_floating_point() else 0
        return torch.full((), value, dtype=tensor.dtype, device=device).expand(tensor.shape)


class Stand(nn.Module):
    """Stands where another module was, without its parameters."""

    def __init__(
        self, original: nn.Module, passage: Passage | None = None, *, drop: bool = True
    ) -> None:
        super().__init__()
        if drop:
            original.to("meta")
        self.__dict__["_passage"] = passage or Passage()
        # In a list, so that its parameters are not this module's.
        self.__dict__["_original"] = [original]
        self.place = torch.device("cpu")
        """Where that stands which stands for its tensors."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_original" not in self.__dict__:
                raise
            value = getattr(self.__dict__["_original"][0], name)
            if isinstance(value, torch.Tensor) and value.is_meta:
                # A weight that the model uses by itself.
                return self.__dict__["_passage"].like(value, self.place)
            return value


class Skip(Stand):
    """A layer of another stage."""

    def __init__(self, original: nn.Module, action: Callable[..., Any]) -> None:
        super().__init__(original)
        self.__dict__["_action"] = action

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the part says."""
        return self.__dict__["_action"](args, kwargs)


class Absent(Stand):
    """A module of another stage, which this one must not reach."""

    def __init__(self, name: str, original: nn.Module, *, drop: bool = True) -> None:
        super().__init__(original, drop=drop)
        self.__dict__["_name"] = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse."""
        raise RuntimeMismatchError(
            f"model: calls {self.__dict__['_name']!r} in front of its layer list, although it is"
            " registered behind it; register modules in the order of use, or name all layers"
        )


class Outline(Stand):
    """Returns nothing of the shape that the original returns; the shape is found once."""

    def __init__(self, name: str, original: nn.Module, passage: Passage) -> None:
        super().__init__(original, passage)
        self.__dict__.update(_name=name, _known={})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Nothing, of the right shape."""
        passage = self.__dict__["_passage"]
        if passage.inside:
            raise RuntimeMismatchError(
                f"model: calls {self.__dict__['_name']!r} behind the begin of its layer list,"
                " although it is registered before it; register modules in the order of use, or"
                " name all layers"
            )
        tensors, template = take_tensors([args, kwargs], "model")
        key = (str(template), *((tensor.shape, tensor.dtype) for tensor in tensors))
        known = self.__dict__["_known"]
        if key not in known:
            meta_args, meta_kwargs = map_tensors(
                [args, kwargs], lambda tensor: tensor.detach().to("meta")
            )
            with torch.no_grad():
                known[key] = self.__dict__["_original"][0](*meta_args, **meta_kwargs)
        return map_tensors(known[key], lambda like: passage.like(like, self.place))
