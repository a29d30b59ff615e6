"""The first input: what one microbatch of a model costs, layer by layer."""

from dataclasses import dataclass, field
from typing import Any

from pipeplan.errors import ProfileError
from pipeplan.validation import require_magnitude

__all__ = ["LayerProfile", "ModelProfile"]


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
    """The part of `backward_ms` that only computes weight gradients; recorded, not yet used."""

    def __post_init__(self) -> None:
        for number in ("forward_ms", "backward_ms", "output_bytes", "parameter_bytes"):
            require_magnitude(ProfileError, number, getattr(self, number))
        for number in ("gradient_bytes", "activation_bytes"):
            if getattr(self, number) is None:
                object.__setattr__(self, number, self.output_bytes)
            require_magnitude(ProfileError, number, getattr(self, number))
        if self.weight_grad_ms is not None:
            require_magnitude(ProfileError, "weight_grad_ms", self.weight_grad_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """A model as a chain of layers, in execution order."""

    name: str
    microbatch_size: int
    layers: tuple[LayerProfile, ...]
    input_bytes: float = 0.0
    """The model's own input for one microbatch."""
    optimizer_bytes_per_parameter_byte: float = 3.0
    """Gradient and optimizer state beside each parameter byte: by default Adam's."""
    document: dict[str, Any] | None = field(default=None, init=False, compare=False, repr=False)
    """The file's content in the form it was given; None for a profile made in Python."""

    def __post_init__(self) -> None:
        if self.microbatch_size < 1:
            raise ProfileError(f"microbatch_size: {self.microbatch_size} is not at least 1")
        require_magnitude(ProfileError, "input_bytes", self.input_bytes)
        require_magnitude(
            ProfileError,
            "optimizer_bytes_per_parameter_byte",
            self.optimizer_bytes_per_parameter_byte,
        )
        if not self.layers:
            raise ProfileError("layers: is empty; a model has at least one layer")
        first_with: dict[str, int] = {}
        for index, layer in enumerate(self.layers):
            first = first_with.setdefault(layer.name, index)
            if first != index:
                raise ProfileError(
                    f"layers[{index}].name: {layer.name!r} is taken by layers[{first}];"
                    " names are unique"
                )

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    def bytes_into(self, layer: int) -> float:
        """What enters `layer` from the layers before it, for one microbatch."""
        return self.layers[layer - 1].output_bytes if layer else self.input_bytes
