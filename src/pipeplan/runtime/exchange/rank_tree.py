"""A tree of all ranks: numbers go down it from the first rank, and sums of numbers go up.

::

    rank 0 of the tree        the first rank of the first stage
      |- 1 |- 3               ranks of later stages are below it; ranks that the plan does not use
      |    |- 4               come last
      |- 2

A stage that comes later ends its last backward earlier. So sums come up while the first stage still
computes. An all-reduce over gloo has more messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipeplan.runtime.exchange.transports import Transport

__all__ = ["DeviceSum", "NumberSum", "RankTree", "TreeSum", "make_sum"]

TREE_TAG = 1 << 30
"""Above all tags of messages between stages; those of the agreement on batches are below this."""
UP, DOWN = TREE_TAG + 2, TREE_TAG + 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTree:
    """One rank's place in the tree."""

    root: int
    parent: int | None
    """None for the root."""
    children: tuple[int, ...]

    @classmethod
    def of(cls, rank: int, stage_ranks: Sequence[Sequence[int]], num_ranks: int) -> "RankTree":
        """The place of a rank; `stage_ranks` are the ranks of each stage."""
        used = list(dict.fromkeys(rank for ranks in stage_ranks for rank in ranks))
        order = [*used, *(rank for rank in range(num_ranks) if rank not in used)]
        position = order.index(rank)
        return cls(
            root=order[0],
            parent=order[(position - 1) // 2] if position else None,
            children=tuple(order[2 * position + 1 : 2 * position + 3]),
        )


class NumberSum:
    """Sums of a few numbers over all ranks, one sum at a time."""

    def expect(self, count: int) -> None:
        """Say how many numbers the next sum has, well before it starts."""

    def start(self, numbers: torch.Tensor) -> None:
        """Give this rank's numbers."""
        raise NotImplementedError

    def finish(self) -> list[float]:
        """The sums, the same on all ranks; waits for them."""
        raise NotImplementedError


class TreeSum(NumberSum):
    """From host to host, along the tree."""

    def __init__(self, tree: RankTree, transport: Transport) -> None:
        self._tree, self._transport = tree, transport
        self._sums = torch.empty(0)
        self._from_parent: dist.Work | None = None
        self._from_children: list[tuple[dist.Work, torch.Tensor]] = []
        self._sent: list[dist.Work] = []

    def expect(self, count: int) -> None:
        """Post all receives: gloo sends at once what is awaited, and else asks first."""
        receive, tree = self._transport.receive_header, self._tree
        self._sums = torch.empty(count, dtype=torch.float64)
        if tree.parent is not None:
            self._from_parent = receive(self._sums, tree.parent, DOWN)
        for child in tree.children:
            buffer = torch.empty(count, dtype=torch.float64)
            self._from_children.append((receive(buffer, child, UP), buffer))

    def start(self, numbers: torch.Tensor) -> None:
        """Add the numbers of the ranks below, and pass them on. This waits for those ranks."""
        for work, buffer in self._from_children:
            work.wait()
            numbers = numbers + buffer
        self._from_children.clear()
        if self._tree.parent is not None:
            self._sent = [self._transport.send_header(numbers, self._tree.parent, UP)]
        else:
            self._sums = numbers
            self._send_down()

    def finish(self) -> list[float]:
        """The sums, the same on all ranks; waits for them."""
        if self._from_parent is not None:
            self._from_parent.wait()
            self._from_parent = None
            self._send_down()
        for work in self._sent:
            work.wait()
        self._sent = []
        sums: list[float] = self._sums.tolist()
        return sums

    def _send_down(self) -> None:
        for child in self._tree.children:
            self._sent.append(self._transport.send_header(self._sums, child, DOWN))


class DeviceSum(NumberSum):
    """By an all-reduce on the device, so that the host need not wait for the device before."""

    def __init__(self) -> None:
        self._numbers = torch.empty(0)
        self._work: dist.Work | None = None

    def start(self, numbers: torch.Tensor) -> None:
        """Queue the all-reduce."""
        self._numbers, self._work = numbers, dist.all_reduce(numbers, async_op=True)

    def finish(self) -> list[float]:
        """The sums, the same on all ranks; waits for them."""
        if self._work is not None:
            self._work.wait()
        sums: list[float] = self._numbers.tolist()
        return sums


def make_sum(transport: Transport, stage_ranks: Sequence[Sequence[int]]) -> NumberSum:
    """The sum that fits the transport; `stage_ranks` are the ranks of each stage."""
    tree = RankTree.of(dist.get_rank(), stage_ranks, dist.get_world_size())
    return TreeSum(tree, transport) if transport.posts_ahead else DeviceSum()
