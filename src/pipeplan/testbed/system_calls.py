"""System calls that Python 3.11 does not offer: namespaces, and the signal of a dying parent."""

import contextlib
import ctypes
import os
import signal
import socket
from pathlib import Path

__all__ = ["be_punctual", "die_with_parent", "take_host_name", "unshare_network", "unshare_user"]

CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWUTS = 0x10000000, 0x40000000, 0x04000000
PR_SET_PDEATHSIG, PR_SET_TIMERSLACK = 1, 29
LEAST_SLACK_NS = 1
PRIORITY = 1


def unshare_network() -> None:
    """Move this process to a new network namespace, which ends with its last process."""
    _unshare(CLONE_NEWNET)


def take_host_name(name: str) -> None:
    """Call this process's machine by another name, for this process only."""
    _unshare(CLONE_NEWUTS)
    socket.sethostname(name)


def unshare_user() -> None:
    """Move this process to a new user namespace, in which it may make network namespaces."""
    user, group = os.getuid(), os.getgid()
    _unshare(CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_with_parent(parent_id: int) -> None:
    """Let the kernel kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_id:  # it has ended meanwhile
        os._exit(1)


def be_punctual() -> None:
    """Wake up in time: real-time scheduling where that is allowed, and exact timers."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, LEAST_SLACK_NS, 0, 0, 0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(PRIORITY))
