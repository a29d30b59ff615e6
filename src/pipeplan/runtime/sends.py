"""Tensors under way: each is kept until it is sent.

Gloo tells that a send is done only to who waits for it. Waiting too early stops the blocks, too
late keeps memory::

    blocks           F0    F1    F2    B0          sends go on beside them
    lazily           wait for output 0 here ^      its gradient is back, so it has arrived
    by a thread         [wait 0][wait 1]           tensors go at once, but a thread takes turns
                                                   with the blocks

Where the memory allows, the lazy way is the faster one. NCCL can be asked, and needs no thread.
Each direction has its own, since a send to the stage behind may have to wait until a send to the
stage before is through.
"""

import queue
import sys
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["LazySends", "Sends", "ThreadedSends"]


class Sends:
    """Keeps tensors that are being sent."""

    def __init__(self, most_open: int = sys.maxsize) -> None:
        self._most_open = most_open
        """Beyond so many microbatches the oldest are waited for."""

    def take(self, microbatch: int, tensors: list[torch.Tensor], works: list[dist.Work]) -> None:
        """Keep the tensors until these works are done."""
        raise NotImplementedError

    def has_arrived(self, microbatch: int) -> None:
        """Its answer is here, so it is surely sent."""

    def finish(self) -> None:
        """Wait until everything is sent."""
        raise NotImplementedError

    def close(self) -> None:
        """No more will come."""


@dataclass(frozen=True, slots=True)
class _Open:
    microbatch: int
    tensors: list[torch.Tensor]
    works: list[dist.Work]


class LazySends(Sends):
    """Waits when a send is surely done, or when too many are open."""

    def __init__(self, most_open: int = sys.maxsize) -> None:
        super().__init__(most_open)
        self._open: deque[_Open] = deque()

    def take(self, microbatch: int, tensors: list[torch.Tensor], works: list[dist.Work]) -> None:
        """Keep the tensors until these works are done."""
        self._open.append(_Open(microbatch, tensors, works))
        while self._open and all(work.is_completed() for work in self._open[0].works):
            self._open.popleft()
        while len(self._open) > self._most_open:
            _wait(self._open.popleft().works)

    def has_arrived(self, microbatch: int) -> None:
        """Let its tensors go."""
        for entry in self._open:
            if entry.microbatch == microbatch:
                _wait(entry.works)
                self._open.remove(entry)
                return

    def finish(self) -> None:
        """Wait until everything is sent."""
        while self._open:
            _wait(self._open.popleft().works)


class ThreadedSends(Sends):
    """A thread waits for each send."""

    def __init__(self, most_open: int = sys.maxsize) -> None:
        super().__init__(most_open)
        self._queue: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._num_open = 0
        self._changed = threading.Condition()
        self._problem: BaseException | None = None
        threading.Thread(target=self._run, name="pipeplan-sends", daemon=True).start()

    def take(self, microbatch: int, tensors: list[torch.Tensor], works: list[dist.Work]) -> None:
        """Keep the tensors until these works are done."""
        with self._changed:
            self._num_open += 1
            self._queue.put([tensors, works])
            self._changed.wait_for(lambda: self._num_open <= self._most_open)
        self._raise_problem()

    def finish(self) -> None:
        """Wait until everything is sent."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_open)
        self._raise_problem()

    def close(self) -> None:
        """End the thread."""
        self._queue.put([])

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _run(self) -> None:
        while entry := self._queue.get():
            try:
                _wait(entry[1])
            except BaseException as problem:
                self._problem = problem
            entry.clear()  # or it would keep the tensors until the next one comes
            with self._changed:
                self._num_open -= 1
                self._changed.notify()


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
