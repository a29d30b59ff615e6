"""The devices that the zoo knows, and the only place where FLOPs become milliseconds.

An operation takes the longer of two times (the roofline of Williams et al. 2009):

    arithmetic   FLOPs / (peak * arithmetic efficiency)
    memory       bytes moved / (memory bandwidth * memory efficiency)

A layer takes the sum over its operations: they run one after another, and only the fusions that
`operations` names happen. Kernel launches are not counted.

Peaks and bandwidths come from the datasheets, for dense matrices. The efficiencies are assumptions,
not measurements: the part of the peak that well-shaped matrix products usually reach. They scale
all matrix products of a device by the same factor, so they hardly change the best cuts of a model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

__all__ = ["ACCELERATORS", "MEMORY_EFFICIENCY", "Accelerator", "Precision"]

MEMORY_EFFICIENCY = 0.8
"""The part of the datasheet's memory bandwidth that streaming kernels reach."""


class Precision(StrEnum):
    """The number format of parameters, activations and gradients."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def bytes_per_element(self) -> int:
        """The bytes of one number."""
        return 4 if self is Precision.FP32 else 2

    @property
    def optimizer_bytes_per_parameter_byte(self) -> float:
        """Bytes that Adam keeps for each byte of parameters.

        fp32: a gradient and two moments, 12 bytes for 4 bytes of parameters. Half precision: a
        half-precision gradient and, in fp32, a master copy and two moments, 14 bytes for 2
        (Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1).
        """
        return 3.0 if self is Precision.FP32 else 7.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A device by its datasheet, with the part of the peak that we assume it reaches."""

    name: str
    peak_tflops: Mapping[Precision, float]
    """1e12 FLOPs per second; the device supports no other precisions."""
    arithmetic_efficiency: Mapping[Precision, float]
    memory_gb_per_s: float
    source: str

    def time_ms(self, *, precision: Precision, flops: float, moved_bytes: float) -> float:
        """The time of one operation: the longer of its arithmetic and its memory traffic."""
        flops_per_ms = self.peak_tflops[precision] * self.arithmetic_efficiency[precision] * 1e9
        bytes_per_ms = self.memory_gb_per_s * MEMORY_EFFICIENCY * 1e6
        return max(flops / flops_per_ms, moved_bytes / bytes_per_ms)


# fp32 is plain fp32 everywhere: TF32 rounds the operands, so it is left out.
_V100 = Accelerator(
    name="V100",
    peak_tflops=MappingProxyType({Precision.FP32: 15.7, Precision.FP16: 125.0}),
    arithmetic_efficiency=MappingProxyType({Precision.FP32: 0.8, Precision.FP16: 0.5}),
    memory_gb_per_s=900.0,
    source="NVIDIA V100 datasheet, SXM2",
)
_A100 = Accelerator(
    name="A100",
    peak_tflops=MappingProxyType(
        {Precision.FP32: 19.5, Precision.FP16: 312.0, Precision.BF16: 312.0}
    ),
    arithmetic_efficiency=MappingProxyType(
        {Precision.FP32: 0.8, Precision.FP16: 0.6, Precision.BF16: 0.6}
    ),
    memory_gb_per_s=2039.0,
    source="NVIDIA A100 datasheet, 80 GB SXM",
)
_H100 = Accelerator(
    name="H100",
    peak_tflops=MappingProxyType(
        {Precision.FP32: 67.0, Precision.FP16: 989.4, Precision.BF16: 989.4}
    ),
    arithmetic_efficiency=MappingProxyType(
        {Precision.FP32: 0.8, Precision.FP16: 0.5, Precision.BF16: 0.5}
    ),
    memory_gb_per_s=3350.0,
    source="NVIDIA H100 datasheet, SXM, without sparsity",
)

ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {accelerator.name: accelerator for accelerator in (_V100, _A100, _H100)}
)
"""The devices by name."""
