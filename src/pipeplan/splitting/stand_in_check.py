"""Checks, in the first microbatch, that a stage's output does not depend on placeholder tensors.

Only what a layer returns crosses a cut. A model that carries more past its layers, such as
`x = block(x) + x0`, would compute with placeholders of other stages. To notice that, the first
microbatch runs three times: with NaN, with zeros and with random numbers as placeholders. All three
outputs have to be the same. Training and evaluation are checked separately.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pipeplan.errors import RuntimeMismatchError
from pipeplan.splitting.nesting import map_tensors, tensors_in
from pipeplan.splitting.stand_ins import Fill, ForwardState

__all__ = ["StandInCheck"]

COLLECTING_OPTIONS = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Options of Hugging Face's models that collect something of each layer."""

RunStage = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs the stage on (carried, args, kwargs)."""


class StandInCheck:
    """Checks one stage, once in training and once in evaluation."""

    def __init__(
        self, model: nn.Module, state: ForwardState, layers_text: str, *, is_needed: bool
    ) -> None:
        self._model, self._state, self._layers_text = model, state, layers_text
        self._checked_modes = set() if is_needed else {True, False}

    @property
    def is_due(self) -> bool:
        """Whether the next microbatch is the first one in the model's mode."""
        return self._model.training not in self._checked_modes

    def run(
        self, run: RunStage, carried: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The stage's output, if it does not depend on placeholders.

        Raises:
            RuntimeMismatchError: it does.
        """
        self._checked_modes.add(self._model.training)
        self._require_own_outputs(kwargs)
        call = map_tensors([carried, args, kwargs], _copy)
        devices = _cuda_devices(call)
        states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)]
        output = run(carried, args, kwargs)
        with torch.random.fork_rng(devices):
            others = []
            for fill in (Fill.ZERO, Fill.RANDOM):
                torch.set_rng_state(states[0])
                for device, state in zip(devices, states[1:], strict=True):
                    torch.cuda.set_rng_state(state, device)
                others.append(self._run_with(run, fill, map_tensors(call, _copy)))
        if not all(_are_same(output, other) for other in others):
            raise RuntimeMismatchError(
                f"model: the layers {self._layers_text} use values of other stages that no layer"
                " returns, such as x0 in x = block(x) + x0, a mask made of embeddings, or a weight"
                " taken from another module; such values do not cross a cut: make it a chain of"
                " modules that return all that later ones need"
            )
        return output

    def _run_with(self, run: RunStage, fill: Fill, call: list[Any]) -> Any:
        """The output with another fill, None if the stage fails; buffers stay as they are."""
        carried, args, kwargs = call
        kept = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        self._state.fill = fill
        try:
            return run(carried, args, kwargs)
        except Exception:  # with the first fill it did not fail
            return None
        finally:
            self._state.fill = Fill.NAN
            for buffer, value in kept:
                buffer.data.copy_(value)

    def _require_own_outputs(self, kwargs: dict[str, Any]) -> None:
        """Refuse options by which a model collects something of each of its layers."""
        config = getattr(self._model, "config", None)
        for name in COLLECTING_OPTIONS:
            if kwargs.get(name) or getattr(config, name, False):
                raise RuntimeMismatchError(
                    f"model: {name} collects something of each layer, but a stage has only its"
                    " own; set it to False"
                )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with a gradient if the original has one; no leaf, so that layers may work in place."""
    return tensor.detach().requires_grad_(tensor.requires_grad).clone()


def _are_same(first: Any, second: Any) -> bool:
    """Whether two outputs are equal up to rounding; NaN equals NaN."""
    pairs = list(zip(tensors_in(first), tensors_in(second), strict=False))
    if len(tensors_in(first)) != len(tensors_in(second)):
        return False
    return all(a.shape == b.shape and _are_close(a.detach(), b.detach()) for a, b in pairs)


def _are_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    finite = a[a.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4 * largest, equal_nan=True)


def _cuda_devices(value: Any) -> list[int]:
    found = {tensor.device.index for tensor in tensors_in(value) if tensor.is_cuda}
    return sorted(index for index in found if index is not None)
