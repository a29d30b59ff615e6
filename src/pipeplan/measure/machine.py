"""What this machine says about itself: its name, memory, GPUs, network cards. Needs no torch."""

import contextlib
import shutil
import socket
import subprocess
from pathlib import Path

from pipeplan.errors import InputError

__all__ = ["gpu_texts", "host_name", "machine_id", "memory_bytes", "network_cards_gb_per_s"]

MEMORY = Path("/proc/meminfo")
LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""What a container may use, in both versions of control groups."""
NVIDIA_SMI = "nvidia-smi"
QUERIES = (
    (("topo", "-m"), True),
    (("nvlink", "-s"), False),
    (("--query-gpu=index,name,memory.total", "--format=csv"), True),
)
"""Arguments, and whether it is an error if this fails: not every GPU has NVLinks."""
NO_GPUS = "for processes on CPUs, give --processes"
PATIENCE_S = 60.0
BITS_IN_BYTE = 8
BOOT = Path("/proc/sys/kernel/random/boot_id")


def host_name() -> str:
    """The name by which the runtime matches ranks and devices."""
    return socket.gethostname()


def machine_id() -> str:
    """Another text on every machine that runs; empty where there is none."""
    with contextlib.suppress(OSError):
        return BOOT.read_text().strip()
    return ""


def memory_bytes() -> int | None:
    """The memory of this machine, or of the container that this is; None: unknown."""
    found = [_total(), *(_limit(path) for path in LIMITS)]
    known = [number for number in found if number]
    return min(known) if known else None


def _total() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in MEMORY.read_text().splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    return None


def _limit(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())  # "max" where there is no limit
    return None


def gpu_texts() -> list[tuple[str, str]]:
    """What nvidia-smi prints about the GPUs of this machine, by command; nothing without GPUs.

    Raises:
        InputError: nvidia-smi is there, but does not work.
    """
    if shutil.which(NVIDIA_SMI) is None:
        return []
    texts = []
    for arguments, is_needed in QUERIES:
        command = " ".join((NVIDIA_SMI, *arguments))
        try:
            ended = subprocess.run(  # noqa: S603
                (NVIDIA_SMI, *arguments),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=PATIENCE_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as problem:
            raise InputError(f"{command}: does not work: {problem}; {NO_GPUS}") from None
        said = (ended.stdout.strip() or ended.stderr.strip()).partition("\n")[0]
        if ended.returncode and is_needed:
            raise InputError(f"{command}: failed: {said or 'it said nothing'}; {NO_GPUS}")
        if not ended.returncode and ended.stdout.strip():
            texts.append((command, ended.stdout))
    return texts


def network_cards_gb_per_s() -> tuple[float, ...]:
    """The line rates of this machine's cards: InfiniBand and RoCE if there are any, else others."""
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    fast = [_infiniband_gb_per_s(port) for port in ports]
    if any(fast):
        return tuple(rate for rate in fast if rate)
    cards = sorted(Path("/sys/class/net").glob("*"))
    rates = [_ethernet_gb_per_s(card) for card in cards if (card / "device").exists()]
    return tuple(rate for rate in rates if rate)


def _infiniband_gb_per_s(port: Path) -> float:
    """From a text like `100 Gb/sec (4X EDR)`; 0 if the port is down."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        if "ACTIVE" in (port / "state").read_text():
            return float((port / "rate").read_text().split()[0]) / BITS_IN_BYTE
    return 0.0


def _ethernet_gb_per_s(card: Path) -> float:
    """From Mbit/s; virtual cards say -1 or nothing."""
    with contextlib.suppress(OSError, ValueError):
        if (card / "operstate").read_text().strip() == "up":
            return max(float((card / "speed").read_text()), 0.0) / 1000 / BITS_IN_BYTE
    return 0.0
