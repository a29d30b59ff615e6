"""Decides, from the last signs of life of all ranks, who is to blame or who is waited for.

All ranks have to make the same calls (`step`, `evaluate`, `save`, ...) in the same order. So calls
are numbered, and the numbers tell who is behind::

    rank 0   step 1   step 2   step 3 ......... waits
    rank 1   step 1   step 2   barrier ........ sits in a collective that nobody else comes to
    rank 2   step 1   step 2   step 3 ......... waits
    rank 3   step 1   step 2   evaluate ....... its third call is another one

    another call     certain as soon as all have come to it
    closed           certain at once, if another rank is in a later call
    stuck            all that do not wait in the pipeline have sat in a collective outside of it for
                     `beat_timeout_s`: nobody is left to come
    silent           native code keeps Python from its watchdog; it is busy, and waits for nobody
    busy             anything else; a line every `notice_s`, and `outside_timeout_s` as the limit
    deadlock         all wait in the pipeline
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeplan.runtime.supervision.options import WatchdogOptions
from pipeplan.runtime.supervision.status_board import INSIDE, Beat, Failure, State

__all__ = ["Waiting", "judge"]

MAX_LISTED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Ranks wait for one that is busy; nobody is to blame yet."""

    rank: int
    """The rank that is waited for."""
    wait_s: float
    """How long the others have waited."""
    what: str
    """What it does, in words that follow its name."""


def judge(beats: Sequence[Beat], options: WatchdogOptions) -> Failure | Waiting | None:
    """The failure that the beats prove; or who is waited for; None if all is well."""
    found = _other_call(beats, options.beat_timeout_s / 3) or _closed(beats)
    if found is not None or any(beat.state is State.SEEKING for beat in beats):
        return found  # where a connection broke, the reason is about to be found
    return _absent(beats, options)


def _other_call(beats: Sequence[Beat], patience_s: float) -> Failure | None:
    """A rank whose call is not the one that most others make.

    Who are most is known when all ranks have come to that call, or have been waited for.
    """
    fewest = min(beat.calls for beat in beats)
    by_number: dict[int, dict[str, list[int]]] = {}
    for rank, beat in enumerate(beats):
        if beat.calls:
            by_number.setdefault(beat.calls, {}).setdefault(beat.call, []).append(rank)
    for number, by_name in by_number.items():
        ranks = [rank for named in by_name.values() for rank in named]
        is_settled = number == fewest or min(beats[rank].age_s for rank in ranks) > patience_s
        if len(by_name) > 1 and is_settled:
            # Training is what ranks usually do. So between equally many, the others are named.
            usual = max(by_name, key=lambda name: (len(by_name[name]), name == "step", name))
            other = min(name for name in by_name if name != usual)
            return Failure(
                rank=by_name[other][0],
                reason=f"calls {other} where {_listed(by_name[usual])} {usual} (call {number} of"
                " the pipeline); all ranks have to make the same calls in the same order",
            )
    return None


def _closed(beats: Sequence[Beat]) -> Failure | None:
    """A rank that has closed its pipeline though another one is in a later call."""
    latest = max(range(len(beats)), key=lambda rank: (_is_inside(beats[rank]), beats[rank].calls))
    if not _is_inside(beats[latest]):
        return None
    for rank, beat in enumerate(beats):
        if beat.state is State.DONE and beat.calls < beats[latest].calls:
            what = f"{beat.doing or 'closed its pipeline'} after call {beat.calls}"
            return Failure(
                rank=rank,
                reason=f"{what}, but rank {latest} is in {_call(beats[latest])};"
                " all ranks have to take the same number of steps",
            )
    return None


def _absent(beats: Sequence[Beat], options: WatchdogOptions) -> Failure | Waiting | None:
    """A rank that others wait for."""
    waits_s = {rank: _wait_s(beat) for rank, beat in enumerate(beats)}
    waiting = {rank: wait_s for rank, wait_s in waits_s.items() if wait_s is not None}
    if not waiting:
        return None
    others = [
        rank
        for rank, beat in enumerate(beats)
        if rank not in waiting and beat.state is not State.DONE
    ]
    if not others:
        return _deadlock(beats, waiting, options)
    first = min(waiting)
    limit_s = min(options.beat_timeout_s, options.outside_timeout_s)
    stuck = [rank for rank in others if beats[rank].collective]
    if stuck == others and min(beats[rank].held_s for rank in others) > limit_s:
        return Failure(
            rank=stuck[0],
            reason=f"sits in {beats[stuck[0]].collective}, outside of the pipeline, while rank"
            f" {first} waits in {_call(beats[first])}; all ranks have to take the same steps",
        )
    wait_s = max(waiting.values())
    behind = min(
        others, key=lambda rank: (beats[rank].calls, rank in stuck, -beats[rank].age_s, rank)
    )
    what, limit_s = _activity(beats[behind], options)
    age_s = beats[behind].age_s
    if beats[behind].state is not State.COMPUTING and min(wait_s, age_s) > limit_s:
        remedy = f"if that may take longer, raise outside_timeout_s ({limit_s:g} s)"
        what = what.removeprefix("is ")
        reason = f"hangs: {what} for {age_s:.0f} s while others wait; {remedy}"
        return Failure(rank=behind, reason=reason)
    return Waiting(rank=behind, wait_s=wait_s, what=f"{what} for {age_s:.0f} s")


def _deadlock(
    beats: Sequence[Beat], waiting: Mapping[int, float], options: WatchdogOptions
) -> Failure | None:
    """All ranks wait for each other."""
    are_idle, wait_s = all(beats[rank].is_idle for rank in waiting), min(waiting.values())
    limit_s = 2 * options.hang_timeout_s if are_idle else options.outside_timeout_s
    if len(beats) < 2 or wait_s <= limit_s:
        return None
    behind = min(waiting, key=lambda rank: (beats[rank].calls, rank))
    return Failure(
        rank=behind,
        reason=f"and all others have waited for each other for {wait_s:.0f} s, it in"
        f" {_call(beats[behind])} {beats[behind].doing}".rstrip()
        + "; if a message may take longer, raise hang_timeout_s",
    )


def _wait_s(beat: Beat) -> float | None:
    """How long a rank has waited inside of the pipeline; None if it does something else."""
    if beat.state is State.WAITING:
        return beat.age_s
    return beat.held_s if beat.state is State.TOGETHER and beat.collective else None


def _activity(beat: Beat, options: WatchdogOptions) -> tuple[str, float]:
    """What a busy rank does, and how long it may."""
    at = f" ({beat.where})" if beat.where else ""
    if beat.state is State.COMPUTING:
        return f"has computed {beat.doing}", options.first_block_timeout_s
    if beat.state is State.SILENT:
        seen = f" (last seen at {beat.where})" if beat.where else ""
        return f"runs, but gives no sign of life{seen}", options.outside_timeout_s
    if beat.state is State.TOGETHER:
        return f"has been busy in {beat.call}{at}", options.outside_timeout_s
    if beat.collective:
        return f"is outside of step in {beat.collective}", options.outside_timeout_s
    return f"is outside of step{at}", options.outside_timeout_s


def _is_inside(beat: Beat) -> bool:
    return beat.state in INSIDE


def _call(beat: Beat) -> str:
    return f"{beat.call} (call {beat.calls})"


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:MAX_LISTED])) + (", ..." if len(ranks) > MAX_LISTED else "")
    return f"rank {shown} calls" if len(ranks) == 1 else f"ranks {shown} call"
