"""The devices that the zoo's models are computed for, and the one place where FLOPs become ms.

An operation takes the longer of two times (the roofline of Williams et al. 2009):

    arithmetic   FLOPs / (peak * arithmetic efficiency)
    memory       bytes moved / (memory bandwidth * memory efficiency)

A layer takes the sum over its operations: they run one after another, and nothing is fused
beyond what `operations` says. Kernel launches are not counted.

The peaks and bandwidths are the datasheets', dense (no structured sparsity). The efficiencies are
assumptions, not measurements: what well-shaped matrix products commonly reach of the peak. They
scale all matrix products of a device alike, and so hardly move where a model is best cut.
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
        """What Adam keeps beside each byte of parameters.

        fp32: a gradient and two moments, 12 bytes beside 4. Half precision: a half gradient and,
        in fp32, a master copy and two moments, 14 bytes beside 2 (Rajbhandari et al. 2020,
        arXiv:1910.02054, section 3.1).
        """
        return 3.0 if self is Precision.FP32 else 7.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A device as its datasheet describes it, and how much of that is assumed to be reached."""

    name: str
    peak_tflops: Mapping[Precision, float]
    """1e12 FLOPs per second; a precision that is missing is not supported."""
    arithmetic_efficiency: Mapping[Precision, float]
    memory_gb_per_s: float
    source: str

    def time_ms(self, *, precision: Precision, flops: float, moved_bytes: float) -> float:
        """How long one operation takes: its arithmetic or its memory traffic, the longer one."""
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
