"""What the ranks of a pipeline tell each other through the store.

::

    process/3    which process rank 3 is
    beat/3       its last sign of life, and what it was doing
    failure      the first failure that any rank noticed; never replaced
    speaker      the rank that prints the failure
    read/3       rank 3 knows the failure
"""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from pipeplan.runtime.supervision.processes import Process

__all__ = ["Beat", "Failure", "FailureKind", "State", "StatusBoard"]

FAILURE, SPEAKER = "failure", "speaker"


class State(StrEnum):
    """What the main thread of a rank does."""

    OUTSIDE = "outside"
    """It runs the program around the pipeline."""
    COMPUTING = "computing"
    WAITING = "waiting"
    """It waits for another rank."""
    SEEKING = "seeking"
    """It met an error of a connection, and waits until the watchdog finds out who failed."""
    DONE = "done"
    """Its pipeline is closed."""


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
    """Makes each sign different from the one before."""
    state: State
    doing: str
    age_s: float
    """How long the rank has done this."""


class StatusBoard:
    """One rank's access to what all ranks tell."""

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self._store, self._rank, self._num_ranks = store, rank, num_ranks

    def exchange_processes(self) -> list[Process]:
        """Tell which process this rank is; the processes of all ranks."""
        self._store.set(f"process/{self._rank}", Process.this_one().to_json())
        return [
            Process.from_json(self._store.get(f"process/{rank}")) for rank in range(self._num_ranks)
        ]

    def write_beat(self, beat: Beat) -> None:
        """Show a sign of life of this rank."""
        self._store.set(f"beat/{self._rank}", json.dumps(asdict(beat)))

    def read_beat(self, rank: int) -> Beat | None:
        """The last sign of life of a rank; None before its first."""
        key = f"beat/{rank}"
        return _beat_from(self._store.get(key)) if self._store.check([key]) else None

    def read_beats(self) -> list[Beat]:
        """The last signs of life of all ranks; none until all have given one."""
        keys = [f"beat/{rank}" for rank in range(self._num_ranks)]
        if not self._store.check(keys):
            return []
        return [_beat_from(text) for text in self._store.multi_get(keys)]

    def declare(self, failure: Failure) -> None:
        """Write the failure, unless there is one already."""
        self._store.compare_set(FAILURE, "", json.dumps(asdict(failure)))

    def read_failure(self) -> Failure | None:
        """The first failure; None while there is none."""
        if not self._store.check([FAILURE]):
            return None
        fields = json.loads(self._store.get(FAILURE))
        return Failure(
            rank=fields["rank"], reason=fields["reason"], kind=FailureKind(fields["kind"])
        )

    def become_speaker(self) -> bool:
        """Whether this rank prints the failure: the first one that asks does."""
        mine = str(self._rank).encode()
        return bool(self._store.compare_set(SPEAKER, "", mine.decode()) == mine)

    def mark_read(self) -> None:
        """Tell that this rank knows the failure and does not need the store any more."""
        self._store.set(f"read/{self._rank}", "yes")

    def has_read(self, rank: int) -> bool:
        """Whether a rank knows the failure."""
        return bool(self._store.check([f"read/{rank}"]))


def _beat_from(text: bytes) -> Beat:
    fields = json.loads(text)
    return Beat(
        count=fields["count"],
        state=State(fields["state"]),
        doing=fields["doing"],
        age_s=fields["age_s"],
    )
