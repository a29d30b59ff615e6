"""The problem as if no link were shared: what it proves and finds is a start for the real one.

Sharing a link only makes transfers longer. So a lower bound for the problem without shared links
holds with them, too. And its plan, judged by the real times, is a plan to start from: who knows
about the links is never slower than who does not.

The real problem goes first. Where its plan is proven optimal, the plan without shared links cannot
be faster, and it is not made.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

from pipeplan.planning.planner.settings import is_proved_quickly
from pipeplan.planning.problem import Draft, LateStart, Problem, SearchInterrupted

__all__ = ["half_time", "plan_knowing_links"]

PlanFrom = Callable[[Problem, Iterable[Draft], LateStart | None], Draft]
"""Plans a problem from complete plans, and before these from a late start, if there is one."""


def plan_knowing_links(
    problem: Problem, plan_from: PlanFrom, starts: Callable[[Problem], Iterable[Draft]]
) -> Draft:
    """The draft of `plan_from`. Where links are shared, it starts from what it finds without."""
    if problem.cost.contention is None:
        return plan_from(problem, starts(problem), None)

    @cache
    def without_links() -> Draft:
        unshared = replace(
            problem,
            cost=problem.cost.without_shared_links(),
            deadline=half_time(problem.deadline),
            needs_bound=problem.needs_bound and is_proved_quickly(problem.cluster.num_devices),
        )
        try:
            return plan_from(unshared, starts(unshared), None)
        except SearchInterrupted as stop:
            # Its guarantee is one for links that are not shared.
            raise SearchInterrupted(replace(stop.draft, schedule_guarantee_ms=None)) from None

    return plan_from(problem, starts(problem), without_links)


def half_time(deadline: float) -> float:
    """Half of the time that is left for the one, half for the other."""
    now = time.monotonic()
    return deadline if math.isinf(deadline) else now + (deadline - now) / 2
