"""What this machine says about itself: its name, its memory. Needs no torch."""

import contextlib
import socket
from pathlib import Path

__all__ = ["host_name", "machine_id", "memory_bytes"]

MEMORY = Path("/proc/meminfo")
LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""What a container may use, in both versions of control groups."""
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
