"""Tensors of other stages: they have a shape, a type and a device, but no values.

A model's forward asks for shapes of what other stages compute, and may calculate with it as long as
nothing comes of it. Whatever is calculated from a placeholder is a placeholder again. A stage whose
output is one, or that asks for a value, needs something that does not cross its cut. So this is
noticed in every step, and not only where a comparison looked.
"""

from typing import Any

import torch

from pipeplan.errors import RuntimeMismatchError
from pipeplan.splitting.nesting import map_tensors, tensors_in
from pipeplan.splitting.torch_private import make_wrapper

__all__ = ["CARRIED_PAST", "Placeholder", "has_placeholder"]

CARRIED_PAST = (
    "they use values of other stages that no layer returns, such as x0 in x = block(x) + x0, a mask"
    " made of embeddings, or a weight taken from another module; such values do not cross a cut:"
    " make it a chain of modules that return all that later ones need"
)

WITHOUT_VALUES = frozenset(
    {
        *("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones"),
        *("new_full", "new_empty", "new_empty_strided", "rand_like", "randn_like", "randint_like"),
    }
)
"""Operations that take only shape and type from their argument."""


class Placeholder(torch.Tensor):
    """A tensor without values."""

    outline: torch.Tensor
    """The same on the meta device, where torch computes shapes."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> "Placeholder":
        """A placeholder in the shape of a tensor on the meta device."""
        made = make_wrapper(cls, inner, device)
        made.outline = inner
        return made  # type: ignore[no-any-return]

    def __init__(self, inner: torch.Tensor, device: torch.device) -> None:
        """All is done in __new__."""

    @classmethod
    def like(cls, tensor: torch.Tensor, device: torch.device) -> "Placeholder":
        """A placeholder in the shape of any tensor; it needs a gradient as that one does.

        It is no leaf, as nothing is that a layer returns: it may be changed in place.
        """
        made = cls(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), device)
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return made
        return made.requires_grad_().clone()  # type: ignore[return-value]

    def __repr__(self) -> str:  # type: ignore[override]
        """Its shape and type; there are no values to show."""
        return f"Placeholder(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute shapes; refuse what needs a value."""
        kwargs = kwargs or {}
        name = str(func).removeprefix("aten.").partition(".")[0]
        found = [value for value in tensors_in([args, kwargs]) if isinstance(value, Placeholder)]
        if name in WITHOUT_VALUES:
            args, kwargs = map_tensors([args, kwargs], _with_any_values)
            return func(*args, **kwargs)
        device = torch.device(kwargs.get("device") or found[0].device)
        if device.type == "meta":  # somebody asks for shapes
            return func(*map_tensors(list(args), _on_meta), **map_tensors(kwargs, _on_meta))
        written = kwargs.get("out", args[0] if name.endswith("_") and args else None)
        if any(not isinstance(value, Placeholder) for value in tensors_in(written)):
            raise RuntimeMismatchError(f"model: {name} writes into a tensor; {CARRIED_PAST}")
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        try:
            output = func(*map_tensors(list(args), _on_meta), **map_tensors(kwargs, _on_meta))
        except Exception as error:
            raise RuntimeMismatchError(
                f"model: {name} needs values of another stage; {CARRIED_PAST}"
            ) from error
        if written is not None:
            return written
        return map_tensors(output, lambda tensor: cls(tensor, device))


def has_placeholder(value: Any) -> bool:
    """Whether a nested value holds a tensor without values."""
    return any(isinstance(tensor, Placeholder) for tensor in tensors_in(value))


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.outline if isinstance(tensor, Placeholder) else tensor.detach().to("meta")


def _with_any_values(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of that shape that takes no memory; only its shape is asked for."""
    if not isinstance(tensor, Placeholder):
        return tensor
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
