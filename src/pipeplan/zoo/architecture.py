"""A model without a device: layers of operations, and the data that crosses each cut."""

from collections.abc import Callable
from dataclasses import dataclass

from pipeplan.zoo.hardware import Precision
from pipeplan.zoo.operations import Operation

__all__ = ["LOSS_BYTES", "Architecture", "LayerShape", "Recipe"]

LOSS_BYTES = 4
"""The output of the last layer: one fp32 loss per sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One layer: its operations, and the data that crosses a cut behind it, for one sample."""

    name: str
    operations: tuple[Operation, ...]
    output_elements: int = 0
    """Elements that cross the cut and have a gradient that comes back."""
    passed_bytes: int = 0
    """Bytes that cross without a gradient: token ids that a later layer reads, the loss."""

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(operation.parameters for operation in self.operations)

    @property
    def flops(self) -> int:
        """The FLOPs of the forward."""
        return sum(operation.flops for operation in self.operations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model as a chain of layers, for one sample."""

    layers: tuple[LayerShape, ...]
    input_elements: int = 0
    """Input elements in the model's precision: pixels."""
    input_id_bytes: int = 0
    """Input bytes that are token ids."""

    @property
    def parameters(self) -> int:
        """The number of parameters; shared ones count once."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def flops(self) -> int:
        """The FLOPs of the forward."""
        return sum(layer.flops for layer in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A model of the zoo: the function that describes it, and its default settings."""

    describe: Callable[[int], Architecture]
    """Makes the architecture from the sequence length; models of images ignore the length."""
    source: str
    device: str
    precision: Precision
    microbatch_size: int
    sequence_length: int | None = None
    """None if the model has no sequence."""
    shortest_sequence: int = 1
    longest_sequence: int | None = None
    """The size of the model's table of positions, if it has one."""

    def architecture(self, sequence_length: int | None = None) -> Architecture:
        """The model at `sequence_length`; by default at its usual length."""
        return self.describe(sequence_length or self.sequence_length or 0)
