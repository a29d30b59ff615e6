"""What the memory of a device consists of."""

from dataclasses import dataclass

__all__ = ["MemoryParts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """What the memory of one device consists of.

    A model's `optimizer_bytes_per_parameter_byte` counts gradients and optimizer state together.
    Gradients are as large as the parameters; the rest belongs to the optimizer.
    """

    parameter_gb: float
    gradient_gb: float
    optimizer_gb: float
    activation_gb: float

    @property
    def total_gb(self) -> float:
        """All of it."""
        state_gb = self.parameter_gb + (self.gradient_gb + self.optimizer_gb)
        return state_gb + self.activation_gb
