"""The cluster that texts about one host describe: matrix, NVLinks, memory, network cards.

::

    nvidia-smi topo -m        which pairs have NVLinks, which go over PCIe
    nvidia-smi nvlink -s      how fast an NVLink is, and how many are active
    nvidia-smi --query-gpu    memory
    NCCL's topology XML       bandwidths by NCCL's own figures, network cards

The first or the last is needed. Each text is recognised by its content. What nobody says is
assumed, and a note says what.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeplan.documents.text import excerpt
from pipeplan.errors import InputError
from pipeplan.interop.gpu_query import QueriedGpu, is_gpu_query, read_gpu_query
from pipeplan.interop.hosts import assumed_bandwidths, equal_hosts
from pipeplan.interop.imported import Imported
from pipeplan.interop.nccl_topology import NcclHost, is_nccl_topology, parse_nccl_topology
from pipeplan.interop.nvidia_topo import TopoMatrix, assumption, is_nvidia_topo, parse_nvidia_topo
from pipeplan.interop.nvlink_status import GpuLinks, is_nvlink_status, read_nvlink_status

__all__ = ["DiscoverySettings", "discover_from_texts", "discover_processes", "usable_memory_gb"]

BYTES_IN_GB = 1e9
GPU_RESERVE_GB, CPU_RESERVE_GB = 1.5, 0.5
"""What the framework itself takes of a device's memory, about."""
MATRIX, NVLINKS, MEMORY, XML = "nvidia-smi topo -m", "nvidia-smi nvlink -s", "--query-gpu", "NCCL"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoverySettings:
    """What the texts do not say."""

    name: str
    hosts: tuple[str, ...]
    """The names of all hosts; they are equal to the one of the texts."""
    assumed_gb_per_s: Mapping[str, float] = field(default_factory=dict)
    cards_gb_per_s: tuple[float, ...] = ()
    """Network cards that this machine says it has; those of the texts go before them."""


@dataclass(slots=True)
class _Texts:
    """What was found in the texts."""

    matrix: TopoMatrix | None = None
    nvlinks: dict[int, GpuLinks] | None = None
    memory: dict[int, QueriedGpu] | None = None
    xml: NcclHost | None = None


def discover_from_texts(texts: Sequence[tuple[str, str]], settings: DiscoverySettings) -> Imported:
    """The cluster in texts, each with the name of its file; errors begin with this name.

    Raises:
        InputError: a text is damaged or in no known form, or texts contradict each other.
    """
    found = _read_all(texts, settings)
    notes: list[str] = []
    if found.xml is not None:
        rows: Sequence[Sequence[float]] = found.xml.rows_gb_per_s
        numbers = found.xml.numbers
        notes.append("bandwidths are NCCL's figures, not measured")
        if found.matrix is not None:
            _require_same(f"{XML}'s XML", len(numbers), MATRIX, len(found.matrix.names))
    elif found.matrix is not None:
        numbers = tuple(int(name.removeprefix("GPU")) for name in found.matrix.names)
        rows = _rows_of_matrix(found, numbers, settings, notes)
    else:
        raise InputError(
            f"no text tells which GPUs are linked; add what '{MATRIX}' prints, or {XML}'s XML"
        )
    cards = _cards(found, settings, notes)
    cluster = equal_hosts(
        settings.name,
        settings.hosts,
        rows,
        memory_gb=_memory(found, numbers, notes),
        between_gb_per_s=max(cards) if cards else None,
        uplink_gb_per_s=_significant(sum(cards)) if cards else None,
    )
    return Imported(result=cluster, notes=tuple(notes))


def discover_processes(
    num_processes: int, memory_bytes: float | None, settings: DiscoverySettings
) -> Imported:
    """Hosts with so many processes on their CPUs, which share the memory."""
    bandwidth = assumed_bandwidths(settings.assumed_gb_per_s)["CPU"]
    each_gb = None
    if memory_bytes is not None:
        each_gb = usable_memory_gb(memory_bytes / num_processes, is_gpu=False)
    notes = []
    if num_processes > 1:
        notes.append(
            f"links between processes are assumed: CPU={bandwidth:g} GB/s; give --assume, or"
            f" measure: torchrun --nproc-per-node {num_processes} -m pipeplan.measure.links"
        )
    cards = _cards(_Texts(), settings, notes)
    cluster = equal_hosts(
        settings.name,
        settings.hosts,
        [[bandwidth] * num_processes for _ in range(num_processes)],
        memory_gb=[each_gb] * num_processes,
        between_gb_per_s=max(cards) if cards else None,
        uplink_gb_per_s=_significant(sum(cards)) if cards else None,
    )
    return Imported(result=cluster, notes=tuple(notes))


def usable_memory_gb(total_bytes: float, *, is_gpu: bool) -> float:
    """What a plan may use of a device's memory: all but what the framework takes, rounded down."""
    usable = total_bytes / BYTES_IN_GB - (GPU_RESERVE_GB if is_gpu else CPU_RESERVE_GB)
    return max(int(usable * 10) / 10, 0.1)


def _read_all(texts: Sequence[tuple[str, str]], settings: DiscoverySettings) -> _Texts:
    sys_gb_per_s = assumed_bandwidths(settings.assumed_gb_per_s)["SYS"]
    found = _Texts()
    source_of: dict[str, str] = {}
    for source, text in texts:
        try:
            kind = _read_one(text, found, sys_gb_per_s)
        except InputError as problem:
            raise InputError(f"{source}: {problem}") from None
        if kind in source_of:
            raise InputError(
                f"{source}: is a second text of {kind}, beside {source_of[kind]};"
                " give those of one host"
            )
        source_of[kind] = source
    return found


def _read_one(text: str, found: _Texts, sys_gb_per_s: float) -> str:
    """Read one text; which kind it is."""
    if is_nccl_topology(text):
        found.xml = parse_nccl_topology(text, sys_gb_per_s)
        return XML
    if is_gpu_query(text):
        found.memory = read_gpu_query(text)
        return MEMORY
    if is_nvlink_status(text):
        found.nvlinks = read_nvlink_status(text)
        return NVLINKS
    if is_nvidia_topo(text):
        found.matrix = parse_nvidia_topo(text)
        return MATRIX
    raise InputError(
        f"is neither what '{MATRIX}' prints, nor '{NVLINKS}', nor 'nvidia-smi"
        " --query-gpu=index,name,memory.total --format=csv', nor NCCL's topology XML"
    )


def _rows_of_matrix(
    found: _Texts, numbers: Sequence[int], settings: DiscoverySettings, notes: list[str]
) -> list[list[float]]:
    """The bandwidths of a matrix of kinds, with the rates of its NVLinks if they are known."""
    assert found.matrix is not None
    matrix, assumed = found.matrix, assumed_bandwidths(settings.assumed_gb_per_s)
    if found.nvlinks is None or "NV" in settings.assumed_gb_per_s:
        notes.append(assumption(assumed))
        return matrix.bandwidths(assumed, lambda one, other: assumed["NV"])
    _require_same(NVLINKS, len(found.nvlinks), MATRIX, len(numbers))
    rates: dict[int, float] = {}
    for index, number in enumerate(numbers):
        links = found.nvlinks.get(number)
        counts = [matrix.num_nvlinks(index, other) for other in range(len(numbers))]
        num_active = len(links.links_gb_per_s) if links is not None else 0
        if any(counts) and (links is None or not num_active):
            raise InputError(
                f"GPU{number}: has NVLinks in '{MATRIX}', but no active ones in '{NVLINKS}'"
            )
        # Links lead to other GPUs, and add up, or all of them to a switch that joins all pairs.
        if num_active not in (sum(counts), max(counts)):
            notes.append(
                f"GPU{number}: {num_active} NVLinks are active, but the matrix counts"
                f" {sum(counts)} ({max(counts)} to one GPU); is a link down?"
            )
        if links is not None and num_active:
            rates[index] = links.link_gb_per_s
    shown = ", ".join(f"{rate:g}" for rate in sorted(set(rates.values()))) or "no"
    notes.append(
        f"an NVLink counts {shown} GB/s, which copies reach; PCIE={assumed['PCIE']:g},"
        f" SYS={assumed['SYS']:g} GB/s are assumed; give --assume, or measure"
    )
    return matrix.bandwidths(
        assumed, lambda one, other: min(rates.get(one, 0.0), rates.get(other, 0.0))
    )


def _cards(found: _Texts, settings: DiscoverySettings, notes: list[str]) -> tuple[float, ...]:
    """The network cards of a host; several hosts need them."""
    from_xml = found.xml.cards_gb_per_s if found.xml is not None else ()
    cards = tuple(card for card in from_xml or settings.cards_gb_per_s if card > 0)
    if cards:
        notes.append(
            f"the host's {len(cards)} network cards have {sum(cards):g} GB/s together, by their"
            " line rate: its uplink"
        )
    elif found.matrix is not None and found.matrix.num_cards:
        notes.append(
            f"the host has {found.matrix.num_cards} network cards of unknown rate; write it as"
            " uplink_gb_per_s"
        )
    if not cards and len(settings.hosts) > 1:
        raise InputError(
            f"hosts: nobody says how fast the network between {len(settings.hosts)} hosts is; add"
            f" {XML}'s XML, or measure: torchrun ... -m pipeplan.measure.links"
        )
    return cards


def _memory(found: _Texts, numbers: Sequence[int], notes: list[str]) -> list[float | None]:
    if found.memory is None:
        notes.append(
            "memory is unknown, so plans take none for a limit; add what 'nvidia-smi"
            " --query-gpu=index,name,memory.total --format=csv' prints"
        )
        return [None] * len(numbers)
    for number in numbers:
        if number not in found.memory:
            raise InputError(f"GPU{number}: its memory is missing; give the texts of one host")
    _require_same(MEMORY, len(found.memory), "the links", len(numbers))
    notes.append(f"{GPU_RESERVE_GB:g} GB of each GPU are left to the framework")
    return [usable_memory_gb(found.memory[n].memory_bytes, is_gpu=True) for n in numbers]


def _require_same(one: str, count: int, other: str, other_count: int) -> None:
    if count != other_count:
        raise InputError(
            f"{one}: has {count} GPUs, but {excerpt(other)} has {other_count};"
            " give the texts of one host"
        )


def _significant(number: float) -> float:
    return float(f"{number:.6g}")
