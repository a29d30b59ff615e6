"""Counts the bytes that a layer's forward and backward hold, by the storages of tensors."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from pipeplan.splitting.nesting import tensors_in
from pipeplan.splitting.split_backward import Box, SavedBoxes
from pipeplan.splitting.torch_private import TorchDispatchMode, storage_key

__all__ = ["AliveBytes", "CountedBoxes", "KeptBytes", "bytes_of"]


def bytes_of(tensors: Iterable[torch.Tensor], without: Iterable[torch.Tensor] = ()) -> int:
    """The bytes of tensors by their storages; each storage counts once, those of `without` not."""
    left_out = {storage_key(tensor) for tensor in without}
    sizes = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for key, size in sizes.items() if key not in left_out)


class _Saved:
    """A tensor that autograd has saved; it lives as long as autograd needs it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class KeptBytes:
    """Counts the bytes that autograd keeps for the backward; parameters do not count."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._saved: list[weakref.ref[_Saved]] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            self._keep, lambda saved: saved.tensor
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What autograd keeps at this moment."""
        return [saved.tensor for saved in (ref() for ref in self._saved) if saved is not None]

    @property
    def total(self) -> int:
        """The bytes at this moment; a storage counts once, even if several operations keep it."""
        return bytes_of(self.tensors, self._parameters)

    def __enter__(self) -> "KeptBytes":
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        self._hooks.__exit__()

    def _keep(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._saved.append(weakref.ref(saved))
        return saved


class CountedBoxes(SavedBoxes):
    """What autograd saves for a backward in two halves, as the runtime saves it; countable."""

    def __init__(self) -> None:
        super().__init__()
        self._boxes: list[weakref.ref[Box]] = []
        self.pack = self._note

    def _note(self, tensor: torch.Tensor) -> Box:
        box = Box(tensor)
        self._boxes.append(weakref.ref(box))
        return box

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What is kept at this moment."""
        boxes = [box for box in (ref() for ref in self._boxes) if box is not None]
        return [box.tensor for box in boxes if box.tensor is not None]


class AliveBytes(TorchDispatchMode):
    """Counts the most bytes of new tensors that are alive at once.

    A parameter's gradient counts until autograd has stored it in the parameter.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._hooks: list[Any] = []
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._now = self.most = 0

    def __enter__(self) -> "AliveBytes":
        for parameter in self._parameters:
            parameter.grad = None
            hook = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._forget_gradient
            )
            self._hooks.append(hook)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and count its outputs."""
        output = func(*args, **(kwargs or {}))
        for tensor in tensors_in(output):
            storage = tensor.untyped_storage()
            key, num_bytes = id(storage), storage.nbytes()
            if key not in self._storages:

                def gone(_: Any, key: int = key, num_bytes: int = num_bytes) -> None:
                    self._forget(key, num_bytes)

                self._storages[key] = weakref.ref(storage, gone)
                self._now += num_bytes
        self.most = max(self.most, self._now)
        return output

    def _forget_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            storage = parameter.grad.untyped_storage()
            self._forget(id(storage), storage.nbytes())

    def _forget(self, key: int, num_bytes: int) -> None:
        if self._storages.pop(key, None) is not None:
            self._now -= num_bytes
