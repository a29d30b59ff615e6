"""Plan with several stages a device, and with backwards cut in two.

A group of devices serves one stage or more, in any order along the chain. The search
(`_core/chain_search.cpp`) anneals over groups, chains and cuts, from regular shapes, from chains
drawn at random and from the best plan with one stage a device. Each candidate is scheduled by list
scheduling under the memory that there is. The schedules of the best ones are improved
(`_core/chain_schedule.cpp`). Effort is spent on rungs (`chain_rungs`), each of which starts from
what those below have found.

The result is never slower than the plan with one stage a device, nor than published orders on even
splits that keep the limits. It has one stage a device where more would gain less than a percent.
What the bound says of other plans: all the work over all the speed.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pipeplan import _core
from pipeplan.bound_checks import has_even_shares
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.figures import group_figures
from pipeplan.group_costs import GroupCosts, group_costs
from pipeplan.group_schedules import joined_at_end, orders_of_blocks
from pipeplan.group_simulator import group_time_ms
from pipeplan.pipeline import Bound, BoundScope, Stage, groups_of, unpack_codes
from pipeplan.planning.group_order import may_cut_backwards
from pipeplan.planning.limits import broken_constraint
from pipeplan.planning.planner.chain_fits import ranked_chains
from pipeplan.planning.planner.chain_rungs import Rung, rungs_up_to
from pipeplan.planning.planner.chain_starts import chain_of, regular_chains
from pipeplan.planning.planner.lower_bound import INSTANT_MS, work_bound_ms
from pipeplan.planning.planner.placement import stage_of_shares
from pipeplan.planning.problem import Draft, Problem, SearchInterrupted
from pipeplan.validation import MAX_BLOCKS

__all__ = ["plan_chains"]

MAX_DEVICES = 128
"""Beyond, the search is too slow to find anything; plans keep one stage a device."""
BUCKETS = (2, 4, 8, 16)
"""Numbers of parts that are tried for the all-reduces of the best plan."""
LEAST_PART = 1 / 500
"""Of the time that all work takes at least. Shorter parts gain less than that, and each one is an
operation, which costs more than its bytes."""
CROWDED = (1.0, 2.0)
"""Factors of transfers, one for each search, where links are shared."""
CROWDED_BEST, CROWDED_POLISH = 2, 0.6
"""Plans of each of these searches that the simulator judges, and what their schedules get: they are
made for times that are not quite true."""
REALLY_FASTER = 1 - 1e-9
WORTH = 0.99
"""A plan with several stages a device, or with cut backwards, has to take no more than this part of
the time with one stage a device. Less is not worth a plan that is harder to read and to run, unless
a published plan of that kind is faster."""
NUM_REGULAR = 24
"""Regular chains that every rung may start from."""
MAX_SEED, NEXT_SEED = 2**64, 1_000_003


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much is searched with effort 1."""

    max_devices: int
    num_starts: int
    anneal: float
    """Blocks that may be scheduled for each start, about 40 nanoseconds each."""
    polish: float
    """The same for each of the best plans; more where the schedule is far above its bound."""
    num_best: int


BUDGETS = (
    Budget(max_devices=8, num_starts=6, anneal=1.4e6, polish=8e5, num_best=2),
    Budget(max_devices=16, num_starts=6, anneal=6e5, polish=2.2e6, num_best=2),
    Budget(max_devices=64, num_starts=6, anneal=7e6, polish=7e6, num_best=2),
    Budget(max_devices=MAX_DEVICES, num_starts=4, anneal=2e7, polish=5e6, num_best=4),
)


OneStageOf = Callable[[float], Draft | None]
"""The best plan with one stage a device that this effort finds, if there is one."""


def plan_chains(
    problem: Problem, one_stage_of: OneStageOf, published: Iterable[Callable[[Problem], Draft]] = ()
) -> Draft | None:
    """The fastest of one stage a device, the published plans within the limits, and what is found.

    None if there is nothing at all.
    """
    search = _ChainSearch(problem.within_samples(), one_stage_of(problem.effort))
    try:
        search.start(published)
        for rung in rungs_up_to(problem.effort):
            if not search.is_over:
                search.climb(rung, one_stage_of(rung.one_stage_effort))
    except (KeyboardInterrupt, SearchInterrupted):
        draft = search.draft()
        if draft is None:
            raise
        raise SearchInterrupted(
            replace(draft, notes={**draft.notes, "interrupted": True})
        ) from None
    return search.draft()


class _ChainSearch:
    """The state of one search."""

    def __init__(self, problem: Problem, one_stage: Draft | None) -> None:
        self.problem = problem
        self.options = problem.options
        self.one_stage = one_stage
        self.best: Draft | None = None
        """The best plan of the rungs so far, with one stage a device or more."""
        self.best_ms = math.inf
        self.is_worth_it = one_stage is None
        """Whether others than plans with one stage a device count, however little they gain."""
        self.max_positions = self.options.max_positions
        self.is_split = bool(self.options.split_backward)
        """Whether the search may cut backwards."""
        self.instance = problem.kernel_instance(positions=self.max_positions)
        self.work_ms = work_bound_ms(problem.cost, problem.num_microbatches)
        self._starts: dict[float, list[_core.ChainPlan]] = {}
        """Regular chains, the best first, by the factor of transfers."""
        self._found: list[_core.ChainPlan] = []
        """The best plans of the search before."""

    def start(self, published: Iterable[Callable[[Problem], Draft]]) -> None:
        """Take plans that are known."""
        for planner in published:
            self.offer_plan_of(planner)

    def climb(self, rung: Rung, one_stage: Draft | None) -> None:
        """Search with the effort of a rung, which knows this plan with one stage a device."""
        one_stage_ms = math.inf if one_stage is None else one_stage.iteration_ms
        if rung.number == 0 and self.best_ms < one_stage_ms * REALLY_FASTER:
            self.is_worth_it = True  # a published plan
        if one_stage is not None and one_stage_ms <= self.best_ms:
            self.best, self.best_ms = one_stage, one_stage_ms
        before = self.best
        if self.may_gain:
            self.run(rung)
        if self.best is not before:
            self.cut_all_reduces()
            self.join_last_gradients()
        self.is_worth_it |= self.best_ms <= one_stage_ms * WORTH

    @property
    def is_late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self.problem.deadline

    @property
    def is_over(self) -> bool:
        """Whether no further rung is worth a look."""
        has_plan = self.best is not None or self.one_stage is not None
        return has_plan and self.is_late

    @property
    def may_gain(self) -> bool:
        """Whether there may be a plan that is worth it, and time to look for one."""
        if self.problem.cluster.num_devices > MAX_DEVICES or self.is_over:
            return False
        return self.is_worth_it or self.work_ms < self.best_ms * WORTH

    def _model(self, problem: Problem) -> _core.ChainModel:
        layers = problem.model.layers if self.is_split else ()
        weight_ms = [layer.weight_grad_ms or 0.0 for layer in layers]
        return _core.ChainModel(
            instance=problem.kernel_instance(positions=self.max_positions),
            weight_ms=weight_ms,
            input_ms=[
                max(0.0, layer.backward_ms - ms)
                for layer, ms in zip(layers, weight_ms, strict=True)
            ],
            kept_bytes=[layer.weight_grad_bytes for layer in layers],
            max_positions=self.max_positions,
            shards_optimizer=self.options.shard_optimizer,
        )

    def run(self, rung: Rung) -> None:
        """Search, and judge what is found by the simulator.

        The search counts transfers as if each were alone on its shared links. Where links are
        shared, it searches again with longer ones.
        """
        if not self.problem.cost.contention:
            self._search(self.problem, rung, 1.0)
            return
        for factor in CROWDED:
            cost = self.problem.cost.with_longer_transfers(factor)
            self._search(replace(self.problem, cost=cost), rung, factor)

    def _search(self, problem: Problem, rung: Rung, factor: float) -> None:
        budget = next(b for b in BUDGETS if problem.cluster.num_devices <= b.max_devices)
        is_crowded = problem is not self.problem
        part = rung.budget * (1 / len(CROWDED) if is_crowded else 1.0)
        model = self._model(problem)
        so_far = "no plan" if self.best is None else f"{self.best_ms:.6g} ms"
        problem.report(f"searching chains: {so_far} so far")
        found = _core.search_chains(
            model,
            self._starts_of(model, problem, factor),
            (problem.seed + rung.number * NEXT_SEED) % MAX_SEED,
            budget.num_starts,
            budget.anneal * part,
            budget.polish * part * (CROWDED_POLISH if is_crowded else 1.0),
            CROWDED_BEST if is_crowded else budget.num_best,
            problem.num_threads,
            problem.deadline,
        )
        self._found = [plan for _, _, plan, _ in found]
        for iteration_ms, parts, plan, blocks in found:
            if iteration_ms < self.best_ms or is_crowded:
                self.offer(self._draft_of(plan, parts, blocks))

    def _starts_of(
        self, model: _core.ChainModel, problem: Problem, factor: float
    ) -> list[_core.ChainPlan]:
        """The best plan, what the search before has found, and regular chains.

        With cut backwards and with whole ones: what cut ones keep may be too much for the memory.
        """
        kinds = (True, False) if self.is_split else (False,)
        if factor not in self._starts:
            # While there is no plan at all, one that fits is the first thing to find.
            ways = (False, True) if self.best is None and problem.limits_memory else (False,)
            made = [
                chain
                for is_split in kinds
                for by_memory in ways
                for chain in regular_chains(
                    model,
                    problem.cost,
                    max_positions=self.max_positions,
                    is_split=is_split,
                    limits=problem.limits,
                    by_memory=by_memory,
                )
            ]
            self._starts[factor] = ranked_chains(
                model,
                problem,
                made,
                most=NUM_REGULAR,
                # What is drawn only serves to have a plan at all.
                drawn_kinds=kinds if self.best is None else (),
            )
        is_start = self.best is not None and not any(s.recompute for s in self.best.stages)
        stages = self.best.stages if self.best is not None and is_start else None
        known = [chain_of(model, stages, is_split) for is_split in kinds] if stages else []
        return _once_each([*known, *self._found, *self._starts[factor]])

    def cut_all_reduces(self) -> None:
        """Let all-reduces begin within the last backward, in parts, where that is faster."""
        chosen = self.best
        if chosen is None or not chosen.orders:
            return
        for buckets in BUCKETS:
            if self.is_late:
                return
            stages = tuple(self._in_parts(stage, buckets) for stage in chosen.stages)
            self.offer(replace(chosen, stages=stages))

    def _in_parts(self, stage: Stage, count: int) -> Stage:
        """The stage with an all-reduce in so many parts, or in fewer that are not too short."""
        cost, least_ms = self.problem.cost, LEAST_PART * self.work_ms
        count = count if stage.num_replicas > 1 else 1
        while count > 1 and cost.all_reduce_ms(stage, count) < least_ms:
            count //= 2
        return replace(stage, gradient_buckets=count)

    def join_last_gradients(self) -> None:
        """Run a stage's last backward in one block where that is faster.

        An all-reduce in parts begins earlier in a whole backward than in a weight gradient alone.
        """
        if self.best is None or not self.best.orders:
            return
        costs = group_costs(self.problem.cost, self.best.stages)
        for index, stage in enumerate(self.best.stages):
            if self.is_late:
                return
            if stage.num_replicas > 1:
                orders = [joined_at_end(order, index) for order in self.best.orders]
                self.offer(replace(self.best, orders=tuple(orders)), costs)

    def _draft_of(
        self, plan: _core.ChainPlan, parts: Sequence[int], blocks: Sequence[int]
    ) -> Draft:
        # A group has the same shares in all its stages, whatever layers they have.
        shares = [self.instance.shares(devices, 0, 1, 0) for devices in plan.devices]
        stages = tuple(
            self._in_parts(
                stage_of_shares(range(first, end), plan.devices[group], shares[group]), count
            )
            for first, end, group, count in zip(
                [0, *plan.end_layer[:-1]], plan.end_layer, plan.group, parts, strict=True
            )
        )
        is_split = [
            plan.is_split
            and may_cut_backwards(self.problem.cost, stage)
            and any(self.problem.model.layers[n].weight_grad_ms for n in stage.layers)
            for stage in stages
        ]
        orders = orders_of_blocks(blocks, plan.group, is_split, self.problem.num_microbatches)
        return Draft(stages=stages, orders=tuple(orders), iteration_ms=0.0)

    def offer_plan_of(self, planner: Callable[[Problem], Draft]) -> None:
        """Take a published planner's plan if it has one, and if that is faster."""
        try:
            self.offer(planner(self.problem))
        except (InputError, InfeasibleError):
            return

    def offer(self, draft: Draft, costs: GroupCosts | None = None) -> None:
        """Take a plan if the simulator finds it faster, and if it keeps all limits.

        `costs` are those of its stages, if they are known.
        """
        if not draft.orders or not self._keeps_limits(draft):
            return
        costs = costs or group_costs(self.problem.cost, draft.stages)
        iteration_ms = group_time_ms(costs, draft.orders, self.problem.num_microbatches)
        if iteration_ms is None or iteration_ms >= self.best_ms * REALLY_FASTER:
            return
        self.best, self.best_ms = replace(draft, iteration_ms=iteration_ms), iteration_ms

    def _keeps_limits(self, draft: Draft) -> bool:
        problem, limits = self.problem, self.problem.limits
        if broken_constraint(draft.stages, limits):
            return False
        if len(draft.stages) * problem.num_microbatches > MAX_BLOCKS // 3:
            return False
        if not self._allows(draft):
            return False
        if not problem.limits_memory:
            return True
        figures = group_figures(
            problem.cost,
            draft.stages,
            draft.orders,
            1.0,
            num_microbatches=problem.num_microbatches,
            shard_optimizer=self.options.shard_optimizer,
        )
        return all(
            device.memory_gb is None
            or figures.peak_memory_gb.get(device.name, 0.0) <= device.memory_gb * (1 + 1e-9)
            for device in problem.cluster.devices
        )

    def _allows(self, draft: Draft) -> bool:
        """Whether the options allow so many stages a device, and cut backwards."""
        most = max(len(group.stages) for group in groups_of(draft.stages))
        is_cut = _has_cut(draft)
        return most <= self.max_positions and bool(self.options.split_backward or not is_cut)

    def draft(self) -> Draft | None:
        """The best plan; with a bound on all plans of its kind."""
        shards, one_stage = self.options.shard_optimizer, self.one_stage
        if one_stage is not None and (
            not self.is_worth_it or one_stage.iteration_ms <= self.best_ms
        ):
            self.best = one_stage
        if self.best is None or (self.best is one_stage and not shards):
            return self.best
        problem = self.problem
        num_terms = 3 * problem.num_microbatches * problem.model.num_layers + 8
        bound_ms = self.work_ms - num_terms * INSTANT_MS
        size = problem.model.microbatch_size
        is_even = all(
            has_even_shares(stage, size) and not stage.recompute for stage in self.best.stages
        )
        bound = Bound(lower_bound_ms=max(0.0, bound_ms), scope=BoundScope.FAMILIES)
        return replace(
            self.best,
            bound=bound if is_even else None,
            notes={"bound": "work"} if is_even else {},
            schedule_guarantee_ms=None,
            shard_optimizer=shards,
        )


def _once_each(chains: Iterable[_core.ChainPlan]) -> list[_core.ChainPlan]:
    known: dict[tuple[str, bool], _core.ChainPlan] = {}
    for chain in chains:
        what = str((chain.devices, chain.group, chain.end_layer))
        known.setdefault((what, chain.is_split), chain)
    return list(known.values())


def _has_cut(draft: Draft) -> bool:
    """Whether some backward is cut in two."""
    return any((unpack_codes(order)[1] > 1).any() for order in draft.orders or ())
