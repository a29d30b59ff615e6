"""What the ranks of a pipeline tell each other through the store.

::

    process/3    which process rank 3 is
    beat/3       its last sign of life, and what it was doing
    failure      the first failure that any rank noticed; never replaced
    speaker      the rank that prints the failure
    read/3       rank 3 knows the failure

All values are signed. Values that somebody else has written are not seen.
"""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from pipeplan.runtime.supervision.processes import Process
from pipeplan.runtime.supervision.signed_store import SignedStore

__all__ = ["INSIDE", "Beat", "Failure", "FailureKind", "State", "Status", "StatusBoard"]

FAILURE, SPEAKER = "failure", "speaker"


class State(StrEnum):
    """What the main thread of a rank does."""

    OUTSIDE = "outside"
    """It runs the program around the pipeline."""
    TOGETHER = "together"
    """It is inside a call that all ranks make; it works there, or waits."""
    COMPUTING = "computing"
    WAITING = "waiting"
    """It waits for another rank."""
    SEEKING = "seeking"
    """It met an error of a connection, and waits until the watchdog finds out who failed."""
    DONE = "done"
    """Its pipeline is closed."""
    SILENT = "silent"
    """It gives no sign of life, though its process runs. No rank says so of itself."""


INSIDE = (State.TOGETHER, State.COMPUTING, State.WAITING, State.SEEKING)
"""It makes a call that all ranks make."""


class FailureKind(StrEnum):
    """How a failure came to be known."""

    NOTICED = "noticed"
    """Somebody saw that a rank died, stopped or hangs."""
    RAISED = "raised"
    """The rank said so itself; its error ends it."""
    INTERRUPTED = "interrupted"
    """The same, for Ctrl-C."""
    MISMATCH = "mismatch"
    """Plan, model and ranks do not fit together. Usually every rank finds that by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why all ranks end."""

    rank: int
    """The rank that failed."""
    reason: str
    """Words that follow the name of the rank."""
    kind: FailureKind = FailureKind.NOTICED


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A sign of life."""

    count: int
    """Grows with each sign."""
    state: State
    doing: str
    age_s: float
    """How long the rank has done this."""
    calls: int = 0
    """How many calls of the pipeline's methods it has begun. All ranks make the same ones."""
    call: str = ""
    """The last of them, such as `step`."""
    where: str = ""
    """The line of the program that it runs."""
    collective: str = ""
    """The collective that it sits in, and the line that called it; empty if none."""
    held_s: float = 0.0
    """How long it has sat there, idle."""
    is_idle: bool = False
    """Whether its main thread does not compute."""


class Status(NamedTuple):
    """What the main thread does; replaced as a whole, so that other threads read it in one.

    This is no dataclass, since every block makes two: tuples are made faster.
    """

    state: State
    doing: Any
    since_s: float
    calls: int
    call: str
    is_first: bool = False
    """Whether it computes the first block of its kind."""


class StatusBoard:
    """One rank's access to what all ranks tell."""

    def __init__(self, store: Any, rank: int, num_ranks: int, key: bytes = b"") -> None:
        self._rank, self._num_ranks, self._key = rank, num_ranks, key
        self.use(store)
        self._newest: dict[int, Beat] = {}

    def use(self, store: Any) -> None:
        """Talk through this store from now on."""
        self._store = store
        self._signed = SignedStore(store, self._key)

    @property
    def has_strangers(self) -> bool:
        """Whether somebody else writes to the store."""
        return self._signed.has_strangers

    def write_process(self) -> None:
        """Tell which process this rank is."""
        self._signed.write(f"process/{self._rank}", Process.this_one().to_json())

    def exchange_processes(self) -> list[Process]:
        """Tell which process this rank is; the processes of all ranks."""
        self.write_process()
        names = [f"process/{rank}" for rank in range(self._num_ranks)]
        self._store.wait(names)
        return [Process.from_json(text or "{}") for text in self._signed.read_all(names)]

    def write_beat(self, beat: Beat) -> None:
        """Show a sign of life of this rank."""
        self._signed.write(f"beat/{self._rank}", json.dumps(asdict(beat)))

    def read_beat(self, rank: int) -> Beat | None:
        """The last sign of life of a rank; None before its first."""
        return self._newer(rank, self._signed.read(f"beat/{rank}"))

    def read_beats(self) -> list[Beat]:
        """The last signs of life of all ranks; none until all have given one."""
        texts = self._signed.read_all([f"beat/{rank}" for rank in range(self._num_ranks)])
        beats = [self._newer(rank, text) for rank, text in enumerate(texts)]
        return [beat for beat in beats if beat is not None] if None not in beats else []

    def _newer(self, rank: int, text: str | None) -> Beat | None:
        """The beat in the text, unless a newer one was read before."""
        beat, newest = _beat_from(text), self._newest.get(rank)
        if beat is not None and (newest is None or beat.count > newest.count):
            self._newest[rank] = beat
        return self._newest.get(rank)

    def declare(self, failure: Failure) -> Failure:
        """Write the failure, unless there is one already; the one that is there now."""
        text = self._signed.write_first(FAILURE, json.dumps(asdict(failure)))
        return _failure_from(text) or failure

    def read_failure(self) -> Failure | None:
        """The first failure; None while there is none."""
        return _failure_from(self._signed.read(FAILURE))

    def become_speaker(self) -> bool:
        """Whether this rank prints the failure: the first one that asks does."""
        return self._signed.write_first(SPEAKER, str(self._rank)) == str(self._rank)

    def mark_read(self) -> None:
        """Tell that this rank knows the failure and does not need the store any more."""
        self._signed.write(f"read/{self._rank}", "yes")

    def has_read(self, rank: int) -> bool:
        """Whether a rank knows the failure."""
        return self._signed.read(f"read/{rank}") is not None


def _beat_from(text: str | None) -> Beat | None:
    """The beat in a text; None if there is none, or if somebody else wrote the text."""
    if text is None:
        return None
    try:
        fields = json.loads(text)
        return Beat(
            count=int(fields["count"]),
            state=State(fields["state"]),
            doing=str(fields["doing"]),
            age_s=float(fields["age_s"]),
            calls=int(fields["calls"]),
            call=str(fields["call"]),
            where=str(fields["where"]),
            collective=str(fields["collective"]),
            held_s=float(fields["held_s"]),
            is_idle=bool(fields["is_idle"]),
        )
    except (ValueError, KeyError, TypeError):
        return None


def _failure_from(text: str | None) -> Failure | None:
    if text is None:
        return None
    try:
        fields = json.loads(text)
        kind = FailureKind(fields["kind"])
        return Failure(rank=int(fields["rank"]), reason=str(fields["reason"]), kind=kind)
    except (ValueError, KeyError, TypeError):
        return None
