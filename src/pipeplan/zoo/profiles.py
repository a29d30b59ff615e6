"""From an architecture and a device to a model profile."""

from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.zoo.architecture import Architecture, LayerShape
from pipeplan.zoo.hardware import Accelerator, Precision
from pipeplan.zoo.operations import BACKWARD_PER_FORWARD

__all__ = ["profile_architecture"]


def profile_architecture(
    architecture: Architecture,
    *,
    name: str,
    accelerator: Accelerator,
    precision: Precision,
    microbatch_size: int,
) -> ModelProfile:
    """The costs of one microbatch of `architecture` on `accelerator`, layer by layer."""
    return ModelProfile(
        name=name,
        microbatch_size=microbatch_size,
        layers=tuple(
            _profile_layer(layer, accelerator, precision, microbatch_size)
            for layer in architecture.layers
        ),
        input_bytes=microbatch_size
        * (architecture.input_elements * precision.bytes_per_element + architecture.input_id_bytes),
        optimizer_bytes_per_parameter_byte=precision.optimizer_bytes_per_parameter_byte,
    )


def _profile_layer(
    layer: LayerShape, accelerator: Accelerator, precision: Precision, microbatch_size: int
) -> LayerProfile:
    element_bytes = precision.bytes_per_element
    forward_ms = weight_grad_ms = 0.0
    kept_bytes = 0
    for operation in layer.operations:
        moved_elements = microbatch_size * operation.moved_elements + operation.weight_elements
        operation_ms = accelerator.time_ms(
            precision=precision,
            flops=microbatch_size * operation.flops,
            moved_bytes=moved_elements * element_bytes,
        )
        forward_ms += operation_ms
        weight_grad_ms += operation_ms * BACKWARD_PER_FORWARD * operation.weight_grad_share
        kept_bytes += operation.kept_elements * element_bytes + operation.kept_bytes
    gradient_bytes = microbatch_size * layer.output_elements * element_bytes
    return LayerProfile(
        name=layer.name,
        forward_ms=forward_ms,
        backward_ms=forward_ms * BACKWARD_PER_FORWARD,
        output_bytes=gradient_bytes + microbatch_size * layer.passed_bytes,
        gradient_bytes=gradient_bytes,
        parameter_bytes=layer.parameters * element_bytes,
        activation_bytes=microbatch_size * kept_bytes,
        weight_grad_ms=weight_grad_ms,
    )
