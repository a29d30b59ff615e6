"""A trace of torch's profiler (Kineto) with module annotations, as a model profile.

Record whole steps of training with `with_stack=True, record_shapes=True` (and `with_modules=True`).
Layers are the annotations of `record_function` around each layer, or else modules: the model's
children, and in place of a child its own children if several of them are blocks of one class.

- Forward: the operators that run within a layer's annotation. What runs between two layers
  belongs to the earlier one, and the loss to the last one.
- Backward: torch numbers the operators that need one, and the backward carries the number.
- `output_bytes`: the gradients that enter the layer's backward. `parameter_bytes`: the gradients
  that are accumulated in it.

An operator costs the time of the kernels that it starts, or its own time if there are none.
Times are means over the recorded steps.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeplan.documents.text import excerpt
from pipeplan.errors import InputError, ProfileError
from pipeplan.interop.imported import Imported, ImportSettings
from pipeplan.interop.trace_events import Event, Span, annotated_spans, events_in, module_spans
from pipeplan.profile import LayerProfile, ModelProfile

__all__ = ["read_torch_trace"]

MS_IN_US = 1e-3
BACKWARD = "autograd::engine::evaluate_function: "
ACCUMULATE = "torch::autograd::AccumulateGrad"
TYPE_BYTES = {
    "double": 8,
    "float": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
}
WITHOUT_GRADIENT = ("long int", "int", "short int", "signed char", "unsigned char", "bool")
NOTES = (
    "activation_bytes are unknown, so those of the output are taken",
    "a tensor that skips over layers is not seen in output_bytes",
)


@dataclass(slots=True)
class _Layer:
    """What has been seen of one layer in all steps."""

    forward_us: float = 0.0
    backward_us: float = 0.0
    parameter_bytes: float = 0.0
    last_sequence: dict[int, int] = field(default_factory=dict)
    """For each step, the largest number among the layer's operators."""
    output_bytes: float | None = None


def read_torch_trace(text: str, settings: ImportSettings) -> Imported:
    """The model that a trace shows, layer by layer."""
    events = events_in(text)
    spans = annotated_spans(events) or module_spans(events)
    names, num_steps = _steps(spans)
    layers = [_Layer() for _ in names]
    costs_us = _costs_us(events)
    place = _Place(spans, len(names))
    owner = _add_forwards(events, costs_us, place, layers)
    _add_backwards(events, costs_us, owner, layers)
    profiles = tuple(
        _profile(name, layer, num_steps, is_last=index == len(names) - 1)
        for index, (name, layer) in enumerate(zip(names, layers, strict=True))
    )
    notes = list(NOTES)
    if settings.microbatch_size is None:
        notes.append("the trace has no microbatch size, 1 is assumed; give --microbatch-size")
    model = ModelProfile(
        name=settings.name, microbatch_size=settings.microbatch_size or 1, layers=profiles
    )
    return Imported(result=model, notes=tuple(notes))


def _steps(spans: Sequence[Span]) -> tuple[list[str], int]:
    """The layers in the order of their first run, and how often each of them runs."""
    counts = Counter(span.name for span in spans)
    names = list(counts)
    num_steps = counts[names[0]]
    for name, count in counts.items():
        if count != num_steps:
            raise InputError(
                f"layer {excerpt(names[0])} runs {num_steps} times, {excerpt(name)} {count} times;"
                " record whole steps, and annotate each layer once"
            )
    for index, span in enumerate(spans):
        if span.name != names[index % len(names)]:
            raise InputError(
                f"layer {excerpt(span.name)} runs in another order than in the first step;"
                " record steps that are all alike"
            )
    return names, num_steps


def _costs_us(events: Sequence[Event]) -> dict[int, float]:
    """By the id of each operator's event, its time: of its kernels, if the trace has any.

    Without kernels only outermost operators count: their time includes that of inner ones.
    """
    kernel_us: dict[int, float] = {}
    for event in events:
        if event.cat == "kernel" and event.external_id is not None:
            kernel_us[event.external_id] = kernel_us.get(event.external_id, 0.0) + event.dur
    has_kernels = bool(kernel_us)
    costs_us: dict[int, float] = {}
    free_from_us: dict[tuple[str, str], float] = {}
    for event in events:
        if event.cat != "cpu_op":
            continue
        if has_kernels:
            costs_us[id(event)] = kernel_us.pop(event.external_id or -1, 0.0)
        elif event.ts >= free_from_us.get(event.thread, -math.inf):
            free_from_us[event.thread] = event.end_us
            costs_us[id(event)] = event.dur
    return costs_us


class _Place:
    """Which layer, of which step, an instant belongs to."""

    def __init__(self, spans: Sequence[Span], num_layers: int) -> None:
        self._starts = [span.start_us for span in spans]
        self._ends = [span.end_us for span in spans]
        self._num_layers = num_layers
        self.thread = spans[0].thread
        self.begin_us = self._starts[0]

    def at(self, instant_us: float) -> tuple[int, int]:
        """The step and the layer that began last."""
        return divmod(bisect_right(self._starts, instant_us) - 1, self._num_layers)

    def is_loss(self, instant_us: float) -> bool:
        """Whether the last layer of a step is over: what follows computes the loss."""
        index = bisect_right(self._starts, instant_us) - 1
        return (index + 1) % self._num_layers == 0 and instant_us >= self._ends[index]


def _add_forwards(
    events: Sequence[Event],
    costs_us: dict[int, float],
    place: _Place,
    layers: Sequence[_Layer],
) -> dict[int, tuple[int, int]]:
    """Add the operators before each step's backward; for each of their numbers, step and layer."""
    owner: dict[int, tuple[int, int]] = {}
    of_loss: set[int] = set()
    last_backward_step = -1
    for event in events:
        if event.cat != "cpu_op" or event.ts < place.begin_us:
            continue
        step, layer = place.at(event.ts)
        if event.name.startswith(BACKWARD):
            last_backward_step = step
        if step == last_backward_step or event.thread != place.thread:
            continue  # the rest of the step is the backward and the optimizer
        layers[layer].forward_us += costs_us.get(id(event), 0.0)
        if event.sequence is not None:
            owner[event.sequence] = (step, layer)  # the last one that has it made the backward
            if place.is_loss(event.ts):
                of_loss.add(event.sequence)
    for sequence, (step, layer) in owner.items():
        if sequence in of_loss:
            continue  # its gradient is that of the loss, not that of the layer's output
        latest = layers[layer].last_sequence
        latest[step] = max(sequence, latest.get(step, -1))
    return owner


def _add_backwards(
    events: Sequence[Event],
    costs_us: dict[int, float],
    owner: dict[int, tuple[int, int]],
    layers: Sequence[_Layer],
) -> None:
    """Add the backward's operators; an accumulation belongs to the operator before it."""
    current: dict[tuple[str, str], _Run] = {}
    for event in events:
        if event.cat != "cpu_op":
            continue
        run = current.get(event.thread)
        if event.name.startswith(BACKWARD):
            if event.sequence is not None and event.sequence in owner:
                step, layer = owner[event.sequence]
                is_last = layers[layer].last_sequence.get(step) == event.sequence
                run = _Run(layer=layers[layer], end_us=0.0, is_output=is_last)
            if run is None:
                continue
            run.end_us = event.ts + event.dur
            current[event.thread] = run
        if run is None or event.ts >= run.end_us:
            continue
        run.layer.backward_us += costs_us.get(id(event), 0.0)
        if event.name == ACCUMULATE:
            run.layer.parameter_bytes += _input_bytes(event)
        elif run.is_output and not event.name.startswith(BACKWARD) and event.sequence is not None:
            run.is_output = False
            if run.layer.output_bytes is None:
                run.layer.output_bytes = _input_bytes(event)


@dataclass(slots=True)
class _Run:
    """The part of the backward that runs at present on a thread."""

    layer: _Layer
    end_us: float
    is_output: bool


def _input_bytes(event: Event) -> float:
    """The bytes of the floating-point tensors that enter an operator."""
    if event.shapes is None:
        raise InputError(
            f"operator {excerpt(event.name)} has no shapes; record them with record_shapes=True"
        )
    num_bytes = 0
    for kind, dims in zip(event.types, event.shapes, strict=False):
        if kind in TYPE_BYTES:
            num_bytes += TYPE_BYTES[kind] * math.prod(dims)
        elif dims and kind not in WITHOUT_GRADIENT:
            raise InputError(
                f"operator {excerpt(event.name)}: the size of type {excerpt(kind)} is not known"
            )
    return float(num_bytes)


def _profile(name: str, layer: _Layer, num_steps: int, *, is_last: bool) -> LayerProfile:
    if layer.output_bytes is None and not is_last:
        raise InputError(
            f"layer {excerpt(name)}: no gradient enters its backward in this trace;"
            " record forward and backward of whole steps with record_shapes=True"
        )
    try:
        return LayerProfile(
            name=name,
            forward_ms=layer.forward_us * MS_IN_US / num_steps,
            backward_ms=layer.backward_us * MS_IN_US / num_steps,
            output_bytes=0.0 if is_last else layer.output_bytes or 0.0,
            parameter_bytes=layer.parameter_bytes / num_steps,
            activation_bytes=layer.output_bytes or 0.0,
        )
    except ProfileError as problem:
        raise ProfileError(f"layer {excerpt(name)}: {problem}") from None
