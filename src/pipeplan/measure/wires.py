"""Timed messages between ranks: over gloo between CPUs, over NCCL between GPUs.

::

    sender     command -->            | data ------->        | answer <--
    receiver              posts, --> ready             data in, -->
                                      |<---- the time of a message ---->|

Commands and readiness go over gloo, and are not timed. The receiver posts its receive before it
says that it is ready, as the runtime does: gloo moves nothing before.

Nothing here was run on NCCL. Its messages go over the communicator of all ranks: one for each pair
would take longer to make than to measure.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pipeplan.measure.link_figures import Flow

__all__ = ["GlooWire", "NcclWire", "Wire"]

DATA, ANSWER, COMMAND, READY = 1, 2, 3, 4
"""Tags of gloo."""
STOP = 0
ANSWER_BYTES = 8


class Wire:
    """What a measurement needs of the connections of one rank."""

    def __init__(self, control: Any, device: torch.device) -> None:
        self.control = control
        """A gloo group of all ranks."""
        self._device = device
        self._buffer = torch.zeros(0, dtype=torch.uint8, device=device)
        self._answer = torch.zeros(ANSWER_BYTES, dtype=torch.uint8, device=device)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.control)

    def time_sends(self, rank: int, num_bytes: int, count: int) -> list[float]:
        """Send messages one after another; for each the seconds until its answer is there."""
        self._tell(rank, COMMAND, num_bytes, count)
        payload = self._memory(num_bytes)
        times = []
        for _ in range(count):
            self._hear(rank, READY)
            begin_s = time.perf_counter()
            self._send_and_await(payload, rank)
            times.append(time.perf_counter() - begin_s)
        return times

    def stop(self, rank: int) -> None:
        """Let the receiver leave `answer_sends`."""
        self._tell(rank, COMMAND, STOP, 0)

    def answer_sends(self, rank: int) -> None:
        """Receive and answer until the sender stops."""
        while True:
            num_bytes, count = self._hear(rank, COMMAND)
            if num_bytes == STOP:
                return
            payload = self._memory(num_bytes)
            for _ in range(count):
                self._receive_and_answer(payload, rank)

    def stream(
        self, sends: Sequence[tuple[int, int]], receives: Sequence[tuple[int, int]], count: int
    ) -> list[Flow]:
        """Carry flows at once, `count` messages each; the arrivals of what this rank receives.

        Both lists have ranks and bytes. All ranks call this; clocks begin behind a barrier.
        """
        raise NotImplementedError

    def _send_and_await(self, payload: torch.Tensor, rank: int) -> None:
        raise NotImplementedError

    def _receive_and_answer(self, payload: torch.Tensor, rank: int) -> None:
        raise NotImplementedError

    def _memory(self, num_bytes: int) -> torch.Tensor:
        """Memory of that size; what it holds is nobody's business."""
        if len(self._buffer) < num_bytes:
            self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        return self._buffer[:num_bytes]

    def _tell(self, rank: int, tag: int, *numbers: int) -> None:
        dist.send(torch.tensor([*numbers, 0, 0][:2]), rank, group=self.control, tag=tag)

    def _hear(self, rank: int, tag: int) -> tuple[int, int]:
        numbers = torch.zeros(2, dtype=torch.int64)
        dist.recv(numbers, rank, group=self.control, tag=tag)
        first, second = numbers.tolist()
        return first, second


class GlooWire(Wire):
    """Between CPUs."""

    def __init__(self, control: Any) -> None:
        super().__init__(control, torch.device("cpu"))

    def _send_and_await(self, payload: torch.Tensor, rank: int) -> None:
        answer = _posted(dist.irecv(self._answer, rank, group=self.control, tag=ANSWER))
        sent = _posted(dist.isend(payload, rank, group=self.control, tag=DATA))
        answer.wait()
        sent.wait()

    def _receive_and_answer(self, payload: torch.Tensor, rank: int) -> None:
        received = _posted(dist.irecv(payload, rank, group=self.control, tag=DATA))
        self._tell(rank, READY)
        received.wait()
        dist.send(self._answer, rank, group=self.control, tag=ANSWER)

    def stream(
        self, sends: Sequence[tuple[int, int]], receives: Sequence[tuple[int, int]], count: int
    ) -> list[Flow]:
        """All messages are posted at once; gloo carries those of different pairs side by side."""
        largest = max((num_bytes for _, num_bytes in (*sends, *receives)), default=0)
        memory = self._memory(largest)
        incoming = [
            [
                _posted(dist.irecv(memory[:n], rank, group=self.control, tag=DATA))
                for _ in range(count)
            ]
            for rank, n in receives
        ]
        self.barrier()
        begin_s = time.perf_counter()
        outgoing = [
            _posted(dist.isend(memory[:n], rank, group=self.control, tag=DATA))
            for _ in range(count)
            for rank, n in sends
        ]
        arrivals = _at_once([partial(_moments, works, begin_s) for works in incoming])
        for work in outgoing:
            work.wait()
        self.barrier()
        return [
            Flow(num_bytes=n, arrivals_s=tuple(moments))
            for (_, n), moments in zip(receives, arrivals, strict=True)
        ]


def _posted(work: Any) -> Any:
    """The work of a send or a receive; torch gives none to ranks outside of a group."""
    assert work is not None
    return work


def _moments(works: Sequence[Any], begin_s: float) -> list[float]:
    """When each of these was done."""
    moments = []
    for work in works:
        work.wait()
        moments.append(time.perf_counter() - begin_s)
    return moments


def _at_once(functions: Sequence[Callable[[], list[float]]]) -> list[list[float]]:
    """What the functions return, each run in a thread of its own."""
    results: list[Any] = [None] * len(functions)

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


class NcclWire(Wire):
    """Between GPUs."""

    def __init__(self, control: Any, data: Any, device: torch.device) -> None:
        super().__init__(control, device)
        self._data = data
        first = torch.zeros(1, device=device)
        dist.all_reduce(first, group=data)  # makes the communicator that batches use
        torch.cuda.synchronize(device)

    def _run(self, operations: Sequence[tuple[Any, torch.Tensor, int]]) -> None:
        """Give sends and receives to the GPU as one batch."""
        batch = [dist.P2POp(kind, each, rank, self._data) for kind, each, rank in operations]
        for work in dist.batch_isend_irecv(batch):
            work.wait()

    def _send_and_await(self, payload: torch.Tensor, rank: int) -> None:
        self._run([(dist.isend, payload, rank)])
        self._run([(dist.irecv, self._answer, rank)])
        torch.cuda.synchronize(self._device)

    def _receive_and_answer(self, payload: torch.Tensor, rank: int) -> None:
        self._run([(dist.irecv, payload, rank)])
        self._tell(rank, READY)
        self._run([(dist.isend, self._answer, rank)])
        torch.cuda.synchronize(self._device)

    def stream(
        self, sends: Sequence[tuple[int, int]], receives: Sequence[tuple[int, int]], count: int
    ) -> list[Flow]:
        """The messages of one turn, to and from all partners, are one batch."""
        largest = max((num_bytes for _, num_bytes in (*sends, *receives)), default=0)
        memory = self._memory(largest)
        operations: list[tuple[Any, torch.Tensor, int]] = [
            *((dist.irecv, memory[:n], rank) for rank, n in receives),
            *((dist.isend, memory[:n], rank) for rank, n in sends),
        ]
        torch.cuda.synchronize(self._device)
        self.barrier()
        begin_s = time.perf_counter()
        moments = []
        for _ in range(count if operations else 0):
            self._run(operations)
            torch.cuda.synchronize(self._device)
            moments.append(time.perf_counter() - begin_s)
        self.barrier()
        return [Flow(num_bytes=n, arrivals_s=tuple(moments)) for _, n in receives]
