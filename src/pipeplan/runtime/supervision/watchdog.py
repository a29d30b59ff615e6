"""Ends all ranks, with one line that names the culprit, when one of them dies, hangs or raises.

Each rank has a thread that looks around every second::

    this host     the processes of all its ranks, by what the kernel says (`local_watch`)
    the store     writes a sign of life, reads the failure that others have noticed (`status_board`)
    the ring      the sign of life of the next rank, if that is on another host
    the arbiter   the first rank that is not done compares the signs of all ranks (`judging`)

    died      its process is gone (same host), or no sign of life for `beat_timeout_s`
    stopped   its process does not run; it is killed
    hangs     one block takes longer than `hang_timeout_s`, or a rank stays outside for longer than
              `outside_timeout_s` while another one waits for it
    strays    it makes another call than the others, has closed its pipeline, or sits in a
              collective that nobody else comes to
    raises    it says so itself

Another thread talks with the store (`courier`), because a store that was stopped never answers.
Times are those of a clock that stands still while this rank gets no processor (`patient_clock`).

A launcher that sees one rank end sends SIGTERM to the others. They then look at once for the rank
that is gone. If the launcher itself is gone, ranks end too. `ending` says how ranks end.
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

from pipeplan.documents.text import printable
from pipeplan.runtime.supervision.courier import Courier, StoreError
from pipeplan.runtime.supervision.driver import Driver
from pipeplan.runtime.supervision.ending import (
    ANSWER_S,
    GRACE_S,
    INTERRUPTED_CODE,
    POLL_S,
    TERMINATED_CODE,
    Ending,
    end_process,
    failure_of,
    print_line,
)
from pipeplan.runtime.supervision.local_watch import LocalWatch, death_of
from pipeplan.runtime.supervision.options import WatchdogOptions
from pipeplan.runtime.supervision.patient_clock import PatientClock
from pipeplan.runtime.supervision.processes import Process
from pipeplan.runtime.supervision.signs import Signs
from pipeplan.runtime.supervision.status_board import (
    Beat,
    Failure,
    FailureKind,
    State,
    Status,
    StatusBoard,
)
from pipeplan.runtime.supervision.store_holder import StoreHolder
from pipeplan.runtime.supervision.termination import Termination

__all__ = ["GRACE_S", "INTERRUPTED_CODE", "Watchdog", "WatchdogOptions"]

SEARCH_S = 1.5
"""How long a rank that was asked to end looks for the reason."""


class Watchdog:
    """Watches over the ranks of one pipeline."""

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
    ) -> None:
        self._rank, self._rank_names, self._options = rank, rank_names, options
        self._pid, self._parent = os.getpid(), os.getppid()
        self._board = StatusBoard(store, rank, len(rank_names), key)
        self._clock = PatientClock(options.beat_s)
        self._driver = Driver()
        self._status = Status(State.OUTSIDE, "", 0.0, 0, "")
        self._seen_blocks: set[Any] = set()
        self.batch_key: Any = None
        """Set this to the shapes of the batch: the first block of each kind may take longer."""
        self._stop, self._is_ending = threading.Event(), threading.Event()
        self._termination = Termination()
        self.failure: str | None = None
        """The line that says why all ranks end."""
        self._processes = processes or self._board.exchange_processes()
        self._local = LocalWatch(rank, self._processes, options.beat_timeout_s)
        self._holder = StoreHolder.of_this_launch(self._processes, self._parent)
        self._courier = Courier()
        self._ending = Ending(
            self._board, self._courier, rank, self._processes, options, end or end_process
        )
        self._signs = Signs(
            self._board, self._courier, rank, rank_names, self._processes, options, self._clock
        )
        self._count = 0
        self._has_store = True
        self._board.write_beat(self._beat())
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=self._watch, name="pipeplan-watchdog", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- for the main thread

    def enter(self, state: State, doing: Any = "") -> None:
        """Say what the main thread of this rank begins to do."""
        before, is_first = self._status, False
        if state is State.COMPUTING:
            kind = (self.batch_key, before.call, getattr(doing, "kind", None))
            is_first = kind not in self._seen_blocks
            self._seen_blocks.add(kind)
        self._status = Status(state, doing, self._clock.now_s, before.calls, before.call, is_first)

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Inside a method that all ranks call; the calls are numbered and compared."""
        self._driver.take_over()
        calls = self._status.calls + 1
        self._status = Status(State.TOGETHER, "", self._clock.now_s, calls, name)
        try:
            yield
        finally:
            if not self._stop.is_set():
                self.enter(State.OUTSIDE)

    def report(self, error: BaseException, *, is_mismatch: bool = False) -> None:
        """Tell the others that this rank raises, and wait until they know it.

        `is_mismatch` says that the other ranks probably raise the same error by themselves.
        """
        if os.getpid() != self._pid:  # a forked child has no part in this
            return
        failure = failure_of(self._rank, error, is_mismatch=is_mismatch)
        self.failure = self._line(failure)
        if failure.kind is FailureKind.INTERRUPTED:
            error.add_note(self.failure)  # the line is printed here or by another rank
        with contextlib.suppress(StoreError):
            self._ending.ask(lambda: self._board.declare(failure))
            if is_mismatch:
                self._ending.ask(self._board.mark_read)  # this rank ends by its own error
            self._ending.await_readers(culprit=self._rank)
            is_interrupt = failure.kind is FailureKind.INTERRUPTED
            if is_interrupt and self._ending.ask(self._board.become_speaker):
                print_line(self.failure)  # there is nobody else to say it

    def await_verdict(self) -> None:
        """Wait until another rank's failure is noticed; that ends this process."""
        if os.getpid() != self._pid:
            return
        patience_s = self._options.beat_timeout_s + 2 * self._options.beat_s + GRACE_S
        self.enter(State.SEEKING)
        self._stop.wait(patience_s)

    def await_end(self) -> None:
        """If the watchdog ends this process right now, let it: it has more to do than to exit."""
        if self._is_ending.is_set() and os.getpid() == self._pid:
            self._thread.join(timeout=2 * (self._options.beat_timeout_s + GRACE_S + ANSWER_S))

    def close(self, reason: str = "") -> None:
        """Stop watching; `reason` is told to ranks that still wait for this one."""
        if os.getpid() != self._pid:
            return
        was_open = not self._stop.is_set()
        if was_open:
            self.enter(State.DONE, reason)
            with contextlib.suppress(StoreError):
                beat = self._beat()
                self._ending.ask(lambda: self._board.write_beat(beat))
        self._stop.set()
        if was_open and threading.current_thread() is not self._thread:
            self._termination.wake()
            self._thread.join(timeout=5)
            self._termination.close()
            if self._rank != 0:
                self._release()

    def _release(self) -> None:
        atexit.unregister(self._at_exit)
        self._courier.close(timeout_s=1.0)

    def _at_exit(self) -> None:
        """The program ends: tell others why; rank 0 lets them read, unless its store has ended."""
        if os.getpid() != self._pid:
            return
        self.await_end()
        if not self._stop.is_set():
            error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
            if isinstance(error, Exception) and self.failure is None:
                self.report(error)
            self.close("ended its program")
        if self._rank == 0:
            deadline_s = time.monotonic() + 2.5 * self._options.beat_s * dist.is_initialized()
            with contextlib.suppress(StoreError):
                while time.monotonic() < deadline_s and not self._are_others_done():
                    time.sleep(POLL_S)
            self._courier.close(timeout_s=0.1)

    def _are_others_done(self) -> bool:
        beats = self._ending.ask(self._board.read_beats)
        return all(
            beat.state is State.DONE or self._processes[rank].is_gone
            for rank, beat in enumerate(beats)
        )

    # ---------------------------------------------------------------- the thread

    def _watch(self) -> None:
        while True:
            is_asked_to_end = self._termination.wait(self._options.beat_s)
            if self._stop.is_set():
                return
            self._driver.look(self._clock.tick())
            if os.getppid() != self._parent:
                self._end_without_launcher()
                return
            if is_asked_to_end:
                self._seek_reason()
                return
            try:
                failure = self._find_failure()
            except StoreError:
                if not self._goes_on_without_store():
                    return
                continue
            if failure is not None:
                self._finish(failure)
                return

    def _beat(self) -> Beat:
        """A new sign of life."""
        status, driver = self._status, self._driver
        self._count += 1
        return Beat(
            count=self._count,
            state=status.state,
            doing=str(status.doing),
            age_s=self._clock.now_s - status.since_s,
            calls=status.calls,
            call=status.call,
            where=driver.where,
            collective=driver.collective,
            held_s=driver.held_s,
            is_idle=driver.is_idle,
        )

    def _find_failure(self) -> Failure | None:
        """The failure that was declared; if there is none, look for one and declare it.

        Raises:
            StoreError: the store is gone, or has not answered for `beat_timeout_s`.
        """
        found = self._own_hang() or self._on_this_host()
        if found is not None and self._holder.rank is None and self._holder.process.is_stopped:
            raise StoreError  # the rank that is gone has ended because of that
        if found is None and self._has_store:
            found = self._signs.exchange(self._beat)
        return self._declared(found)

    def _declared(self, found: Failure | None) -> Failure | None:
        """The failure that all ranks read: this one, if it is the first."""
        if found is not None and found.rank == self._holder.rank:
            self._has_store &= not self._holder.process.is_stopped  # so it cannot answer
        if found is None or not self._has_store:
            return found
        try:
            return self._ending.ask(lambda: self._board.declare(found))
        except StoreError:
            self._has_store = False
            return found

    def _own_hang(self) -> Failure | None:
        status, options = self._status, self._options
        if status.state is not State.COMPUTING:
            return None
        age_s, name = self._clock.now_s - status.since_s, "hang_timeout_s"
        limit_s = options.hang_timeout_s
        if status.is_first and options.first_block_timeout_s > limit_s:
            limit_s, name = options.first_block_timeout_s, "first_block_timeout_s"
        if age_s <= limit_s:
            return None
        at = f" ({self._driver.where})" if self._driver.where else ""
        return Failure(
            rank=self._rank,
            reason=f"hangs: {status.doing} has run for {age_s:.0f} s{at}; if a block may take"
            f" longer, raise {name} ({limit_s:g} s)",
        )

    def _on_this_host(self) -> Failure | None:
        """A rank of this host that has ended before it was done, or was stopped."""
        for failure in self._local.look(self._clock.now_s):
            if failure.rank not in self._local.gone or not self._is_done(failure.rank):
                return failure
        return None

    def _is_done(self, rank: int) -> bool:
        """Whether a rank that has ended had closed its pipeline before."""
        beat = self._signs.last(rank)
        if self._has_store and (beat is None or beat.state is not State.DONE):
            with contextlib.suppress(StoreError):
                beat = self._ending.ask(lambda: self._board.read_beat(rank)) or beat
        if beat is not None:
            self._signs.note(rank, beat)
        return beat is not None and beat.state is State.DONE

    # ---------------------------------------------------------------- the end

    def _finish(self, failure: Failure) -> None:
        """Say the failure if nobody else does, and end this process."""
        self.failure = self._line(failure)
        if self._ends_by_itself(failure):
            return
        if failure.kind is FailureKind.MISMATCH and self._stop.wait(GRACE_S):
            return  # this rank has found the mismatch by itself
        self._is_ending.set()
        try:
            if not self._has_store:
                raise StoreError
            self._ending.with_store(failure, self.failure)
        except StoreError:
            self._ending.without_store(self.failure, failure.rank, self._absent(failure.rank))

    def _ends_by_itself(self, failure: Failure) -> bool:
        """Whether the failure is an error of this rank's main thread, which ends the rank."""
        return failure.rank == self._rank and failure.kind is not FailureKind.NOTICED

    def _absent(self, culprit: int | None) -> set[int]:
        """Ranks that do not print: they are done."""
        return self._signs.done() - {culprit}

    def _seek_reason(self) -> None:
        """Find out which rank is gone, and say so; then end, as the launcher asked."""
        deadline_s = time.monotonic() + SEARCH_S
        found: Failure | None = None
        while time.monotonic() < deadline_s and found is None:
            gone = [rank for rank, process in enumerate(self._processes) if process.is_gone]
            lost = [rank for rank in gone if not self._is_done(rank)]
            if lost:
                found = self._declared(death_of(lost[0], self._processes[lost[0]]))
            elif self._has_store:
                try:
                    found = self._ending.ask(self._board.read_failure)
                except StoreError:
                    self._has_store = False
            time.sleep(POLL_S)
        if found is not None:
            if self._ends_by_itself(found):
                return
            self._finish(found)
        self._ending.end(TERMINATED_CODE)

    def _end_without_launcher(self) -> None:
        """The launcher may have held the store, so the store cannot settle who speaks."""
        self.failure = "the launcher is gone; all ranks end"
        self._ending.without_store(self.failure, None, self._absent(None))

    def _goes_on_without_store(self) -> bool:
        """Blame whoever holds the store, and end; go on if that rank was done before."""
        self._has_store = False
        self._stop.wait(self._options.beat_s)
        if self._stop.is_set():
            return False  # this rank is done; the store went with a rank that was done before
        if os.getppid() != self._parent:
            self._end_without_launcher()
            return False
        rank = self._holder.rank
        beat = self._signs.last(rank) if rank is not None else None
        if rank is not None and beat is not None:
            is_ahead = self._status.calls > beat.calls and self._status.state is not State.OUTSIDE
            if beat.state is State.DONE and not is_ahead:
                return True
            if beat.state is State.DONE:
                what = f"{beat.doing or 'closed its pipeline'} after call {beat.calls}"
                self._finish(Failure(rank=rank, reason=f"{what}, but others are in a later one"))
                return False
        reason = self._holder.reason(
            self._options.beat_timeout_s, is_gone=not self._signs.is_waiting
        )
        if rank is not None:
            self._finish(Failure(rank=rank, reason=reason))
        else:
            self.failure = f"{reason}; all ranks end"
            self._ending.without_store(self.failure, None, self._absent(None))
        return False

    def _line(self, failure: Failure) -> str:
        name = self._rank_names[failure.rank]
        return printable(f"rank {failure.rank} ({name}) {failure.reason}; all ranks end")
