"""Flows that share links, in plain Python (rules 8-11), for the checker's replays.

Every instant moves all flows on, and all rates are found anew, by letting them grow alike until
each is stopped. It shares no code with the simulator.
"""

from collections import Counter
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from pipeplan.pipeline import Plan, Stage

__all__ = ["FlowKind", "FlowMaker", "Sharing", "Side", "capacities", "users_of"]

BYTES_PER_MS_IN_GB_PER_S = 1e6
MS_IN_US = 1e-3

Side = tuple[int, int]
"""A shared link, and 0 for what its members send, 1 for what they receive."""
Task = tuple[Any, int, int]
"""What flows belong to, as a replay names it."""
End = tuple[float, Any, int, int]
"""When a task ends, or a part of it."""


@dataclass(frozen=True, slots=True)
class FlowKind:
    """Equal flows of one task: when they start, how much each carries, how fast it may be."""

    latency_ms: float
    num_bytes: float
    limit: float
    sides: tuple[Side, ...]

    def longest_ms(self, users: "Counter[Side]", capacity: dict[Side, float]) -> float:
        """The time of a flow if it has to share every link with all that could use it."""
        if not self.num_bytes:
            return self.latency_ms
        rate = min([self.limit, *(capacity[side] / users[side] for side in self.sides)])
        return self.latency_ms + self.num_bytes / rate


@dataclass(slots=True)
class _UnderWay:
    """Equal flows that have started and not ended."""

    kind: FlowKind
    count: int
    task: Task
    left_bytes: float
    rate: float = 0.0

    def end_ms(self, now_ms: float) -> float:
        """When they end at this rate."""
        return now_ms + self.left_bytes / self.rate if self.rate else float("inf")


def users_of(kinds: "Counter[FlowKind]") -> "Counter[Side]":
    """How many of these flows use each side of each shared link."""
    users: Counter[Side] = Counter()
    for kind, count in kinds.items():
        if kind.num_bytes:
            users.update(dict.fromkeys(kind.sides, count))
    return users


def capacities(plan: Plan) -> dict[Side, float]:
    """What each side of each shared link carries, in bytes per ms."""
    capacity: dict[Side, float] = {}
    for index, link in enumerate(plan.cluster.links):
        capacity[index, 0] = link.out_gb_per_s * BYTES_PER_MS_IN_GB_PER_S
        capacity[index, 1] = link.in_gb_per_s * BYTES_PER_MS_IN_GB_PER_S
    return capacity


class Sharing:
    """All flows under way. `ends` is the replay's heap, which gets what takes a given time."""

    def __init__(self, plan: Plan, ends: list[End]) -> None:
        self.capacity = capacities(plan)
        self.ends = ends
        self.num_left: dict[Task, int] = {}
        self.starts: list[tuple[float, int, Task, FlowKind, int]] = []
        """A heap of flows that wait for their latency; the second number only tells them apart."""
        self.under_way: list[_UnderWay] = []
        self.moved_ms = 0.0
        self.has_changed = False

    def next_ms(self) -> float:
        """The next end or start of anything."""
        times = [
            self.moved_ms + each.left_bytes / each.rate for each in self.under_way if each.rate
        ]
        if self.ends:
            times.append(self.ends[0][0])
        if self.starts:
            times.append(self.starts[0][0])
        return min(times, default=float("inf"))

    def move_on(self, now_ms: float) -> None:
        """Carry bytes until now."""
        for each in self.under_way:
            each.left_bytes = max(0.0, each.left_bytes - each.rate * (now_ms - self.moved_ms))
        self.moved_ms = now_ms

    def begin(self, task: Task, kinds: "Counter[FlowKind]", begin_ms: float) -> None:
        """Flows of no bytes, or without a shared link, only take their time."""
        self.num_left[task] = 1
        alone_ms = 0.0
        for kind, count in kinds.items():
            if kind.sides and kind.num_bytes:
                self.num_left[task] += 1
                start_ms = begin_ms + kind.latency_ms
                heappush(self.starts, (start_ms, id(kind), task, kind, count))
            else:
                alone_ms = max(alone_ms, kind.latency_ms + kind.num_bytes / kind.limit)
        if len(kinds) == self.num_left[task] - 1 and kinds:
            self.num_left[task] -= 1  # nothing but flows that share links
        else:
            heappush(self.ends, (begin_ms + alone_ms, *task))

    def is_last(self, task: Task) -> bool:
        """Count one end of a task; whether that was its last one, or it has no flows."""
        if task not in self.num_left:
            return True
        self.num_left[task] -= 1
        return self.num_left[task] == 0

    def take_flows(self, last_ms: float) -> list[End]:
        """Start and end the flows whose time has come; the ends of the latter."""
        ended = []
        for each in self.under_way:
            if (end_ms := each.end_ms(self.moved_ms)) <= last_ms:
                ended.append((end_ms, *each.task))
                each.count = 0
        self.under_way = [each for each in self.under_way if each.count]
        while self.starts and self.starts[0][0] <= last_ms:
            _, _, task, kind, count = heappop(self.starts)
            self.under_way.append(_UnderWay(kind, count, task, kind.num_bytes))
            self.has_changed = True
        self.has_changed = self.has_changed or bool(ended)
        return sorted(ended)

    def share_links(self) -> None:
        """Let all rates grow alike from 0; a flow stops at its limit, or when a link is full."""
        if not self.has_changed:
            return
        self.has_changed = False
        left = dict(self.capacity)
        open_flows = list(self.under_way)
        while open_flows:
            users: Counter[Side] = Counter()
            for each in open_flows:
                for side in each.kind.sides:
                    users[side] += each.count
            level = min(each.kind.limit for each in open_flows)
            level = min([level, *(left[side] / users[side] for side in users)])
            full = {side for side in users if left[side] / users[side] <= level * (1 + 1e-12)}
            still_open = []
            for each in open_flows:
                if each.kind.limit > level and full.isdisjoint(each.kind.sides):
                    still_open.append(each)
                    continue
                each.rate = level
                for side in each.kind.sides:
                    left[side] -= each.count * level
            open_flows = still_open


class FlowMaker:
    """Makes the flows of transfers and all-reduces, pair by pair."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.members = [link.devices for link in plan.cluster.links]

    def forward(self, stage: Stage, behind: Stage) -> "Counter[FlowKind]":
        """The flows of one microbatch's outputs to the stage behind."""
        return self._pairs(stage, behind, self.plan.model.layers[stage.layers[-1]].output_bytes)

    def backward(self, stage: Stage, behind: Stage) -> "Counter[FlowKind]":
        """The flows of one microbatch's gradients from the stage behind."""
        return self._pairs(behind, stage, self.plan.model.layers[stage.layers[-1]].gradient_bytes)

    def _pairs(self, sender: Stage, receiver: Stage, num_bytes: float) -> "Counter[FlowKind]":
        return Counter(
            FlowKind(self._latency_ms(u, v), x * y * num_bytes, self._rate(u, v), self._sides(u, v))
            for u, x in zip(sender.devices, sender.device_shares, strict=True)
            for v, y in zip(receiver.devices, receiver.device_shares, strict=True)
        )

    def ring(self, stage: Stage, num_parts: int = 1) -> "Counter[FlowKind]":
        """The flows of a stage's all-reduce, or of one of its parts; none for one device."""
        k = len(stage.devices)
        if k == 1:
            return Counter()
        pairs = [(u, v) for u in stage.devices for v in stage.devices if u != v]
        limit = min(self._rate(u, v) for u, v in pairs)
        latency_ms = 2 * (k - 1) * max(self._latency_ms(u, v) for u, v in pairs)
        parameters = sum(self.plan.model.layers[n].parameter_bytes for n in stage.layers)
        num_bytes = 2 * (k - 1) / k * parameters / num_parts
        hosts: dict[str, list[int]] = {}
        for device in sorted(stage.devices):
            hosts.setdefault(self.plan.cluster.devices[device].host, []).append(device)
        ring = [device for devices in hosts.values() for device in devices]
        return Counter(
            FlowKind(latency_ms, num_bytes, limit, self._sides(u, v))
            for u, v in zip(ring, ring[1:] + ring[:1], strict=True)
        )

    def _rate(self, u: int, v: int) -> float:
        return self.plan.cluster.bandwidth_gb_per_s[u][v] * BYTES_PER_MS_IN_GB_PER_S

    def _latency_ms(self, u: int, v: int) -> float:
        latency_us = self.plan.cluster.latency_us
        if isinstance(latency_us, tuple | list):
            return latency_us[u][v] * MS_IN_US
        return latency_us * MS_IN_US

    def _sides(self, u: int, v: int) -> tuple[Side, ...]:
        return tuple(
            (index, 0 if u in members else 1)
            for index, members in enumerate(self.members)
            if (u in members) != (v in members)
        )
