"""From measured times to the figures of a cluster file: latencies, bandwidths, uplinks.

A message of n bytes and its short answer take t(n) = n / bandwidth + two latencies. So the latency
is half of what the shortest message takes, and the bandwidth is the slope. Medians count.

A card is what all flows of a host reach together while all of them are under way. If they reach
what they reach one by one, nothing is shared.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeplan.shared_links import SharedLink, Uplinks
from pipeplan.validation import BANDWIDTH_GB_PER_S, LATENCY_US

__all__ = ["UNSHARED", "Cards", "Flow", "LinkFigures", "cards_of", "combined_gb_per_s", "fit_link"]

BYTES_IN_GB = 1e9
US_IN_S = 1e6
DIGITS = 4
UNSHARED = 0.95
"""Flows that reach this part of what they reach one by one share nothing."""
ALIKE = 0.05
"""Figures that differ by this part count as the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigures:
    """One direction of a pair."""

    latency_us: float
    gb_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Messages of equal size that have arrived one after another."""

    num_bytes: int
    """Of each message."""
    arrivals_s: tuple[float, ...]
    """By clocks that began together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cards:
    """What hosts share, as a cluster file says it."""

    uplinks: Uplinks = None
    shared: tuple[SharedLink, ...] = ()


def fit_link(small_s: Sequence[float], large_s: Sequence[float], num_bytes: int) -> LinkFigures:
    """The figures, from the times of the shortest messages and of messages of `num_bytes`."""
    shortest = statistics.median(small_s)
    longest = statistics.median(large_s)
    # Where messages are too short to tell, their time is all that is known.
    slope_s = longest - shortest if longest > shortest else longest
    return LinkFigures(
        latency_us=_within(shortest / 2 * US_IN_S, LATENCY_US.least, LATENCY_US.most),
        gb_per_s=_within(
            num_bytes / max(slope_s, 1e-12) / BYTES_IN_GB,
            BANDWIDTH_GB_PER_S.least,
            BANDWIDTH_GB_PER_S.most,
        ),
    )


def _within(number: float, least: float, most: float) -> float:
    return float(f"{min(max(number, least), most):.{DIGITS}g}")


def combined_gb_per_s(flows: Sequence[Flow]) -> float:
    """What flows carry together while all of them are under way."""
    begin_s = max(flow.arrivals_s[0] for flow in flows)
    end_s = min(flow.arrivals_s[-1] for flow in flows)
    if end_s <= begin_s:  # one had ended before another one began: they were never together
        return max(_carried(flow, *flow.arrivals_s[:: len(flow.arrivals_s) - 1]) for flow in flows)
    return sum(_carried(flow, begin_s, end_s) for flow in flows)


def _carried(flow: Flow, begin_s: float, end_s: float) -> float:
    """GB/s of one flow between two moments; bytes come evenly between two arrivals."""
    num_messages = _messages_until(flow, end_s) - _messages_until(flow, begin_s)
    return num_messages * flow.num_bytes / (end_s - begin_s) / BYTES_IN_GB


def _messages_until(flow: Flow, moment_s: float) -> float:
    before = 0
    for index, arrival_s in enumerate(flow.arrivals_s):
        if arrival_s > moment_s:
            if not index:
                return 0.0
            since_s = moment_s - flow.arrivals_s[index - 1]
            return before + since_s / (arrival_s - flow.arrivals_s[index - 1])
        before = index + 1
    return float(before)


def cards_of(
    together: Mapping[tuple[str, bool], float], one_by_one: Mapping[tuple[str, bool], float]
) -> Cards:
    """The cards of hosts, by host and whether outward: GB/s at once, and the sum of single flows.

    A host whose flows do not slow each other has none. If a card sends and receives at different
    rates, it is a shared link of its own.
    """
    uplinks: dict[str, float] = {}
    shared: list[SharedLink] = []
    for host in dict.fromkeys(host for host, _ in together):
        both = together[host, True], together[host, False]
        alone = one_by_one[host, True], one_by_one[host, False]
        if all(a >= UNSHARED * b for a, b in zip(both, alone, strict=True)):
            continue
        out, into = (_within(each, 1e-6, BANDWIDTH_GB_PER_S.most) for each in both)
        if abs(out - into) <= ALIKE * max(out, into):
            uplinks[host] = _within((out + into) / 2, 1e-6, BANDWIDTH_GB_PER_S.most)
        else:
            name = f"card of {host}"
            shared.append(SharedLink(name=name, members=(host,), gb_per_s=out, in_gb_per_s=into))
    return Cards(uplinks=uplinks or None, shared=tuple(shared))
