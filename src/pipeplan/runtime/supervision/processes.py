"""Names a process so that it is not mistaken for a later one with the same number."""

import contextlib
import json
import os
import signal
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Process"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of some host."""

    host: str
    pid: int
    birth: str
    """When it started, in the kernel's ticks; "alive" on systems without /proc."""

    @classmethod
    def this_one(cls) -> "Process":
        """The process that calls."""
        return cls(host=socket.gethostname(), pid=os.getpid(), birth=_birth_of(os.getpid()))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Process":
        """The process that `to_json` described."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """A text that another rank can read."""
        return json.dumps(asdict(self))

    @property
    def is_on_this_host(self) -> bool:
        """Whether it runs, or ran, on this host."""
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether this very process still runs, and is no zombie; asked on its own host only."""
        return bool(self.birth) and _birth_of(self.pid) == self.birth

    @property
    def is_gone(self) -> bool:
        """Whether this host knows for sure that it has ended."""
        return self.is_on_this_host and not self.is_alive

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGKILL)


def _birth_of(pid: int) -> str:
    """When a process started; empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "" if Path("/proc/self").exists() else _birth_without_proc(pid)
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
