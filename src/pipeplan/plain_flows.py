"""One iteration of a plan on a cluster with shared links, replayed in plain Python (rules 8-12).

The checker judges plans by it. It shares no code with the simulator.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heappop
from itertools import pairwise

from pipeplan.cluster import Duplex
from pipeplan.cost import PipelineCosts
from pipeplan.pipeline import Plan
from pipeplan.plain_replay import BACKWARD, FORWARD, SAME_INSTANT_MS, Replay
from pipeplan.plain_sharing import FlowKind, FlowMaker, Sharing, Side, capacities, users_of

__all__ = ["longest_times", "replay_flows"]

RING = -1
"""In place of a direction: the all-reduce of a stage."""


def replay_flows(plan: Plan, costs: PipelineCosts) -> "tuple[list[array[float]], list[float]]":
    """When each block ends, and when each stage's all-reduce ends."""
    orders = [plan.schedule.codes(stage).data for stage in range(len(plan.stages))]
    iteration = _FlowReplay(plan, costs, orders)
    iteration.start(range(len(orders)))
    while (now_ms := iteration.sharing.next_ms()) < float("inf"):
        iteration.move_on(now_ms)
        last_ms = now_ms + SAME_INSTANT_MS
        while iteration.sharing.next_ms() <= last_ms:
            taken = []
            while iteration.ends and iteration.ends[0][0] <= last_ms:
                taken.append(heappop(iteration.ends))
            channels, stages = iteration.take(taken + iteration.sharing.take_flows(last_ms))
            iteration.begin_rings(stages)
            iteration.serve(channels)
            iteration.start(stages)
        iteration.sharing.share_links()
    iteration.require_done()
    return iteration.ends_ms, iteration.ring_ends_ms


def longest_times(plan: Plan) -> tuple[list[float], list[float]]:
    """The most that channels and all-reduces can take for one microbatch (rule 13).

    A flow counts with its least rate: that of a link which all flows share that could be under way.
    A full-duplex channel counts the longer of its directions, a half-duplex one both.
    """
    make = FlowMaker(plan)
    there = [make.forward(*pair) for pair in pairwise(plan.stages)]
    back = [make.backward(*pair) for pair in pairwise(plan.stages)]
    rings = [make.ring(stage) for stage in plan.stages]
    is_half = plan.cluster.duplex is Duplex.HALF
    users: Counter[Side] = Counter()
    for forward, backward in zip(there, back, strict=True):
        # `|` takes the larger count of each side, `+` the sum.
        users += (
            users_of(forward) | users_of(backward)
            if is_half
            else users_of(forward) + users_of(backward)
        )
    for ring in rings:
        users += users_of(ring)
    capacity = capacities(plan)

    def longest_ms(kinds: "Counter[FlowKind]") -> float:
        return max((kind.longest_ms(users, capacity) for kind in kinds), default=0.0)

    channels_ms = [
        sum(times) if is_half else max(times)
        for times in zip(map(longest_ms, there), map(longest_ms, back), strict=True)
    ]
    return channels_ms, [longest_ms(ring) for ring in rings]


class _FlowReplay(Replay):
    """An iteration whose transfers are flows."""

    def __init__(self, plan: Plan, costs: PipelineCosts, orders: Sequence[Sequence[int]]) -> None:
        super().__init__(costs, orders)
        self.sharing = Sharing(plan, self.ends)
        make = FlowMaker(plan)
        stages = plan.stages
        self.kinds = {
            (channel, direction): flows(stages[channel], stages[channel + 1])
            for channel in range(self.last)
            for direction, flows in ((FORWARD, make.forward), (BACKWARD, make.backward))
        }
        self.rings = [make.ring(stage) for stage in stages]
        self.ring_ends_ms = [0.0] * len(stages)
        self.has_ring = [False] * len(stages)

    def move_on(self, now_ms: float) -> None:
        """Carry bytes until now."""
        self.sharing.move_on(now_ms)
        self.now_ms = now_ms

    def begin_transfer(self, channel: int, direction: int, code: int) -> None:
        task = (-1 - channel, direction, code)
        self.sharing.begin(task, self.kinds[channel, direction], self.now_ms)

    def begin_rings(self, stages: Iterable[int]) -> None:
        """Begin the all-reduce of each of these stages that has just ended its last block."""
        for stage in set(stages):
            done = self.next_position[stage] == len(self.orders[stage]) and self.is_free[stage]
            if done and not self.has_ring[stage]:
                self.has_ring[stage] = True
                task = (stage, RING, 0)
                self.sharing.begin(task, self.rings[stage], self.ends_ms[stage][-1])

    def take(self, taken: list[tuple[float, int, int, int]]) -> tuple[list[int], list[int]]:
        """Take these ends; of a transfer or an all-reduce only the last one counts."""
        whole = []
        for end in taken:
            if not self.sharing.is_last(end[1:]):
                continue
            if end[2] == RING:
                self.ring_ends_ms[end[1]] = end[0]
            else:
                whole.append(end)
        return super().take(whole)
