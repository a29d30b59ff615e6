"""Ends all ranks, with one line that names the culprit, when one of them dies, hangs or raises.

The main thread says here what it does (`activity`). Another thread looks around in each beat, every
second by default (`watching`), and finds a rank that

    died      its process is gone (same host), or no sign of life for `beat_timeout_s`
    stopped   its process does not run; it is killed
    hangs     one block takes longer than `hang_timeout_s`, or a rank stays outside for longer than
              `outside_timeout_s` while another one waits for it
    strays    it makes another call than the others, has closed its pipeline, or sits in a
              collective that nobody else comes to
    raises    it says so itself

A third thread talks with the store (`courier`), because a store that was stopped never answers.
Times are those of a clock that stands still while this rank gets no processor (`patient_clock`).
`ending` says how ranks end.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.supervision.activity import Activity
from pipeplan.runtime.supervision.courier import ANSWER_S, Courier, StoreError
from pipeplan.runtime.supervision.crew import make_crew
from pipeplan.runtime.supervision.ending import (
    GRACE_S,
    INTERRUPTED_CODE,
    POLL_S,
    end_process,
    failure_of,
    print_line,
)
from pipeplan.runtime.supervision.options import WatchdogOptions
from pipeplan.runtime.supervision.processes import Process
from pipeplan.runtime.supervision.status_board import INSIDE, FailureKind, State, StatusBoard
from pipeplan.runtime.supervision.watching import Watcher

__all__ = ["GRACE_S", "INTERRUPTED_CODE", "Watchdog", "WatchdogOptions"]


class Watchdog:
    """Watches over the ranks of one launch or pipeline."""

    def __init__(
        self,
        store: Any,
        rank: int,
        rank_names: list[str],
        options: WatchdogOptions,
        end: Callable[[int], None] | None = None,
        *,
        key: bytes = b"",
        processes: list[Process] | None = None,
        courier: Courier | None = None,
    ) -> None:
        self._pid = os.getpid()
        if processes is None:
            processes = StatusBoard(store, rank, len(rank_names), key).exchange_processes()
        courier = courier or Courier()
        self._crew = make_crew(store, rank, processes, options, courier, key, rank_names)
        self._activity = Activity(self._crew.clock)
        self.enter = self._activity.enter
        """Say what the main thread of this rank begins to do."""
        self._tell(self._activity.beat())
        atexit.register(self._at_exit)
        self._watcher = Watcher(self._crew, self._activity, end or end_process)

    def _tell(self, beat: Any) -> None:
        """Show a sign of life, if the store answers."""
        with contextlib.suppress(StoreError):
            self._crew.courier.ask(lambda: self._crew.board.write_beat(beat))

    def be_patient(self, options: WatchdogOptions) -> None:
        """Use other limits from now on."""
        self._crew.be_patient(options)
        self._watcher.termination.wake()  # it may be in the midst of a longer beat

    def name_ranks(self, rank_names: list[str]) -> None:
        """Call the ranks so from now on, besides their numbers."""
        self._crew.rank_names = rank_names

    def note_batch(self, key: Any) -> None:
        """Say which shapes the batch has: the first block of each kind may take longer."""
        self._activity.batch_key = key

    @property
    def failure(self) -> str | None:
        """The line that says why all ranks end; None while all is well."""
        return self._watcher.failure

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Inside a method that all ranks call; the calls are numbered and compared.

        Raises:
            RuntimeMismatchError: nobody watches any more.
        """
        if self._watcher.stop.is_set():
            raise RuntimeMismatchError(f"{name}: the pipeline is closed; make a new one")
        self._activity.begin_call(name)
        try:
            yield
        finally:
            if not self._watcher.stop.is_set():
                self.enter(State.OUTSIDE)

    def report(self, error: BaseException, *, is_mismatch: bool = False) -> None:
        """Tell the others that this rank raises, and wait until they know it.

        `is_mismatch` says that the other ranks probably raise the same error by themselves.
        """
        if os.getpid() != self._pid:
            return  # a forked child has no part in this
        failure = failure_of(self._crew.rank, error, is_mismatch=is_mismatch)
        line = self._watcher.failure = self._crew.line_of(failure)
        self._watcher.has_reported = True
        is_interrupt = failure.kind is FailureKind.INTERRUPTED
        if is_interrupt:
            error.add_note(line)  # the line is printed here or by another rank
        ask, board = self._crew.courier.ask, self._crew.board
        with contextlib.suppress(StoreError):
            ask(lambda: board.declare(failure))
            if is_mismatch:
                ask(board.mark_read)  # this rank ends by its own error
            self._watcher.ending.await_readers(culprit=self._crew.rank)
            if is_interrupt and ask(board.become_speaker):
                print_line(line)  # there is nobody else to say it

    def await_verdict(self) -> None:
        """Wait until another rank's failure is noticed; that ends this process."""
        if os.getpid() != self._pid:
            return
        options = self._crew.options
        self.enter(State.SEEKING)
        self._watcher.stop.wait(options.beat_timeout_s + 2 * options.beat_s + GRACE_S)

    def await_end(self) -> None:
        """If the watchdog ends this process right now, let it: it has more to do than to exit."""
        if self._watcher.is_ending.is_set() and os.getpid() == self._pid:
            timeout_s = 2 * (self._crew.options.beat_timeout_s + GRACE_S + ANSWER_S)
            self._watcher.thread.join(timeout_s)

    def close(self, reason: str = "") -> None:
        """Stop watching; `reason` is told to ranks that still wait for this one."""
        if os.getpid() != self._pid:
            return
        watcher = self._watcher
        was_open = not watcher.stop.is_set()
        if was_open:
            self.enter(State.DONE, reason)
            self._tell(self._activity.beat())
        watcher.stop.set()
        if was_open and threading.current_thread() is not watcher.thread:
            watcher.termination.wake()
            watcher.thread.join(timeout=5)
            watcher.termination.close()
            if self._crew.rank != 0:
                self._release()

    def _release(self) -> None:
        atexit.unregister(self._at_exit)
        self._crew.courier.close(timeout_s=1.0)

    def _at_exit(self) -> None:
        """The program ends: tell others why; rank 0 lets them read, unless its store has ended."""
        if os.getpid() != self._pid:
            return
        self.await_end()
        if not self._watcher.stop.is_set():
            error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
            if isinstance(error, Exception | KeyboardInterrupt) and self.failure is None:
                self.report(error)
            self.close("ended its program")
        if self._crew.rank == 0:
            # A store that this program has destroyed answers nobody.
            with contextlib.suppress(StoreError):
                if dist.is_initialized():
                    self._let_others_read()
            self._crew.courier.close(timeout_s=0.1)

    def _let_others_read(self) -> None:
        """Keep the store until others are done, or know why they end.

        A rank that still waits for this one is about to find out that it does so in vain.
        """
        start_s, options = time.monotonic(), self._crew.options
        while not self._are_others_done():
            beats = self._crew.courier.ask(self._crew.board.read_beats)
            is_awaited = any(beat.state in INSIDE for beat in beats)
            # A rank that gets no processor for a while has to read, too, that this one is done.
            brief_s = max(2.5 * options.beat_s, GRACE_S)
            limit_s = options.beat_timeout_s if is_awaited else brief_s
            if time.monotonic() - start_s > limit_s:
                return
            time.sleep(POLL_S)

    def _are_others_done(self) -> bool:
        ending, rank = self._watcher.ending, self._crew.rank
        others = (other for other in range(self._crew.num_ranks) if other != rank)
        return all(ending.knows_or_ended(other) for other in others)
