"""What `nvidia-smi nvlink -s` prints: the rate of each NVLink of each GPU.

::

    GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-...)
             Link 0: 25 GB/s
             Link 1: <inactive>

`nvidia-smi -L` prints the same without links. Rates are of the wire, in one direction. What copies
reach is less: for the generations that are known, NCCL's figure stands for it.
"""

import re
from dataclasses import dataclass

from pipeplan.documents.text import excerpt
from pipeplan.errors import InputError
from pipeplan.interop.source_text import number_in, plain_lines

__all__ = ["GpuLinks", "is_nvlink_status", "read_nvlink_status"]

GPU = re.compile(r"GPU ([0-9]{1,4}): (.{0,200}?)(?: \(UUID: [^()]{0,100}\))?", re.ASCII)
LINK = re.compile(r"Link ([0-9]{1,4}): (?:(\S{1,40}) GB/s|<inactive>)", re.ASCII)
ASIDE = ("NVML:", "MIG ")
"""With these begin lines that say that a GPU has no links, or how it is divided."""
REACHED_GB_PER_S = {14.062: 12.0, 20.0: 18.0, 25.0: 20.0, 25.781: 20.0, 26.562: 20.6}
REACHED_GB_PER_S |= {50.0: 40.1, 53.125: 40.1}
"""What NCCL counts for a wire of this rate: sm86, sm60, sm80, sm70, sm90, sm100."""
SAME_WIRE = 0.01
REACHED_PART = 0.8
"""Of the rate of other wires."""
MOST_LINK_GB_PER_S = 1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLinks:
    """One GPU, and the rates of its active NVLinks."""

    name: str
    links_gb_per_s: tuple[float, ...]

    @property
    def link_gb_per_s(self) -> float:
        """What copies reach over one link, the slowest of them."""
        wire = min(self.links_gb_per_s)
        for known, reached in REACHED_GB_PER_S.items():
            if abs(wire - known) <= SAME_WIRE * known:
                return reached
        return REACHED_PART * wire


def is_nvlink_status(text: str) -> bool:
    """Whether the first line names a GPU, as `nvidia-smi nvlink -s` does."""
    lines = plain_lines(text)
    return bool(lines) and GPU.fullmatch(lines[0][1]) is not None


def read_nvlink_status(text: str) -> dict[int, GpuLinks]:
    """The GPUs by their numbers."""
    names: dict[int, str] = {}
    links: dict[int, dict[int, float]] = {}
    current: int | None = None
    for number, line in plain_lines(text):
        gpu, link = GPU.fullmatch(line), LINK.fullmatch(line)
        if gpu:
            current = int(gpu[1])
            if current in names:
                raise InputError(f"line {number}: GPU {current} stands twice; give one host's text")
            names[current], links[current] = gpu[2], {}
        elif link and current is not None:
            if int(link[1]) in links[current]:
                raise InputError(f"line {number}: link {link[1]} of GPU {current} stands twice")
            links[current][int(link[1])] = _rate(link[2], f"line {number}")
        elif not line.startswith(ASIDE):
            raise InputError(
                f"line {number}: {excerpt(line)} is neither a GPU nor a link;"
                " 'nvidia-smi nvlink -s' prints them"
            )
    return {
        gpu: GpuLinks(
            name=names[gpu], links_gb_per_s=tuple(rate for rate in links[gpu].values() if rate)
        )
        for gpu in names
    }


def _rate(text: str | None, where: str) -> float:
    if text is None:  # inactive
        return 0.0
    rate = number_in(text, where)
    if not 0 <= rate <= MOST_LINK_GB_PER_S:
        raise InputError(f"{where}: {excerpt(text)} GB/s is no rate of an NVLink")
    return rate
