"""Estimates instead of measuring: what operations would take on a device that is not here.

The model runs on fake tensors of torch, which have shapes but neither memory nor values. Each
operation takes the longer of its arithmetic and its memory traffic on the device (Williams et al.
2009; `zoo.hardware` has devices and efficiencies)::

    FLOPs    torch's own formulas; attention counts every pair of positions, masked or not
    bytes    all inputs read and all outputs written once; a view moves nothing; a look-up reads
             only the rows that it returns

Operations run one after another, and none are fused, as in eager torch. Kernel launches and the
network are not counted.
"""

import math
import re
from types import MappingProxyType
from typing import Any

import torch

from pipeplan.errors import InputError
from pipeplan.splitting.nesting import tensors_in
from pipeplan.splitting.placeholders import Placeholder
from pipeplan.splitting.torch_private import TorchDispatchMode, count_flops, makes_views
from pipeplan.zoo.hardware import ACCELERATORS, MEMORY_EFFICIENCY, Accelerator, Precision

__all__ = ["RooflineClock", "find_accelerator"]

PRECISION_OF = {
    torch.float16: Precision.FP16,
    torch.bfloat16: Precision.BF16,
}
"""All other types compute at the speed of fp32."""

FREE = frozenset(
    {"_unsafe_view", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
)
"""Operations that move no bytes, besides views."""
LOOK_UPS = frozenset({"embedding", "index", "index_select", "gather"})
"""Operations that read only what they return."""
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
"""Attention without its matrix, as fast kernels of GPUs do it."""
GROUPED_PRODUCT = "_grouped_mm"
"""The experts of a mixture: rows of one matrix times one of several others each."""
BACKWARD_PRODUCTS = 2.5
"""Five matrix products for the two of the forward: such kernels compute the scores again."""


def find_accelerator(text: str) -> Accelerator:
    """The device that `a100` or `312,2039` (TFLOPs, GB/s) stands for.

    The assumed efficiencies belong to the named devices; two numbers are taken as they are.
    """
    known = {name.lower(): accelerator for name, accelerator in ACCELERATORS.items()}
    if text.lower() in known:
        return known[text.lower()]
    numbers = [part.strip() for part in text.split(",")]
    if len(numbers) == 2 and all(re.fullmatch(r"\d+(\.\d*)?|\.\d+", part) for part in numbers):
        peak, gb_per_s = map(float, numbers)
        if 1e-6 <= peak <= 1e6 and 1e-6 <= gb_per_s <= 1e9:
            every = list(Precision)
            return Accelerator(
                name=f"{peak:g} TFLOPs, {gb_per_s:g} GB/s",
                peak_tflops=MappingProxyType(dict.fromkeys(every, peak)),
                arithmetic_efficiency=MappingProxyType(dict.fromkeys(every, 1.0)),
                memory_gb_per_s=gb_per_s / MEMORY_EFFICIENCY,
                source="the caller",
            )
    raise InputError(
        f"estimate: {text!r} is neither of {', '.join(known)} nor two numbers above 0, the peak in"
        " TFLOPs and the memory's GB/s, such as 312,2039"
    )


class RooflineClock(TorchDispatchMode):
    """A clock that goes on by what each operation would take."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._accelerator = accelerator
        self._ms = self._flops = 0.0

    def mark(self) -> tuple[float, float]:
        """The time and the FLOPs so far."""
        return self._ms, self._flops

    def ms_between(self, start: tuple[float, float], end: tuple[float, float]) -> float:
        """The milliseconds between two marks."""
        return end[0] - start[0]

    def flops_between(self, start: tuple[float, float], end: tuple[float, float]) -> float:
        """The FLOPs between two marks."""
        return end[1] - start[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and count it."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        name = func._overloadpacket.__name__
        written = tensors_in(output)
        if func.namespace != "aten" or name in FREE or not written or makes_views(func):
            return output
        read = tensors_in([args, kwargs])
        if any(isinstance(t, Placeholder) or t.is_meta for t in (*read, *written)):
            return output  # of another stage
        flops = _flops_of(name, args)
        if flops is None:
            flops = count_flops(func, args, kwargs, output) or 0.0
        num_bytes = sum(map(_moved_bytes, written))
        num_bytes += num_bytes if name in LOOK_UPS else sum(map(_moved_bytes, read))
        self._flops += flops
        self._ms += self._accelerator.time_ms(
            precision=self._precision(read or written, flops), flops=flops, moved_bytes=num_bytes
        )
        return output

    def _precision(self, tensors: list[torch.Tensor], flops: float) -> Precision:
        floating = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
        precision = PRECISION_OF.get(floating[0], Precision.FP32) if floating else Precision.FP32
        if precision in self._accelerator.peak_tflops:
            return precision
        if not flops:
            return Precision.FP32  # nothing but memory traffic
        raise InputError(
            f"estimate: {self._accelerator.name} does not compute in {precision}; build the model"
            f" in another type, or choose another device"
        )


def _moved_bytes(tensor: torch.Tensor) -> int:
    """What is read or written; an expanded tensor has less memory than elements."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _flops_of(name: str, args: Any) -> float | None:
    """The FLOPs of operations for which torch has no formula; None for all others."""
    if name == GROUPED_PRODUCT:
        left, right = args[:2]
        num_groups = left.shape[0] if left.ndim == right.ndim == 3 else 1
        return 2.0 * float(num_groups * math.prod(left.shape[-2:]) * right.shape[-1])
    if not name.startswith(ATTENTION):
        return None
    is_backward = name.endswith("_backward")
    query, key, value = args[1:4] if is_backward else args[:3]
    batch, heads, length, width = query.shape
    pairs = float(batch * heads * length * key.shape[-2])
    forward = 2.0 * pairs * float(width + value.shape[-1])
    return forward * BACKWARD_PRODUCTS if is_backward else forward
