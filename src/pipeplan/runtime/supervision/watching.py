"""The thread of a watchdog: finds a rank that fails, and ends this one.

It looks around in each beat::

    this host     the processes of all its ranks, by what the kernel says (`local_watch`)
    the store     writes a sign of life, reads the failure that others have noticed (`status_board`)
    the ring      the sign of life of the next rank, if that is on another host
    the arbiter   the first rank that is not done compares the signs of all ranks (`judging`)

If a launcher sends SIGTERM because another rank is gone, it looks for that rank at once. If the
launcher itself is gone, this rank ends, too.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable

from pipeplan.runtime.supervision.activity import Activity
from pipeplan.runtime.supervision.courier import StoreError
from pipeplan.runtime.supervision.crew import Crew
from pipeplan.runtime.supervision.ending import GRACE_S, POLL_S, TERMINATED_CODE, Ending
from pipeplan.runtime.supervision.local_watch import LocalWatch, death_of
from pipeplan.runtime.supervision.signs import Signs
from pipeplan.runtime.supervision.status_board import Beat, Failure, FailureKind, State
from pipeplan.runtime.supervision.store_holder import StoreHolder
from pipeplan.runtime.supervision.termination import Termination

__all__ = ["Watcher"]

SEARCH_S = 1.5
"""How long a rank that was asked to end looks for the reason."""


class Watcher:
    """Looks around until it is stopped, or until a failure ends this rank."""

    def __init__(self, crew: Crew, activity: Activity, end: Callable[[int], None]) -> None:
        self._crew, self._activity = crew, activity
        self._parent = os.getppid()
        self._local = LocalWatch(crew.rank, crew.processes)
        self._holder = StoreHolder.of_this_launch(crew.processes, self._parent)
        self._signs = Signs(crew)
        self._has_store = True
        self.ending = Ending(crew, end)
        self.termination = Termination()
        self.stop, self.is_ending = threading.Event(), threading.Event()
        self.failure: str | None = None
        """The line that says why all ranks end."""
        self.has_reported = False
        """Whether the main thread has told the others about an error of its own."""
        self.thread = threading.Thread(target=self._watch, name="pipeplan-watchdog", daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        while True:
            is_asked_to_end = self.termination.wait(self._crew.options.beat_s)
            if self.stop.is_set():
                return
            self._activity.look(self._crew.clock.tick())
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

    # ---------------------------------------------------------------- finding

    def _find_failure(self) -> Failure | None:
        """The failure that was declared; if there is none, look for one and declare it.

        Raises:
            StoreError: the store is gone, or has not answered for `beat_timeout_s`.
        """
        found = self._activity.hang(self._crew.rank, self._crew.options) or self._on_this_host()
        if found is not None and self._holder.rank is None and self._holder.process.is_stopped:
            raise StoreError  # the rank that is gone has ended because of that
        if found is None and self._has_store:
            found = self._signs.exchange(self._activity.beat)
        return self._declared(found)

    def _declared(self, found: Failure | None) -> Failure | None:
        """The failure that all ranks read: this one, if it is the first."""
        if found is not None and found.rank == self._holder.rank:
            self._has_store &= not self._holder.process.is_stopped  # so it cannot answer
        if found is None or not self._has_store:
            return found
        try:
            return self._crew.courier.ask(lambda: self._crew.board.declare(found))
        except StoreError:
            self._has_store = False
            return found

    def _on_this_host(self) -> Failure | None:
        """A rank of this host that has ended before it was done, or was stopped."""
        timeout_s = self._crew.options.beat_timeout_s
        for failure in self._local.look(self._crew.clock.now_s, timeout_s):
            if failure.rank not in self._local.gone or not self._is_done(failure.rank):
                return failure
        return None

    def _is_done(self, rank: int) -> bool:
        """Whether a rank that has ended had closed its pipeline before."""
        beat = self._signs.last(rank)
        if self._has_store and (beat is None or beat.state is not State.DONE):
            with contextlib.suppress(StoreError):
                read_beat = self._crew.board.read_beat
                beat = self._crew.courier.ask(lambda: read_beat(rank)) or beat
        if beat is not None:
            self._signs.note(rank, beat)
        return beat is not None and beat.state is State.DONE

    # ---------------------------------------------------------------- ending

    def _finish(self, failure: Failure) -> None:
        """Say the failure if nobody else does, and end this process, unless it is done."""
        if self.stop.is_set():
            return  # closed while this thread looked; what others do now concerns it no more
        if self.has_reported and failure.kind is FailureKind.NOTICED:
            # All end because of an error that is told already; who ends first is no culprit.
            if not self.stop.wait(GRACE_S):
                self.ending.end(1)
            return
        self.failure = self._crew.line_of(failure)
        if self._ends_by_itself(failure):
            return
        if failure.kind is FailureKind.MISMATCH and self.stop.wait(GRACE_S):
            return  # this rank has found the mismatch by itself
        self.is_ending.set()
        try:
            if not self._has_store:
                raise StoreError
            self.ending.with_store(failure, self.failure)
        except StoreError:
            self._end_without_store(self.failure, failure.rank)

    def _ends_by_itself(self, failure: Failure) -> bool:
        """Whether the failure is an error of this rank's main thread, which ends the rank."""
        return failure.rank == self._crew.rank and failure.kind is not FailureKind.NOTICED

    def _end_without_store(self, line: str, culprit: int | None) -> None:
        self.failure = line
        self.is_ending.set()
        # Ranks that are done do not print.
        self.ending.without_store(line, culprit, self._signs.done() - {culprit})

    def _end_without_launcher(self) -> None:
        """The launcher may have held the store, so the store cannot settle who speaks."""
        self._end_without_store("the launcher is gone; all ranks end", None)

    def _seek_reason(self) -> None:
        """Find out which rank is gone, and say so; then end, as the launcher asked."""
        deadline_s = time.monotonic() + SEARCH_S
        found: Failure | None = None
        while time.monotonic() < deadline_s and found is None:
            processes = self._crew.processes
            gone = [rank for rank, process in enumerate(processes) if process.is_gone]
            lost = [rank for rank in gone if not self._is_done(rank)]
            if lost:
                found = self._declared(death_of(lost[0], processes[lost[0]]))
            elif self._has_store:
                try:
                    found = self._crew.courier.ask(self._crew.board.read_failure)
                except StoreError:
                    self._has_store = False
            time.sleep(POLL_S)
        if found is not None:
            if self._ends_by_itself(found):
                return
            self._finish(found)
        self.ending.end(TERMINATED_CODE)

    # ---------------------------------------------------------------- without the store

    def _goes_on_without_store(self) -> bool:
        """Blame whoever holds the store, and end; go on if that rank was done before."""
        self._has_store = False
        self.stop.wait(self._crew.options.beat_s)
        if self.stop.is_set():
            return False  # this rank is done; the store went with a rank that was done before
        if os.getppid() != self._parent:
            self._end_without_launcher()
            return False
        rank = self._holder.rank
        beat = self._signs.last(rank) if rank is not None else None
        if beat is not None and beat.state is State.DONE and not self._is_ahead_of(beat):
            return True
        self._blame_holder(beat)
        return False

    def _is_ahead_of(self, beat: Beat) -> bool:
        """Whether this rank is in a later call than the last one of another rank."""
        status = self._activity.status
        return status.calls > beat.calls and status.state is not State.OUTSIDE

    def _blame_holder(self, beat: Beat | None) -> None:
        """Say what became of the store's holder, whose last sign of life this was."""
        silence_s, is_gone = self._crew.options.beat_timeout_s, not self._signs.is_waiting
        reason = self._holder.reason(silence_s, is_gone=is_gone)
        if beat is not None and beat.state is State.DONE:
            what = f"{beat.doing or 'closed its pipeline'} after call {beat.calls}"
            reason = f"{what}, but others are in a later one"
        if self._holder.rank is not None:
            self._finish(Failure(rank=self._holder.rank, reason=reason))
        else:
            self._end_without_store(f"{reason}; all ranks end", None)
