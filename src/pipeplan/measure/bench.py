"""Runs single atoms, and says what they hold and how long they take.

A backward is measured twice: as a whole, and in its two halves, as the runtime runs them
(`splitting.split_backward`). The halves take a little longer than the whole, since they share some
work. So `weight_grad_ms` is the weights' part of the whole's time. Where the first half has to do
everything, it is 0.

Activations are what autograd keeps for the backward. For the last layer with its loss, they are the
most bytes alive at once in its forward and backward. With a large vocabulary, the gradients of
logits and of their logarithms are several times larger than what autograd keeps. They make up most
of the last stage's memory.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from pipeplan.errors import InputError
from pipeplan.measure.atoms import Atom, Call
from pipeplan.measure.clocks import Clock
from pipeplan.measure.footprint import AliveBytes, CountedBoxes, KeptBytes, bytes_of
from pipeplan.splitting.nesting import tensors_in
from pipeplan.splitting.split_backward import SavedBoxes, WeightHalf, run_input_half
from pipeplan.splitting.torch_private import is_fake

__all__ = ["AtomBytes", "AtomTimes", "Begun", "Bench", "Loss"]

Loss = Callable[[Any], torch.Tensor]
Span = tuple[Any, Any]
"""Two marks of a clock."""
LEAST_PART = 0.1
"""No layer takes less than this part of what was measured, however long starting it takes."""


@dataclass(slots=True, kw_only=True)
class AtomBytes:
    """What an atom holds and hands on, for one microbatch."""

    output_bytes: int
    gradient_bytes: int
    parameter_bytes: int
    activation_bytes: int
    weight_grad_bytes: int


@dataclass(slots=True)
class AtomTimes:
    """The times of all runs, in milliseconds."""

    forward_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)
    input_grad_ms: list[float] = field(default_factory=list)
    weight_grad_ms: list[float] = field(default_factory=list)
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    """FLOPs of one run, where they are counted."""

    def note(self, clock: Clock, forward: Span, backward: Span) -> None:
        """Note a forward and a backward, each between two marks."""
        self.forward_ms.append(clock.ms_between(*forward))
        self.backward_ms.append(clock.ms_between(*backward))
        self.forward_flops = clock.flops_between(*forward)
        self.backward_flops = clock.flops_between(*backward)

    forward_start_ms: float = 0.0
    backward_start_ms: float = 0.0
    """What starting a forward or a backward takes by itself; a stage pays it once for all its
    layers, so it is left out."""

    @property
    def forward(self) -> float:
        """The median of the forwards, without starting them."""
        return _without(median(self.forward_ms), self.forward_start_ms)

    @property
    def backward(self) -> float:
        """The median of the backwards, without starting them."""
        return _without(median(self.backward_ms), self.backward_start_ms)

    @property
    def weight_grad(self) -> float:
        """The weights' part of the backward."""
        weights, inputs = median(self.weight_grad_ms), median(self.input_grad_ms)
        return self.backward * weights / (weights + inputs) if weights else 0.0

    @property
    def spread(self) -> float:
        """The distance of the quartiles of forward and backward together, as part of the median."""
        whole = [f + b for f, b in zip(self.forward_ms, self.backward_ms, strict=True)]
        if len(whole) < 2 or not median(whole):
            return 0.0
        low, _, high = quantiles(whole, n=4, method="inclusive")
        return (high - low) / median(whole)


@dataclass(slots=True)
class Begun:
    """A forward whose backward is still to come."""

    roots: list[torch.Tensor]
    gradients: list[torch.Tensor]
    forward: Span


class Bench:
    """Runs atoms by one clock."""

    def __init__(
        self, clock: Clock, device: torch.device, loss: Loss | None, amp_dtype: torch.dtype | None
    ) -> None:
        self.clock = clock
        self._device, self._loss, self._amp_dtype = device, loss, amp_dtype

    def hold(self, atom: Atom, *, is_last: bool) -> tuple[AtomBytes, Any]:
        """What an atom holds, and its output."""
        loss = self._loss if is_last else None
        with atom.ready(), KeptBytes(atom.parameters) as kept:
            output, roots = self._forward(atom, atom.enter()[0], loss)
            _require_numbers(atom, output, roots if loss else [])
            activation_bytes = kept.total
            _backward(roots, _ones(roots))
        if loss is not None:
            entered, _ = atom.enter()
            with atom.ready(), AliveBytes(atom.parameters) as alive:
                roots = self._forward(atom, entered, loss)[1]
                _backward(roots, _ones(roots))
            del roots
            entered_bytes = sum(tensor.nbytes for tensor in tensors_in(entered))
            activation_bytes = max(activation_bytes, entered_bytes + alive.most)
        leaving = tensors_in(output)
        found = AtomBytes(
            output_bytes=sum(tensor.nbytes for tensor in leaving),
            gradient_bytes=sum(tensor.nbytes for tensor in leaving if tensor.requires_grad),
            parameter_bytes=sum(parameter.nbytes for parameter in atom.parameters),
            activation_bytes=activation_bytes,
            weight_grad_bytes=self._held_between_halves(atom, loss),
        )
        return found, output

    def _held_between_halves(self, atom: Atom, loss: Loss | None) -> int:
        """The bytes kept between the gradient of inputs and that of weights."""
        if not _trained(atom):
            return 0
        boxes = CountedBoxes()
        half = self._first_half(atom, loss, boxes, lambda: None)
        return bytes_of([*boxes.tensors, *half.gradient_tensors], atom.parameters)

    def _first_half(
        self, atom: Atom, loss: Loss | None, boxes: SavedBoxes, begin: Callable[[], None]
    ) -> WeightHalf:
        """Run a forward, and the first half of its backward; `begin` is called between the two."""
        entered, leaves = atom.enter()
        with atom.ready():
            with boxes.packing():
                roots = self._forward(atom, entered, loss)[1]
            del entered
            edges = [get_gradient_edge(root) for root in roots]
            given = list(zip(edges, _ones(roots), strict=True))
            del roots
            begin()
            if boxes.meets_checkpoints:
                torch.autograd.backward(edges, [gradient for _, gradient in given])
                return WeightHalf()
            return run_input_half(given, leaves, boxes)[1]

    def begin(self, atom: Atom, *, is_last: bool) -> "Begun":
        """Run an atom's forward; `finish` runs its backward."""
        entered, _ = atom.enter()
        marks = []
        atom.call_on_enter(lambda: marks.append(self.clock.mark()))
        with atom.ready():
            marks.append(self.clock.mark())
            roots = self._forward(atom, entered, self._loss if is_last else None)[1]
            end = self.clock.mark()
        atom.call_on_enter(None)
        gradients = _ones(roots)  # that of an output comes from the next stage
        return Begun(roots, gradients, (marks[-1], end))

    def finish(self, atom: Atom, begun: "Begun", times: AtomTimes) -> None:
        """Run the backward of a forward, and note both times."""
        with atom.ready():  # activations may be computed again
            start = self.clock.mark()
            _backward(begun.roots, begun.gradients)
            end = self.clock.mark()
        times.note(self.clock, begun.forward, (start, end))

    def time_halves(self, atom: Atom, times: AtomTimes, *, is_last: bool) -> None:
        """Run an atom with its backward in two halves, and note their times."""
        if not _trained(atom):
            times.input_grad_ms.append(times.backward_ms[-1])
            times.weight_grad_ms.append(0.0)
            return
        marks: list[Any] = []
        loss = self._loss if is_last else None

        def mark() -> None:
            marks.append(self.clock.mark())

        half = self._first_half(atom, loss, SavedBoxes(), mark)
        mark()
        with atom.ready():
            begin = self.clock.mark()
            half.run()
            end = self.clock.mark()
        times.input_grad_ms.append(self.clock.ms_between(*marks))
        times.weight_grad_ms.append(self.clock.ms_between(begin, end))

    def time_nothing(self, times: AtomTimes) -> None:
        """Time a forward and a backward that do nothing; note the times."""
        leaf = torch.zeros(1, device=self._device, requires_grad=True)
        nothing = Atom(
            name="",
            parameters=(),
            run=lambda entered: entered,
            inputs=leaf,
            ready=contextlib.nullcontext,
        )
        self.finish(nothing, self.begin(nothing, is_last=False), times)

    def time_whole(self, model: nn.Module, call: Call, times: AtomTimes) -> None:
        """Run the whole model once, with its loss; note the times."""
        start = self.clock.mark()
        with self._cast():
            output = call.of(model)
            roots = _roots(self._loss(output) if self._loss else output)
        middle = self.clock.mark()
        gradients = _ones(roots)
        begin = self.clock.mark()
        _backward(roots, gradients)
        end = self.clock.mark()
        times.note(self.clock, (start, middle), (begin, end))

    def _forward(
        self, atom: Atom, entered: Any, loss: Loss | None
    ) -> tuple[Any, list[torch.Tensor]]:
        """The output, and the tensors with which the backward begins."""
        with self._cast():
            output = atom.run(entered)
            return output, _roots(loss(output) if loss else output)

    def _cast(self) -> contextlib.AbstractContextManager[Any]:
        if self._amp_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._amp_dtype, cache_enabled=False)


def _without(ms: float, start_ms: float) -> float:
    """A time without that of starting it; where little else is left, a part of it."""
    return max(ms * LEAST_PART, ms - start_ms)


def _trained(atom: Atom) -> list[nn.Parameter]:
    return [parameter for parameter in atom.parameters if parameter.requires_grad]


def _roots(output: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(output) if tensor.requires_grad]


def _ones(roots: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.ones_like(root) for root in roots]


def _backward(roots: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    if roots:
        torch.autograd.backward(roots, gradients)


def _require_numbers(atom: Atom, output: Any, losses: list[torch.Tensor]) -> None:
    """Refuse NaN, which may take another time than numbers, and is a mistake anyway."""
    for tensor in tensors_in(output):
        if tensor.is_floating_point() and _is_any(torch.isnan(tensor)):
            raise InputError(
                f"model: the output of its layer {atom.name!r} holds NaN for this batch; check the"
                " batch and how the model is initialised"
            )
    for loss in losses:
        if loss.ndim:
            raise InputError(
                f"loss: has shape {tuple(loss.shape)}; it has to return one number, the mean loss"
            )
        if _is_any(~torch.isfinite(loss)):
            raise InputError("loss: is not finite for this batch; check the targets")


def _is_any(found: torch.Tensor) -> bool:
    """Whether anything is true; fake tensors have no values, so nothing is known to be."""
    return not is_fake(found) and bool(found.any())
