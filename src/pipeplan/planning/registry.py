"""Every planner by its name: ours, the published ones, and those of other packages."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from pipeplan.errors import InfeasibleError, InputError
from pipeplan.planning.baselines import BASELINES, GROUP_BASELINES
from pipeplan.planning.group_order import require_weight_gradients
from pipeplan.planning.limits import require_positions
from pipeplan.planning.options import PlanningOptions
from pipeplan.planning.planner.best_shares import plan_best_shares
from pipeplan.planning.planner.chains import plan_chains
from pipeplan.planning.planner.exact import plan_exact
from pipeplan.planning.planner.reduction import plan_within_limits
from pipeplan.planning.planner.settings import published_starts
from pipeplan.planning.planner.spp import plan_spp
from pipeplan.planning.planner.unshared import half_time, plan_knowing_links
from pipeplan.planning.problem import Draft, Planner, Problem
from pipeplan.plugins import PLANNER_GROUP, all_names, find

__all__ = [
    "KEEP_LIMITS",
    "PLANNERS",
    "SEARCH_FAMILIES",
    "choose_planners",
    "find_planner",
    "planner_names",
    "require_known_options",
]

CHOOSE_BY_TIME = ("grid",)
"""Published planners that choose by real times, so that shared links change their plans."""
SEARCH_FAMILIES = ("best",)
"""Planners that search several stages a device and cut backwards by default."""
KEEP_LIMITS = ("best", "exact")
"""Planners whose plans keep all limits; those of published planners may break them."""
SLOW = "exact"
"""Takes minutes where the others take milliseconds, so it runs only if somebody names it."""


def plan_best_of_all(problem: Problem) -> Draft:
    """`best`, which also starts from the plans of published planners."""
    options = problem.options.settled(
        problem.model, problem.cluster.num_devices, problem.num_microbatches, is_free=True
    )
    require_positions(problem.limits, problem.cluster, options.max_positions)
    if options.split_backward:  # while layers have the names that they were given
        require_weight_gradients(problem, "split_backward")
    return plan_within_limits(replace(problem, options=options), _plan_best_from_published)


def plan_exact_within_limits(problem: Problem) -> Draft:
    """`exact` for the problem that the constraints leave; it knows one stage a device."""
    require_positions(problem.limits, problem.cluster, 1)
    return plan_within_limits(problem, plan_exact)


def _plan_best_from_published(problem: Problem) -> Draft:
    published = _PublishedPlans()
    if not problem.options.uses_families:
        return plan_knowing_links(problem, plan_best_shares, published.drafts)
    return _plan_families(problem, published)


def _plan_families(problem: Problem, published: "_PublishedPlans") -> Draft:
    """One stage a device, then several."""
    failed: list[InfeasibleError] = []

    @cache
    def one_stage_of(effort: float) -> Draft | None:
        """None if there is none; then less effort would not find one either."""
        part = replace(problem, effort=effort, deadline=half_time(problem.deadline))
        try:
            require_positions(problem.limits, problem.cluster, 1)
            return None if failed else plan_knowing_links(part, plan_best_shares, published.drafts)
        except InfeasibleError as error:
            failed.append(error)
            return None

    def with_whole_optimizers(sharded: Problem) -> Draft:
        options = replace(sharded.options, shard_optimizer=False)
        deadline = half_time(sharded.deadline)
        whole = plan_chains(replace(sharded, options=options, deadline=deadline), one_stage_of)
        if whole is None:
            raise InfeasibleError("shard_optimizer: no plan fits without it")
        return whole

    known = [BASELINES[name] for name in GROUP_BASELINES]
    if problem.options.shard_optimizer and problem.limits_memory:
        # Elsewhere the search would do the same again.
        known.append(with_whole_optimizers)
    draft = plan_chains(problem, one_stage_of, known)
    if draft is not None:
        return draft
    try:
        require_positions(problem.limits, problem.cluster, 1)
    except InfeasibleError:  # says what to do where several stages a device are not allowed
        raise InfeasibleError(
            f"stages: no plan with {problem.limits.min_stages} stages was found that keeps the"
            " limits; ask for fewer"
        ) from None
    raise failed[0]


class _PublishedPlans:
    """Plans of published planners. Most know no shared links, and make their plan only once."""

    def __init__(self) -> None:
        self._made: dict[str, Draft] = {}

    def drafts(self, problem: Problem) -> Iterator[Draft]:
        """Their plans of a problem, with or without its shared links, one by one."""
        names = published_starts(problem.cluster.num_devices, problem.model.num_layers)
        by_stage = [name for name in BASELINES if name not in GROUP_BASELINES]
        unshared = problem
        if problem.cost.contention is not None:
            unshared = replace(problem, cost=problem.cost.without_shared_links())
        for name in by_stage if names is None else names:
            if name in CHOOSE_BY_TIME:
                yield BASELINES[name](problem)
                continue
            if name not in self._made:
                self._made[name] = BASELINES[name](unshared)
            yield self._made[name]


PLANNERS: dict[str, Planner] = {
    "best": plan_best_of_all,
    "spp": plan_spp,
    "exact": plan_exact_within_limits,
    **BASELINES,
}
"""The planners that come with pipeplan."""


def find_planner(name: str) -> Planner:
    """The planner of that name, ours or another package's."""
    return find("planner", name, PLANNERS, PLANNER_GROUP)


def planner_names() -> tuple[str, ...]:
    """The names of all planners, those of other packages included."""
    return all_names(PLANNERS, PLANNER_GROUP)


def choose_planners(names: Sequence[str] | None) -> tuple[str, ...]:
    """These planners, once each; for None all planners that are quick."""
    if names is None:
        return tuple(name for name in planner_names() if name != SLOW)
    if not names:
        raise InputError(f"planners: names none; known are {', '.join(planner_names())}")
    for name in names:
        find_planner(name)
    return tuple(dict.fromkeys(names))


def require_known_options(options: PlanningOptions, planner: str) -> None:
    """Refuse options that only planners that search families know, if this is another one.

    Where several planners get the same options, each takes those that it knows.
    """
    if planner in SEARCH_FAMILIES:
        return
    find_planner(planner)
    for name in options.asked_families:
        flag = name.replace("_", "-")
        raise InputError(
            f"{name}: planner {planner!r} knows no --{flag}; leave it out, or use planner"
            f" {SEARCH_FAMILIES[0]!r}"
        )
