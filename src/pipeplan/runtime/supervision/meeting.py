"""Where the ranks of a pipeline meet, and begin to watch over each other."""

import itertools
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.supervision.ending import print_line
from pipeplan.runtime.supervision.gathering import Gathering, gather
from pipeplan.runtime.supervision.options import WatchdogOptions
from pipeplan.runtime.supervision.watchdog import Watchdog
from pipeplan.splitting.torch_private import default_store

__all__ = [
    "Meeting",
    "confirm",
    "keep_for_pipeline",
    "meet",
    "meet_at_default_store",
    "watch_over",
]

_NUMBERS = itertools.count()
"""Numbers the gatherings that this process takes part in. All ranks take part in the same ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Ranks that watch over each other."""

    gathering: Gathering
    watchdog: Watchdog


_UNUSED: list[Meeting] = []
"""The meeting of `join_ranks`, until the first pipeline uses it."""


def meet(options: WatchdogOptions) -> Meeting:
    """The ranks that make a pipeline: those that `join_ranks` has joined, or all that come now."""
    if _UNUSED:
        meeting = _UNUSED.pop()
        meeting.watchdog.be_patient(options)
        return meeting
    gathering = meet_at_default_store(options)
    return Meeting(gathering=gathering, watchdog=watch_over(gathering, dist.get_rank(), options))


def keep_for_pipeline(meeting: Meeting) -> None:
    """Let the next pipeline use this meeting, instead of one that was kept before."""
    while _UNUSED:
        _UNUSED.pop().watchdog.close("joined other ranks")
    _UNUSED.append(meeting)


def meet_at_default_store(options: WatchdogOptions) -> Gathering:
    """Wait for all ranks of the default process group."""
    name, store = f"pipeplan/gathering/{next(_NUMBERS)}", default_store()

    def open_store() -> Any:
        return dist.PrefixStore(name, store.clone())  # type: ignore[attr-defined]

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    return gather(open_store, rank, num_ranks, "make their pipeline", options)


def watch_over(gathering: Gathering, rank: int, options: WatchdogOptions) -> Watchdog:
    """Watch over the ranks that have gathered."""
    return Watchdog(
        gathering.store,
        rank,
        [""] * len(gathering.processes),
        options,
        key=gathering.key,
        processes=gathering.processes,
        courier=gathering.courier,
    )


def confirm(gathering: Gathering) -> None:
    """Make sure that all ranks have gathered; rank 0 says in one line if they share no secret.

    This goes through the ranks' own connections, and not through the store, to which others may
    write.

    Raises:
        RuntimeMismatchError: somebody else has written to the store.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (gathering.name, gathering.proof))
    proofs = [proof for _, proof in everyone]
    is_shared = all(proof == gathering.proof != "" for proof in proofs)
    if len({name for name, _ in everyone}) > 1 or (is_shared and not gathering.key):
        raise RuntimeMismatchError(
            "ranks: they have read different texts in the store, so somebody else writes to it;"
            " keep its port inside a network that you trust, and start again"
        )
    if not is_shared and dist.get_rank() == 0:
        others = [rank for rank, proof in enumerate(proofs) if proof != proofs[0]]
        problem = gathering.problem or f"rank {others[0]} has another secret than rank 0"
        print_line(
            f"this run is unprotected: {problem}; whoever reaches the store's port can end it;"
            " set PIPEPLAN_SECRET to the same value on all hosts"
        )
