"""The timeline of a plan with too many items to show one by one: how busy each moment is.

The iteration is divided into equal *bins*. Axes: R lanes, K bins, S stages. Lanes are those of the
page: for each stage its blocks, then its channel's transfers forward and backward.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from pipeplan.cost import Floats, prefix_sums
from pipeplan.report.analysis.items import ALL_REDUCE, BACKWARD, FORWARD, Items
from pipeplan.report.analysis.memory import StageMemory
from pipeplan.simulator import Codes

__all__ = ["TimelineSummary", "summarise"]

MOST_BINS, LEAST_BINS = 4000, 240
WHOLE = 255
"""What a bin that is busy all the time has."""
MOST_VALUES = 2_000_000
"""Lanes times bins; with more lanes there are fewer bins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSummary:
    """How busy each lane is in each bin."""

    num_bins: int
    busy_RK: NDArray[np.uint8]
    """The part of the bin in which the lane is busy, from 0 to `WHOLE`."""
    backward_RK: NDArray[np.uint8]
    """The part of the bin in which the lane runs backwards, likewise."""
    in_flight_SK: Codes | Floats
    """The most microbatches that a stage holds in a bin, or bytes that a group does."""


def summarise(
    items: Items, memory: tuple[StageMemory, ...], iteration_ms: float
) -> TimelineSummary:
    """The summary of a timeline; its size depends on the number of stages alone."""
    num_lanes = 3 * items.num_stages - 2
    is_grouped = items.num_groups < items.num_stages
    num_bins = min(MOST_BINS, max(LEAST_BINS, MOST_VALUES // num_lanes))
    edges_ms = np.linspace(0.0, iteration_ms, num_bins + 1)
    busy = np.zeros((num_lanes, num_bins), dtype=np.uint8)
    backward = np.zeros((num_lanes, num_bins), dtype=np.uint8)
    in_flight = np.zeros((items.num_groups, num_bins), dtype=memory[0].in_flight.dtype)
    for stage in range(items.num_groups):
        lane, blocks = 3 * stage, items.blocks_of(stage)
        kind, start_ms = items.kind_N[blocks], items.start_ms_N[blocks]
        end_ms = items.end_ms_N[blocks]
        busy[lane] = _busy_parts(start_ms, end_ms, edges_ms)
        these = (kind == BACKWARD) | (kind > ALL_REDUCE)
        backward[lane] = _busy_parts(start_ms[these], end_ms[these], edges_ms)
        in_flight[stage] = _most_in_bins(memory[stage], edges_ms)
        if stage + 1 < items.num_stages and not is_grouped:
            for direction in (FORWARD, BACKWARD):
                sent = items.transfers_of(stage, direction)
                busy[lane + 1 + direction] = _busy_parts(
                    items.start_ms_N[sent], items.end_ms_N[sent], edges_ms
                )
    return TimelineSummary(
        num_bins=num_bins, busy_RK=busy, backward_RK=backward, in_flight_SK=in_flight
    )


def _busy_parts(start_ms: Floats, end_ms: Floats, edges_ms: Floats) -> NDArray[np.uint8]:
    """The part of each bin that spans cover; the spans ascend and do not overlap."""
    # The time that was busy before each edge: at a span's start, and at its end, it is known.
    before_ms = prefix_sums(end_ms - start_ms)
    known_ms = np.empty(2 * len(start_ms))
    known_ms[0::2], known_ms[1::2] = start_ms, end_ms
    busy_ms = np.empty(2 * len(start_ms))
    busy_ms[0::2], busy_ms[1::2] = before_ms[:-1], before_ms[1:]
    at_edges_ms = np.interp(edges_ms, known_ms, busy_ms, left=0.0)
    width_ms = edges_ms[1] - edges_ms[0]
    parts = np.clip(np.diff(at_edges_ms) / (width_ms or 1.0), 0.0, 1.0)
    # A lane that is hardly ever busy must not look idle.
    rounded: NDArray[np.uint8] = np.maximum(np.rint(WHOLE * parts), parts > 0).astype(np.uint8)
    return rounded


def _most_in_bins(memory: StageMemory, edges_ms: Floats) -> Codes | Floats:
    """The most that is held in each bin, what is held when it begins included."""
    at_edges = np.searchsorted(memory.times_ms, edges_ms, side="right") - 1
    at_edges[0] = 0  # all that happens at the very start
    most = np.maximum.reduceat(memory.in_flight, at_edges[:-1])  # without the last of each bin
    most = np.maximum(most, memory.in_flight[at_edges[1:]])
    return cast("Codes | Floats", most.astype(memory.in_flight.dtype))
