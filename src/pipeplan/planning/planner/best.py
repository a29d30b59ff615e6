"""Plan on iteration time itself, and prove how close to the optimum the result is.

The fixed-plan bound (`_core/bound.hpp`) is the objective: unlike the paper's bottleneck it knows
fill, drain, round trips and where an all-reduce hides. The steps, each of which starts
from the best time so far and drops what cannot beat it:

1. data parallel and even splits;
2. the recursion on the bound over several device orders (`_core/plan_on_order.cpp`), first with
   few replica counts and narrow fronts, then with all;
3. the paper's partitions (`spp`), those that could still win;
4. a lower bound for every plan; for small clusters by the same recursion over all sets of
   devices, which yields plans as well;
5. complete plans that the caller offers, unless the optimum is found already;
6. local search from the best different plans (`_core/local_search.cpp`), until its budget is
   spent or the bound is met.

Every plan is simulated under a portfolio of schedules before it counts. Never slower than
any of its starting points. The same input, seed and effort give the same plan whatever the number
of threads; only a time limit can change that.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from pipeplan import _core
from pipeplan.pipeline import Bound, BoundScope, Stage
from pipeplan.planning.planner.coarsening import coarsen
from pipeplan.planning.planner.device_classes import device_classes, num_set_triples
from pipeplan.planning.planner.device_order import connected_parts, recursive_device_order
from pipeplan.planning.planner.device_orders import device_orders
from pipeplan.planning.planner.incumbent import Incumbent, placed_stages
from pipeplan.planning.planner.lower_bound import relaxed_bound_ms, work_bound_ms
from pipeplan.planning.planner.partition import best_partitions
from pipeplan.planning.problem import Draft, Problem, SearchInterrupted

__all__ = ["plan_best"]

OPTIMAL_WITHIN = 1e-9
NUM_CANDIDATES = 10
NUM_STARTS = 4
FINER_ORDERS = 2
"""How many orders of more than 8 devices are planned on with more replica counts."""
MAX_RELAXED_DEVICES = 128
"""Beyond this the relaxed bound takes longer than planning; the work bound stands."""
MAX_CLASSES = 24
"""Devices up to which classes of equal ones are looked for."""
MAX_SET_TRIPLES, MAX_SET_STEPS = 300_000, 64e6
"""How many triples of sets, and of these times layers, planning on sets is worth its time for: up
to nine devices that all differ, or two hosts of eight equal ones."""


def plan_best(problem: Problem, starts: Iterable[Draft] = ()) -> Draft:
    """The fastest plan that all of the above finds, with its certificate.

    Never slower than any of the `starts`, which are taken one by one.
    """
    search = _Search(problem)
    search.offer_simple_plans()
    try:
        search.plan_on_orders()
        if search.plans_on_sets:  # what a better time rules out there is worth more than it costs
            search.improve(search.budget / 4, rounds=1)
        search.prove()
        search.offer_all(starts)
        search.improve(search.budget, rounds=max(1, round(problem.effort)))
    except KeyboardInterrupt:
        draft = search.draft()
        raise SearchInterrupted(
            replace(draft, notes={**draft.notes, "interrupted": True})
        ) from None
    return search.draft()


class _Search:
    """The state of one planning run."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.cost = problem.cost
        self.num_devices = len(problem.cost.speed_D)
        self.num_layers = len(problem.cost.forward_ms_L)
        self.incumbent = Incumbent(problem.cost, problem.num_microbatches)
        self.bound_ms = work_bound_ms(problem.cost, problem.num_microbatches)
        self.bound_name = "work"
        self.orders = device_orders(problem.cost)
        # Without the cuts that never pay nothing is lost; with fewer still, only planning on
        # orders has to do.
        self.lossless = coarsen(problem.cost, self.num_layers)
        self.coarse = coarsen(problem.cost, 256 if self.num_devices <= 64 else 64)
        self.classes = device_classes(problem.cost) if self.num_devices <= MAX_CLASSES else None
        self._num_searches = 0

    @property
    def budget(self) -> float:
        """What each start of the local search may spend, about a nanosecond a unit.

        Grows with the cluster, so that planning stays within the time that people wait.
        """
        for devices, budget in ((8, 6e6), (16, 10e6), (64, 25e6), (256, 100e6)):
            if self.num_devices <= devices:
                return budget * min(1.0, self.problem.effort)
        return 150e6 * min(1.0, self.problem.effort)

    @property
    def plans_on_sets(self) -> bool:
        """Whether the recursion over all sets of devices is worth its time."""
        if self.classes is None:
            return False
        triples = num_set_triples(self.classes)
        steps = triples * len(self.lossless.end_layer)
        return triples <= MAX_SET_TRIPLES and steps <= MAX_SET_STEPS

    @property
    def is_optimal(self) -> bool:
        """Whether the best plan meets the bound."""
        return self.incumbent.iteration_ms <= self.bound_ms * (1 + OPTIMAL_WITHIN)

    @property
    def is_late(self) -> bool:
        """Whether the caller's time is up."""
        return time.monotonic() >= self.problem.deadline

    def offer_simple_plans(self) -> None:
        """Data parallel on the largest connected part, and even 1F1B on the first order."""
        everything = range(self.num_layers)
        part = max(connected_parts(self.cost), key=len)
        self.incumbent.offer((Stage(layers=everything, devices=tuple(part[:1])),))
        self.incumbent.offer((Stage(layers=everything, devices=tuple(part)),))
        num_stages = min(self.num_layers, self.num_devices)
        cuts = [self.num_layers * n // num_stages for n in range(num_stages + 1)]
        for order in (tuple(range(self.num_devices)), self.orders[0]):
            self.incumbent.offer(
                tuple(
                    Stage(layers=range(cuts[n], cuts[n + 1]), devices=(order[n],))
                    for n in range(num_stages)
                )
            )

    def plan_on_orders(self) -> None:
        """The recursion on every order: powers of two first, then finer on the best orders."""
        powers, all_sizes = _powers_of_two(self.num_devices), range(1, self.num_devices + 1)
        cascade: list[tuple[Sequence[int], int]] = [(powers, 1)]
        if self.num_devices <= 32:
            cascade += [(powers, 4), (_coarse_sizes(self.num_devices), 4), (all_sizes, 8)]
        elif self.num_devices <= 64:
            halfway = [
                size + size // 2 for size in powers[1:] if size + size // 2 < self.num_devices
            ]
            cascade += [(powers, 2), (sorted(powers + halfway), 3)]
        else:
            cascade += [(_coarse_sizes(self.num_devices // 4), 2)]
        # Reversed orders come last; on large clusters they are not worth their time.
        most = 4 if self.num_devices <= 256 else FINER_ORDERS
        orders = self.orders if self.num_devices <= 32 else self.orders[:most]
        for sizes, capacity in cascade:
            least_ms = {}
            for order in orders:
                if self.is_late or self.is_optimal:
                    return
                self.problem.report(f"planning with {len(sizes)} replica counts")
                least_ms[order], plans = _core.plan_on_order(
                    self.coarse.cost.kernel_instance(self.problem.num_microbatches, order),
                    np.array(sizes, dtype=np.int32),
                    capacity,
                    self.incumbent.iteration_ms,
                    NUM_CANDIDATES if self.num_devices <= 8 else NUM_CANDIDATES // 2,
                    self.problem.num_threads,
                )
                for placed in plans:
                    mapped = [(end, [order[position] for position in at]) for end, at in placed]
                    self.incumbent.offer(placed_stages(self.coarse.refine(mapped)))
            if self.num_devices > 8:
                few = len(orders) > FINER_ORDERS and self.num_devices <= 64
                fewer = FINER_ORDERS if few or self.num_devices <= 32 else 1
                orders = sorted(orders, key=least_ms.__getitem__)[:fewer]
        self.offer_partitions()

    def offer_partitions(self) -> None:
        """The paper's partitions that are not ruled out by the best time so far."""
        if self.num_devices > 64:
            return
        for part in connected_parts(self.cost):
            order = recursive_device_order(self.cost, part)
            for partition in best_partitions(
                self.cost,
                order,
                self.problem.num_microbatches,
                limit_ms=self.incumbent.iteration_ms,
                num_threads=self.problem.num_threads,
            ):
                self.incumbent.offer(partition.stages)

    def offer_all(self, drafts: Iterable[Draft]) -> None:
        """Complete plans; not even made once the optimum is found."""
        drafts = iter(drafts)
        while not (self.is_optimal or self.is_late):
            draft = next(drafts, None)
            if draft is None:
                return
            self.incumbent.offer_draft(draft)

    def prove(self) -> None:
        """The best lower bound that is worth its time."""
        if self.is_optimal or self.is_late or self.num_devices > MAX_RELAXED_DEVICES:
            return
        self.problem.report("proving a lower bound")
        limit_ms = self.incumbent.iteration_ms
        relaxed_ms = relaxed_bound_ms(
            self.lossless.cost, self.problem.num_microbatches, limit_ms, self.problem.num_threads
        )
        self._raise_bound(relaxed_ms, "relaxed")
        if self.is_optimal or self.classes is None or not self.plans_on_sets:
            return
        exact_ms, plans = _core.plan_on_sets(
            self.lossless.cost.kernel_instance(self.problem.num_microbatches),
            self.classes,
            16,
            limit_ms,
            3 * NUM_CANDIDATES,
            self.problem.num_threads,
        )
        self._raise_bound(exact_ms, "exact-sets")
        for placed in plans:
            self.incumbent.offer(placed_stages(self.lossless.refine(placed)))

    def improve(self, budget: float, rounds: int) -> None:
        """Local search from the best different plans; later rounds go on from what it found."""
        for _ in range(rounds):
            if self.is_optimal or self.is_late:
                return
            self.problem.report(f"searching: {self.incumbent.iteration_ms:.6g} ms so far")
            starts = self.incumbent.pool(NUM_STARTS if self.num_devices <= 256 else 2)
            self._num_searches += 1
            found = _core.local_search(
                self.cost.kernel_instance(self.problem.num_microbatches),
                starts,
                self.problem.seed * 1_000_003 + self._num_searches,
                budget,
                self.bound_ms,
                self.problem.num_threads,
            )
            for _, _, placed in found:
                self.incumbent.offer(placed_stages(placed))

    def draft(self) -> Draft:
        """The best plan with its certificate."""
        lower_bound_ms = min(self.bound_ms, self.incumbent.iteration_ms)
        return replace(
            self.incumbent.draft(),
            bound=Bound(lower_bound_ms=lower_bound_ms, scope=BoundScope.EVEN_SHARES),
            notes={"bound": self.bound_name},
        )

    def _raise_bound(self, bound_ms: float, name: str) -> None:
        if bound_ms > self.bound_ms:
            self.bound_ms, self.bound_name = bound_ms, name


def _powers_of_two(most: int) -> list[int]:
    return [2**k for k in range(most.bit_length()) if 2**k <= most]


def _coarse_sizes(most: int) -> list[int]:
    """1 to 8, then steps of about a quarter, on multiples of 4."""
    sizes = list(range(1, 9))
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(2, sizes[-1] // 16 * 4))
    return sorted({size for size in (*sizes, *_powers_of_two(most)) if size <= most})
