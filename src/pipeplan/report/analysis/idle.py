"""Where the time of the used devices goes: computing, links, all-reduce, or nothing at all."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeplan.cost import Floats
from pipeplan.report.analysis.items import Items
from pipeplan.report.analysis.waits import SAME_INSTANT_MS
from pipeplan.simulator import Codes

__all__ = ["IdleTimes", "Phase", "Shares", "average_shares", "find_phases", "idle_times"]

FEW = 8
"""With fewer chains than this a plain loop is quicker than arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleTimes:
    """The times in which a stage does nothing, in order; one entry each."""

    start_ms: Floats
    end_ms: Floats
    waited_for: Codes
    """The item that ended the wait; at the end of the iteration the last all-reduce of all."""
    on_links_ms: Floats
    """The part in which the awaited data was on a link, or queued for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of the iteration: warm-up, steady or drain."""

    name: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Where the used devices' time goes; the four add up to 1."""

    compute: float
    communication: float
    """Idle while the awaited data was on a link: communication that no computing hid."""
    all_reduce: float
    bubble: float
    """Idle for any other reason: filling, draining, uneven stages or replicas, the barrier."""


def idle_times(items: Items, waits: Codes, group: int, last_item: int) -> IdleTimes:
    """The idle times of one group, which mostly is a stage."""
    mine = items.blocks_of(group)
    starts_ms = items.start_ms_N[mine]
    free_ms = np.concatenate([[0.0], items.end_ms_N[mine][:-1]])
    these = np.flatnonzero(starts_ms > free_ms + SAME_INSTANT_MS)
    start_ms, end_ms, waited_for = free_ms[these], starts_ms[these], waits[mine][these]
    on_links_ms = _time_on_links(items, waits, start_ms, end_ms, waited_for)
    done_ms, iteration_ms = items.done_ms(group), float(items.end_ms_N[last_item])
    if iteration_ms > done_ms + SAME_INSTANT_MS:
        start_ms, end_ms = np.append(start_ms, done_ms), np.append(end_ms, iteration_ms)
        waited_for = np.append(waited_for, np.int32(last_item))
        on_links_ms = np.append(on_links_ms, 0.0)
    return IdleTimes(
        start_ms=start_ms, end_ms=end_ms, waited_for=waited_for, on_links_ms=on_links_ms
    )


def _time_on_links(
    items: Items, waits: Codes, start_ms: Floats, end_ms: Floats, waited_for: Codes
) -> Floats:
    """For each idle time, how much of it the chain of transfers before its end fills."""
    on_links_ms = np.zeros(len(start_ms))
    which, numbers = np.arange(len(start_ms)), waited_for
    while len(which) >= FEW:
        goes_on = (numbers >= items.first_transfer) & (items.end_ms_N[numbers] > start_ms[which])
        which, numbers = which[goes_on], numbers[goes_on]
        on_links_ms[which] += np.minimum(items.end_ms_N[numbers], end_ms[which]) - np.maximum(
            items.start_ms_N[numbers], start_ms[which]
        )
        numbers = waits[numbers]
    item_start_ms, item_end_ms, waits_item = (
        items.start_ms_N.item,
        items.end_ms_N.item,
        waits.item,
    )
    for index, first in zip(which.tolist(), numbers.tolist(), strict=True):
        from_ms, until_ms, number = float(start_ms[index]), float(end_ms[index]), first
        while number >= items.first_transfer and item_end_ms(number) > from_ms:
            on_links_ms[index] += min(item_end_ms(number), until_ms) - max(
                item_start_ms(number), from_ms
            )
            number = waits_item(number)
    return on_links_ms


def average_shares(weights: Sequence[float], parts: Sequence[Shares]) -> Shares:
    """The shares of several stages together, each with its weight."""

    def average(name: str) -> float:
        values = (getattr(part, name) for part in parts)
        return math.fsum(w * value for w, value in zip(weights, values, strict=True))

    return Shares(
        compute=average("compute"),
        communication=average("communication"),
        all_reduce=average("all_reduce"),
        bubble=average("bubble"),
    )


def find_phases(items: Items, iteration_ms: float) -> tuple[Phase, ...]:
    """Warm-up ends when the last stage begins; drain begins when the last stage is done."""
    mine = items.blocks_of(int(items.group_of_S[-1]))
    of_stage = mine.start + np.flatnonzero(items.place_N[mine] == items.num_stages - 1)
    full_ms, empty_ms = (
        float(items.start_ms_N[of_stage[0]]),
        float(items.end_ms_N[of_stage[-1]]),
    )
    return (
        Phase(name="warm-up", start_ms=0.0, end_ms=full_ms),
        Phase(name="steady", start_ms=full_ms, end_ms=empty_ms),
        Phase(name="drain", start_ms=empty_ms, end_ms=iteration_ms),
    )
