"""What the main thread of this rank does, as the other ranks are told."""

from typing import Any

from pipeplan.runtime.supervision.driver import Driver
from pipeplan.runtime.supervision.options import WatchdogOptions
from pipeplan.runtime.supervision.patient_clock import PatientClock
from pipeplan.runtime.supervision.status_board import Beat, Failure, State, Status

__all__ = ["Activity"]


class Activity:
    """The main thread says what it begins to do; the watching thread looks how long it takes."""

    def __init__(self, clock: PatientClock) -> None:
        self._clock, self._driver = clock, Driver()
        self._seen_blocks: set[Any] = set()
        self._count = 0
        self.status = Status(State.OUTSIDE, "", 0.0, 0, "")
        self.batch_key: Any = None
        """The shapes of the batch: the first block of each kind may take longer."""

    def enter(self, state: State, doing: Any = "") -> None:
        """Say what the main thread begins to do."""
        before, is_first = self.status, False
        if state is State.COMPUTING:
            kind = (self.batch_key, before.call, getattr(doing, "kind", None))
            is_first = kind not in self._seen_blocks
            if is_first:
                self._seen_blocks.add(kind)
        self.status = Status(state, doing, self._clock.now_s, before.calls, before.call, is_first)

    def begin_call(self, name: str) -> None:
        """Say that the calling thread begins a method that all ranks call."""
        self._driver.take_over()
        calls = self.status.calls + 1
        self.status = Status(State.TOGETHER, "", self._clock.now_s, calls, name)

    def look(self, counted_s: float) -> None:
        """See where the main thread is; `counted_s` is the time since the last look."""
        self._driver.look(counted_s)

    def beat(self) -> Beat:
        """A new sign of life."""
        status, driver = self.status, self._driver
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

    def hang(self, rank: int, options: WatchdogOptions) -> Failure | None:
        """The failure of this rank if it has computed one block for too long."""
        status = self.status
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
            rank=rank,
            reason=f"hangs: {status.doing} has run for {age_s:.0f} s{at}; if a block may take"
            f" longer, raise {name} ({limit_s:g} s)",
        )
