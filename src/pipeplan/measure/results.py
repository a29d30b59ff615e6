"""What measuring a model found: its profile, and what tells whether to trust it."""

from dataclasses import dataclass

from pipeplan.profile import ModelProfile

__all__ = ["ModelMeasurement"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMeasurement:
    """A model profile, and the whole model beside the sum of its layers."""

    profile: ModelProfile
    whole_forward_ms: float
    whole_backward_ms: float
    """The whole model with its loss, run at once: the median."""
    spreads: tuple[float, ...]
    """For each layer, how far the quartiles of its times lie apart, as part of the median."""
    num_runs: int
    """How often each layer ran; 1 for an estimate."""
    device: str
    """Where it ran, or which device was estimated."""
    is_estimate: bool
    forward_flops: tuple[float, ...]
    """For each layer; 0 where they were not counted."""
    backward_flops: tuple[float, ...]

    @property
    def layers_ms(self) -> float:
        """The sum of all layers' forwards and backwards."""
        return sum(layer.forward_ms + layer.backward_ms for layer in self.profile.layers)

    @property
    def whole_ms(self) -> float:
        """Forward and backward of the whole model."""
        return self.whole_forward_ms + self.whole_backward_ms

    @property
    def difference(self) -> float:
        """The sum of layers against the whole: 0.05 where it is 5 % above."""
        return self.layers_ms / self.whole_ms - 1 if self.whole_ms else 0.0

    def document(self) -> dict[str, object]:
        """The figures as plain data."""
        return {
            "name": self.profile.name,
            "microbatch_size": self.profile.microbatch_size,
            "device": self.device,
            "is_estimate": self.is_estimate,
            "num_runs": self.num_runs,
            "whole_forward_ms": self.whole_forward_ms,
            "whole_backward_ms": self.whole_backward_ms,
            "layers_ms": self.layers_ms,
            "difference": self.difference,
            "tied": [list(group) for group in self.profile.tied],
            "layers": [
                {
                    "name": layer.name,
                    "forward_ms": layer.forward_ms,
                    "backward_ms": layer.backward_ms,
                    "weight_grad_ms": layer.weight_grad_ms,
                    "output_bytes": layer.output_bytes,
                    "parameter_bytes": layer.parameter_bytes,
                    "activation_bytes": layer.activation_bytes,
                    "weight_grad_bytes": layer.weight_grad_bytes,
                    "spread": spread,
                    "forward_flops": forward,
                    "backward_flops": backward,
                }
                for layer, spread, forward, backward in zip(
                    self.profile.layers,
                    self.spreads,
                    self.forward_flops,
                    self.backward_flops,
                    strict=True,
                )
            ],
        }
