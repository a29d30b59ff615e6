"""The runtime with blocks as long as the profile says.

A block begins when its device is free and its input has arrived, and ends so many milliseconds
later. Both are moments of a clock, so that delays of this machine do not add up::

    device    |  F0  |  F1  |....wait for B0....|  B0  |
    thread    |sleep.|,sleep|                   |,sleep.     , is Python: below a millisecond

A thread that comes late by up to `GRACE_S` is forgiven: a device would have begun already. What is
later than that counts. So a runtime that blocks its own device shows in the measurement.

Arrivals: a thread for each kind of message waits for it and notes the moment. The message counts as
arrived a latency later: not every kernel can delay packets.

Sends: a thread for each other rank hands tensors to gloo. Gloo copies them into the socket, and the
kernel passes the first packets on, before it returns: some milliseconds for seven replicas. A card
does that beside the device's computation.

Gradients: a stage's last block computes them from behind. Those of part j are there when its j-th
part is over. Then the runtime's own all-reduce of this part starts::

    last block   |  part 1  |  part 2  |  part 3  |
    all-reduces             |  1  |    |  2  |    |  3  |

A thread takes them one by one. Each begins after its latency.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from pipeplan.pipeline import Block, Kind, Plan
from pipeplan.runtime.exchange.lanes import TAGS_PER_MESSAGE
from pipeplan.runtime.exchange.rank_tree import TREE_TAG
from pipeplan.runtime.exchange.transports import GlooTransport, Transport
from pipeplan.runtime.gradients import start_sum
from pipeplan.runtime.replica_setup import ReplicaSettings
from pipeplan.runtime.streams import HostStreams
from pipeplan.runtime.training import Pipeline

__all__ = ["BlockRecord", "DeviceClock", "NotingTransport", "Pace", "PacedPipeline", "PacedReducer"]

GRACE_S = 2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRecord:
    """When a block was under way, by the clock of this machine."""

    block: Block
    start_s: float
    end_s: float
    arrival_s: float
    """When its input had arrived; 0 if it has none."""
    over_s: float
    """By how much real computation took longer than its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long this rank's blocks take, and how far away other ranks are."""

    lengths_s: dict[tuple[int, Kind], float]
    """By stage and kind of block; with what recomputation takes."""
    latency_s: tuple[float, ...]
    """From each rank."""
    reduce_latency_s: float
    """Of one all-reduce."""
    again_s: dict[int, float]
    """How much of a whole backward is recomputation, by stage."""


class DeviceClock:
    """The time of one emulated device."""

    def __init__(self, num_microbatches: int) -> None:
        self._num_microbatches = num_microbatches
        self._free_s = self._arrived_s = 0.0
        self._arrival_of: dict[tuple[int, int, int], float] = {}
        """By channel, microbatch and kind, forwards 0 and backwards 1."""
        self.records: list[BlockRecord] = []

    def begin(self) -> None:
        """Begin an iteration."""
        self._free_s, self._arrived_s = time.perf_counter(), 0.0
        self._arrival_of, self.records = {}, []

    def note_arrival(self, moment_s: float, tag: int) -> None:
        """Note that a message counts as arrived at this moment; before the block that needs it."""
        self._arrived_s = max(self._arrived_s, moment_s)
        if tag < TREE_TAG:
            key = (*divmod(tag // TAGS_PER_MESSAGE, self._num_microbatches), tag % 2)
            self._arrival_of[key] = max(self._arrival_of.get(key, 0.0), moment_s)

    @contextlib.contextmanager
    def block(self, block: Block, length_s: float) -> Any:
        """Let what is inside take this long; it is told when the block has begun."""
        start_s = max(self._free_s, self._arrived_s, time.perf_counter() - GRACE_S)
        yield start_s
        end_s = start_s + length_s
        over_s = max(0.0, time.perf_counter() - end_s)
        sleep_until(end_s)
        self._free_s = end_s = max(end_s, time.perf_counter() - GRACE_S)
        self.records.append(
            BlockRecord(
                block=block,
                start_s=start_s,
                end_s=end_s,
                arrival_s=self._find_arrival(block),
                over_s=over_s,
            )
        )

    def _find_arrival(self, block: Block) -> float:
        if block.kind is Kind.WEIGHT_GRADIENT:
            return 0.0
        is_forward = block.kind is Kind.FORWARD
        key = (block.stage - is_forward, block.microbatch, int(not is_forward))
        return self._arrival_of.get(key, 0.0)


def sleep_until(moment_s: float) -> None:
    """Sleep; a busy loop would take the processor from other ranks."""
    rest_s = moment_s - time.perf_counter()
    if rest_s > 0:
        time.sleep(rest_s)


class _NotedWork:
    """A receive whose arrival is noted; it counts as arrived a latency after it has."""

    def __init__(self, work: Any, clock: DeviceClock, latency_s: float, tag: int) -> None:
        self._work, self._clock, self._latency_s, self._tag = work, clock, latency_s, tag
        self._done = threading.Event()
        self._arrived_s = 0.0
        self._error: BaseException | None = None

    def watch(self) -> None:
        """Wait in a thread of its own."""
        try:
            self._work.wait()
        except BaseException as error:
            self._error = error
        self._arrived_s = time.perf_counter() + self._latency_s
        self._done.set()

    def wait(self) -> None:
        """Wait until it counts as arrived."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        self._clock.note_arrival(self._arrived_s, self._tag)
        sleep_until(self._arrived_s)


class _Handed:
    """A message, or a sum over ranks, that a thread starts."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self._work: Future[Any] = Future()

    def run(self) -> None:
        """Start it; in the thread."""
        try:
            self._work.set_result(self._start())
        except BaseException as error:
            self._work.set_exception(error)

    def wait(self) -> None:
        """Wait until it is done."""
        self._work.result().wait()


class _Hands:
    """A thread that starts what it is handed, in this order."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Handed] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def take(self, start: Callable[[], Any]) -> _Handed:
        """Start this when all before it has been started."""
        handed = _Handed(start)
        self._queue.put(handed)
        return handed

    def _run(self) -> None:
        while True:
            self._queue.get().run()


class NotingTransport(GlooTransport):
    """Gloo beside the computation, with the moments at which messages arrive."""

    carries_notes = False  # an iteration of the cost model ends on all ranks before the next begins

    def __init__(
        self, clock: DeviceClock, latency_s: tuple[float, ...], num_microbatches: int
    ) -> None:
        super().__init__(HostStreams())
        self._clock, self._latency_s = clock, latency_s
        self._num_microbatches = num_microbatches
        self._queues: dict[tuple[int, int], queue.SimpleQueue[_NotedWork]] = {}
        self._hands: dict[int, _Hands] = {}

    def send(self, tensor: torch.Tensor, rank: int, tag: int, channel: int, kind: Kind) -> Any:
        """Start to send, in the order of these calls."""
        if rank not in self._hands:
            self._hands[rank] = _Hands()
        return self._hands[rank].take(partial(super().send, tensor, rank, tag, channel, kind))

    def receive_header(self, header: torch.Tensor, rank: int, tag: int) -> Any:
        """Start to receive into memory of the host."""
        work = super().receive_header(header, rank, tag)
        noted = _NotedWork(work, self._clock, self._latency_s[rank], tag)
        # Headers are awaited long before they come. Other messages must not queue behind them.
        key = (rank, tag)
        if tag < TREE_TAG:
            channel = tag // TAGS_PER_MESSAGE // self._num_microbatches
            key = (rank, channel * TAGS_PER_MESSAGE + tag % TAGS_PER_MESSAGE)
        if key not in self._queues:
            self._queues[key] = queue.SimpleQueue()
            threading.Thread(target=self._watch, args=(self._queues[key],), daemon=True).start()
        self._queues[key].put(noted)
        return noted

    def _watch(self, works: "queue.SimpleQueue[_NotedWork]") -> None:
        """Wait for messages of one kind and rank, which come in the order of their receives."""
        while True:
            works.get().watch()


class PacedReducer:
    """A reducer whose all-reduces begin as the paced gradients are there, each after its latency.

    The last one of a stage is the runtime's own to start, behind the block.
    """

    def __init__(self, reducer: Any, latency_s: float) -> None:
        self._reducer, self._latency_s, self._hands = reducer, latency_s, _Hands()
        self._ending: int | None = None
        """The stage whose last backward runs."""
        reducer.starts_inside = False
        reducer.start_sum = self._start_sum

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def begin_backward(self, *, is_last: bool, stage: int, **more: Any) -> None:
        """Say that a backward begins."""
        self._ending = stage if is_last else None
        self._reducer.begin_backward(is_last=is_last, stage=stage, **more)

    def start_parts(self, start_s: float, length_s: float) -> None:
        """Start all-reduces while the gradients of a stage's last backward are computed."""
        if self._ending is None:
            return
        sizes, done = self._reducer.sizes_left(self._ending), 0
        for size in sizes[:-1]:
            done += size
            sleep_until(start_s + length_s * done / sum(sizes))
            self._reducer.start_one()

    def _start_sum(self, tensor: torch.Tensor, group: Any) -> _Handed:
        return self._hands.take(partial(self._sum, tensor, group))

    def _sum(self, tensor: torch.Tensor, group: Any) -> Any:
        """Sum over ranks, and return something done: there is one all-reduce at a time."""
        if self._latency_s:
            time.sleep(self._latency_s)
        work = start_sum(tensor, group)
        work.wait()
        return work


class _PacedRunner:
    """A runner of a stage's blocks that takes its time."""

    def __init__(
        self, runner: Any, stage: int, clock: DeviceClock, pace: Pace, reducer: PacedReducer
    ) -> None:
        self._runner, self._stage, self._clock, self._pace = runner, stage, clock, pace
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    @contextlib.contextmanager
    def _paced(self, kind: Kind, microbatch: int) -> Any:
        length_s = self._pace.lengths_s[self._stage, kind]
        with self._clock.block(Block(kind, self._stage, microbatch), length_s) as start_s:
            yield
            if kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
                again_s = self._pace.again_s[self._stage] if kind is Kind.BACKWARD else 0.0
                self._reducer.start_parts(start_s + again_s, length_s - again_s)

    def forward(self, step: int, microbatch: int, *args: Any, **kwargs: Any) -> Any:
        """A forward that lasts as long as the profile says."""
        with self._paced(Kind.FORWARD, microbatch):
            return self._runner.forward(step, microbatch, *args, **kwargs)

    def forward_last(self, step: int, microbatch: int, *args: Any, **kwargs: Any) -> Any:
        """The same on the last stage."""
        with self._paced(Kind.FORWARD, microbatch):
            return self._runner.forward_last(step, microbatch, *args, **kwargs)

    def backward(self, microbatch: int, *args: Any) -> Any:
        """A backward that lasts as long as the profile says."""
        with self._paced(Kind.BACKWARD, microbatch):
            return self._runner.backward(microbatch, *args)

    def backward_input(self, microbatch: int, *args: Any) -> Any:
        """Its first half."""
        with self._paced(Kind.INPUT_GRADIENT, microbatch):
            return self._runner.backward_input(microbatch, *args)

    def backward_weight(self, microbatch: int) -> None:
        """Its second half."""
        with self._paced(Kind.WEIGHT_GRADIENT, microbatch):
            self._runner.backward_weight(microbatch)


class PacedPipeline(Pipeline):
    """The runtime's pipeline with blocks that last as long as the profile says."""

    def __init__(self, pace: Pace, plan: Plan, *args: Any, **kwargs: Any) -> None:
        self._pace, self.clock = pace, DeviceClock(plan.microbatches)
        super().__init__(plan, *args, **kwargs)

    @property
    def start_s(self) -> float:
        """When the last step began."""
        return self._steps.start_s

    @property
    def end_s(self) -> float:
        """When the last step had ended."""
        return self.start_s + self.iteration_ms / 1e3

    @property
    def reduce_end_s(self) -> float:
        """When the last all-reduce had ended."""
        return self._steps.times[-1].end_s

    def _make_transport(self) -> Transport:
        return NotingTransport(self.clock, self._pace.latency_s, self.plan.microbatches)

    def _set_up_stage(self, model: nn.Module, settings: ReplicaSettings) -> None:
        super()._set_up_stage(model, settings)
        assert self._replica is not None  # every rank has a stage
        reducer = PacedReducer(self._replica.reducer, self._pace.reduce_latency_s)
        parts = []
        for part in self._replica.parts:
            runner = _PacedRunner(part.runner, part.stage, self.clock, self._pace, reducer)
            parts.append(replace(part, runner=cast(Any, runner)))
        self._replica = replace(self._replica, parts=tuple(parts), reducer=cast(Any, reducer))

    def step(self, batch: Any, targets: Any = None, *, update: bool = True) -> float:
        """Train on one batch, from a time of the device that begins now."""
        self.clock.begin()
        return super().step(batch, targets, update=update)
