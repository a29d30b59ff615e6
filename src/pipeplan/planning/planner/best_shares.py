"""Plan with shares that follow speed, and with even shares only; take the faster plan.

The first search tries even shares of every plan, too. But it draws random numbers, so it may miss
what a search among even shares finds. The second one gets a part of the effort. It is left out once
the optimum is found.
"""

import itertools
import time
from collections.abc import Iterable
from dataclasses import replace

from pipeplan import _core
from pipeplan.errors import InfeasibleError
from pipeplan.planning.planner.best import OPTIMAL_WITHIN, plan_best
from pipeplan.planning.problem import Draft, LateStart, Problem, SearchInterrupted

__all__ = ["plan_best_shares"]

EVEN_EFFORT = 0.25
"""The part of the effort for even shares. All of it won in 2 of 35 cases, and so did a quarter."""
MIN_EVEN_EFFORT, FEW_DEVICES = 0.1, 32
"""With less effort on more devices nothing is searched, and the first search has tried even shares
of nearly the same plans."""
FASTER = 1 - 1e-12
"""By less than this two plans take the same time."""


def plan_best_shares(
    problem: Problem, starts: Iterable[Draft] = (), late: LateStart | None = None
) -> Draft:
    """The fastest plan with whatever shares, with its certificate; see `plan_best`."""
    if not problem.any_shares:
        return plan_best(problem, starts, late)
    starts, again = itertools.tee(starts)
    best = plan_best(problem, starts, late)
    if best.bound is None or best.bound.gap(best.iteration_ms) < OPTIMAL_WITHIN:
        return best
    effort = EVEN_EFFORT * problem.effort
    is_too_little = effort < MIN_EVEN_EFFORT and problem.cluster.num_devices > FEW_DEVICES
    if is_too_little or time.monotonic() >= problem.deadline:
        return best
    try:
        even_only = replace(
            problem,
            limits=replace(problem.limits, shares=False),
            effort=effort,
            needs_bound=False,
        )
        return _faster(best, plan_best(even_only, again, late))
    except (InfeasibleError, _core.DeadlineError):
        return best
    except SearchInterrupted as stop:
        found = _faster(best, stop.draft)
        raise SearchInterrupted(
            replace(found, notes={**found.notes, "interrupted": True})
        ) from None
    except KeyboardInterrupt:
        raise SearchInterrupted(replace(best, notes={**best.notes, "interrupted": True})) from None


def _faster(best: Draft, even: Draft) -> Draft:
    """The faster of two plans, with the bound for any shares, which comes with the first."""
    if not even.iteration_ms < best.iteration_ms * FASTER or best.bound is None:
        return best
    bound_ms = min(best.bound.lower_bound_ms, even.iteration_ms)
    return replace(even, bound=replace(best.bound, lower_bound_ms=bound_ms), notes=best.notes)
