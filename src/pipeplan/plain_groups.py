"""One iteration of a plan with groups, replayed in plain Python by rules 14-20 of the format.

The checker judges plans of the second version by it. It shares no code with the simulator.
"""

from collections import Counter
from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import pairwise

from pipeplan.errors import ScheduleError
from pipeplan.group_costs import GroupCosts
from pipeplan.pipeline import Kind, Plan, unpack_codes
from pipeplan.plain_replay import SAME_INSTANT_MS

__all__ = ["GroupReplay", "Sending", "replay_groups"]

LETTERS = tuple(Kind)
FORWARD, BACKWARD, INPUT, WEIGHT = range(4)
MOST_NAMED = 8
"""How many waiting groups a message names."""

Step = tuple[int, int, int]
"""A block: stage, kind, microbatch."""
Lane = tuple[int, int]
"""A channel by its two groups, sender first; with half duplex the smaller number first."""
Sending = tuple[str, int, int]
"""What is sent: `there` from a stage or `back` from it, and the microbatch; or `part` of a stage's
all-reduce, and its number."""
Event = tuple[float, str, int, int]
"""When it happens; `block` and its group; `ready`, a stage and a part; or a `Sending` that ends."""


def replay_groups(plan: Plan, costs: GroupCosts) -> "GroupReplay":
    """The iteration, walked from instant to instant; a deadlock raises `ScheduleError`.

    At an instant all ends and arrivals are taken first, then channels and rings are served, then
    groups start. Each round takes what the one before it brought about within the instant.
    """
    iteration = GroupReplay(plan, costs)
    iteration.start(range(len(iteration.orders)))
    while iteration.events:
        iteration.now_ms = iteration.events[0][0]
        last_ms = iteration.now_ms + SAME_INSTANT_MS
        while iteration.events and iteration.events[0][0] <= last_ms:
            taken = []
            while iteration.events and iteration.events[0][0] <= last_ms:
                taken.append(heappop(iteration.events))
            iteration.play_round(taken)
    iteration.require_done()
    return iteration


class GroupReplay:
    """One iteration under way: what runs, what waits, what has arrived."""

    def __init__(self, plan: Plan, costs: GroupCosts) -> None:
        self.costs = costs
        self.group_of = costs.group_of_S.tolist()
        self.last = len(self.group_of) - 1
        self.orders: list[list[Step]] = []
        for group in range(len(plan.schedule)):
            parts = (part.tolist() for part in unpack_codes(plan.schedule.group_codes(group)))
            self.orders.append(list(zip(*parts, strict=True)))
        self.length_ms = costs.length_ms_S4.tolist()
        self.recompute_ms = costs.recompute_ms_S.tolist()
        self.send_ms = {
            "there": costs.send_forward_ms_C.tolist(),
            "back": [0.0, *costs.send_backward_ms_C.tolist()],
            "part": costs.part_ms_S.tolist(),
        }
        self.num_parts = costs.num_parts_S.tolist()
        self.num_cuts = Counter(map(frozenset, pairwise(self.group_of)))
        self.closing = {
            stage: position for order in self.orders for position, (stage, _, _) in enumerate(order)
        }
        """For each stage the position of its last block in its group's order."""
        self.now_ms = 0.0
        self.round = 0
        self.events: list[Event] = []
        self.position = [0] * len(self.orders)
        self.is_free = [True] * len(self.orders)
        self.there: set[Step] = {(0, FORWARD, m) for m in range(plan.microbatches)}
        """The inputs that have come: for an F, or, as that of a B, for B and I alike."""
        self.ended: set[Step] = set()
        self.waiting: dict[tuple[Lane, str], list[tuple[int, int, int, Sending]]] = {}
        self.begun: Counter[tuple[Lane, str]] = Counter()
        self.is_busy: dict[Lane, bool] = {}
        self.ring_waits: list[list[tuple[int, int, int]]] = [[] for _ in self.orders]
        self.ring_is_free = [True] * len(self.orders)
        self.lanes_to_serve: set[Lane] = set()
        self.groups_to_serve: set[int] = set()
        """Those for which something has changed in this round."""
        self.ends_ms: list[list[float]] = [[] for _ in self.orders]
        self.iteration_ms = 0.0

    def play_round(self, taken: Iterable[Event]) -> None:
        """Take ends, serve channels and rings, start groups."""
        self.round += 1
        for at_ms, what, place, detail in taken:
            if what == "block":
                self._end_block(place, at_ms)
            elif what == "ready":
                heappush(self.ring_waits[self.group_of[place]], (self.round, detail, place))
                self.groups_to_serve.add(self.group_of[place])
            elif what == "part":
                self.ring_is_free[self.group_of[place]] = True
                self.groups_to_serve.add(self.group_of[place])
                self.iteration_ms = max(self.iteration_ms, at_ms)
            else:
                self._arrive(what, place, detail)
        for lane in self.lanes_to_serve:
            self._serve(lane)
        for group in self.groups_to_serve:
            self._serve_ring(group)
        self.start(self.groups_to_serve)
        self.lanes_to_serve.clear()
        self.groups_to_serve.clear()

    def _end_block(self, group: int, at_ms: float) -> None:
        stage, kind, microbatch = block = self.orders[group][self.position[group]]
        self.position[group] += 1
        self.is_free[group] = True
        self.groups_to_serve.add(group)
        self.ended.add(block)
        self.ends_ms[group].append(at_ms)
        self.iteration_ms = max(self.iteration_ms, at_ms)
        if kind == FORWARD and stage == self.last:
            self.there.add((stage, BACKWARD, microbatch))
        elif kind == FORWARD:
            self._pass_on("there", stage, stage + 1, microbatch)
        elif kind in (BACKWARD, INPUT) and stage > 0:
            self._pass_on("back", stage, stage - 1, microbatch)
        if self._closes(group, stage) and self.num_parts[stage]:
            waits = (self.round, self.num_parts[stage], stage)
            heappush(self.ring_waits[group], waits)

    def _closes(self, group: int, stage: int) -> bool:
        """Whether the block that has just ended is the last one of its stage."""
        return self.position[group] == self.closing[stage] + 1

    def _pass_on(self, way: str, stage: int, other: int, microbatch: int) -> None:
        """Give a result to another stage, at once or over a channel."""
        sender, receiver = self.group_of[stage], self.group_of[other]
        if sender == receiver:
            self._arrive(way, stage, microbatch, sent=False)
            return
        lane = self._lane(sender, receiver)
        self.is_busy.setdefault(lane, False)
        self.lanes_to_serve.add(lane)
        queue = self.waiting.setdefault((lane, self._queue_name(lane, way)), [])
        gradient_first = 0 if way == "back" else 1
        heappush(queue, (self.round, gradient_first, microbatch, (way, stage, microbatch)))

    def _lane(self, sender: int, receiver: int) -> Lane:
        if self.costs.half_duplex and sender > receiver:
            return receiver, sender
        return sender, receiver

    def _queue_name(self, lane: Lane, way: str) -> str:
        """Both directions have queues of their own where one cut shares a half-duplex channel."""
        is_single = self.costs.half_duplex and self.num_cuts[frozenset(lane)] == 1
        return way if is_single else "both"

    def _arrive(self, way: str, stage: int, microbatch: int, *, sent: bool = True) -> None:
        if way == "there":
            other = stage + 1
            self.there.add((other, FORWARD, microbatch))
        else:
            other = stage - 1
            self.there.add((other, BACKWARD, microbatch))
        if sent:
            lane = self._lane(self.group_of[stage], self.group_of[other])
            self.is_busy[lane] = False
            self.lanes_to_serve.add(lane)
            self.groups_to_serve.add(self.group_of[other])

    def _serve(self, lane: Lane) -> None:
        if self.is_busy[lane]:
            return
        names = [name for name in ("there", "back", "both") if self.waiting.get((lane, name))]
        if not names:
            return
        name = names[0] if len(names) == 1 else self._goes_first(lane)
        *_, sending = heappop(self.waiting[lane, name])
        self.begun[lane, name] += 1
        self.is_busy[lane] = True
        self.begin(sending)

    def _goes_first(self, lane: Lane) -> str:
        """The direction that a half-duplex channel with one cut serves where both wait (rule 4)."""
        n = min(self.waiting[lane, "there"])[3][1]
        i, j = self.begun[lane, "back"], self.begun[lane, "there"]
        return "back" if i + 4 * self.last - 2 * n - 1 <= j + 2 * n + 1 else "there"

    def _serve_ring(self, group: int) -> None:
        if self.ring_waits[group] and self.ring_is_free[group]:
            _, part, stage = heappop(self.ring_waits[group])
            self.ring_is_free[group] = False
            self.begin(("part", stage, part))

    def begin(self, sending: Sending) -> None:
        """Send something that takes a given time; its channel or ring is marked as busy already."""
        way, stage, _ = sending
        heappush(self.events, (self.now_ms + self.send_ms[way][stage], *sending))

    def start(self, groups: Iterable[int]) -> None:
        """Start the next block of each of these groups that is free and has its input."""
        for group in groups:
            position, order = self.position[group], self.orders[group]
            is_over = not self.is_free[group] or position == len(order)
            if is_over or not self._can_start(order[position]):
                continue
            stage, kind, _ = order[position]
            self.is_free[group] = False
            length_ms = self.length_ms[stage][kind]
            heappush(self.events, (self.now_ms + length_ms, "block", group, 0))
            if position == self.closing[stage]:
                before_ms = self.recompute_ms[stage] if kind == BACKWARD else 0.0
                for part in range(1, self.num_parts[stage]):
                    done = part / self.num_parts[stage]
                    ready_ms = self.now_ms + before_ms + done * (length_ms - before_ms)
                    heappush(self.events, (ready_ms, "ready", stage, part))

    def _can_start(self, block: Step) -> bool:
        stage, kind, microbatch = block
        if kind == WEIGHT:
            return (stage, INPUT, microbatch) in self.ended
        return (stage, BACKWARD if kind == INPUT else kind, microbatch) in self.there

    def require_done(self) -> None:
        """Refuse a schedule in which groups wait for ever."""
        stuck = [
            f"group {group} at {stage}{LETTERS[kind]}{microbatch}"
            for group, order in enumerate(self.orders)
            for stage, kind, microbatch in order[self.position[group] : self.position[group] + 1]
        ]
        if stuck:
            more = f" and {len(stuck) - MOST_NAMED} more" if len(stuck) > MOST_NAMED else ""
            named = ", ".join(stuck[:MOST_NAMED])
            raise ScheduleError(f"schedule: deadlocks: {named}{more} wait for ever")
