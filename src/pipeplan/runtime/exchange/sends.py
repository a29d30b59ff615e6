"""Keeps tensors until they are sent.

With gloo, only a caller that waits learns that a send is done. Waiting too early stops the blocks.
Waiting too late holds memory. There are two ways::

    blocks           F0    F1    F2    B0
    lazily           wait for output 0 here ^      its gradient is back, so it has arrived
    by a thread         [wait 0][wait 1]           frees tensors at once, but the thread takes
                                                   turns with the blocks

The lazy way is faster, and is used where memory allows. NCCL can be asked whether a send is done.
There nobody waits: `work.wait()` would stop the computing stream, so the host asks from time to
time. Each direction keeps its own sends: a send to the stage behind may have to wait until a send
to the stage before is through.
"""

import queue
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

__all__ = ["LazySends", "PendingSends", "PolledSends", "ThreadedSends", "Works"]

POLL_S = 20e-6


@dataclass(slots=True)
class Works:
    """What is under way of one message."""

    headers: list[dist.Work] = field(default_factory=list)
    """From host to host."""
    tensors: list[dist.Work] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until everything is sent."""
        for work in self.headers:
            work.wait()
        for work in self.tensors:
            work.wait()


class PendingSends:
    """Keeps tensors that are being sent."""

    def __init__(self) -> None:
        self.most_open = sys.maxsize
        """With more open microbatches than this, wait for the oldest."""

    def keep(self, microbatch: int, tensors: list[torch.Tensor], works: Works) -> None:
        """Keep the tensors until these works are done."""
        raise NotImplementedError

    def confirm_arrival(self, microbatch: int) -> None:
        """Note that the answer to this microbatch has come, so its send is done."""

    def finish(self) -> None:
        """Wait until everything is sent."""
        raise NotImplementedError

    def close(self) -> None:
        """Free threads; nothing will be sent any more."""


class _OpenSend(NamedTuple):
    microbatch: int
    tensors: list[torch.Tensor]
    works: Works


class LazySends(PendingSends):
    """Waits when a send is known to be done, or when too many are open."""

    def __init__(self) -> None:
        super().__init__()
        self._open: deque[_OpenSend] = deque()

    def keep(self, microbatch: int, tensors: list[torch.Tensor], works: Works) -> None:
        """Keep the tensors until these works are done."""
        self._open.append(_OpenSend(microbatch, tensors, works))
        while len(self._open) > self.most_open:
            self._open.popleft().works.wait()

    def confirm_arrival(self, microbatch: int) -> None:
        """Free the tensors of this microbatch."""
        for entry in self._open:
            if entry.microbatch == microbatch:
                entry.works.wait()
                self._open.remove(entry)
                return

    def finish(self) -> None:
        """Wait until everything is sent."""
        while self._open:
            self._open.popleft().works.wait()


class PolledSends(PendingSends):
    """Asks which sends of the device are done, and never lets a stream wait."""

    def __init__(self) -> None:
        super().__init__()
        self._open: deque[_OpenSend] = deque()
        self._headers: list[dist.Work] = []
        """Gloo has to be waited for. The other host reads headers soon."""

    def keep(self, microbatch: int, tensors: list[torch.Tensor], works: Works) -> None:
        """Keep the tensors until these works are done."""
        self._headers += works.headers
        self._open.append(_OpenSend(microbatch, tensors, works))
        self._drop_done()
        while len(self._open) > self.most_open:
            time.sleep(POLL_S)
            self._drop_done()

    def finish(self) -> None:
        """Free what is sent. The device may still send the rest: nobody changes those tensors."""
        for work in self._headers:
            work.wait()
        self._headers.clear()
        self._drop_done()

    def _drop_done(self) -> None:
        while self._open and all(work.is_completed() for work in self._open[0].works.tensors):
            self._open.popleft()


class ThreadedSends(PendingSends):
    """Lets a thread wait for each send."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._num_open = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="pipeplan-sends", daemon=True).start()

    def keep(self, microbatch: int, tensors: list[torch.Tensor], works: Works) -> None:
        """Keep the tensors until these works are done."""
        with self._changed:
            self._num_open += 1
            self._queue.put([tensors, works])
            self._changed.wait_for(lambda: self._num_open <= self.most_open)
        self._raise_error()

    def finish(self) -> None:
        """Wait until everything is sent."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_open)
        self._raise_error()

    def close(self) -> None:
        """End the thread."""
        self._queue.put([])

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while entry := self._queue.get():
            try:
                entry[1].wait()
            except BaseException as error:
                self._error = error
            entry.clear()  # the variable would hold the tensors until the next send
            with self._changed:
                self._num_open -= 1
                self._changed.notify()
