r"""The matrix that `nvidia-smi topo -m` prints: one host, and the kind of link of each pair.

::

    \tGPU0\tGPU1\tNIC0\tCPU Affinity
    GPU0\t X \tNV12\tPXB\t0-63
    GPU1\tNV12\t X \tSYS\t0-63

Only columns of GPUs count. `NV12` is twelve NVLinks. PIX, PXB, PHB and NODE go over PCIe, SYS also
over the link between two sockets. The matrix has no bandwidths, so they are assumed.
"""

import re

from pipeplan.documents.text import excerpt
from pipeplan.errors import InputError
from pipeplan.interop.hosts import assumed_bandwidths, host_cluster, require_devices
from pipeplan.interop.imported import Imported, ImportSettings

__all__ = ["is_nvidia_topo", "read_nvidia_topo"]

TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*m")
GPU = re.compile(r"GPU[0-9]{1,4}", re.ASCII)
NVLINKS = re.compile(r"NV([0-9]{1,3})", re.ASCII)
OVER_PCIE = ("PIX", "PXB", "PHB", "NODE")
SELF = "X"


def is_nvidia_topo(text: str) -> bool:
    """Whether the first line names GPUs, as the header of the matrix does."""
    return _header(_lines(text)[0][1]) is not None


def read_nvidia_topo(text: str, settings: ImportSettings) -> Imported:
    """The host that the matrix shows, with an assumed bandwidth for each kind of link."""
    lines = _lines(text)
    start = next((i for i, (_, cells) in enumerate(lines) if _header(cells) is not None), None)
    if start is None:
        raise InputError("there is no line with GPU0, GPU1, ...; 'nvidia-smi topo -m' prints it")
    names = _header(lines[start][1]) or []
    require_devices(len(names))
    assumed = assumed_bandwidths(settings.assumed_gb_per_s)
    rows: dict[str, list[float]] = {}
    for number, cells in lines[start + 1 :]:
        if cells[0] not in names:
            continue
        if cells[0] in rows:
            raise InputError(f"line {number}: {cells[0]} stands twice")
        links = cells[1 : len(names) + 1]
        if len(links) < len(names):
            raise InputError(f"line {number}: has {len(links)} links for {len(names)} GPUs")
        rows[cells[0]] = [
            _bandwidth(link, is_self=column == cells[0], assumed=assumed, where=f"line {number}")
            for column, link in zip(names, links, strict=True)
        ]
    for name in names:
        if name not in rows:
            raise InputError(f"the line of {name} is missing")
    cluster = host_cluster(settings.name, names, [rows[name] for name in names])
    figures = ", ".join(f"{kind}={assumed[kind]:g}" for kind in assumed)
    note = (
        f"the matrix has no bandwidths, {figures} GB/s are assumed (NV: each NVLink);"
        " give --assume, or edit the file"
    )
    return Imported(result=cluster, notes=(note,))


def _lines(text: str) -> list[tuple[int, list[str]]]:
    """The lines that hold something, as cells; runs of blanks or tabs divide them."""
    plain = TERMINAL_CODES.sub("", text)
    numbered = ((number, line.split()) for number, line in enumerate(plain.splitlines(), 1))
    lines = [(number, cells) for number, cells in numbered if cells]
    if not lines:
        raise InputError("is empty")
    return lines


def _header(cells: list[str]) -> list[str] | None:
    """The GPUs whose columns come first, or None if this is not the header."""
    names: list[str] = []
    for cell in cells:
        if not GPU.fullmatch(cell) or cell in names:
            break
        names.append(cell)
    is_row = len(cells) > 1 and bool(names) and not GPU.fullmatch(cells[1]) and cells[1] == SELF
    return names if names and not is_row and cells[0] == names[0] == "GPU0" else None


def _bandwidth(link: str, *, is_self: bool, assumed: dict[str, float], where: str) -> float:
    if is_self:
        if link != SELF:
            raise InputError(f"{where}: {excerpt(link)} stands where X (itself) is expected")
        return 0.0
    nvlinks = NVLINKS.fullmatch(link)
    if nvlinks and int(nvlinks[1]):
        return int(nvlinks[1]) * assumed["NV"]
    if link in OVER_PCIE:
        return assumed["PCIE"]
    if link == "SYS":
        return min(assumed["SYS"], assumed["PCIE"])
    raise InputError(
        f"{where}: {excerpt(link)} is no kind of link; known are NV<n>, {', '.join(OVER_PCIE)}, SYS"
    )
