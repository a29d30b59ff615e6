"""One rank's knowledge of the signs of life of others.

Each beat, the rank writes its own sign to the store. It reads the failure that others have
declared, and the signs of two ranks: the next one of the ring and the arbiter. The arbiter is the
first rank that is not done and not silent. It reads the signs of all ranks, and judges them. So the
load grows with the number of ranks, not with its square.

A rank is silent while native code holds Python's lock, because then its watchdog does not run. It
is busy. Its process is watched by the ranks of its own host; only if its whole host is silent, the
rank counts as lost.
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
    is_of_arbiter: bool
    """Whether this rank is to judge them."""


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
        return {rank for rank in self._beats if self._is_done(rank)}

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
        num_ranks, me, done = self._crew.num_ranks, self._crew.rank, self.done()
        before = [rank for rank in range(me) if rank not in done]
        arbiter = next((rank for rank in before if not self._is_silent(rank)), me)
        is_arbiter = arbiter == me
        neighbour = (me + 1) % num_ranks
        wanted = {rank for rank in before if rank <= arbiter} | {neighbour}
        if self._silence_s(neighbour) > self._crew.options.beat_timeout_s / 3:
            wanted.update(self._with_host_of(neighbour))

        def talk() -> Round:
            self._crew.board.write_beat(beat)
            failure = self._crew.board.read_failure()
            if is_arbiter:
                beats = dict(enumerate(self._crew.board.read_beats()))
                return Round(failure=failure, beats=beats, is_of_arbiter=True)
            found = {rank: self._crew.board.read_beat(rank) for rank in wanted}
            beats = {rank: known for rank, known in found.items() if known is not None}
            return Round(failure=failure, beats=beats, is_of_arbiter=False)

        self._round, self._round_since_s = self._crew.courier.send(talk), self._crew.clock.now_s

    def _take(self, brought: Round) -> Failure | None:
        """The failure that others have declared, or that the signs of life prove."""
        if brought.failure is not None:
            return brought.failure
        for rank, beat in brought.beats.items():
            self.note(rank, beat)
        found = self._lost_neighbour()
        if found is not None or not (brought.is_of_arbiter and brought.beats):
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
        """The last beat of a rank. What a silent one does is not known, but it does not wait."""
        beat, _ = self._beats[rank]
        if not self._is_silent(rank):
            return beat
        age_s = self._silence_s(rank)
        return dataclasses.replace(beat, state=State.SILENT, age_s=age_s, collective="")

    def _silence_s(self, rank: int) -> float:
        """How long a rank has given no new sign of life; 0 for one that is done or not known."""
        if rank not in self._beats or self._is_done(rank):
            return 0.0
        return self._crew.clock.now_s - self._beats[rank][1]

    def _is_done(self, rank: int) -> bool:
        return rank in self._beats and self._beats[rank][0].state is State.DONE

    def _is_silent(self, rank: int) -> bool:
        return self._silence_s(rank) > self._crew.options.beat_timeout_s

    def _with_host_of(self, rank: int) -> list[int]:
        """The ranks on the host of this one, itself included."""
        processes = self._crew.processes
        return [
            other
            for other, process in enumerate(processes)
            if other == rank or process.shares_host(processes[rank])
        ]

    def _lost_neighbour(self) -> Failure | None:
        """The next rank of the ring, if it is on another host that gives no sign of life."""
        rank = (self._crew.rank + 1) % self._crew.num_ranks
        is_here = self._crew.processes[rank].is_on_this_host
        if rank not in self._beats or self._is_done(rank) or is_here:
            return None
        there = [other for other in self._with_host_of(rank) if other in self._beats]
        silence_s = min(self._silence_s(other) for other in there if not self._is_done(other))
        limit_s = self._crew.options.beat_timeout_s
        if self._crew.board.has_strangers:  # who may well hide the signs of life
            limit_s = self._crew.options.outside_timeout_s
        if silence_s <= limit_s:
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
