"""Ends all ranks, with one line that names the culprit, when one of them dies, hangs or raises.

Each rank has a thread that writes a sign of life to the store every second. It also watches the
next rank around the ring. So the load grows with the number of ranks, not with its square. Rank 0
also compares the signs of all ranks::

    rank 0 --watches--> rank 1 --watches--> rank 2 --watches--> rank 0

    died      its process is gone (same host), or no sign of life for `beat_timeout_s`
    stopped   no sign of life although the process exists; it is killed
    hangs     one block takes longer than `hang_timeout_s`, or a rank stays outside `step` for so
              long while another one waits for it
    raises    it says so itself

How ranks end::

    the first to notice   writes the failure to the store; later ones do not replace it
    every other rank      reads it; the first reader prints the line; each marks that it has read
    rank 0, the speaker   wait until all others have read it: the store may end with rank 0, and
                          a rank that finds no store would blame rank 0
    then                  each ends its own process, since a thread that waits for a message
                          cannot be woken in another way

A launcher that sees one rank end sends SIGTERM to the others. They then look at once for the rank
that is gone. If the launcher itself is gone, ranks end too.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeplan.documents.text import printable
from pipeplan.runtime.supervision.processes import Process
from pipeplan.runtime.supervision.status_board import (
    Beat,
    Failure,
    FailureKind,
    State,
    StatusBoard,
)
from pipeplan.runtime.supervision.termination import Termination

__all__ = ["INTERRUPTED_CODE", "Watchdog", "WatchdogOptions"]

INTERRUPTED_CODE = 128 + signal.SIGINT
"""The exit code after Ctrl-C."""
TERMINATED_CODE = 128 + signal.SIGTERM
"""The exit code of a rank that was asked to end, and found no reason."""
SEARCH_S = 1.5
"""How long such a rank looks for the reason."""
GRACE_S = 3.0
"""How long a failed rank may take to end by itself before it is killed."""
POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogOptions:
    """How patient the ranks are with each other."""

    beat_s: float = 1.0
    """The time between two signs of life."""
    beat_timeout_s: float = 10.0
    """A rank without a sign of life for so long counts as dead."""
    hang_timeout_s: float = 20.0
    """Raise this where one block, or the time between two steps, may take longer."""


class Watchdog:
    """Watches over the ranks of one pipeline."""

    def __init__(
        self,
        store: Any,
        rank: int,
        rank_names: list[str],
        options: WatchdogOptions,
        end: Callable[[int], None] | None = None,
    ) -> None:
        self._rank, self._rank_names, self._options = rank, rank_names, options
        self._board = StatusBoard(store, rank, len(rank_names))
        self._end = end or _end_process
        self._state, self._doing, self._since_s = State.OUTSIDE, "", time.monotonic()
        self._stop = threading.Event()
        self._termination = Termination()
        self._parent = os.getppid()
        self._last_beat: tuple[Beat | None, float] = (None, time.monotonic())
        """The last sign of life of the rank that this one watches, and when it was new."""
        self.failure: str | None = None
        """The line that says why all ranks end."""
        self._processes = self._board.exchange_processes()
        self._beat(0)
        self._thread = threading.Thread(target=self._watch, name="pipeplan-watchdog", daemon=True)
        self._thread.start()

    def enter(self, state: State, doing: Any = "") -> None:
        """Say what the main thread of this rank begins to do."""
        self._state, self._doing, self._since_s = state, doing, time.monotonic()

    def report(self, error: BaseException, *, is_mismatch: bool = False) -> None:
        """Tell the others that this rank raises, and wait until they know it.

        `is_mismatch` says that the other ranks probably raise the same error by themselves.
        """
        failure = _failure_of(self._rank, error, is_mismatch=is_mismatch)
        self.failure = self._line(failure)
        if failure.kind is FailureKind.INTERRUPTED:
            error.add_note(self.failure)  # the line is printed here or by another rank
        with contextlib.suppress(Exception):
            self._board.declare(failure)
            if is_mismatch:
                self._board.mark_read()  # this rank ends by its own error
            self._await_readers(culprit=self._rank)
            is_interrupt = failure.kind is FailureKind.INTERRUPTED
            if is_interrupt and self._board.become_speaker():
                _print_line(self.failure)  # there is nobody else to say it

    def await_verdict(self) -> None:
        """Wait until another rank's failure is noticed; that ends this process."""
        patience_s = self._options.beat_timeout_s + 2 * self._options.beat_s + GRACE_S
        self.enter(State.SEEKING)
        self._stop.wait(patience_s)

    def close(self) -> None:
        """Stop watching."""
        was_open = not self._stop.is_set()
        if was_open:
            self.enter(State.DONE)
            with contextlib.suppress(Exception):
                self._beat(-1)
        self._stop.set()
        if was_open and threading.current_thread() is not self._thread:
            self._termination.wake()
            self._thread.join(timeout=5)
            self._termination.close()

    # ---------------------------------------------------------------- the thread

    def _watch(self) -> None:
        count, last_s = 0, time.monotonic()
        while True:
            is_asked_to_end = self._termination.wait(self._options.beat_s)
            if self._stop.is_set():
                return
            count += 1
            if os.getppid() != self._parent:
                self._end_without_launcher()
                return
            now_s = time.monotonic()
            if now_s - last_s > self._options.beat_timeout_s / 2:
                # This thread was held up itself. The others probably were, too.
                self._last_beat = (None, now_s)
            last_s = now_s
            try:
                if is_asked_to_end:
                    self._seek_reason()
                self._beat(count)
                failure = self._find_failure()
            except Exception:  # the store is gone, and so is the rank that holds it
                if self._stop.is_set():
                    return
                self._end_without_store()
                return
            if failure is not None:
                self._finish(failure)
                return

    def _beat(self, count: int) -> None:
        age_s = time.monotonic() - self._since_s
        self._board.write_beat(
            Beat(count=count, state=self._state, doing=str(self._doing), age_s=age_s)
        )

    def _find_failure(self) -> Failure | None:
        """The failure that was declared; if there is none, look for one and declare it."""
        failure = self._board.read_failure()
        if failure is not None:
            return failure
        limit_s = self._options.hang_timeout_s
        age_s = time.monotonic() - self._since_s
        if self._state is State.COMPUTING and age_s > limit_s:
            self._declare(self._rank, f"hangs: {self._doing} has run for {age_s:.0f} s")
        next_rank = (self._rank + 1) % len(self._rank_names)
        if next_rank != self._rank:
            self._check_life(next_rank)
        if self._rank == 0:
            self._check_absence(limit_s)
        return None

    def _seek_reason(self) -> None:
        """Find out which rank is gone, and say so; then end, as the launcher asked."""
        deadline_s = time.monotonic() + SEARCH_S
        while time.monotonic() < deadline_s:
            for rank, process in enumerate(self._processes):
                if process.is_gone:
                    self._declare(rank, f"died (process {process.pid} is gone)")
            failure = self._board.read_failure()
            if failure is not None:
                if self._ends_by_itself(failure):
                    return
                self._finish(failure)
                break
            time.sleep(POLL_S)
        self._end(TERMINATED_CODE)

    def _check_life(self, rank: int) -> None:
        beat = self._board.read_beat(rank)
        if beat is None or beat.state is State.DONE:
            return
        now_s = time.monotonic()
        if beat != self._last_beat[0]:
            self._last_beat = (beat, now_s)
        silence_s = now_s - self._last_beat[1]
        process = self._processes[rank]
        if process.is_gone:
            self._declare(rank, f"died (process {process.pid} is gone)")
        elif silence_s > self._options.beat_timeout_s:
            is_here = process.is_on_this_host
            what = "stopped answering" if is_here else "died or is out of reach"
            self._declare(rank, f"{what}: no sign of life for {silence_s:.0f} s")
            if is_here:  # it cannot end itself, and this rank may soon be gone
                process.kill()

    def _check_absence(self, limit_s: float) -> None:
        """Find a rank that does not come to `step` although others wait, or a deadlock."""
        beats = self._board.read_beats()
        waits_s = [beat.age_s for beat in beats if beat.state is State.WAITING]
        for rank, beat in enumerate(beats):
            is_absent = beat.state in (State.OUTSIDE, State.DONE) and beat.age_s > limit_s
            if is_absent and waits_s and max(waits_s) > limit_s:
                self._declare(
                    rank, f"hangs: outside of step for {beat.age_s:.0f} s while others wait"
                )
        if waits_s and len(waits_s) == len(beats) and min(waits_s) > 2 * limit_s:
            self._declare(0, f"and all others have waited for each other for {min(waits_s):.0f} s")

    def _declare(self, rank: int, reason: str) -> None:
        self._board.declare(Failure(rank=rank, reason=reason))

    # ---------------------------------------------------------------- the end

    def _finish(self, failure: Failure) -> None:
        """Say the failure if nobody else does, and end this process."""
        self.failure = self._line(failure)
        if self._ends_by_itself(failure):
            return
        with contextlib.suppress(Exception):
            if failure.kind is FailureKind.MISMATCH and self._stop.wait(GRACE_S):
                return  # this rank has found the mismatch by itself
            # Print before marking: who has marked does not keep the store alive any more.
            is_speaker = self._board.become_speaker()
            if is_speaker:
                _print_line(self.failure)
            self._board.mark_read()
            if is_speaker or self._rank == 0:
                self._await_readers(failure.rank)
            if is_speaker and failure.rank != self._rank:
                self._kill_late(self._processes[failure.rank])
        self._end(INTERRUPTED_CODE if failure.kind is FailureKind.INTERRUPTED else 1)

    def _ends_by_itself(self, failure: Failure) -> bool:
        """Whether the failure is an error of this rank's main thread, which ends the rank."""
        return failure.rank == self._rank and failure.kind is not FailureKind.NOTICED

    def _await_readers(self, culprit: int) -> None:
        """Wait until all ranks but the culprit know the failure, or have ended.

        A rank that takes longer than `beat_timeout_s` counts as dead anyway.
        """
        deadline_s = time.monotonic() + max(GRACE_S, self._options.beat_timeout_s)
        missing = set(range(len(self._rank_names))) - {self._rank, culprit}
        while time.monotonic() < deadline_s:
            missing = {rank for rank in missing if not self._knows_or_ended(rank)}
            if not missing:
                return
            time.sleep(POLL_S)

    def _knows_or_ended(self, rank: int) -> bool:
        if self._board.has_read(rank) or self._processes[rank].is_gone:
            return True
        beat = self._board.read_beat(rank)
        return beat is not None and beat.state is State.DONE

    def _kill_late(self, process: Process) -> None:
        """Kill a failed rank of this host that does not end by itself."""
        deadline_s = time.monotonic() + GRACE_S
        while process.is_on_this_host and process.is_alive:
            if time.monotonic() > deadline_s:
                process.kill()
                return
            time.sleep(2 * POLL_S)

    def _end_without_launcher(self) -> None:
        """The launcher may have held the store, so the store cannot settle who speaks."""
        self.failure = "the launcher is gone; all ranks end"
        self._print_without_store(self.failure)
        self._end(1)

    def _end_without_store(self) -> None:
        """Blame rank 0, which holds the store."""
        self._stop.wait(self._options.beat_s)
        if self._stop.is_set():
            return  # this rank is done; the store went with a rank that was done before
        if os.getppid() != self._parent:
            self._end_without_launcher()
            return
        reason = "died" if self._processes[0].is_gone else "is out of reach: its store is gone"
        self.failure = self._line(Failure(rank=0, reason=reason))
        self._print_without_store(self.failure, culprit=0)
        self._end(1)

    def _print_without_store(self, line: str, culprit: int | None = None) -> None:
        """Print if this is the first rank of its host, leaving out the culprit.

        The number alone settles it: other ranks may have ended already.
        """
        speakers = [
            rank
            for rank, process in enumerate(self._processes)
            if rank != culprit and process.is_on_this_host
        ]
        if not speakers or speakers[0] == self._rank:
            _print_line(line)

    def _line(self, failure: Failure) -> str:
        name = self._rank_names[failure.rank]
        return printable(f"rank {failure.rank} ({name}) {failure.reason}; all ranks end")


def _failure_of(rank: int, error: BaseException, *, is_mismatch: bool) -> Failure:
    """How a rank tells its own error."""
    if isinstance(error, KeyboardInterrupt):
        return Failure(rank=rank, reason="was interrupted", kind=FailureKind.INTERRUPTED)
    lines = str(error).strip().splitlines()
    reason = f"raised {type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
    kind = FailureKind.MISMATCH if is_mismatch else FailureKind.RAISED
    return Failure(rank=rank, reason=reason, kind=kind)


def _print_line(message: str) -> None:
    """Write one line to stderr at once, from any thread."""
    with contextlib.suppress(OSError):
        stderr = sys.__stderr__.fileno() if sys.__stderr__ else 2
        os.write(stderr, f"pipeplan: {printable(message)}\n".encode(errors="replace"))


def _end_process(code: int) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
