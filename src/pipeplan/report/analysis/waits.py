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

from pipeplan.report.analysis.items import BACKWARD, FORWARD, NOTHING, Items
from pipeplan.simulator import Codes

__all__ = ["SAME_INSTANT_MS", "follow_back", "waited_for"]

SAME_INSTANT_MS = 1e-9
"""Times this close are one instant, as in the cost model."""


def waited_for(items: Items, *, half_duplex: bool) -> Codes:
    """For each item the number of the one that it waited for, or `NOTHING`."""
    waits = np.full(len(items), NOTHING, dtype=np.int32)
    for stage in range(items.num_stages):
        _set_block_waits(items, stage, waits)
    for lane in _channel_lanes(items, half_duplex):
        _set_transfer_waits(items, lane, waits)
    num_blocks = 2 * items.num_microbatches
    lasts = np.arange(num_blocks - 1, items.first_transfer, num_blocks, dtype=np.int32)
    waits[items.first_all_reduce :] = lasts
    return waits


def _set_block_waits(items: Items, stage: int, waits: Codes) -> None:
    """A block waits for the block before it, or for the transfer that brings its input."""
    mine = items.blocks_of(stage)
    kind, microbatch = items.kind_N[mine], items.microbatch_N[mine]
    previous = np.arange(mine.start - 1, mine.stop - 1, dtype=np.int32)
    previous_end_ms = items.end_ms_N[previous]
    previous[0], previous_end_ms[0] = NOTHING, -np.inf
    waits[mine] = previous
    for direction, channel in ((FORWARD, stage - 1), (BACKWARD, stage)):
        if not 0 <= channel < items.num_stages - 1:
            continue  # the first stage makes its input; the last turns forwards round
        these = np.flatnonzero(kind == direction)
        arrival = items.transfer_number_2CM[direction, channel, microbatch[these]]
        later = items.end_ms_N[arrival] > previous_end_ms[these] + SAME_INSTANT_MS
        waits[mine.start + these[later]] = arrival[later]


def _channel_lanes(items: Items, half_duplex: bool) -> Iterator[Codes]:
    """The transfers that exclude each other, in the order in which they are sent."""
    for channel in range(items.num_stages - 1):
        there, back = (
            np.arange(lane.start, lane.stop, dtype=np.int32)
            for lane in (
                items.transfers_of(channel, FORWARD),
                items.transfers_of(channel, BACKWARD),
            )
        )
        if half_duplex:
            both = np.concatenate([there, back])
            yield both[np.lexsort((items.end_ms_N[both], items.start_ms_N[both]))]
        else:
            yield there
            yield back


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
