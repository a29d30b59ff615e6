"""One iteration of a plan on a cluster with shared links, replayed in plain Python (rules 8-12).

The checker judges plans by it. It shares no code with the simulator: every instant moves all flows
on, and all rates are found anew, by letting them grow alike until each is stopped.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

from pipeplan.cluster import Duplex
from pipeplan.cost import PipelineCosts
from pipeplan.pipeline import Plan, Stage
from pipeplan.plain_replay import BACKWARD, FORWARD, SAME_INSTANT_MS, Replay

__all__ = ["longest_times", "replay_flows"]

BYTES_PER_MS_IN_GB_PER_S = 1e6
MS_IN_US = 1e-3

Side = tuple[int, int]
"""A shared link, and 0 for what its members send, 1 for what they receive."""
Task = tuple[int, int, int]
"""What flows belong to: a transfer, as `Replay.ends` names it, or a ring: its stage, `RING`, 0."""
RING = -1


@dataclass(frozen=True, slots=True)
class _Kind:
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

    kind: _Kind
    count: int
    task: Task
    left_bytes: float
    rate: float = 0.0

    def end_ms(self, now_ms: float) -> float:
        """When they end at this rate."""
        return now_ms + self.left_bytes / self.rate if self.rate else float("inf")


def replay_flows(plan: Plan, costs: PipelineCosts) -> "tuple[list[array[float]], list[float]]":
    """When each block ends, and when each stage's all-reduce ends."""
    orders = [plan.schedule.codes(stage).data for stage in range(len(plan.stages))]
    iteration = _FlowReplay(plan, costs, orders)
    iteration.start(range(len(orders)))
    while (now_ms := iteration.next_ms()) < float("inf"):
        iteration.move_on(now_ms)
        last_ms = now_ms + SAME_INSTANT_MS
        while iteration.next_ms() <= last_ms:
            taken = []
            while iteration.ends and iteration.ends[0][0] <= last_ms:
                taken.append(heappop(iteration.ends))
            channels, stages = iteration.take(taken + iteration.take_flows(last_ms))
            iteration.begin_rings(stages)
            iteration.serve(channels)
            iteration.start(stages)
        iteration.share_links()
    iteration.require_done()
    return iteration.ends_ms, iteration.ring_ends_ms


def longest_times(plan: Plan) -> tuple[list[float], list[float]]:
    """The most that channels and all-reduces can take for one microbatch (rule 13).

    A flow counts with its least rate: that of a link which all flows share that could be under way.
    A full-duplex channel counts the longer of its directions, a half-duplex one both.
    """
    make = _Flows(plan)
    there = [make.transfer(*pair, FORWARD) for pair in pairwise(plan.stages)]
    back = [make.transfer(*pair, BACKWARD) for pair in pairwise(plan.stages)]
    rings = [make.ring(stage) for stage in plan.stages]
    is_half = plan.cluster.duplex is Duplex.HALF
    users: Counter[Side] = Counter()
    for forward, backward in zip(there, back, strict=True):
        # `|` takes the larger count of each side, `+` the sum.
        users += (
            _users(forward) | _users(backward) if is_half else _users(forward) + _users(backward)
        )
    for ring in rings:
        users += _users(ring)
    capacity = _capacities(plan)

    def longest_ms(kinds: "Counter[_Kind]") -> float:
        return max((kind.longest_ms(users, capacity) for kind in kinds), default=0.0)

    channels_ms = [
        sum(times) if is_half else max(times)
        for times in zip(map(longest_ms, there), map(longest_ms, back), strict=True)
    ]
    return channels_ms, [longest_ms(ring) for ring in rings]


def _users(kinds: "Counter[_Kind]") -> "Counter[Side]":
    """How many of these flows use each side of each shared link."""
    users: Counter[Side] = Counter()
    for kind, count in kinds.items():
        if kind.num_bytes:
            users.update(dict.fromkeys(kind.sides, count))
    return users


def _capacities(plan: Plan) -> dict[Side, float]:
    capacity: dict[Side, float] = {}
    for index, link in enumerate(plan.cluster.links):
        capacity[index, 0] = link.out_gb_per_s * BYTES_PER_MS_IN_GB_PER_S
        capacity[index, 1] = link.in_gb_per_s * BYTES_PER_MS_IN_GB_PER_S
    return capacity


class _FlowReplay(Replay):
    """An iteration whose transfers are flows."""

    def __init__(self, plan: Plan, costs: PipelineCosts, orders: Sequence[Sequence[int]]) -> None:
        super().__init__(costs, orders)
        self.capacity = _capacities(plan)
        make = _Flows(plan)
        stages = plan.stages
        self.kinds = {
            (channel, direction): make.transfer(stages[channel], stages[channel + 1], direction)
            for channel in range(self.last)
            for direction in (FORWARD, BACKWARD)
        }
        self.rings = [make.ring(stage) for stage in stages]
        self.ring_ends_ms = [0.0] * len(stages)
        self.num_left: dict[Task, int] = {}
        self.starts: list[tuple[float, int, Task, _Kind, int]] = []
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
        self.now_ms = self.moved_ms = now_ms

    def begin_transfer(self, channel: int, direction: int, code: int) -> None:
        kinds = self.kinds[channel, direction]
        self._begin((-1 - channel, direction, code), kinds, self.now_ms)

    def begin_rings(self, stages: Iterable[int]) -> None:
        """Begin the all-reduce of each of these stages that has just ended its last block."""
        for stage in set(stages):
            done = self.next_position[stage] == len(self.orders[stage]) and self.is_free[stage]
            if done and (stage, RING, 0) not in self.num_left:
                self._begin((stage, RING, 0), self.rings[stage], self.ends_ms[stage][-1])

    def _begin(self, task: Task, kinds: "Counter[_Kind]", begin_ms: float) -> None:
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

    def take(self, taken: list[tuple[float, int, int, int]]) -> tuple[list[int], list[int]]:
        """Take these ends; of a task only the last one counts."""
        whole = []
        for end in taken:
            task = end[1:]
            if task in self.num_left:
                self.num_left[task] -= 1
                if self.num_left[task] > 0:
                    continue
                if task[1] == RING:
                    self.ring_ends_ms[task[0]] = end[0]
                    continue
                del self.num_left[task]
            whole.append(end)
        return super().take(whole)

    def take_flows(self, last_ms: float) -> list[tuple[float, int, int, int]]:
        """Start and end the flows whose time has come; the ends, for `take`."""
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


class _Flows:
    """Makes the flows of transfers and all-reduces, pair by pair."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.members = [link.devices for link in plan.cluster.links]

    def transfer(self, stage: Stage, behind: Stage, direction: int) -> "Counter[_Kind]":
        """The flows of one microbatch over the channel between two stages."""
        layer = self.plan.model.layers[stage.layers[-1]]
        if direction == FORWARD:
            return self._pairs(stage, behind, layer.output_bytes)
        return self._pairs(behind, stage, layer.gradient_bytes)

    def _pairs(self, sender: Stage, receiver: Stage, num_bytes: float) -> "Counter[_Kind]":
        return Counter(
            _Kind(self._latency_ms(u, v), x * y * num_bytes, self._rate(u, v), self._sides(u, v))
            for u, x in zip(sender.devices, sender.device_shares, strict=True)
            for v, y in zip(receiver.devices, receiver.device_shares, strict=True)
        )

    def ring(self, stage: Stage) -> "Counter[_Kind]":
        """The flows of a stage's all-reduce; none for one device."""
        k = len(stage.devices)
        if k == 1:
            return Counter()
        pairs = [(u, v) for u in stage.devices for v in stage.devices if u != v]
        limit = min(self._rate(u, v) for u, v in pairs)
        latency_ms = 2 * (k - 1) * max(self._latency_ms(u, v) for u, v in pairs)
        parameters = sum(self.plan.model.layers[n].parameter_bytes for n in stage.layers)
        num_bytes = 2 * (k - 1) / k * parameters
        hosts: dict[str, list[int]] = {}
        for device in sorted(stage.devices):
            hosts.setdefault(self.plan.cluster.devices[device].host, []).append(device)
        ring = [device for devices in hosts.values() for device in devices]
        return Counter(
            _Kind(latency_ms, num_bytes, limit, self._sides(u, v))
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
