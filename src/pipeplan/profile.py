"""The first input: what one microbatch of a model costs, layer by layer."""

import reprlib
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from pipeplan.errors import ProfileError
from pipeplan.validation import (
    COUNT,
    MAX_LAYERS,
    NUM_BYTES,
    OPTIMIZER_RATIO,
    TIME_MS,
    require_count,
    require_number,
    require_text,
)

__all__ = ["LayerProfile", "ModelProfile", "TimesAt", "merged_layer", "merged_times"]

ROUNDING = 1e-9
"""By which fraction a part may exceed its whole: both were rounded."""

MAX_SIZES = 256
"""Microbatch sizes, over all layers, at which times may be given."""

BYTE_FIELDS = (
    "output_bytes",
    "parameter_bytes",
    "gradient_bytes",
    "activation_bytes",
    "weight_grad_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesAt:
    """The times of a layer, measured at another microbatch size than the profile's."""

    microbatch_size: int
    forward_ms: float
    backward_ms: float

    def __post_init__(self) -> None:
        require_count(ProfileError, "microbatch_size", self.microbatch_size, COUNT)
        for number in ("forward_ms", "backward_ms"):
            require_number(ProfileError, number, getattr(self, number), TIME_MS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """What one layer costs for one microbatch on a device of speed 1.0."""

    name: str
    forward_ms: float
    backward_ms: float
    output_bytes: float
    """Everything that must reach the layers behind if the model is cut right after this layer."""
    parameter_bytes: float
    gradient_bytes: float = None  # type: ignore[assignment]  # settled on construction
    """What comes back over the same cut; by default `output_bytes`."""
    activation_bytes: float = None  # type: ignore[assignment]  # settled on construction
    """Kept from forward to backward of one microbatch; by default `output_bytes`."""
    weight_grad_ms: float | None = None
    """The part of `backward_ms` that only computes weight gradients."""
    weight_grad_bytes: float = None  # type: ignore[assignment]  # settled on construction
    """Kept between the two parts of a backward; by default `activation_bytes`."""
    at: tuple[TimesAt, ...] = ()
    """Times at other microbatch sizes; without them time is proportional to the samples."""

    def __post_init__(self) -> None:
        require_text(ProfileError, "name", self.name)
        for number in ("gradient_bytes", "activation_bytes"):
            if getattr(self, number) is None:
                object.__setattr__(self, number, self.output_bytes)
        if self.weight_grad_bytes is None:
            object.__setattr__(self, "weight_grad_bytes", self.activation_bytes)
        for number in ("forward_ms", "backward_ms"):
            require_number(ProfileError, number, getattr(self, number), TIME_MS)
        for number in BYTE_FIELDS:
            require_number(ProfileError, number, getattr(self, number), NUM_BYTES)
        if self.weight_grad_ms is not None:
            require_number(ProfileError, "weight_grad_ms", self.weight_grad_ms, TIME_MS)
            if self.weight_grad_ms > self.backward_ms * (1 + ROUNDING):
                raise ProfileError(
                    f"weight_grad_ms: {self.weight_grad_ms:g} is above {self.backward_ms:g},"
                    " the backward_ms that it is a part of"
                )

    def __repr__(self) -> str:
        return (
            f"<Layer {reprlib.repr(self.name)}: forward {self.forward_ms:.4g} ms,"
            f" backward {self.backward_ms:.4g} ms,"
            f" {self.parameter_bytes / 1e6:.4g} MB of parameters>"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """A model as a chain of layers, in execution order.

    Examples:
        >>> import pipeplan as pp
        >>> costs = {"forward_ms": 2, "backward_ms": 4, "output_bytes": 1e6, "parameter_bytes": 8e6}
        >>> layers = tuple(pp.LayerProfile(name=f"layer{n}", **costs) for n in range(6))
        >>> model = pp.ModelProfile(name="six", microbatch_size=8, layers=layers)
        >>> pp.plan(model, pp.zoo.cluster("1x8-pcie"), microbatches=8).num_used_devices
        8
    """

    name: str
    microbatch_size: int
    layers: tuple[LayerProfile, ...]
    input_bytes: float = 0.0
    """The model's own input for one microbatch."""
    optimizer_bytes_per_parameter_byte: float = 3.0
    """Gradient and optimizer state beside each parameter byte: by default Adam's."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Groups of layers, by name, that share parameters; recorded, not charged."""
    document: dict[str, Any] | None = field(default=None, init=False, compare=False, repr=False)
    """The file's content in the form it was given; None for a profile made in Python."""

    def __post_init__(self) -> None:
        require_text(ProfileError, "name", self.name)
        require_count(ProfileError, "microbatch_size", self.microbatch_size, COUNT)
        require_number(ProfileError, "input_bytes", self.input_bytes, NUM_BYTES)
        require_number(
            ProfileError,
            "optimizer_bytes_per_parameter_byte",
            self.optimizer_bytes_per_parameter_byte,
            OPTIMIZER_RATIO,
        )
        if not self.layers:
            raise ProfileError("layers: is empty; a model has at least one layer")
        if len(self.layers) > MAX_LAYERS:
            raise ProfileError(
                f"layers: {len(self.layers):,} are more than the {MAX_LAYERS:,} supported;"
                " join neighbouring layers"
            )
        first_with: dict[str, int] = {}
        for index, layer in enumerate(self.layers):
            first = first_with.setdefault(layer.name, index)
            if first != index:
                raise ProfileError(
                    f"layers[{index}].name: {layer.name!r} is taken by layers[{first}];"
                    " names are unique"
                )
        _require_tied(self.tied, first_with)
        _require_sizes(self.layers, self.microbatch_size)

    def __repr__(self) -> str:
        num_bytes = sum(layer.parameter_bytes for layer in self.layers)
        return (
            f"<Model {reprlib.repr(self.name)}: {len(self.layers)} layers,"
            f" {num_bytes / 1e9:.4g} GB of parameters, microbatches of {self.microbatch_size}>"
        )

    @property
    def has_weight_gradients(self) -> bool:
        """Whether each layer says how long its weight gradients take."""
        return all(layer.weight_grad_ms is not None for layer in self.layers)

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    def bytes_into(self, layer: int) -> float:
        """What enters `layer` from the layers before it, for one microbatch."""
        return self.layers[layer - 1].output_bytes if layer else self.input_bytes


def _require_sizes(layers: tuple[LayerProfile, ...], own_size: int) -> None:
    """Refuse a size that stands twice in a layer, and more sizes than planning can look at."""
    sizes: set[int] = set()
    for index, layer in enumerate(layers):
        seen = {own_size}
        for position, times in enumerate(layer.at):
            if times.microbatch_size in seen:
                raise ProfileError(
                    f"layers[{index}].at[{position}].microbatch_size: {times.microbatch_size}"
                    " is the profile's own or stands twice; name each size once"
                )
            seen.add(times.microbatch_size)
        sizes |= seen
    if len(sizes) > MAX_SIZES:
        raise ProfileError(
            f"layers: are measured at {len(sizes)} microbatch sizes, more than the {MAX_SIZES}"
            " supported; leave some out"
        )


def merged_layer(
    name: str,
    *,
    forward_ms: float,
    backward_ms: float,
    output_bytes: float,
    gradient_bytes: float,
    parameter_bytes: float,
    activation_bytes: float,
    weight_grad_ms: float | None = None,
    weight_grad_bytes: float | None = None,
    at: tuple[TimesAt, ...] = (),
) -> LayerProfile:
    """A layer that stands for several valid ones: its sums may exceed the limits of one layer."""
    layer = object.__new__(LayerProfile)
    for field_name, value in (
        ("name", name),
        ("forward_ms", forward_ms),
        ("backward_ms", backward_ms),
        ("output_bytes", output_bytes),
        ("gradient_bytes", gradient_bytes),
        ("parameter_bytes", parameter_bytes),
        ("activation_bytes", activation_bytes),
        ("weight_grad_ms", weight_grad_ms),
        ("weight_grad_bytes", activation_bytes if weight_grad_bytes is None else weight_grad_bytes),
        ("at", at),
    ):
        object.__setattr__(layer, field_name, value)
    return layer


def _require_tied(tied: tuple[tuple[str, ...], ...], known: Container[str]) -> None:
    """Refuse groups that name no layer, or one layer only, or one layer twice."""
    for index, group in enumerate(tied):
        if len(set(group)) < max(2, len(group)):
            raise ProfileError(f"tied[{index}]: has to name at least two layers, each of them once")
        for position, name in enumerate(group):
            if name not in known:
                raise ProfileError(f"tied[{index}][{position}]: {name!r} is no layer's name")


def merged_times(microbatch_size: int, forward_ms: float, backward_ms: float) -> TimesAt:
    """Times of several layers together, which may exceed the limits of one layer."""
    times = object.__new__(TimesAt)
    for name, value in (
        ("microbatch_size", microbatch_size),
        ("forward_ms", forward_ms),
        ("backward_ms", backward_ms),
    ):
        object.__setattr__(times, name, value)
    return times
