"""Plan on iteration time itself, and prove how close to the optimum the result is.

The fixed-plan bound (`_core/bound.hpp`) is the objective: unlike the paper's bottleneck it knows
fill, drain, round trips and where an all-reduce hides. The steps, each of which starts
from the best time so far and drops what cannot beat it:

1. data parallel and even splits;
2. the recursion on the bound over several device orders (`_core/plan_on_order.cpp`), first with
   few replica counts and narrow fronts, then with all; the paper's partitions (`spp`);
3. a lower bound for every plan (`lower_bound`); over all sets of devices it yields plans as well;
4. complete plans that the caller offers, a late start first, unless the optimum is found already;
5. local search (`_core/local_search.cpp`) from the best plans that differ and from plain ones,
   and the recursion again on the order that the best plan uses, until the effort is spent or the
   bound is met.

Every plan is simulated under a portfolio of schedules before it counts. Never slower than any of
its starting points. The same input, seed and effort give the same plan with any number of threads;
only a time limit can change that. `settings` says how much of each step is done.
"""

import itertools
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipeplan import _core
from pipeplan.errors import InfeasibleError
from pipeplan.pipeline import Stage
from pipeplan.planning.planner import fit_starts, settings
from pipeplan.planning.planner.coarsening import coarsen
from pipeplan.planning.planner.device_classes import num_link_rates, num_set_triples
from pipeplan.planning.planner.device_order import connected_parts
from pipeplan.planning.planner.device_orders import device_orders
from pipeplan.planning.planner.incumbent import Incumbent
from pipeplan.planning.planner.lower_bound import (
    bucket_sizes,
    certificate,
    relaxed_bound_ms,
    work_bound_ms,
)
from pipeplan.planning.planner.paper_partitions import paper_stages
from pipeplan.planning.planner.placement import placed_plan, placed_stages
from pipeplan.planning.planner.room import orders_to_fit
from pipeplan.planning.planner.starts import different_plans, even_split, starts_of, with_ends
from pipeplan.planning.problem import Draft, LateStart, Problem, SearchInterrupted
from pipeplan.simulator import Codes

__all__ = ["plan_best"]

OPTIMAL_WITHIN = 1e-7
"""Proofs are so exact. Plans that are nearer to the bound count as optimal (`Bound.verdict`)."""
SET_CAPACITY = 2
"""Points in a front of planning on sets. 16 take up to five times as long, and prove no more."""
NUM_POLISHED, NUM_POLISHED_ON_SETS = {False: 4, True: 2}, {False: 16, True: 8}
"""Plans for which each search looks for better schedules, by whether links are shared."""


def plan_best(
    problem: Problem, starts: Iterable[Draft] = (), late: LateStart | None = None
) -> Draft:
    """The fastest plan that all of the above finds, with its certificate.

    Never slower than `late`, whose bound has to hold here, nor than any of the `starts`, which
    are taken one by one.
    """
    search = _Search(problem.within_samples())
    search.offer_simple_plans()
    try:
        search.order_devices()
        search.plan_on_orders()
        if search.plans_on_sets and not problem.cost.contention:  # prunes more than it costs
            first = different_plans(search.incumbent.ranked(), settings.BEFORE_PROOF.num_searches)
            search.search_from(first, settings.BEFORE_PROOF)
        search.prove()
        if late is not None:
            search.polish_on_sets()  # an optimum spares the late start
            search.start_from(late)
        search.offer_all(starts)
        search.polish_on_sets()
        search.improve()
    except _core.DeadlineError:
        if not search.incumbent.has_plan:
            raise
    except KeyboardInterrupt:
        if not search.incumbent.has_plan:
            raise
        raise SearchInterrupted(search.draft(interrupted=True)) from None
    if not search.incumbent.has_plan:
        return fit_starts.draft_by_memory(search.problem, search.orders)
    return search.draft()


class _Search:
    """The state of one planning run."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.cost = problem.cost
        self.shares_links = problem.cost.contention is not None
        self.num_devices = len(problem.cost.speed_D)
        self.num_layers = len(problem.cost.forward_ms_L)
        self.settings = settings.settings_for(self.num_devices)
        self.instance = problem.kernel_instance()
        self.bounded = problem.bound_instance(self.instance)
        limits = replace(problem.limits, memory=problem.limits_memory)
        self.incumbent = Incumbent(problem.cost, problem.num_microbatches, self.instance, limits)
        self.bound_ms = work_bound_ms(problem.cost, problem.num_microbatches)
        self.bound_name = "work"
        self.orders = [tuple(range(self.num_devices))]
        self.coarse = coarsen(problem.cost, self.settings.max_layers)
        self.coarse_instance = self.coarse.cost.with_layers(self.instance)
        has_classes = self.num_devices <= settings.MAX_CLASS_DEVICES
        self.classes = _core.device_classes(self.instance) if has_classes else None
        self._num_searches = 0
        self._factor = settings.budget_factor(
            self.num_devices,
            problem.num_microbatches,
            has_equal_devices=self.instance.has_equal_devices,
            num_rates=num_link_rates(problem.cost),
            shares_links=self.shares_links,
            plans_on_sets=self.plans_on_sets,
        )

    @property
    def plans_on_sets(self) -> bool:
        """Whether the recursion over all sets of devices is worth its time."""
        if self.classes is None:
            return False
        triples = num_set_triples(self.classes)
        steps = triples * self.num_layers**settings.SET_STEPS_PER_LAYER
        return triples <= settings.MAX_SET_TRIPLES and steps <= settings.MAX_SET_STEPS

    @property
    def is_optimal(self) -> bool:
        """Whether the best plan meets the bound."""
        return self.incumbent.iteration_ms <= self.bound_ms * (1 + OPTIMAL_WITHIN)

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing left to win, or too little to search for it."""
        return self.is_optimal or self._is_within(settings.SMALL_GAP / self.problem.effort)

    def _is_within(self, gap: float) -> bool:
        """Whether all sets of devices were planned on, and the best plan is so near the bound."""
        return self.plans_on_sets and self.incumbent.iteration_ms <= self.bound_ms * (1 + gap)

    @property
    def is_late(self) -> bool:
        """Whether the caller's time is up."""
        return time.monotonic() >= self.problem.deadline

    def offer_simple_plans(self) -> None:
        """One device, and data parallel on the largest connected part."""
        everything = range(self.num_layers)
        part = max(connected_parts(self.cost), key=len)
        self.incumbent.offer((Stage(layers=everything, devices=tuple(part[:1])),))
        self.incumbent.offer((Stage(layers=everything, devices=tuple(part)),))

    def start_from(self, late: LateStart) -> None:
        """Consider a plan that takes long to make, and take over its bound."""
        if self.is_optimal or self.is_late:
            return
        try:
            draft = late()
        except InfeasibleError:
            return  # in this problem there may still be a plan
        except SearchInterrupted as stop:
            self.incumbent.offer_draft(stop.draft, self.problem.deadline)
            raise
        self.incumbent.offer_draft(draft, self.problem.deadline)
        if draft.bound is not None:
            self._raise_bound(draft.bound.lower_bound_ms, draft.notes["bound"])

    def order_devices(self) -> None:
        """Make the device orders; offer an even split on the first and on the cluster's own."""
        self.offer(even_split(self.orders[0], self.num_layers))
        if self.instance.has_equal_devices:
            return  # every order looks the same
        orders = device_orders(
            self.cost,
            by_cuts=self.settings.orders_by_cuts,
            most=self.settings.num_orders,
            deadline=self.problem.deadline,
        )
        ended = (with_ends(order, self.problem.limits) for order in orders)
        self.orders = list(dict.fromkeys(ended))
        self.offer(even_split(self.orders[0], self.num_layers))

    def offer(self, stages: tuple[Stage, ...]) -> None:
        """Consider stages before the deadline."""
        self.incumbent.offer(stages, self.problem.deadline)

    def plan_on_orders(self) -> None:
        """The recursion on every order: powers of two first, then finer on the best orders."""
        orders: Sequence[tuple[int, ...]] = self.orders
        for step in self.settings.steps:
            least_ms = {}
            for order in orders[: int(min(step.num_orders, len(orders)))]:
                if self.is_late or self.is_optimal:
                    return
                least_ms[order] = self._plan_on_order(order, step)
            orders = sorted(least_ms, key=least_ms.__getitem__)
        if self.settings.tries_partitions:
            for stages in paper_stages(self.problem, self.coarse, self.incumbent):
                self.offer(stages)
        for last_resort in (self.plan_within_memory, self.plan_on_more_orders):
            if not self.incumbent.has_plan:
                last_resort()

    def plan_within_memory(self) -> None:
        """Plans that fit, whatever time they take, and the recursion on their orders."""
        for stages in fit_starts.even_plans(self.problem):
            self.offer(stages)
            self.plan_on_order_of(stages)

    def plan_on_more_orders(self) -> None:
        """Look for any plan that fits: on orders by memory, then on random ones."""
        if self.instance.has_equal_devices:
            return  # every order looks the same
        for order in orders_to_fit(self.problem):
            if self.is_late or self.incumbent.has_plan:
                return
            self._plan_on_order(with_ends(order, self.problem.limits), settings.ANY_PLAN)

    def _plan_on_order(self, order: tuple[int, ...], step: settings.Step) -> float:
        """Offer the best plans on an order, and return the least bound of a plan on it."""
        unit = settings.unit_of(self.num_devices)
        sizes = settings.replica_counts(step.sizes, -(-self.num_devices // unit))
        self.problem.report(f"planning with {len(sizes)} replica counts")
        least_ms, plans = _core.plan_on_order(
            self.coarse_instance.on_devices(order),
            np.array(sizes, dtype=np.int32),
            step.capacity,
            self.incumbent.iteration_ms,
            self.settings.num_candidates,
            self.problem.num_threads,
            self.problem.deadline,
            unit,
        )
        ends = self.coarse.end_layer
        for placed in plans:
            self.offer(placed_stages(placed, self.instance, order=order, end_layer=ends))
        return least_ms

    def offer_all(self, drafts: Iterable[Draft]) -> None:
        """Complete plans; not even made once the optimum is found."""
        drafts = iter(drafts)
        while not (self.is_optimal or self.is_late):
            draft = next(drafts, None)
            if draft is None:
                return
            self.incumbent.offer_draft(draft, self.problem.deadline)

    def prove(self) -> None:
        """The best lower bound that is worth its time."""
        problem = self.problem
        is_wanted = problem.needs_bound or self.plans_on_sets  # on sets it finds plans as well
        is_over = self.is_optimal or self.is_late
        if is_over or not is_wanted or self.num_devices > settings.MAX_PROVED_DEVICES:
            return
        problem.report("proving a lower bound")
        proofs = [self._prove_relaxed, self._prove_on_sets_or_prices]
        # Where memory counts, the relaxed bound is hardly ever met: 1 of 23 on two hosts.
        if problem.limits_memory and self.plans_on_sets and not self.instance.has_equal_devices:
            proofs.reverse()
        for proof in (*proofs, self._prove_on_near_sets):
            if not self.is_optimal:
                proof()

    def _prove_relaxed(self) -> None:
        """All plans, by the numbers of devices alone."""
        problem, buckets = self.problem, bucket_sizes(self.num_devices, self.num_layers)
        if buckets and settings.proves_relaxed(problem, self.num_devices, self.num_layers):
            known = (self.incumbent.iteration_ms, problem.num_threads, problem.deadline)
            points = settings.RELAXED_POINTS[self.shares_links and self.plans_on_sets]
            self._raise_bound(relaxed_bound_ms(self.bounded, buckets, *known, points), "relaxed")

    def _prove_on_sets_or_prices(self) -> None:
        """All sets of devices, or a bound by their prices where any shares count."""
        if self.plans_on_sets:
            self._prove_on_sets()
        elif self.problem.any_shares:
            steps = settings.PRICE_STEPS * self.problem.effort
            known = (self.bound_ms, self.incumbent.iteration_ms, steps, self.problem.deadline)
            self._raise_bound(_core.price_bound(self.bounded, *known), "prices")

    def _prove_on_sets(self) -> None:
        """All sets of devices, then single plans; both may give a better plan as well."""
        assert self.classes is not None, "without classes there are too many sets"
        exact_ms, plans, found = _core.prove_on_sets(
            self.bounded,
            self.classes,
            SET_CAPACITY,
            self.incumbent.iteration_ms,
            *settings.set_proof(shares_links=self.shares_links),
            self.problem.num_threads,
            self.problem.deadline,
        )
        self._raise_bound(exact_ms, "exact-sets")
        self._offer_found(found)
        for placed in plans:
            self.incumbent.offer_placed(placed, self.problem.deadline)

    def _prove_on_near_sets(self) -> None:
        """Small sets of devices, as far as the effort allows, where all of them are too many."""
        if self.plans_on_sets or self.num_devices > settings.MAX_NEAR_DEVICES:
            return
        near_ms, _, found = _core.prove_on_near_sets(
            self.bounded,
            SET_CAPACITY,
            self.bound_ms,
            self.incumbent.iteration_ms,
            settings.NEAR_STEPS * self.problem.effort,
            settings.MAX_PROOF_STEPS / 10,
            self.problem.num_threads,
            self.problem.deadline,
        )
        self._raise_bound(near_ms, "near-sets")
        self._offer_found(found)

    def _offer_found(self, found: list[tuple[float, _core.PlacedPlan, Codes]]) -> None:
        for iteration_ms, placed, codes in found:
            stages = placed_stages(placed, self.instance)
            draft = Draft(stages=stages, codes=codes, iteration_ms=iteration_ms)
            if self.cost.measured is None:
                self.incumbent.offer_draft(draft, self.problem.deadline)
            else:  # the bound's times are too low
                self.offer(draft.stages)

    def improve(self) -> None:
        """Local search, as much as the effort allows.

        The steps form one long sequence, and more effort only goes further along it. So more effort
        never gives a slower plan.
        """
        steps, bought = settings.search_cycle(
            self.settings,
            on_sets=self.plans_on_sets,
            near=self._is_within(settings.LARGE_GAP),
            shares_links=self.shares_links,
            memory_differs=self.problem.memory_differs,
        )
        left = self.problem.effort * bought
        for cycle in itertools.count():
            rng = random.Random(f"{self.problem.seed} {cycle}")
            for step in steps:
                left -= step.cost
                if left < -1e-9 or self.is_settled or self.is_late:
                    return
                starts = starts_of(step, self.incumbent.ranked(), self.cost, self.orders, rng)
                self.search_from(starts, step)
            self.plan_on_order_of(self.incumbent.stages)

    def polish_on_sets(self) -> None:
        """Where all sets were planned on, only a schedule may be missing; whatever the effort."""
        if self.plans_on_sets and not (self.is_optimal or self.is_late):
            count = NUM_POLISHED_ON_SETS[self.shares_links]
            self.incumbent.polish(count, self.problem.deadline)

    def search_from(self, starts: Sequence[tuple[Stage, ...]], step: settings.SearchStep) -> None:
        """Local search from each of these plans, each with its own random numbers."""
        self.problem.report(f"searching: {self.incumbent.iteration_ms:.6g} ms so far")
        self._num_searches += 1
        most = settings.SMALL_GAP_BUDGET if self._is_within(settings.LARGE_GAP) else np.inf
        found = _core.local_search(
            self.instance,
            [placed_plan(self.instance, stages) for stages in starts],
            (self.problem.seed * 1_000_003 + self._num_searches) % 2**64,
            step.budget * min(self.settings.budget, most) * self._factor,
            self.bound_ms,
            self.problem.num_threads,
            self.problem.deadline,
            self.incumbent.iteration_ms,
            step.heat,
            step.overflow_price,
        )
        for iteration_ms, rule, placed in found:
            if iteration_ms < np.inf:
                self.incumbent.offer_found(placed, rule, iteration_ms, self.problem.deadline)
        self.incumbent.polish(NUM_POLISHED[self.shares_links], self.problem.deadline)

    def plan_on_order_of(self, stages: tuple[Stage, ...]) -> None:
        """The recursion on the order in which a plan uses the devices."""
        if not self.instance.has_equal_devices:  # else this order looks like all others
            order = fit_starts.order_of(stages, self.num_devices)
            self._plan_on_order(order, self.settings.steps[-1])

    def draft(self, **notes: Any) -> Draft:
        """The best plan with its certificate."""
        draft = self.incumbent.draft()
        bound = certificate(self.problem, self.bound_ms, draft.iteration_ms)
        return replace(draft, bound=bound, notes={"bound": self.bound_name, **notes})

    def _raise_bound(self, bound_ms: float, name: str) -> None:
        if bound_ms > self.bound_ms:
            self.bound_ms, self.bound_name = bound_ms, name
