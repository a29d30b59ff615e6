"""One rank's knowledge of the signs of life of others.

Each beat, the rank writes its own sign to the store. It reads the failure that others have
declared, and the signs of two ranks: the next one of the ring and the arbiter. The arbiter is the
first rank that is not done. It reads the signs of all ranks, and judges them. So the load grows
with the number of ranks, not with its square.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from pipeplan.runtime.supervision.courier import Errand, StoreError
from pipeplan.runtime.supervision.crew import Crew
from pipeplan.runtime.supervision.ending import print_line
from pipeplan.runtime.supervision.judging import Waiting, judge
from pipeplan.runtime.supervision.status_board import Beat, Failure, State

__all__ = ["Signs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one round of talk with the store brought back."""

    failure: Failure | None
    beats: dict[int, Beat]


class Signs:
    """The last signs of life of the ranks that this one reads."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._beats: dict[int, tuple[Beat, float]] = {}
        """By rank, its last sign, and when it was new."""
        self._round: Errand[Round] | None = None
        self._round_since_s = 0.0
        self._notices = 0

    @property
    def is_waiting(self) -> bool:
        """Whether the store has not answered yet."""
        return self._round is not None and not self._round.is_done

    def last(self, rank: int) -> Beat | None:
        """The last sign of life of a rank; None if it is not known."""
        return self._beats[rank][0] if rank in self._beats else None

    def note(self, rank: int, beat: Beat) -> None:
        """Take note of a sign of life."""
        if rank not in self._beats or beat.count != self._beats[rank][0].count:
            self._beats[rank] = (beat, self._crew.clock.now_s)

    def done(self) -> set[int]:
        """The ranks that are known to have closed their pipeline."""
        return {rank for rank, (beat, _) in self._beats.items() if beat.state is State.DONE}

    def exchange(self, make_beat: Callable[[], Beat]) -> Failure | None:
        """Send a new sign, if the store has taken the last one; the failure that others' prove.

        Raises:
            StoreError: the store is gone, or has not answered for `beat_timeout_s`.
        """
        found = None
        if self._round is not None:
            if not self._round.is_done:
                if self._crew.clock.now_s - self._round_since_s > self._crew.options.beat_timeout_s:
                    raise StoreError("the store does not answer")
                return None
            found = self._take(self._round.result(0.0))
        self._send(make_beat())
        return found

    def _send(self, beat: Beat) -> None:
        num_ranks, done = self._crew.num_ranks, self.done()
        arbiter = next((rank for rank in range(num_ranks) if rank not in done), self._crew.rank)
        is_arbiter = arbiter == self._crew.rank
        wanted = {arbiter, (self._crew.rank + 1) % num_ranks}

        def talk() -> Round:
            self._crew.board.write_beat(beat)
            failure = self._crew.board.read_failure()
            if is_arbiter:
                return Round(failure=failure, beats=dict(enumerate(self._crew.board.read_beats())))
            found = {rank: self._crew.board.read_beat(rank) for rank in wanted}
            beats = {rank: known for rank, known in found.items() if known is not None}
            return Round(failure=failure, beats=beats)

        self._round, self._round_since_s = self._crew.courier.send(talk), self._crew.clock.now_s

    def _take(self, brought: Round) -> Failure | None:
        """The failure that others have declared, or that the signs of life prove."""
        if brought.failure is not None:
            return brought.failure
        for rank, beat in brought.beats.items():
            self.note(rank, beat)
        found = self._lost_neighbour()
        if found is not None or len(brought.beats) < self._crew.num_ranks:
            return found
        verdict = judge(
            [self._aged(rank) for rank in range(self._crew.num_ranks)], self._crew.options
        )
        if isinstance(verdict, Waiting):
            self._notice(verdict)
            return None
        self._notices = 0
        return verdict

    def _aged(self, rank: int) -> Beat:
        """The last beat of a rank; a rank that has been silent still does what it did."""
        beat, since_s = self._beats[rank]
        silence_s = self._crew.clock.now_s - since_s
        if silence_s <= self._crew.options.beat_timeout_s:
            return beat
        return dataclasses.replace(beat, age_s=beat.age_s + silence_s)

    def _lost_neighbour(self) -> Failure | None:
        """The next rank of the ring, if it is on another host and gives no sign of life."""
        rank = (self._crew.rank + 1) % self._crew.num_ranks
        if rank not in self._beats or self._crew.processes[rank].is_on_this_host:
            return None
        beat, since_s = self._beats[rank]
        silence_s, limit_s = self._crew.clock.now_s - since_s, self._crew.options.beat_timeout_s
        if self._crew.board.has_strangers:  # who may well hide the signs of life
            limit_s = self._crew.options.outside_timeout_s
        if beat.state is State.DONE or silence_s <= limit_s:
            return None
        reason = f"died or is out of reach: no sign of life for {silence_s:.0f} s"
        return Failure(rank=rank, reason=reason)

    def _notice(self, waiting: Waiting) -> None:
        """Say from time to time who is waited for."""
        due = int(waiting.wait_s // self._crew.options.notice_s)
        if due > self._notices:
            name = self._crew.name_of(waiting.rank)
            print_line(
                f"ranks have waited for {name} for {waiting.wait_s:.0f} s: it {waiting.what}"
            )
        self._notices = due
