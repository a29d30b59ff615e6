"""A clock that stands still while its process gets no processor.

On a machine with far more work than processors, a thread may wait seconds for its turn. Neither its
own silence nor that of others says anything then. So the times that judge ranks leave those out::

    counted = elapsed - the longest that any thread of this process waited for a processor

and one tick counts for two beats at most, since a watcher that was stopped has missed the rest.
"""

import os
import time
from pathlib import Path

__all__ = ["PatientClock", "thread_run_s"]

NS_PER_S = 1e9


class PatientClock:
    """Counts the seconds in which this process could run; one thread ticks, all may read."""

    def __init__(self, beat_s: float) -> None:
        self.beat_s = beat_s
        self._last_s = time.monotonic()
        self._delays_ns = _delays_ns()
        self.now_s = 0.0
        """Counted until the last tick."""

    def tick(self) -> float:
        """Move on; the seconds that count."""
        now_s, delays_ns = time.monotonic(), _delays_ns()
        waited_s = max(
            (delay - self._delays_ns.get(task, delay) for task, delay in delays_ns.items()),
            default=0,
        )
        elapsed_s = min(now_s - self._last_s, 2 * self.beat_s)
        counted_s = max(0.0, elapsed_s - waited_s / NS_PER_S)
        self._last_s, self._delays_ns = now_s, delays_ns
        self.now_s += counted_s
        return counted_s


def thread_run_s(task: int) -> float | None:
    """How long a thread of this process has run; None where the kernel does not tell."""
    fields = _schedstat(Path("/proc/self/task") / str(task))
    return fields[0] / NS_PER_S if fields else None


def _delays_ns() -> dict[str, int]:
    """By thread, how long it has waited for a processor."""
    found = {}
    try:
        names = os.listdir("/proc/self/task")
    except OSError:
        return {}
    for name in names:
        fields = _schedstat(Path("/proc/self/task") / name)
        if fields:
            found[name] = fields[1]
    return found


def _schedstat(task: Path) -> list[int]:
    """Of a thread: nanoseconds run, nanoseconds waited for a processor, number of turns."""
    try:
        return [int(field) for field in (task / "schedstat").read_text().split()]
    except (OSError, ValueError):
        return []
