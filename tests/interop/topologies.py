"""Texts as nvidia-smi and NCCL write them on known machines, made from the links of each machine.

The layout of each text is that of a driver: which columns there are, what stands between them.
"""

MESH = {
    frozenset(pair): links
    for links, pairs in {
        1: ((0, 1), (0, 2), (1, 3), (2, 3), (4, 5), (4, 6), (5, 7), (6, 7)),
        2: ((0, 3), (0, 4), (1, 2), (1, 5), (2, 6), (3, 7), (4, 7), (5, 6)),
    }.items()
    for pair in pairs
}
"""NVLinks of a DGX-1 with V100: a hybrid cube mesh, six links a GPU."""
LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""
ON, OFF = "\x1b[4m", "\x1b[0m"


def _table(kinds, cards, header_end, row_end, *, between="\t", codes=("", "")) -> str:
    """The matrix; `cards` has the name and the kind to each GPU of every network card."""
    names = [f"GPU{n}" for n in range(len(kinds))]
    columns = [*names, *(name for name, _ in cards)]
    head = between.join([*columns, *header_end])
    lines = [f"{between}{codes[0]}{head}{codes[1]}"]
    for number, row in enumerate(kinds):
        cells = [*row, *(to_gpus[number] for _, to_gpus in cards), *row_end(number)]
        lines.append(between.join([names[number], *cells]))
    for place, (name, to_gpus) in enumerate(cards):
        among = [" X " if other == place else "SYS" for other in range(len(cards))]
        lines.append(between.join([name, *to_gpus, *among]))
    return "\n".join(lines) + "\n"


def _kinds(count: int, kind_of) -> list[list[str]]:
    return [[" X " if a == b else kind_of(a, b) for b in range(count)] for a in range(count)]


def _mesh_kind(far: str):
    """DGX-1: NVLinks; else one switch for two GPUs, two of them a socket."""

    def kind(a: int, b: int) -> str:
        links = MESH.get(frozenset((a, b)))
        return f"NV{links}" if links else ("PIX" if a // 2 == b // 2 else far)

    return kind


def _near(gpus: set[int], count: int) -> list[str]:
    return ["PIX" if gpu in gpus else "SYS" for gpu in range(count)]


DGX1_OLD = (
    _table(
        _kinds(8, _mesh_kind("SOC")),
        [(f"mlx5_{2 * n}", _near({2 * n, 2 * n + 1}, 8)) for n in range(4)],
        ["CPU Affinity"],
        lambda gpu: ["0-19,40-59" if gpu < 4 else "20-39,60-79"],
    )
    + "\nLegend:\n\n  X   = Self\n  SOC  = Connection traversing PCIe as well as the SMP link\n"
)
"""An old driver: SOC for SYS, cards by their own names, no NUMA column."""
DGX1_NEW = (
    _table(
        _kinds(8, _mesh_kind("SYS")),
        [(f"NIC{n}", _near({2 * n, 2 * n + 1}, 8)) for n in range(4)],
        ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"],
        lambda gpu: ["0-19,40-59" if gpu < 4 else "20-39,60-79", str(gpu // 4), "", "N/A"],
        codes=(ON, OFF),
    )
    + LEGEND
    + "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_2\n  NIC2: mlx5_4\n  NIC3: mlx5_6\n"
)
"""A new one: underlined header, two tabs before N/A, a legend of cards."""
DGX_A100 = (
    _table(
        _kinds(8, lambda a, b: "NV12"),
        [(f"NIC{n}", ["PXB" if g // 2 == n // 2 else "SYS" for g in range(8)]) for n in range(8)],
        ["CPU Affinity", "NUMA Affinity"],
        lambda gpu: [f"{16 * gpu}-{16 * gpu + 15}", str(gpu // 2)],
        codes=(ON, OFF),
    )
    + LEGEND
)
DGX_H100 = (
    _table(
        _kinds(8, lambda a, b: "NV18"),
        [(f"NIC{n}", ["PXB" if g == n else "SYS" for g in range(8)]) for n in range(8)],
        ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"],
        lambda gpu: ["0-55,112-167" if gpu < 4 else "56-111,168-223", str(gpu // 4), "", "N/A"],
        codes=(ON, OFF),
    )
    + LEGEND
)


def _box_kind(a: int, b: int) -> str:
    if a // 2 == b // 2:
        return "PIX"
    return "NODE" if a // 4 == b // 4 else "SYS"


PCIE_BOX = (
    _table(
        _kinds(8, _box_kind),
        [("NIC0", _near({0, 1}, 8)), ("NIC1", _near({4, 5}, 8))],
        ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"],
        lambda gpu: ["0-31" if gpu < 4 else "32-63", str(gpu // 4), "", "N/A"],
        between="\t",
    )
    + LEGEND
)
"""GPUs without NVLinks, two a switch, on two sockets with one card each."""


def nvlink_status(name: str, num_gpus: int, links: dict[int, str] | int, rate: str) -> str:
    """What `nvidia-smi nvlink -s` prints."""
    lines = []
    for gpu in range(num_gpus):
        lines.append(f"GPU {gpu}: {name} (UUID: GPU-{gpu:08x}-0000-1111-2222-333333333333)")
        count = links if isinstance(links, int) else len(links)
        lines += [f"\t Link {link}: {rate} GB/s" for link in range(count)]
    return "\n".join(lines) + "\n"


NVLINKS_V100 = nvlink_status("Tesla V100-SXM2-16GB", 8, 6, "25.781")
NVLINKS_A100 = nvlink_status("NVIDIA A100-SXM4-40GB", 8, 12, "25")
NVLINKS_H100 = nvlink_status("NVIDIA H100 80GB HBM3", 8, 18, "26.562")


def memory_query(name: str, num_gpus: int, mib: int, *, units: bool = True) -> str:
    """What `nvidia-smi --query-gpu=index,name,memory.total --format=csv` prints."""
    unit = " MiB" if units else ""
    rows = [f"{gpu}, {name}, {mib}{unit}" for gpu in range(num_gpus)]
    return "\n".join(["index, name, memory.total [MiB]", *rows]) + "\n"


MEMORY_V100 = memory_query("Tesla V100-SXM2-16GB", 8, 16160)
MEMORY_H100 = memory_query("NVIDIA H100 80GB HBM3", 8, 81559, units=False)


def _nccl_gpu(number: int, bus: str, sm: int, nvlinks: str, speed: str) -> str:
    return (
        f'<pci busid="{bus}" class="0x030200" link_speed="{speed}" link_width="16">'
        f'<gpu dev="{number}" sm="{sm}" rank="{number}" gdr="1">{nvlinks}</gpu></pci>'
    )


def _bus(gpu: int) -> str:
    return f"0000:{0x10 + gpu:02x}:00.0"


def nccl_mesh() -> str:
    """A DGX-1: NVLinks between GPUs, a card of 100 Gbit/s for each switch."""
    sockets = []
    for socket in range(2):
        switches = []
        for switch in range(2):
            number = 2 * socket + switch
            gpus = []
            for gpu in (2 * number, 2 * number + 1):
                links = "".join(
                    f'<nvlink target="{_bus(b)}" count="{MESH[frozenset((gpu, b))]}"'
                    ' tclass="0x030200"/>'
                    for b in range(8)
                    if frozenset((gpu, b)) in MESH
                )
                gpus.append(_nccl_gpu(gpu, _bus(gpu), 70, links, "8.0 GT/s PCIe"))
            card = (
                f'<pci busid="0000:4{number}:00.0" link_speed="8.0 GT/s PCIe" link_width="16"><nic>'
                f'<net name="mlx5_{number}" dev="{number}" speed="100000" port="1"/></nic></pci>'
            )
            switches.append(
                f'<pci busid="0000:5{number}:00.0" link_speed="8.0 GT/s PCIe" link_width="16">'
                f"{''.join(gpus)}{card}</pci>"
            )
        sockets.append(f'<cpu numaid="{socket}">{"".join(switches)}</cpu>')
    return f'<system version="1">{"".join(sockets)}</system>\n'


def nccl_switched(sm: int, switches: int, links: int, speed: str, mbit_per_s: int) -> str:
    """NVSwitches: each GPU has links to all of them, and a card of its own."""
    sockets = []
    for socket in range(2):
        parts = []
        for gpu in range(4 * socket, 4 * socket + 4):
            nvlinks = "".join(
                f'<nvlink target="0000:c{switch}:00.0" count="{links}" tclass="0x068000"/>'
                for switch in range(switches)
            )
            parts.append(_nccl_gpu(gpu, _bus(gpu), sm, nvlinks, speed))
            parts.append(
                f'<pci busid="0000:4{gpu}:00.0" link_speed="{speed}" link_width="16"><nic>'
                f'<net name="mlx5_{gpu}" dev="{gpu}" speed="{mbit_per_s}" port="1"/></nic></pci>'
            )
        sockets.append(f'<cpu numaid="{socket}">{"".join(parts)}</cpu>')
    return f'<system version="1">{"".join(sockets)}</system>\n'


NCCL_DGX1 = nccl_mesh()
NCCL_A100 = nccl_switched(80, 6, 2, "16.0 GT/s PCIe", 200000)
NCCL_H100 = nccl_switched(90, 6, 3, "32.0 GT/s PCIe", 400000)
