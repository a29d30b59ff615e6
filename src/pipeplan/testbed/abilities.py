"""Which way works on this machine: namespaces, or pacing. Each step of the first is tried."""

import os
import subprocess
import sys
from collections.abc import Callable
from enum import StrEnum

import msgspec

from pipeplan.documents.text import printable
from pipeplan.errors import RuntimeMismatchError
from pipeplan.testbed.orders import Way
from pipeplan.testbed.system_calls import unshare_network, unshare_user

__all__ = ["Abilities", "Privilege", "find_abilities"]

PATIENCE_S = 30.0


class Privilege(StrEnum):
    """By what right namespaces are made."""

    OWN = "own"
    USER = "user"
    """By that of a new user namespace, which needs no privilege."""


class Abilities(msgspec.Struct, frozen=True, kw_only=True):
    """What this machine allows."""

    way: Way
    privilege: Privilege = Privilege.OWN
    failed_step: str = ""
    """The first step towards namespaces that does not work, and why."""


STEPS = (
    ("veth", "ip link add veth0 type veth peer name veth1"),
    ("bridge", "ip link add bridge0 type bridge"),
    ("htb", "tc qdisc add dev veth0 root handle 1: htb default 1"),
    ("class", "tc class add dev veth0 parent 1: classid 1:1 htb rate 1000000bit quantum 2000"),
    ("pfifo", "tc qdisc add dev veth0 parent 1:1 pfifo limit 10"),
    ("u32", "tc filter add dev veth0 parent 1: protocol ip u32 match ip dst 10.0.0.1 flowid 1:1"),
)


def find_abilities() -> Abilities:
    """Try, in a process of its own, what the testbed needs."""
    if sys.platform != "linux":
        raise RuntimeMismatchError(f"testbed: runs on Linux only, not on {sys.platform}")
    tried = subprocess.run(
        [sys.executable, "-m", "pipeplan.testbed.abilities"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    try:
        return msgspec.json.decode(tried.stdout, type=Abilities)
    except msgspec.DecodeError:
        return Abilities(way=Way.PACING, failed_step="the trial of namespaces has crashed")


def _try_all() -> Abilities:
    privilege, problem = Privilege.OWN, _problem_of(unshare_network)
    if problem:
        privilege, problem = (
            Privilege.USER,
            _problem_of(unshare_user) or _problem_of(unshare_network),
        )
    if problem:
        return Abilities(way=Way.PACING, failed_step=f"network namespace: {problem}")
    for name, command in STEPS:
        problem = _problem_of(lambda command=command: _run(command))  # type: ignore[misc]
        if problem:
            return Abilities(way=Way.PACING, failed_step=f"{name}: {problem}")
    return Abilities(way=Way.NAMESPACES, privilege=privilege)


def _problem_of(step: Callable[[], None]) -> str:
    try:
        step()
    except subprocess.CalledProcessError as error:
        return printable(error.stderr.strip().partition("\n")[0] or "failed")
    except OSError as error:
        return printable(error.strerror or str(error))
    return ""


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)  # noqa: S603


if __name__ == "__main__":
    os.write(1, msgspec.json.encode(_try_all()))
