"""How busy shared links are over time, and which transfers slow each other there.

The simulator records when flows change their rates. What a link carries is the sum over its flows.
A transfer is slowed if it takes longer than it would alone. It is slowed by the transfer or
all-reduce that used a full link together with it for the longest time.
"""

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from pipeplan import _core
from pipeplan.cost import BYTES_PER_MS_IN_GB_PER_S, Floats, PipelineCosts
from pipeplan.group_costs import GroupCosts
from pipeplan.pipeline import GroupTimeline, Plan
from pipeplan.report.analysis.items import BACKWARD, FORWARD, NOTHING, Items
from pipeplan.simulator import Codes

__all__ = [
    "MAX_USE_CHANGES",
    "LinkUse",
    "SharedUse",
    "Slowing",
    "costs_as_run",
    "shared_use",
    "shared_use_of_groups",
]

FULL = 1 - 1e-6
"""The part of its capacity from which on a link counts as full."""
WORTH_A_WORD = 1e-3
"""A transfer counts as slowed if it takes longer by more than this part of its own time."""
MAX_USE_CHANGES = 100_000
"""Of all links together, in a trace."""
MAX_SLOWED_ITEMS = 200_000
"""In a plan with more transfers nobody looks for the ones that slow each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """One direction of a shared link."""

    name: str
    is_out: bool
    """Whether it is what the members send; else what they receive."""
    devices: frozenset[int]
    gb_per_s: float
    times_ms: Floats
    """When the use changes; the first time is 0."""
    used: Floats
    """The part of the capacity in use from each time on."""
    busy: float
    """The mean of that over the iteration."""
    full: float
    """The part of the iteration in which the link is full."""

    @property
    def direction(self) -> str:
        """The direction in a word."""
        return "out" if self.is_out else "in"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowing:
    """Why a transfer or an all-reduce takes longer than alone."""

    by: int
    """The number of the item that shared a full link with it for the longest time."""
    link: int
    """Which of the used links that was."""
    more_ms: float
    """How much longer than alone it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedUse:
    """All shared links that carry something, and all items that they slow."""

    links: tuple[LinkUse, ...]
    slowed: dict[int, Slowing]
    """By the numbers of the items."""

    def busiest(self, most_changes: int) -> list[LinkUse]:
        """The busiest links, as many as have so many changes of their use together."""
        chosen = []
        for link in sorted(self.links, key=lambda link: -link.busy):
            most_changes -= len(link.times_ms)
            if most_changes < 0:
                break
            chosen.append(link)
        return chosen


def shared_use(plan: Plan, costs: PipelineCosts, order_SM2: Codes, items: Items) -> SharedUse:
    """How the plan's iteration uses its shared links; nothing where there are none."""
    if costs.flows is None:
        return SharedUse(links=(), slowed={})
    changes = _core.rate_changes(costs.for_kernels(), order_SM2)
    alone_ms = _alone_ms(costs, costs.all_reduce_ms_S, items)
    return _use(plan, costs.flows.groups(), changes, alone_ms, items)


def shared_use_of_groups(
    plan: Plan, costs: GroupCosts, timeline: GroupTimeline, items: Items
) -> SharedUse:
    """The same of a plan with several stages a group."""
    if costs.flows is None:
        return SharedUse(links=(), slowed={})
    sizes = np.diff(timeline.first_block_G1).tolist()
    changes = _core.group_rate_changes(
        costs.for_kernels(), items.num_microbatches, timeline.code_N, sizes
    )
    alone_ms = _alone_ms(costs, costs.part_ms_S, items)
    return _use(plan, costs.flows.groups(), changes, alone_ms, items)


def _use(
    plan: Plan,
    groups: list[tuple[int, int, float, float, list[int]]],
    changes: tuple[Floats, Codes, Floats],
    alone_ms: Floats,
    items: Items,
) -> SharedUse:
    """From groups of flows and the changes of their rates to links and who slows whom."""
    times_ms, group_E, rate_E = changes
    rises_E = _rises(group_E, rate_E) * np.array([count for _, count, *_ in groups] or [0])[group_E]
    groups_of: dict[int, list[int]] = defaultdict(list)
    transfers_of: dict[int, set[int]] = defaultdict(set)
    for number, (transfer, _, _, _, its_sides) in enumerate(groups):
        for side in its_sides:
            groups_of[side].append(number)
            transfers_of[side].add(transfer)
    iteration_ms = float(items.end_ms_N.max(initial=0.0)) or 1.0
    links: list[LinkUse] = []
    sides: list[int] = []
    for side in sorted(groups_of):
        chosen = np.isin(group_E, groups_of[side])
        if chosen.any():
            links.append(_link_use(plan, side, times_ms[chosen], rises_E[chosen], iteration_ms))
            sides.append(side)
    users = [sorted(transfers_of[side]) for side in sides]
    return SharedUse(links=tuple(links), slowed=_slowed(alone_ms, items, links, users))


def costs_as_run(costs: PipelineCosts, items: Items) -> PipelineCosts:
    """The same costs, with the times that transfers took in the mean, where links are shared.

    Inside a group nothing is sent. The parts of an all-reduce count together.
    """
    lengths_ms = items.end_ms_N - items.start_ms_N
    sent_ms_2CM = np.where(
        items.transfer_number_2CM == NOTHING, 0.0, lengths_ms[items.transfer_number_2CM]
    )
    mean_ms_2C = sent_ms_2CM.mean(axis=2)
    parts = [items.parts_of(stage) for stage in range(items.num_stages)]
    return replace(
        costs,
        send_forward_ms_C=mean_ms_2C[FORWARD],
        send_backward_ms_C=mean_ms_2C[BACKWARD],
        all_reduce_ms_S=np.array([lengths_ms[each].sum() for each in parts]),
    )


def _rises(group_E: Codes, rate_E: Floats) -> Floats:
    """By how much each event changes the rate of its group."""
    order = np.argsort(group_E, kind="stable")
    rises = np.diff(rate_E[order], prepend=0.0)
    first = np.diff(group_E[order], prepend=-1) != 0
    rises[first] = rate_E[order][first]
    result = np.empty_like(rises)
    result[order] = rises
    return result


def _link_use(
    plan: Plan, side: int, times_ms: Floats, rises: Floats, iteration_ms: float
) -> LinkUse:
    link, is_out = plan.cluster.links[side // 2], side % 2 == 0
    gb_per_s = link.out_gb_per_s if is_out else link.in_gb_per_s
    used = np.cumsum(rises) / (gb_per_s * BYTES_PER_MS_IN_GB_PER_S)
    # Of several changes at one instant only the last one counts.
    last = np.append(np.diff(times_ms) > 1e-9, True)
    times_ms, used = np.append(0.0, times_ms[last]), np.append(0.0, used[last])
    used = np.clip(used, 0.0, 1.0)
    used[used < 1e-9] = 0.0
    changes = np.append(True, np.abs(np.diff(used)) > 1e-9)
    times_ms, used = times_ms[changes], used[changes]
    lengths_ms = np.diff(times_ms, append=max(iteration_ms, times_ms[-1]))
    return LinkUse(
        name=link.name,
        is_out=is_out,
        devices=link.devices,
        gb_per_s=gb_per_s,
        times_ms=times_ms,
        used=used,
        busy=float((used * lengths_ms).sum()) / iteration_ms,
        full=float(lengths_ms[used >= FULL].sum()) / iteration_ms,
    )


def _slowed(
    alone_ms: Floats, items: Items, links: list[LinkUse], users: list[list[int]]
) -> dict[int, Slowing]:
    """Who slows whom; `users` has the transfers that use each link."""
    first = items.first_transfer
    if len(items) - first > MAX_SLOWED_ITEMS:
        return {}
    more_ms = items.end_ms_N[first:] - items.start_ms_N[first:] - alone_ms
    is_slowed = more_ms > np.maximum(alone_ms * WORTH_A_WORD, 1e-9)
    longest: dict[int, tuple[float, int, int]] = {}
    for index, (link, transfers) in enumerate(zip(links, users, strict=True)):
        company = _Company(link, items, transfers)
        for number in company.numbers:
            if is_slowed[number - first]:
                other, together_ms = company.longest(number)
                if together_ms > longest.get(number, (1e-9, 0, 0))[0]:
                    longest[number] = together_ms, other, index
    return {
        number: Slowing(by=other, link=link, more_ms=float(more_ms[number - first]))
        for number, (_, other, link) in longest.items()
    }


class _Company:
    """The items that use one link, by their starts."""

    def __init__(self, link: LinkUse, items: Items, transfers: list[int]) -> None:
        self.numbers = [number for each in transfers for number in _items_of(items, each)]
        self.numbers.sort(key=lambda number: (items.start_ms_N[number], number))
        self._starts_ms = items.start_ms_N[self.numbers].tolist()
        self._ends_ms = items.end_ms_N[self.numbers].tolist()
        spans_ms = zip(self._starts_ms, self._ends_ms, strict=True)
        self._longest_ms = max((end - start for start, end in spans_ms), default=0.0)
        # For how long the link has been full until each time.
        full_ms = np.cumsum(np.diff(link.times_ms) * (link.used[:-1] >= FULL))
        self._full_until = link.times_ms, np.append(0.0, full_ms)
        self._position = {number: position for position, number in enumerate(self.numbers)}

    def longest(self, number: int) -> tuple[int, float]:
        """With which other item, and for how long, an item used the link while it was full."""
        mine = self._position[number]
        start_ms, end_ms = self._starts_ms[mine], self._ends_ms[mine]
        first = bisect_left(self._starts_ms, start_ms - self._longest_ms)
        best = number, 0.0
        for other in range(first, bisect_left(self._starts_ms, end_ms)):
            both_ms = max(start_ms, self._starts_ms[other]), min(end_ms, self._ends_ms[other])
            if other == mine or both_ms[0] >= both_ms[1]:
                continue
            full_ms = float(np.diff(np.interp(both_ms, *self._full_until))[0])
            if full_ms > best[1]:
                best = self.numbers[other], full_ms
        return best


def _alone_ms(costs: PipelineCosts | GroupCosts, reduce_ms_S: Floats, items: Items) -> Floats:
    """For each transfer and all-reduce the time that it takes if nothing else is sent."""
    transfers = slice(items.first_transfer, items.first_all_reduce)
    channel_T, is_forward_T = items.place_N[transfers], items.kind_N[transfers] == FORWARD
    forward_ms_T = costs.send_forward_ms_C[channel_T]
    send_ms_T = np.where(is_forward_T, forward_ms_T, costs.send_backward_ms_C[channel_T])
    return np.concatenate([send_ms_T, reduce_ms_S[items.place_N[items.first_all_reduce :]]])


def _items_of(items: Items, transfer: int) -> range:
    """The items of one direction of a channel, or of a stage's all-reduce."""
    num_lanes = 2 * (items.num_stages - 1)
    if transfer >= num_lanes:
        lane = items.parts_of(transfer - num_lanes)
    else:
        lane = items.transfers_of(transfer // 2, transfer % 2)
    return range(lane.start, lane.stop)
