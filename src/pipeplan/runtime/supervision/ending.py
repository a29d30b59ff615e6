"""Ends all ranks, with one line that names the culprit.

With the store::

    the first to notice   writes the failure; later ones do not replace it
    every other rank      reads it; the first reader prints the line; each marks that it has read
    rank 0, the speaker   wait until all others have read it: the store may end with rank 0, and
                          a rank that finds no store would blame rank 0
    then                  each ends its own process, since a thread that waits for a message
                          cannot be woken in another way

Without it, because it is gone or does not answer, each rank finds the culprit by itself. The first
rank of each host prints. All stay for some beats, so that nobody takes them for the culprit.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable

from pipeplan.documents.text import printable
from pipeplan.runtime.supervision.courier import StoreError
from pipeplan.runtime.supervision.crew import Crew
from pipeplan.runtime.supervision.processes import Process
from pipeplan.runtime.supervision.status_board import Failure, FailureKind, State

__all__ = [
    "GRACE_S",
    "INTERRUPTED_CODE",
    "POLL_S",
    "TERMINATED_CODE",
    "Ending",
    "end_process",
    "failure_of",
    "print_line",
]

INTERRUPTED_CODE = 128 + signal.SIGINT
"""The exit code after Ctrl-C."""
TERMINATED_CODE = 128 + signal.SIGTERM
"""The exit code of a rank that was asked to end, and found no reason."""
GRACE_S = 3.0
"""How long a rank that hangs may take to end by itself before it is killed."""
FINISH_S = 15.0
"""The same for a rank that raises, since its program may have something to finish."""
LINGER_BEATS = 3
"""How long a rank that ends without a store stays, at least, for others that are late."""
POLL_S = 0.05
FLUSH_S = 1.0


class Ending:
    """What one rank does when all ranks end."""

    def __init__(self, crew: Crew, end: Callable[[int], None]) -> None:
        self._crew, self.end = crew, end

    def with_store(self, failure: Failure, line: str) -> None:
        """Print the line if nobody else does, and end when all know it.

        Raises:
            StoreError: the store is gone, or does not answer.
        """
        # Print before marking: who has marked does not keep the store alive any more.
        is_speaker = self._crew.courier.ask(self._crew.board.become_speaker)
        if is_speaker:
            print_line(line)
        with contextlib.suppress(StoreError):
            self._crew.courier.ask(self._crew.board.mark_read)
            if is_speaker or self._crew.rank == 0:
                self._kill_unreached(self.await_readers(failure.rank))
        if is_speaker and failure.rank != self._crew.rank:
            grace_s = GRACE_S if failure.kind is FailureKind.NOTICED else FINISH_S
            self._kill_late(self._crew.processes[failure.rank], grace_s)
        self.end(_code_of(failure))

    def without_store(self, line: str, culprit: int | None, absent: Iterable[int]) -> None:
        """Print the line on the first rank of this host, and end.

        `absent` are ranks that were gone or done before, so they print nothing.
        """
        here = [
            rank
            for rank, process in enumerate(self._crew.processes)
            if rank != culprit
            and process.is_on_this_host
            and rank not in absent
            # One that has ended already prints nothing any more, whatever this rank knew of it.
            and (rank == self._crew.rank or not process.is_gone)
        ]
        is_speaker = not here or min(here) >= self._crew.rank
        if is_speaker:
            print_line(line)
            if culprit is not None and culprit != self._crew.rank:
                self._crew.processes[culprit].kill()
        linger_s = max(
            LINGER_BEATS * self._crew.options.beat_s, self._crew.options.beat_timeout_s / 3
        )
        deadline_s = time.monotonic() + linger_s
        others = [rank for rank in here if rank != self._crew.rank]
        while time.monotonic() < deadline_s and not all(
            self._crew.processes[rank].is_gone for rank in others
        ):
            time.sleep(POLL_S)
        if culprit is not None and culprit != self._crew.rank:
            self._crew.processes[culprit].kill()
        self.end(1)

    def await_readers(self, culprit: int) -> set[int]:
        """Wait until all ranks but the culprit know the failure, or have ended; who does not.

        A rank that takes longer than `beat_timeout_s` is not waited for.
        """
        deadline_s = time.monotonic() + max(GRACE_S, self._crew.options.beat_timeout_s)
        missing = set(range(len(self._crew.processes))) - {self._crew.rank, culprit}
        while time.monotonic() < deadline_s:
            missing = {rank for rank in missing if not self.knows_or_ended(rank)}
            if not missing:
                break
            time.sleep(POLL_S)
        return missing

    def _kill_unreached(self, ranks: Iterable[int]) -> None:
        """End ranks of this host that do not learn of the failure: native code may hold them."""
        for rank in ranks:
            self._crew.processes[rank].kill()

    def knows_or_ended(self, rank: int) -> bool:
        """Whether a rank needs the store no more: it knows the failure, is done or has ended."""
        process, board, ask = self._crew.processes[rank], self._crew.board, self._crew.courier.ask
        if process.is_gone or not process.is_known or ask(lambda: board.has_read(rank)):
            return True
        beat = ask(lambda: board.read_beat(rank))
        return beat is not None and beat.state is State.DONE

    def _kill_late(self, process: Process, grace_s: float) -> None:
        """Kill a failed rank of this host that does not end by itself."""
        deadline_s = time.monotonic() + grace_s
        while process.is_on_this_host and process.is_alive:
            if process.is_stopped or time.monotonic() > deadline_s:
                process.kill()
                return
            time.sleep(2 * POLL_S)


def failure_of(rank: int, error: BaseException, *, is_mismatch: bool) -> Failure:
    """How a rank tells its own error."""
    if isinstance(error, KeyboardInterrupt):
        return Failure(rank=rank, reason="was interrupted", kind=FailureKind.INTERRUPTED)
    if isinstance(error, SystemExit) and not error.code:
        reason = "ended its program by sys.exit() in the midst of a call"
        return Failure(rank=rank, reason=reason, kind=FailureKind.RAISED)
    lines = str(error).strip().splitlines()
    reason = f"raised {type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
    kind = FailureKind.MISMATCH if is_mismatch else FailureKind.RAISED
    return Failure(rank=rank, reason=reason, kind=kind)


def _code_of(failure: Failure) -> int:
    return INTERRUPTED_CODE if failure.kind is FailureKind.INTERRUPTED else 1


def print_line(message: str) -> None:
    """Write one line to stderr at once, from any thread."""
    line = f"pipeplan: {printable(message)}\n".encode(errors="replace")
    stderr = sys.__stderr__.fileno() if sys.__stderr__ else 2
    _briefly(lambda: os.write(stderr, line))


def end_process(code: int) -> None:
    """End this process at once, whatever its other threads do."""
    _briefly(sys.stdout.flush)
    _briefly(sys.stderr.flush)
    os._exit(code)


def _briefly(function: Callable[[], object]) -> None:
    """Run this, but do not wait long: nobody may read the pipe that it writes to."""

    def run() -> None:
        with contextlib.suppress(Exception):
            function()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(FLUSH_S)
