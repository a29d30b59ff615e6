"""A model before any device is chosen: layers of operations, and what crosses the cuts."""

from collections.abc import Callable
from dataclasses import dataclass

from pipeplan.zoo.hardware import Precision
from pipeplan.zoo.operations import Operation

__all__ = ["LOSS_BYTES", "Architecture", "LayerShape", "Recipe"]

LOSS_BYTES = 4
"""What leaves the last layer: one fp32 loss per sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One layer: its operations, and what crosses a cut right after it, for one sample."""

    name: str
    operations: tuple[Operation, ...]
    output_elements: int = 0
    """What crosses, and whose gradient comes back."""
    passed_bytes: int = 0
    """What crosses without a gradient: token ids that a later layer reads, the loss."""

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(operation.parameters for operation in self.operations)

    @property
    def flops(self) -> int:
        """The FLOPs of forward."""
        return sum(operation.flops for operation in self.operations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model as a chain of layers, for one sample."""

    layers: tuple[LayerShape, ...]
    input_elements: int = 0
    """The input in the model's precision: pixels."""
    input_id_bytes: int = 0
    """The input that is token ids."""

    @property
    def parameters(self) -> int:
        """The number of parameters, shared ones once."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def flops(self) -> int:
        """The FLOPs of forward."""
        return sum(layer.flops for layer in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A model of the zoo: how it is described, and the setting it has by default."""

    describe: Callable[[int], Architecture]
    """From the sequence length; models of fixed-size images ignore it."""
    source: str
    device: str
    precision: Precision
    microbatch_size: int
    sequence_length: int | None = None
    """None: the model has no sequence length."""
    shortest_sequence: int = 1
    longest_sequence: int | None = None
    """Where the model has a table of positions: its size."""

    def architecture(self, sequence_length: int | None = None) -> Architecture:
        """The model at `sequence_length`, by default its own."""
        return self.describe(sequence_length or self.sequence_length or 0)
