"""The process that has torch, and forks the ranks of one plan after another.

::

    parent --- nursery (imports torch once)
                 |- leader   its namespace has the switches
                      |- rank 0, rank 1, ...   each with a namespace of its own

Importing torch takes seconds, forking milliseconds. Each process is killed by the kernel when the
one above it ends. A namespace ends with its last process. So nothing is left behind, however and
whenever anything ends.
"""

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

import msgspec

from pipeplan.documents.inputs import parse_cluster
from pipeplan.documents.plans import parse_plan
from pipeplan.documents.text import printable
from pipeplan.errors import PipeplanError
from pipeplan.testbed.orders import Answer, LinksOrder, Order, RankTimes, Way
from pipeplan.testbed.shaping import (
    SETTINGS,
    address,
    rank_link,
    rank_shaping,
    switch_links,
    switch_shaping,
)
from pipeplan.testbed.system_calls import (
    be_punctual,
    die_with_parent,
    unshare_network,
    unshare_user,
)
from pipeplan.testbed.topology import Topology, find_topology, topology_of

__all__ = ["main"]

PORT = 29500
LOCAL = "127.0.0.1"
PROBLEM = b"!"
"""With this begins what a rank says instead of its times."""


class _RankFailedError(Exception):
    """A rank has ended without its times; it has said why itself."""


def main() -> None:
    """Carry out orders from standard input until it ends."""
    parent_id, is_new_user = int(sys.argv[1]), sys.argv[2] == "user"
    die_with_parent(parent_id)
    if is_new_user:
        unshare_user()  # before there are threads
    from pipeplan.testbed.rank import preload  # with torch

    preload()
    os.environ.setdefault("PIPEPLAN_SECRET", secrets.token_hex(16))
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a model prints is no answer
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=Order | LinksOrder)
        text = _in_child(lambda order=order: _lead(order))  # type: ignore[misc]
        os.write(answers, (text or msgspec.json.encode(Answer(problem="ended early"))) + b"\n")


def _in_child(run: Callable[[], bytes]) -> bytes:
    """What a forked process returns; empty if it ended before."""
    reading, writing = os.pipe()
    parent_id = os.getpid()
    child = os.fork()
    if not child:
        os.close(reading)
        _run_and_exit(parent_id, writing, run)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def _run_and_exit(parent_id: int, writing: int, run: Callable[[], bytes]) -> NoReturn:
    """Run in a forked process, write what it returns, and end without the parent's clean-up."""
    code = 1
    try:
        die_with_parent(parent_id)
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(run())
        code = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stderr.flush()
        os._exit(code)


def _lead(order: Order | LinksOrder) -> bytes:
    """Make the network, run the ranks, and return what they say."""
    try:
        topology, work = _find_work(order)
        if order.way is Way.NAMESPACES:
            unshare_network()
        crew = _Crew(order.way, topology, work)
        try:
            texts = crew.run()
        finally:
            crew.end()
        if isinstance(order, LinksOrder):
            return texts[0]
        answer = Answer(ranks=[msgspec.json.decode(text, type=RankTimes) for text in texts])
    except (PipeplanError, subprocess.CalledProcessError, OSError) as error:
        stderr = getattr(error, "stderr", "") or ""
        answer = Answer(problem=printable(f"{error} {stderr}".strip()))
    except _RankFailedError as error:
        answer = Answer(problem=str(error))
    return msgspec.json.encode(answer)


def _find_work(order: Order | LinksOrder) -> tuple[Topology, Callable[[int], bytes]]:
    """The network of an order, and what each rank does there."""
    if isinstance(order, LinksOrder):
        cluster = parse_cluster(order.cluster)
        topology = topology_of(cluster, range(cluster.num_devices))

        def measure(rank: int) -> bytes:
            from pipeplan.testbed.link_rank import measure_rank

            return measure_rank(order, cluster, topology, rank)

        return topology, measure
    plan = parse_plan(order.plan)
    topology = find_topology(plan)

    def train(rank: int) -> bytes:
        from pipeplan.testbed.rank import run_rank

        return msgspec.json.encode(run_rank(order, plan, topology, rank))

    return topology, train


class _Crew:
    """The ranks of one order."""

    def __init__(self, way: Way, topology: Topology, work: Callable[[int], bytes]) -> None:
        self._way, self._topology, self._work = way, topology, work
        self._process_ids: list[int] = []
        self._ready, self._go, self._results = [], [], []  # type: ignore[var-annotated]
        self._port = PORT if way is Way.NAMESPACES else _free_port()

    def run(self) -> list[bytes]:
        """Fork the ranks, connect them, and wait for what they say."""
        for rank in range(self._topology.num_ranks):
            self._fork(rank)
        for rank, pipe in enumerate(self._ready):
            if not pipe.read(1):
                raise _RankFailedError(f"rank {rank} has ended before it began")
        if self._way is Way.NAMESPACES:
            batch("ip", switch_links(self._topology, self._process_ids))
            batch("tc", switch_shaping(self._topology))
        for pipe in self._go:
            pipe.write(b"!")
            pipe.close()
        texts = []
        for rank, pipe in enumerate(self._results):
            text = pipe.read()
            if text.startswith(PROBLEM):
                raise _RankFailedError(text.removeprefix(PROBLEM).decode())
            if not text:
                raise _RankFailedError(f"rank {rank} has failed")
            texts.append(text)
        return texts

    def end(self) -> None:
        """Kill what is left, and wait for it."""
        for process_id in self._process_ids:
            os.kill(process_id, signal.SIGKILL)
        for process_id in self._process_ids:
            os.waitpid(process_id, 0)

    def _fork(self, rank: int) -> None:
        ready, go, result = os.pipe(), os.pipe(), os.pipe()
        leader_id = os.getpid()
        child = os.fork()
        if not child:
            for pipe in (*self._ready, *self._go, *self._results):
                pipe.close()
            for end in (ready[0], go[1], result[0]):
                os.close(end)
            _run_and_exit(leader_id, result[1], lambda: self._be_rank(rank, ready[1], go[0]))
        for end in (ready[1], go[0], result[1]):
            os.close(end)
        self._process_ids.append(child)
        self._ready.append(os.fdopen(ready[0], "rb"))
        self._go.append(os.fdopen(go[1], "wb"))
        self._results.append(os.fdopen(result[0], "rb"))

    def _be_rank(self, rank: int, ready: int, go: int) -> bytes:
        """In a forked process: configure the own end of the network, and work."""
        is_apart = self._way is Way.NAMESPACES
        if is_apart:
            unshare_network()
        os.write(ready, b"!")
        if not os.read(go, 1):
            os._exit(1)
        if is_apart:
            _settle(self._topology, rank)
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(self._topology.num_ranks),
            MASTER_ADDR=address(0) if is_apart else LOCAL,
            MASTER_PORT=str(self._port),
            GLOO_SOCKET_IFNAME="eth0" if is_apart else "lo",
        )
        be_punctual()
        try:
            return self._work(rank)
        except PipeplanError as error:
            return PROBLEM + printable(str(error)).encode()


def _settle(topology: Topology, rank: int) -> None:
    """Set up a rank's end of the network, from inside its namespace."""
    for name, value in SETTINGS.items():
        try:
            Path("/proc/sys", name).write_text(value)
        except OSError:  # not every kernel has each of them
            continue
    batch("ip", rank_link(topology, rank))
    batch("tc", rank_shaping(topology, rank))


def batch(program: str, lines: Iterable[str]) -> None:
    """Give commands to `ip` or `tc`, all at once."""
    subprocess.run(  # noqa: S603
        [program, "-batch", "-"],
        input="".join(f"{line}\n" for line in lines),
        text=True,
        capture_output=True,
        check=True,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOCAL, 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
