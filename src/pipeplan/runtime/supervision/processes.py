"""Names a process so that it is not mistaken for a later one, or for a stranger's."""

import contextlib
import json
import os
import signal
import socket
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

__all__ = ["Process"]

PROC = Path("/proc")
LAUNCH_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
"""All ranks of a launch inherit the same values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of some host."""

    host: str
    pid: int
    birth: str
    """When it started, in the kernel's ticks; "alive" on systems without /proc."""
    machine: str = ""
    """Tells apart hosts of the same name, and containers that number processes by themselves."""

    @classmethod
    def this_one(cls) -> "Process":
        """The process that calls."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> "Process":
        """A process of this host."""
        return cls(host=socket.gethostname(), pid=pid, birth=_birth_of(pid), machine=_machine())

    @classmethod
    def unknown(cls) -> "Process":
        """A process that has not told its name yet."""
        return cls(host="", pid=0, birth="")

    @classmethod
    def from_json(cls, text: str | bytes) -> "Process":
        """The process that `to_json` described."""
        fields = json.loads(text)
        return cls(
            host=str(fields["host"]),
            pid=int(fields["pid"]),
            birth=str(fields["birth"]),
            machine=str(fields["machine"]),
        )

    def to_json(self) -> str:
        """A text that another rank can read."""
        return json.dumps(asdict(self))

    @property
    def is_known(self) -> bool:
        """Whether it has told its name."""
        return self.pid > 0

    @property
    def is_on_this_host(self) -> bool:
        """Whether it runs, or ran, on this host."""
        return self.host == socket.gethostname() and self.machine == _machine()

    def shares_host(self, other: "Process") -> bool:
        """Whether both are known to run, or to have run, on the same host."""
        return self.is_known and (self.host, self.machine) == (other.host, other.machine)

    @property
    def is_alive(self) -> bool:
        """Whether this very process still runs, and is no zombie; asked on its own host only.

        If the kernel does not tell, because this process has too many open files, it counts as
        alive.
        """
        try:
            return bool(self.birth) and _birth_of(self.pid) == self.birth
        except OSError:
            return True

    @property
    def is_gone(self) -> bool:
        """Whether this host knows for sure that it has ended."""
        return self.is_on_this_host and not self.is_alive

    @property
    def is_stopped(self) -> bool:
        """Whether somebody has stopped it (SIGSTOP, a debugger); asked on its own host only."""
        try:
            return _fields_of(self.pid)[0] in "Tt"
        except OSError:
            return False

    @property
    def num_runs(self) -> int | None:
        """How often its threads were given a processor; None where the kernel does not tell.

        A process that was not stopped runs at least once in each beat of its watchdog.
        """
        total = 0
        try:
            for task in (PROC / str(self.pid) / "task").iterdir():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    total += int((task / "schedstat").read_text().split()[2])
        except (OSError, ValueError, IndexError):
            return None
        return total or None

    @property
    def is_ours(self) -> bool:
        """Whether it is a process of this user and of this launch, and still the same one."""
        if self.pid <= 1 or not self.is_on_this_host or not self.is_alive:
            return False
        if not PROC.joinpath("self").exists():
            return True  # nothing more can be known; only our own user's processes can be killed
        try:
            if (PROC / str(self.pid)).stat().st_uid != os.getuid():
                return False
            mine, its = _launch_of("self"), _launch_of(str(self.pid))
        except OSError:
            return False
        return mine == its and (bool(mine) or _parent_of(self.pid) == os.getppid())

    def kill(self) -> None:
        """End it at once, if it is a process of this launch."""
        if self.is_ours:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


@cache
def _machine() -> str:
    """The start of this machine, and the space of its process numbers."""
    parts = []
    with contextlib.suppress(OSError):
        parts.append((PROC / "sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink(PROC / "self/ns/pid"))
    return " ".join(parts)


def _launch_of(pid: str) -> dict[bytes, bytes]:
    """The launch's variables in the environment that a process was started with."""
    entries = (PROC / pid / "environ").read_bytes().split(b"\0")
    variables = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
    names = [name.encode() for name in LAUNCH_VARIABLES]
    return {name: variables[name] for name in names if name in variables}


def _fields_of(pid: int) -> list[str]:
    """What the kernel says about a process, from its state on."""
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def _parent_of(pid: int) -> int:
    return int(_fields_of(pid)[1])


def _birth_of(pid: int) -> str:
    """When a process started; empty if it has ended."""
    try:
        fields = _fields_of(pid)
    except (FileNotFoundError, ProcessLookupError):
        return "" if (PROC / "self").exists() else _birth_without_proc(pid)
    state, start_ticks = fields[0], fields[19]
    return "" if state in "ZX" else start_ticks


def _birth_without_proc(pid: int) -> str:
    """Without /proc we only know whether a process with this number exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "alive"
