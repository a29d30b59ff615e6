"""The way without privileges: the kernel paces what gloo's own sockets send over loopback.

Each connection of two ranks gets the rate of their pair. Gloo has one connection for each pair and
group, and no two of them are busy at once. Which socket belongs to which rank, ranks find out by
comparing the two ends of all their connections.

Nobody limits what several connections send together, so shared links need namespaces.
"""

import contextlib
import os
import socket
from collections.abc import Iterator

import torch.distributed as dist

from pipeplan.testbed.topology import Topology

__all__ = ["pace_sockets"]

SO_MAX_PACING_RATE = 47
"""Of Linux; Python's socket module does not name it."""
MOST_BYTES_PER_S = 2**32 - 2

Ends = tuple[tuple[str, int], tuple[str, int]]
"""The addresses of this end and of the other end."""


def pace_sockets(topology: Topology, rank: int) -> None:
    """Limit what this rank's connections send; all ranks call it, once they are connected."""
    mine = dict(_connections())
    everyone: list[list[Ends]] = [[] for _ in topology.devices]
    dist.all_gather_object(everyone, list(mine))
    rank_of = {ends: other for other, listed in enumerate(everyone) for ends in listed}
    for (here, there), number in mine.items():
        other = rank_of.get((there, here))
        if other is not None and other != rank:
            rate = min(round(topology.bytes_per_s[rank][other]), MOST_BYTES_PER_S)
            with _borrowed(number) as connection:
                connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)


def _connections() -> Iterator[tuple[Ends, int]]:
    """The connections of this process, each with its file descriptor."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), _borrowed(int(name)) as connection:
            if connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM:
                yield (connection.getsockname(), connection.getpeername()), int(name)


@contextlib.contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """A socket object for a descriptor that somebody else owns."""
    connection = socket.socket(fileno=os.dup(number))
    try:
        yield connection
    finally:
        connection.close()
