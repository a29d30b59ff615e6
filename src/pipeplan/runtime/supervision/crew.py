"""What the parts of one rank's watchdog share."""

from dataclasses import dataclass
from typing import Any

from pipeplan.documents.text import printable
from pipeplan.runtime.supervision.courier import Courier
from pipeplan.runtime.supervision.options import WatchdogOptions
from pipeplan.runtime.supervision.patient_clock import PatientClock
from pipeplan.runtime.supervision.processes import Process
from pipeplan.runtime.supervision.status_board import Failure, StatusBoard

__all__ = ["Crew", "make_crew"]


@dataclass(slots=True, kw_only=True)
class Crew:
    """This rank, the others, and how it talks with them."""

    rank: int
    processes: list[Process]
    """By rank."""
    rank_names: list[str]
    """What a line calls them besides their number, such as their stage; may be empty."""
    options: WatchdogOptions
    board: StatusBoard
    courier: Courier
    clock: PatientClock

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.processes)

    def name_of(self, rank: int) -> str:
        """How a line names a rank."""
        name = self.rank_names[rank]
        return f"rank {rank} ({name})" if name else f"rank {rank}"

    def line_of(self, failure: Failure) -> str:
        """The line that says why all ranks end."""
        return printable(f"{self.name_of(failure.rank)} {failure.reason}; all ranks end")

    def be_patient(self, options: WatchdogOptions) -> None:
        """Use other limits from now on."""
        self.options, self.clock.beat_s = options, options.beat_s


def make_crew(
    store: Any,
    rank: int,
    processes: list[Process],
    options: WatchdogOptions,
    courier: Courier,
    key: bytes,
    rank_names: list[str] | None = None,
) -> Crew:
    """The crew of one rank, which tell each other what they do through the store."""
    num_ranks = len(processes)
    return Crew(
        rank=rank,
        processes=processes,
        rank_names=rank_names or [""] * num_ranks,
        options=options,
        board=StatusBoard(store, rank, num_ranks, key),
        courier=courier,
        clock=PatientClock(options.beat_s),
    )
