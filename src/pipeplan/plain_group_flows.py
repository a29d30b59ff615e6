"""A plan with groups on a cluster with shared links, replayed in plain Python (rules 8-20).

The checker judges plans of the second version by it. It shares no code with the simulator.
"""

from heapq import heappop

from pipeplan.group_costs import GroupCosts
from pipeplan.pipeline import Plan
from pipeplan.plain_groups import GroupReplay, Sending
from pipeplan.plain_replay import SAME_INSTANT_MS
from pipeplan.plain_sharing import FlowMaker, Sharing

__all__ = ["replay_group_flows"]


def replay_group_flows(plan: Plan, costs: GroupCosts) -> GroupReplay:
    """The iteration, walked from instant to instant; a deadlock raises `ScheduleError`."""
    iteration = _FlowGroupReplay(plan, costs)
    sharing = iteration.sharing
    iteration.start(range(len(iteration.orders)))
    while (now_ms := sharing.next_ms()) < float("inf"):
        sharing.move_on(now_ms)
        iteration.now_ms = now_ms
        last_ms = now_ms + SAME_INSTANT_MS
        while sharing.next_ms() <= last_ms:
            taken = []
            while iteration.events and iteration.events[0][0] <= last_ms:
                taken.append(heappop(iteration.events))
            taken += sharing.take_flows(last_ms)
            iteration.play_round([event for event in taken if sharing.is_last(event[1:])])
        sharing.share_links()
    iteration.require_done()
    return iteration


class _FlowGroupReplay(GroupReplay):
    """An iteration in which what is sent are flows."""

    def __init__(self, plan: Plan, costs: GroupCosts) -> None:
        super().__init__(plan, costs)
        self.sharing = Sharing(plan, self.events)
        make, stages = FlowMaker(plan), plan.stages
        self.kinds = {
            ("part", index): make.ring(stage, stage.gradient_buckets)
            for index, stage in enumerate(stages)
        }
        for index in range(self.last):
            if self.group_of[index] != self.group_of[index + 1]:
                pair = stages[index], stages[index + 1]
                self.kinds["there", index] = make.forward(*pair)
                self.kinds["back", index + 1] = make.backward(*pair)

    def begin(self, sending: Sending) -> None:
        self.sharing.begin(sending, self.kinds[sending[:2]], self.now_ms)
