"""One iteration of a plan, replayed by the rules of `docs/formats.md` in plain Python.

The checker judges plans by it. It shares no code with the simulator, so that neither can hide
the other's mistakes.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from pipeplan.cost import PipelineCosts
from pipeplan.errors import ScheduleError
from pipeplan.pipeline import Kind

__all__ = ["BACKWARD", "FORWARD", "SAME_INSTANT_MS", "Replay", "block_name", "replay"]

SAME_INSTANT_MS = 1e-9
FORWARD, BACKWARD = 0, 1
MOST_NAMED = 8
"""How many waiting stages a message names."""


def block_name(stage: int, code: int) -> str:
    """A block as people read it, `2F0`, from its code."""
    return f"{stage}{Kind.FORWARD}{code}" if code >= 0 else f"{stage}{Kind.BACKWARD}{-1 - code}"


def replay(costs: PipelineCosts, orders: Sequence[Sequence[int]]) -> "list[array[float]]":
    """When each block ends, found by walking from instant to instant.

    Orders hold codes: F(m) is `m`, B(m) is `-1 - m`. An instant is the earliest end that has
    not been taken, with all ends that follow it within 1e-9 ms. At an instant all ends and
    arrivals are taken first, then channels are served, then stages start. Work of no length
    opens another round at that instant. O(blocks * log stages): a round looks only at the
    channels and stages for which something has changed.
    """
    iteration = Replay(costs, orders)
    ends = iteration.ends
    iteration.start(range(len(orders)))
    while ends:
        iteration.now_ms = ends[0][0]
        last_ms = iteration.now_ms + SAME_INSTANT_MS
        while ends and not ends[0][0] > last_ms:
            taken = [heappop(ends)]
            while ends and ends[0][0] <= last_ms:
                taken.append(heappop(ends))
            channels, stages = iteration.take(taken)
            iteration.serve(channels)
            iteration.start(stages)
    iteration.require_done()
    return iteration.ends_ms


class Replay:
    """One iteration under way: what runs, what waits, what has arrived."""

    def __init__(self, costs: PipelineCosts, orders: Sequence[Sequence[int]]) -> None:
        self.last = len(orders) - 1
        self.half_duplex = costs.half_duplex
        self.length_ms = costs.forward_ms_S.tolist(), costs.backward_ms_S.tolist()
        self.send_ms = costs.send_forward_ms_C.tolist(), costs.send_backward_ms_C.tolist()
        self.orders = orders
        self.now_ms = 0.0
        self.ends: list[tuple[float, int, int, int]] = []
        """A heap of what is under way: when it ends, place, direction, code of the block.

        The place is a stage `n`, or `-1 - c` for the channel between stages c and c + 1.
        """
        self.ends_ms = [array("d") for _ in orders]
        self.next_position = [0] * len(orders)
        self.is_free = [True] * len(orders)
        self.arrived: list[set[int]] = [set() for _ in orders]
        self.arrived[0].update(code for code in orders[0] if code >= 0)
        self.waiting: list[tuple[deque[int], deque[int]]] = [
            (deque(), deque()) for _ in range(self.last)
        ]
        self.is_sending = [[False, False] for _ in range(self.last)]
        self.begun = [[0, 0] for _ in range(self.last)]

    def take(self, taken: list[tuple[float, int, int, int]]) -> tuple[list[int], list[int]]:
        """Take these ends; the channels and the stages for which something has changed."""
        channels, stages = [], []
        for end_ms, place, direction, code in taken:
            if place >= 0:
                self.is_free[place] = True
                self.ends_ms[place].append(end_ms)
                stages.append(place)
                if direction == FORWARD and place == self.last:
                    self.arrived[place].add(-1 - code)
                elif direction == FORWARD:
                    self.waiting[place][FORWARD].append(code)
                    channels.append(place)
                elif place > 0:
                    self.waiting[place - 1][BACKWARD].append(code)
                    channels.append(place - 1)
            else:
                channel = -1 - place
                receiver = channel + 1 if direction == FORWARD else channel
                self.is_sending[channel][direction] = False
                self.arrived[receiver].add(code)
                channels.append(channel)
                stages.append(receiver)
        return channels, stages

    def serve(self, channels: Iterable[int]) -> None:
        """Begin what can be sent on these channels."""
        for channel in channels:
            waiting, is_sending = self.waiting[channel], self.is_sending[channel]
            wanted = [d for d in (FORWARD, BACKWARD) if waiting[d] and not is_sending[d]]
            if self.half_duplex and wanted:
                if is_sending[FORWARD] or is_sending[BACKWARD]:
                    continue
                if len(wanted) == 2:
                    wanted = [self._goes_first(channel)]
            for direction in wanted:
                self.begun[channel][direction] += 1
                is_sending[direction] = True
                self.begin_transfer(channel, direction, waiting[direction].popleft())

    def begin_transfer(self, channel: int, direction: int, code: int) -> None:
        """Send one block's result; the channel is marked as busy already."""
        end_ms = self.now_ms + self.send_ms[direction][channel]
        heappush(self.ends, (end_ms, -1 - channel, direction, code))

    def _goes_first(self, channel: int) -> int:
        """The direction that a half-duplex channel serves where both wait."""
        j, i = self.begun[channel]
        is_backward = i + 4 * self.last - 2 * channel - 1 <= j + 2 * channel + 1
        return BACKWARD if is_backward else FORWARD

    def start(self, stages: Iterable[int]) -> None:
        """Start the next block of each of these stages that is free and has its input."""
        for stage in stages:
            position = self.next_position[stage]
            order = self.orders[stage]
            if not self.is_free[stage] or position == len(order):
                continue
            code = order[position]
            if code not in self.arrived[stage]:
                continue
            self.arrived[stage].remove(code)
            self.next_position[stage] = position + 1
            self.is_free[stage] = False
            direction = FORWARD if code >= 0 else BACKWARD
            end_ms = self.now_ms + self.length_ms[direction][stage]
            heappush(self.ends, (end_ms, stage, direction, code))

    def require_done(self) -> None:
        """Refuse a schedule in which stages wait for ever."""
        stuck = [
            f"stage {stage} at {block_name(stage, order[position])}"
            for stage, (order, position) in enumerate(
                zip(self.orders, self.next_position, strict=True)
            )
            if position < len(order)
        ]
        if stuck:
            more = f" and {len(stuck) - MOST_NAMED} more" if len(stuck) > MOST_NAMED else ""
            named = ", ".join(stuck[:MOST_NAMED])
            raise ScheduleError(f"schedule: deadlocks: {named}{more} wait for ever")
