r"""The matrix that `nvidia-smi topo -m` prints: one host, and the kind of link of each pair.

::

    \tGPU0\tGPU1\tNIC0\tCPU Affinity
    GPU0\t X \tNV12\tPXB\t0-63
    GPU1\tNV12\t X \tSYS\t0-63

Only columns of GPUs count. `NV12` is twelve NVLinks. PIX, PXB, PHB and NODE go over PCIe, SYS also
over the link between two sockets. The matrix has no bandwidths, so they are assumed.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from pipeplan.documents.text import excerpt
from pipeplan.errors import InputError
from pipeplan.interop.hosts import assumed_bandwidths, host_cluster, require_host_size
from pipeplan.interop.imported import Imported, ImportSettings
from pipeplan.interop.source_text import plain_lines

__all__ = ["TopoMatrix", "is_nvidia_topo", "parse_nvidia_topo", "read_nvidia_topo"]

GPU = re.compile(r"GPU[0-9]{1,4}", re.ASCII)
NVLINKS = re.compile(r"NV([0-9]{1,3})", re.ASCII)
OVER_PCIE = ("PIX", "PXB", "PHB", "NODE")
OVER_SOCKETS = ("SYS", "SOC")
"""SOC is what old drivers say."""
SELF = "X"
HEADER_WITHIN = 20
"""The header is one of the first lines; a prompt or a warning may stand above it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopoMatrix:
    """The kind of link of each pair of GPUs."""

    names: tuple[str, ...]
    kinds: tuple[tuple[str, ...], ...]
    """X for a GPU and itself."""
    num_cards: int
    """Network cards; the matrix has no rates of them."""

    def num_nvlinks(self, one: int, other: int) -> int:
        """The NVLinks that a pair has."""
        match = NVLINKS.fullmatch(self.kinds[one][other])
        return int(match[1]) if match else 0

    def bandwidths(
        self, assumed: dict[str, float], nvlink_gb_per_s: Callable[[int, int], float]
    ) -> list[list[float]]:
        """GB/s of each pair, by the kind of its link and the rate of one of its NVLinks."""
        return [
            [
                0.0
                if one == other
                else self.num_nvlinks(one, other) * nvlink_gb_per_s(one, other)
                or _over_pcie(self.kinds[one][other], assumed)
                for other in range(len(self.names))
            ]
            for one in range(len(self.names))
        ]


def _over_pcie(kind: str, assumed: dict[str, float]) -> float:
    return min(assumed["SYS"], assumed["PCIE"]) if kind in OVER_SOCKETS else assumed["PCIE"]


def is_nvidia_topo(text: str) -> bool:
    """Whether one of the first lines names GPUs, as the header of the matrix does."""
    return any(_header(line.split()) for _, line in plain_lines(text)[:HEADER_WITHIN])


def read_nvidia_topo(text: str, settings: ImportSettings) -> Imported:
    """The host that the matrix shows, with an assumed bandwidth for each kind of link."""
    matrix = parse_nvidia_topo(text)
    assumed = assumed_bandwidths(settings.assumed_gb_per_s)
    rows = matrix.bandwidths(assumed, lambda one, other: assumed["NV"])
    cluster = host_cluster(settings.name, matrix.names, rows)
    return Imported(result=cluster, notes=(assumption(assumed),))


def assumption(assumed: dict[str, float]) -> str:
    """What was assumed, as a note."""
    figures = ", ".join(f"{kind}={assumed[kind]:g}" for kind in ("NV", "PCIE", "SYS"))
    return (
        f"the matrix has no bandwidths, {figures} GB/s are assumed (NV: each NVLink);"
        " give --assume, or edit the file"
    )


def parse_nvidia_topo(text: str) -> TopoMatrix:
    """The matrix, checked: a line for each GPU, a known kind for each pair, the same both ways."""
    lines = [(number, line.split()) for number, line in plain_lines(text)]
    if not lines:
        raise InputError("is empty")
    headers = (i for i, (_, cells) in enumerate(lines[:HEADER_WITHIN]) if _header(cells))
    start = next(headers, None)
    if start is None:
        raise InputError("there is no line with GPU0, GPU1, ...; 'nvidia-smi topo -m' prints it")
    header = lines[start][1]
    names = _header(header)
    require_host_size(len(names))
    rows: dict[str, tuple[str, ...]] = {}
    for number, cells in lines[start + 1 :]:
        if cells[0] not in names:
            if cells[0].startswith("GPU"):
                raise InputError(f"line {number}: there is no column of {excerpt(cells[0])}")
            continue
        if cells[0] in rows:
            raise InputError(f"line {number}: {cells[0]} stands twice")
        links = cells[1 : len(names) + 1]
        if len(links) < len(names):
            raise InputError(f"line {number}: has {len(links)} links for {len(names)} GPUs")
        for column, link in zip(names, links, strict=True):
            _require_kind(link, is_self=column == cells[0], where=f"line {number}")
        rows[cells[0]] = tuple(links)
    for name in names:
        if name not in rows:
            raise InputError(f"the line of {name} is missing")
    kinds = tuple(rows[name] for name in names)
    _require_symmetry(names, kinds)
    others = header[len(names) :]
    num_cards = others.index("CPU") if "CPU" in others else len(others)
    return TopoMatrix(names=tuple(names), kinds=kinds, num_cards=num_cards)


def _header(cells: list[str]) -> list[str]:
    """The GPUs whose columns come first; none if this is not the header."""
    names: list[str] = []
    for cell in cells:
        if not GPU.fullmatch(cell):
            break
        if cell in names:
            raise InputError(f"the column {cell} stands twice")
        names.append(cell)
    is_row = len(cells) > 1 and cells[1] == SELF
    return names if names and not is_row and names[0] == "GPU0" else []


def _require_kind(link: str, *, is_self: bool, where: str) -> None:
    if is_self:
        if link != SELF:
            raise InputError(f"{where}: {excerpt(link)} stands where X (itself) is expected")
        return
    nvlinks = NVLINKS.fullmatch(link)
    if (nvlinks and int(nvlinks[1])) or link in (*OVER_PCIE, *OVER_SOCKETS):
        return
    raise InputError(
        f"{where}: {excerpt(link)} is no kind of link; known are NV<n>, {', '.join(OVER_PCIE)}, SYS"
    )


def _require_symmetry(names: list[str], kinds: tuple[tuple[str, ...], ...]) -> None:
    """Refuse a matrix that says two things about one pair: a line is damaged."""
    for one, row in enumerate(kinds):
        for other, kind in enumerate(row[:one]):
            if kinds[other][one] != kind:
                raise InputError(
                    f"{names[one]} and {names[other]}: {kind} in one line and"
                    f" {kinds[other][one]} in the other; a pair has one kind of link"
                )
