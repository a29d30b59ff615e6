"""The one item that each item waited for: the last to end of all that it needed.

Two stages, F and a transfer take 1, B takes 2::

    stage 0  F0 F1 .  .  .  .  B0 B0 .  B1 B1
    there    .  f0 f1
    back     .  .  .  .  .  b0 .  .  b1
    stage 1  .  .  F0 B0 B0 F1 B1 B1

B1 on stage 0 waited for b1. b1 waited for B1 on stage 1, and that one for F1 before it. Followed
back to the start this is the critical path. Its lengths add up to the iteration.
"""

from collections.abc import Iterator

import numpy as np

from pipeplan.report.analysis.items import BACKWARD, FORWARD, INPUT, NOTHING, Items
from pipeplan.simulator import Codes

__all__ = ["SAME_INSTANT_MS", "follow_back", "waited_for"]

SAME_INSTANT_MS = 1e-9
"""Times this close are one instant, as in the cost model."""


def waited_for(items: Items, *, half_duplex: bool) -> Codes:
    """For each item the number of the one that it waited for, or `NOTHING`."""
    waits = np.full(len(items), NOTHING, dtype=np.int32)
    for group in range(items.num_groups):
        _set_block_waits(items, group, waits)
        _set_reduce_waits(items, group, waits)
    for lane in _channel_lanes(items, half_duplex):
        _set_transfer_waits(items, lane, waits)
    return waits


def _set_block_waits(items: Items, group: int, waits: Codes) -> None:
    """A block waits for the block before it, or for the transfer that brings its input."""
    mine = items.blocks_of(group)
    kind, microbatch, stage = items.kind_N[mine], items.microbatch_N[mine], items.place_N[mine]
    previous = np.arange(mine.start - 1, mine.stop - 1, dtype=np.int32)
    previous_end_ms = items.end_ms_N[previous]
    previous[0], previous_end_ms[0] = NOTHING, -np.inf
    waits[mine] = previous
    for direction, channel in ((FORWARD, stage - 1), (BACKWARD, stage)):
        runs = (kind == FORWARD) if direction == FORWARD else (kind == BACKWARD) | (kind == INPUT)
        # The first stage makes its input; the last turns forwards round.
        these = np.flatnonzero(runs & (channel >= 0) & (channel < items.num_stages - 1))
        if not len(these):
            continue
        arrival = items.transfer_number_2CM[direction, channel[these], microbatch[these]]
        later = items.end_ms_N[arrival] > previous_end_ms[these] + SAME_INSTANT_MS
        later &= arrival != NOTHING  # inside a group nothing is sent
        waits[mine.start + these[later]] = arrival[later]


def _set_reduce_waits(items: Items, group: int, waits: Codes) -> None:
    """An all-reduce waits for the last block of its stage, or for the ring to become free."""
    mine = items.blocks_of(group)
    before = NOTHING
    for number in items.reduces_of(group).tolist():
        stage = items.place_N[number]
        last = mine.start + int(np.flatnonzero(items.place_N[mine] == stage)[-1])
        is_first = number == items.parts_of(int(stage)).start
        starts_ms = items.start_ms_N[number]
        queued = before != NOTHING and items.end_ms_N[before] >= starts_ms - SAME_INSTANT_MS
        ready_ms = items.end_ms_N[last] if is_first else starts_ms
        held = queued and (not is_first or items.end_ms_N[before] > ready_ms + SAME_INSTANT_MS)
        waits[number] = before if held else last
        before = number


def _channel_lanes(items: Items, half_duplex: bool) -> Iterator[Codes]:
    """The transfers that exclude each other, in the order in which they are sent."""
    lanes: dict[tuple[int, int], list[Codes]] = {}
    for channel in range(items.num_stages - 1):
        ends = int(items.group_of_S[channel]), int(items.group_of_S[channel + 1])
        for direction, pair in ((FORWARD, ends), (BACKWARD, ends[::-1])):
            lane = items.transfers_of(channel, direction)
            key = (min(pair), max(pair)) if half_duplex else pair
            if lane.stop > lane.start:
                lanes.setdefault(key, []).append(np.arange(lane.start, lane.stop, dtype=np.int32))
    for parts in lanes.values():
        if len(parts) == 1:
            yield parts[0]
        else:
            both = np.concatenate(parts)
            yield both[np.lexsort((items.end_ms_N[both], items.start_ms_N[both]))]


def _set_transfer_waits(items: Items, lane: Codes, waits: Codes) -> None:
    """A transfer waits for the block that made its data, or for the channel to become free."""
    kind, channel = items.kind_N[lane], items.place_N[lane]
    maker = items.block_number_2SM[kind, channel + kind, items.microbatch_N[lane]]
    start_ms, end_ms = items.start_ms_N[lane], items.end_ms_N[lane]
    # The holder is the last transfer before that kept the channel busy for any time.
    long_enough = end_ms - start_ms > SAME_INSTANT_MS
    positions = np.where(long_enough, np.arange(len(lane)), -1)
    holder = np.concatenate([[-1], np.maximum.accumulate(positions)[:-1]])
    holder_end_ms = np.where(holder >= 0, end_ms[holder], -np.inf)
    queued = (items.end_ms_N[maker] + SAME_INSTANT_MS < holder_end_ms) & (
        holder_end_ms <= start_ms + SAME_INSTANT_MS
    )
    waits[lane] = np.where(queued, lane[holder], maker)


def follow_back(waits: Codes, last: int) -> Codes:
    """The items from the start of the iteration to `last`: each waited for the one before it.

    This ends, because waiting leads back in time or along an order that has no circle.
    """
    path = [last]
    item = waits.item
    while (number := item(path[-1])) != NOTHING:
        path.append(number)
    return np.array(path[::-1], dtype=np.int32)
