"""Stand for what passes between the layers of a chain while its forward is rehearsed.

A token has no values. Code between layers may look at it, for a log, but nothing may come of that::

    print(token.mean(), token.std().item())      right: shows "(unknown)"
    if token.max() > 3: ...                      refused: nobody knows
    token.mul_(2), token.data = ...              refused: it is lost
    self.mean = token.mean()                     refused when the forward has ended: kept for later

So what is computed from a token is computed on torch's meta device, and has to be gone afterwards.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch

from pipeplan.errors import RuntimeMismatchError
from pipeplan.splitting.nesting import map_tensors, tensors_in
from pipeplan.splitting.torch_private import count_changes

__all__ = ["HARMLESS", "SHAPE", "Token", "Tokens"]

HARMLESS = frozenset(
    {
        *("contiguous", "to", "type", "cpu", "cuda", "requires_grad_"),
        *("float", "double", "half", "bfloat16", "long", "int", "bool"),
    }
)
"""Functions that may return their argument itself, since nothing is to be done."""
FREE = frozenset({"dtype", "device", "is_cuda", "is_cpu", "layout"})
"""What code may ask of a token: it stays what it was in the first step."""
SHAPE = frozenset({"shape", "size", "len", "__len__", "dim", "ndim", "numel", "nelement"})
TEXT = frozenset({"__format__", "__repr__", "__str__"})
UNKNOWN = "(unknown)"

Refusal = Callable[[str], RuntimeMismatchError]
"""The error for a function of this name."""


class Tokens:
    """Those of one forward, and what was computed from them."""

    def __init__(self, refuse: Refusal) -> None:
        self.refuse = refuse
        self.was_shown = False
        """Whether a text or a number was made of something unknown."""
        self._computed: list[weakref.ref[Any]] = []

    def make(self, dtype: torch.dtype, shape: tuple[int, ...] | None) -> "Token":
        """A token for a tensor of this type; nobody may ask for its shape if that is unknown."""
        like = None if shape is None else torch.empty(shape, dtype=dtype, device="meta")
        return Token.make(dtype, like, self)

    def computed(self, like: torch.Tensor, name: str) -> "Token":
        """What a function of this name gives for a token."""
        token = Token.make(like.dtype, like, self)
        token.made_by = name
        self.noted(token)
        return token

    def noted(self, value: Any) -> Any:
        """Remember that this was computed from a token."""
        self._computed.append(weakref.ref(value))
        return value

    def are_kept(self) -> bool:
        """Whether something that was computed from tokens is still in use; then none is."""
        if any(each() is not None for each in self._computed):
            gc.collect()
        kept = any(each() is not None for each in self._computed)
        self._computed = []
        return kept


class Token(torch.Tensor):
    """Stands for a tensor that passes from layer to layer, or for what is computed from it."""

    tokens: Tokens
    like: torch.Tensor | None
    """A tensor of its shape, if that is known."""
    made_by: str | None = None
    """The function that has computed it from another token."""

    @classmethod
    def make(cls, dtype: torch.dtype, like: torch.Tensor | None, tokens: Tokens) -> "Token":
        """A token like a tensor on the meta device."""
        token = torch.empty(0, dtype=dtype).as_subclass(cls)
        token.tokens, token.like = tokens, like
        return token

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what needs no values; refuse the rest."""
        name = getattr(func, "__name__", str(func))
        is_setting, is_getting = name == "__set__", name == "__get__"
        if is_setting or is_getting:
            name = func.__self__.__name__
        if name in FREE and not is_setting:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if name == "requires_grad" and is_getting:
            return torch.is_grad_enabled()
        found = [t for t in tensors_in([args, kwargs or {}]) if isinstance(t, Token)]
        tokens = found[0].tokens
        if name in HARMLESS and args and isinstance(args[0], Token):
            return args[0]
        if name in TEXT or name == "item":
            tokens.was_shown = True
            return UNKNOWN if name in TEXT else tokens.noted(UnknownNumber(tokens))
        if is_setting or any(each.like is None for each in found):
            raise tokens.refuse(name.strip("_"))
        return _computed(func, name, args, kwargs or {})


def _computed(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """What a function gives for tokens, without values; it must change nothing."""
    tokens = next(t.tokens for t in tensors_in([args, kwargs]) if isinstance(t, Token))
    likely, more = map_tensors([args, kwargs], _like)
    watched = tensors_in([likely, more])
    changes = [count_changes(each) for each in watched]
    try:
        output = func(*likely, **more)
    except Exception as error:
        raise tokens.refuse(name.strip("_")) from error
    if name in SHAPE:
        return output
    results = tensors_in(output)
    is_same = any(result is each for result in results for each in watched)
    if not results or is_same or [count_changes(each) for each in watched] != changes:
        raise tokens.refuse(name.strip("_"))
    return map_tensors(output, lambda like: tokens.computed(like, name.strip("_")))


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.like if isinstance(tensor, Token) and tensor.like is not None else tensor


class UnknownNumber:
    """A number that nobody knows: it can be shown, and reckoned with, but decides nothing."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def __str__(self) -> str:
        return UNKNOWN

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return UNKNOWN


def _another(self: UnknownNumber, *others: Any) -> UnknownNumber:
    number: UnknownNumber = self._tokens.noted(UnknownNumber(self._tokens))
    return number


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(self: UnknownNumber, *others: Any) -> Any:
        raise self._tokens.refuse(name)

    return refuse


for _name in ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod"):
    setattr(UnknownNumber, f"__{_name}__", _another)
    setattr(UnknownNumber, f"__r{_name}__", _another)
for _name in ("neg", "abs", "round"):
    setattr(UnknownNumber, f"__{_name}__", _another)
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "bool", "float", "int", "index"):
    setattr(UnknownNumber, f"__{_name}__", _refusing(_name))
