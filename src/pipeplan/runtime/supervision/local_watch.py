"""Watches the processes of this host by what the kernel says, without any store.

A process that was stopped does not run. Any other one runs at least once in each beat, since its
watchdog does. So nobody is taken for stopped because his messages are late.
"""

import time
from collections.abc import Sequence

from pipeplan.runtime.supervision.processes import Process
from pipeplan.runtime.supervision.status_board import Failure

__all__ = ["LocalWatch", "death_of"]


class LocalWatch:
    """The other ranks of this host, as the last look found them."""

    def __init__(self, rank: int, processes: Sequence[Process]) -> None:
        self._rank = rank
        self._processes: dict[int, Process] = {}
        for other, process in enumerate(processes):
            self.watch(other, process)
        self._progress: dict[int, tuple[int | None, float]] = {}
        """By rank, how often it had run when it last ran, and when that was."""
        self._stopped_since_s: dict[int, float] = {}
        self._last_look_s = time.monotonic()
        self.gone: list[int] = []
        """Ranks that have ended, in the order in which that was noticed."""

    def watch(self, rank: int, process: Process) -> None:
        """Look after this process, too, if it is another one of this host."""
        if rank != self._rank and process.is_on_this_host:
            self._processes[rank] = process

    def look(self, now_s: float, timeout_s: float) -> list[Failure]:
        """What is newly wrong on this host; `now_s` is the time of a patient clock.

        A process that has not run for `timeout_s` counts as stopped.
        """
        found = []
        wall_s, last_s = time.monotonic(), self._last_look_s
        self._last_look_s = wall_s
        if wall_s - last_s > timeout_s / 2:
            self._stopped_since_s.clear()  # this rank was stopped itself
        for rank, process in self._processes.items():
            if rank in self.gone:
                continue
            if process.is_gone:
                self.gone.append(rank)
                found.append(death_of(rank, process))
                continue
            silence_s = max(
                self._silence_s(rank, process, now_s), self._stopped_s(rank, process, wall_s)
            )
            if silence_s > timeout_s:
                what = f"process {process.pid} has not run for {silence_s:.0f} s"
                found.append(Failure(rank=rank, reason=f"stopped answering: {what}"))
        return found

    def _silence_s(self, rank: int, process: Process, now_s: float) -> float:
        """How long a process has not run."""
        num_runs = process.num_runs
        before, since_s = self._progress.get(rank, (None, now_s))
        if num_runs is None or num_runs != before:
            self._progress[rank] = (num_runs, now_s)
            return 0.0
        return now_s - since_s

    def _stopped_s(self, rank: int, process: Process, wall_s: float) -> float:
        """How long the kernel has called it stopped, which no busy machine can feign."""
        if not process.is_stopped:
            self._stopped_since_s.pop(rank, None)
            return 0.0
        return wall_s - self._stopped_since_s.setdefault(rank, wall_s)


def death_of(rank: int, process: Process) -> Failure:
    """How it is told that a process has ended."""
    return Failure(rank=rank, reason=f"died (process {process.pid} is gone)")
