"""Waits until all ranks have come, and says which have not.

Before a pipeline is set up there is no watchdog. So while ranks meet, a thread looks who is there::

    here/2    rank 2 has come

It says every `notice_s` who is missing, and ends this rank after the limit. If the processes of
ranks on this host are known, it watches them, too.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from pipeplan.documents.text import printable
from pipeplan.runtime.supervision.connections import is_of_connection
from pipeplan.runtime.supervision.courier import Courier, Errand, StoreError
from pipeplan.runtime.supervision.ending import ANSWER_S, end_process, print_line
from pipeplan.runtime.supervision.local_watch import LocalWatch
from pipeplan.runtime.supervision.options import WatchdogOptions
from pipeplan.runtime.supervision.patient_clock import PatientClock
from pipeplan.runtime.supervision.processes import Process

__all__ = ["Arrival"]

SPEAKER = "speaker"


class Arrival:
    """Inside, ranks meet; `what` says what for, such as "make their pipeline"."""

    def __init__(
        self,
        store: Any,
        rank: int,
        num_ranks: int,
        what: str,
        options: WatchdogOptions,
        processes: Sequence[Process] = (),
        end: Callable[[int], None] = end_process,
    ) -> None:
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._what, self._options, self._end = what, options, end
        self._local = LocalWatch(rank, processes, options.beat_timeout_s)
        self._clock, self._parent = PatientClock(options.beat_s), os.getppid()
        self._courier, self._stop = Courier(), threading.Event()
        self._missing = [other for other in range(num_ranks) if other != rank]
        self._thread = threading.Thread(target=self._watch, name="pipeplan-arrival", daemon=True)

    def __enter__(self) -> "Arrival":
        self._courier.send(lambda: self._store.set(f"here/{self._rank}", "yes"))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        if error is not None and is_of_connection(error):
            self._blame(error)
        self._courier.close(timeout_s=ANSWER_S)

    def _watch(self) -> None:
        errand, since_s, notices = self._courier.send(self._find_missing), 0.0, 0
        while not self._stop.wait(self._options.beat_s):
            self._clock.tick()
            now_s = self._clock.now_s
            if os.getppid() != self._parent:
                self._finish("the launcher is gone")
            for failure in self._local.look(now_s):
                self._finish(f"rank {failure.rank} {failure.reason}")
            if errand.is_done:
                self._take(errand)
                errand, since_s = self._courier.send(self._find_missing), now_s
            elif now_s - since_s > self._options.beat_timeout_s:
                self._finish(f"the store has not answered for {now_s - since_s:.0f} s")
            if now_s > self._options.outside_timeout_s:
                self._finish(f"{self._missing_text()} within {now_s:.0f} s")
            elif int(now_s // self._options.notice_s) > notices:
                notices += 1
                if min({*range(self._num_ranks)} - {*self._missing}) == self._rank:
                    print_line(f"ranks wait to {self._what}: {self._missing_text()}")

    def _find_missing(self) -> list[int]:
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        return [rank for rank in others if not self._store.check([f"here/{rank}"])]

    def _take(self, errand: "Errand[list[int]]") -> None:
        with contextlib.suppress(StoreError):  # the ranks' own connections tell more
            self._missing = errand.result(0.0)

    def _missing_text(self) -> str:
        if not self._missing:
            return "all have come, but not all go on"
        ranks = "rank" if len(self._missing) == 1 else "ranks"
        have = "has" if len(self._missing) == 1 else "have"
        return f"{ranks} {', '.join(map(str, self._missing[:8]))} {have} not come"

    def _blame(self, error: BaseException) -> None:
        """A connection broke: a rank has ended meanwhile."""
        gone = self._local.look(self._clock.now_s)
        with contextlib.suppress(StoreError):
            self._missing = self._courier.send(self._find_missing).result(ANSWER_S)
        if gone or self._local.gone:
            rank = gone[0].rank if gone else self._local.gone[0]
            self._finish(f"rank {rank} died")
        elif self._missing:
            self._finish(f"{self._missing_text()}, and a connection broke")
        self._finish(f"a rank ended: {printable(str(error).splitlines()[0])[:120]}")

    def _finish(self, problem: str) -> None:
        """Print the line unless another rank does, and end."""
        is_speaker = True
        with contextlib.suppress(StoreError):
            mine = str(self._rank)
            errand = self._courier.send(lambda: self._store.compare_set(SPEAKER, "", mine))
            is_speaker = errand.result(ANSWER_S) == mine.encode()
        if is_speaker:
            print_line(f"ranks could not {self._what}: {problem}; all ranks end")
        self._end(1)
