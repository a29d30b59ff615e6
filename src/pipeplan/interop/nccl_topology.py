"""The XML that NCCL writes to `NCCL_TOPO_DUMP_FILE`: one host, its PCIe tree, NVLinks and cards.

Two GPUs are as fast as their NVLinks. If both have links to an NVSwitch, all these links count,
since a switch joins all pairs. Without NVLinks they are as fast as the slowest PCIe link on the way
between them, and as the link between sockets if they hang on different CPUs.

The figures are NCCL's own: GB/s of one NVLink by the generation of the GPU (`sm`), and of a PCIe
lane by its speed.
"""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from itertools import pairwise
from xml.parsers.expat import ExpatError

from pipeplan.documents.text import excerpt
from pipeplan.errors import InputError
from pipeplan.interop.hosts import assumed_bandwidths, host_cluster, require_host_size
from pipeplan.interop.imported import Imported, ImportSettings
from pipeplan.interop.source_text import number_in, whole_number_in

__all__ = ["NcclHost", "is_nccl_topology", "parse_nccl_topology", "read_nccl_topology"]

NVLINK_GB_PER_S = {60: 18.0, 70: 20.0, 80: 20.0, 86: 12.0, 90: 20.6, 100: 40.1}
"""By the first generation that has it; a GPU takes the last entry that is not above its `sm`."""
LANE_SPEED = {"2.5": 15, "5": 30, "5.0": 30, "8": 60, "8.0": 60, "16": 120, "16.0": 120}
LANE_SPEED |= {"32": 240, "32.0": 240, "64": 480, "64.0": 480}
SPEEDS_IN_GB_PER_S = 80
"""So many of the units above times lanes make one GB/s."""
USUAL_SPEED, USUAL_WIDTH = 60, 16
"""What NCCL takes where the file says nothing: PCIe 3.0 x16."""
NVSWITCH = "0x068000"
"""The class of an NVSwitch among the targets of NVLinks."""
MBIT_PER_S_IN_GB_PER_S = 8000
MAX_ELEMENTS = 200_000
MAX_DEPTH = 64
DECLARATION = re.compile(r"<!(?!--)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gpu:
    """A GPU, where it hangs in the tree, and its NVLinks."""

    number: int
    bus: str
    sm: int
    path: tuple[tuple[int, float], ...]
    """From the CPU downward: an id for each PCIe link, and its GB/s."""
    cpu: int
    nvlinks: tuple[tuple[str, int, str], ...]
    """Target, number of links, class of the target."""

    @property
    def nvlink_gb_per_s(self) -> float:
        known = [gb_per_s for sm, gb_per_s in NVLINK_GB_PER_S.items() if sm <= self.sm]
        return known[-1] if known else NVLINK_GB_PER_S[60]


def is_nccl_topology(text: str) -> bool:
    """Whether this is XML."""
    return text.lstrip().startswith("<")


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclHost:
    """What a file says about its host."""

    numbers: tuple[int, ...]
    """Of its GPUs, rising."""
    rows_gb_per_s: tuple[tuple[float, ...], ...]
    """Between its GPUs."""
    cards_gb_per_s: tuple[float, ...]


def read_nccl_topology(text: str, settings: ImportSettings) -> Imported:
    """The host that an XML file of NCCL describes."""
    host = parse_nccl_topology(text, assumed_bandwidths(settings.assumed_gb_per_s)["SYS"])
    names = [f"gpu{number}" for number in host.numbers]
    cluster = host_cluster(settings.name, names, host.rows_gb_per_s)
    notes = ["bandwidths are NCCL's figures, not measured"]
    if host.cards_gb_per_s:
        cards = host.cards_gb_per_s
        total = f"{len(cards)} network cards with {sum(cards):g} GB/s together"
        notes.append(f"this is one host; it has {total}, for between_hosts_gb_per_s")
    return Imported(result=cluster, notes=tuple(notes))


def parse_nccl_topology(text: str, sys_gb_per_s: float) -> NcclHost:
    """The GPUs of a file with the bandwidths between them; `sys` is the link between sockets."""
    system = _parse(text)
    if system.tag != "system":
        raise InputError(f"the root is <{excerpt(system.tag)}>, not <system>")
    gpus, cards_gb_per_s = _walk(system)
    require_host_size(len(gpus))
    gpus.sort(key=lambda gpu: gpu.number)
    for gpu, other in pairwise(gpus):
        if gpu.number == other.number:
            raise InputError(f"two GPUs have dev {gpu.number}; give the file of one host")
    return NcclHost(
        numbers=tuple(gpu.number for gpu in gpus),
        rows_gb_per_s=tuple(
            tuple(0.0 if gpu is other else _between(gpu, other, sys_gb_per_s) for other in gpus)
            for gpu in gpus
        ),
        cards_gb_per_s=tuple(cards_gb_per_s),
    )


def _parse(text: str) -> ElementTree.Element:
    if DECLARATION.search(text):
        raise InputError("has a declaration <!...>, which files of NCCL never have")
    try:
        return ElementTree.fromstring(text)  # noqa: S314  # no declarations, so no entities
    except (ElementTree.ParseError, ExpatError, ValueError) as problem:
        raise InputError(f"is not XML: {problem}") from None


def _walk(system: ElementTree.Element) -> tuple[list[_Gpu], list[float]]:
    """The GPUs of the tree, and the speeds of its network cards."""
    gpus: list[_Gpu] = []
    cards_gb_per_s: list[float] = []
    cpus = 0
    to_visit: list[tuple[ElementTree.Element, int, str, tuple[tuple[int, float], ...]]]
    to_visit = [(system, -1, "", ())]
    for visited in range(MAX_ELEMENTS):
        if not to_visit:
            return gpus, cards_gb_per_s
        element, cpu, bus, path = to_visit.pop()
        if element.tag == "cpu":
            cpu, cpus = cpus, cpus + 1
        elif element.tag == "pci":
            bus = element.get("busid", bus)
            path = (*path, (visited, _pcie_gb_per_s(element)))
            if len(path) > MAX_DEPTH:
                raise InputError(f"<pci> is nested deeper than {MAX_DEPTH} levels")
        elif element.tag == "gpu":
            gpus.append(_gpu(element, cpu, bus, path))
        elif element.tag == "net":
            where = f"net {excerpt(element.get('name', ''))}: speed"
            mbit_per_s = number_in(element.get("speed", "0"), where)
            if not 0 <= mbit_per_s <= 1e12:
                raise InputError(f"{where}: {mbit_per_s:g} is not within 0..1e12 Mbit/s")
            cards_gb_per_s.append(mbit_per_s / MBIT_PER_S_IN_GB_PER_S)
        to_visit.extend((child, cpu, bus, path) for child in reversed(element))
    raise InputError(f"has more than {MAX_ELEMENTS:,} elements")


def _gpu(
    element: ElementTree.Element, cpu: int, bus: str, path: tuple[tuple[int, float], ...]
) -> _Gpu:
    for field in ("dev", "sm"):
        if element.get(field) is None:
            raise InputError(f"gpu at {excerpt(bus)}: {field} is missing")
    links = []
    for link in element.iterfind("nvlink"):
        count = whole_number_in(link.get("count", "1"), f"gpu at {excerpt(bus)}: nvlink count")
        if count > 1000:
            raise InputError(f"gpu at {excerpt(bus)}: nvlink count: {count} is above 1000")
        links.append((link.get("target", ""), count, link.get("tclass", "")))
    return _Gpu(
        number=whole_number_in(element.get("dev", ""), f"gpu at {excerpt(bus)}: dev"),
        bus=bus,
        sm=whole_number_in(element.get("sm", ""), f"gpu at {excerpt(bus)}: sm"),
        path=path,
        cpu=cpu,
        nvlinks=tuple(links),
    )


def _pcie_gb_per_s(element: ElementTree.Element) -> float:
    """What NCCL makes of a link's speed and width; what it does not know is PCIe 3.0 x16."""
    speed = LANE_SPEED.get(element.get("link_speed", "").split("GT")[0].strip(), USUAL_SPEED)
    width = element.get("link_width", "").strip() or "0"
    lanes = whole_number_in(width, f"pci {excerpt(element.get('busid', ''))}: link_width")
    if lanes > 1000:
        raise InputError(
            f"pci {excerpt(element.get('busid', ''))}: link_width: {lanes} is too much"
        )
    return speed * (lanes or USUAL_WIDTH) / SPEEDS_IN_GB_PER_S


def _between(gpu: _Gpu, other: _Gpu, sys_gb_per_s: float) -> float:
    """The bandwidth from one GPU to another one."""
    direct = sum(count for target, count, _ in gpu.nvlinks if target == other.bus and other.bus)
    to_switch = min(
        sum(count for _, count, tclass in each.nvlinks if tclass.startswith(NVSWITCH))
        for each in (gpu, other)
    )
    links = direct + to_switch
    if links:
        return links * min(gpu.nvlink_gb_per_s, other.nvlink_gb_per_s)
    shared = 0
    for mine, theirs in zip(gpu.path, other.path, strict=False):
        if mine[0] != theirs[0]:
            break
        shared += 1
    way = [gb_per_s for _, gb_per_s in (*gpu.path[shared:], *other.path[shared:])]
    if gpu.cpu != other.cpu:
        way.append(sys_gb_per_s)
    return min(way) if way else USUAL_SPEED * USUAL_WIDTH / SPEEDS_IN_GB_PER_S
