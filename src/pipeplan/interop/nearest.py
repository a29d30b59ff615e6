"""The nearest plan that another program can run: equal replicas, an order that it knows.

For each number of replicas and of stages it takes groups of neighbours as stages, in three orders
of the devices: the plan's, the plan's with the devices of a host kept together, the cluster's. It
cuts the model into parts of equal work, into parts of equally many layers and, where the plan has
as many stages, as the plan does. So every grid of equal parts is among the candidates. The best of
them are improved by moving single cuts while that helps. Plans that fit into memory go before
others. Every candidate is simulated. This is a search among few plans, not a planner: no bound
comes with it.

Of a plan with several stages a group, its own stages are candidates, too: in its own order, with
whole backwards, and in interleaved 1F1B.

O(L^2 S + candidates * simulation); candidates and simulations are limited.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise, product

import numpy as np
from numpy.typing import NDArray

from pipeplan.checker import memory_excesses
from pipeplan.errors import PlanFileError, ScheduleError
from pipeplan.interop.exported import CannotExport
from pipeplan.interop.nearest_groups import group_candidates, plain_stages
from pipeplan.pipeline import Plan, Schedule, Stage
from pipeplan.replaying import Replayed, replay_plan
from pipeplan.schedules import PORTFOLIO, SCHEDULES
from pipeplan.validation import MAX_BLOCKS

__all__ = ["describe", "find_nearest"]

MAX_SHAPES = 200
"""Numbers of replicas and stages that are tried."""
MAX_MOVES = 3000
"""Cuts that are moved on trial."""
MAX_STARTS = 3
"""Candidates that are improved."""
MAX_STEPS = 200_000
"""Layers times stages; with more, each layer counts alike."""
MAX_SIMULATED_BLOCKS = 40_000_000
"""A few seconds of simulation."""
MAX_PLACED_DEVICES = 1_000_000
"""Devices of all candidates together; a few seconds, too."""
FEWEST_CANDIDATES = 20
LISTED_STAGES = 16


def find_nearest(
    replayed: Replayed,
    accept: Callable[[Replayed], object],
    rules: Sequence[str] = PORTFOLIO,
    *,
    with_groups: bool = True,
) -> Replayed | None:
    """The best of the candidates that `accept` does not refuse, or None.

    `accept` raises `CannotExport` for a plan that cannot be exported; `rules` are the names of the
    orders that the other program can run. Without `with_groups` each device has one stage.
    """
    search = _Search(replayed, accept, rules)
    num_candidates = max(FEWEST_CANDIDATES, MAX_PLACED_DEVICES // replayed.plan.cluster.num_devices)
    if with_groups and replayed.plan.uses_families:
        for candidate in group_candidates(replayed.plan):
            search.try_groups(candidate)
    candidates = islice(_candidates(replayed.plan), num_candidates)
    tried = [search.try_stages(stages) for stages in candidates]
    if search.best is None:
        return None
    ranked = sorted((trial for trial in tried if trial is not None), key=lambda trial: trial.rank)
    for trial in ranked[:MAX_STARTS]:
        search.improve(trial)
    return search.best


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """Stages that were simulated."""

    stages: tuple[Stage, ...]
    rank: tuple[bool, float]
    """Whether they need too much memory, and their time; smaller is better."""


class _Search:
    """The best plan so far."""

    def __init__(
        self, replayed: Replayed, accept: Callable[[Replayed], object], rules: Sequence[str]
    ) -> None:
        self._plan = replace(replayed.plan, shard_optimizer=False)
        self._cost = replayed.cost
        self._accept, self._rules = accept, rules
        self._best_rank = (True, float("inf"))
        self._blocks_left = MAX_SIMULATED_BLOCKS
        self._moves_left = min(MAX_MOVES, MAX_PLACED_DEVICES // replayed.plan.cluster.num_devices)
        self.best: Replayed | None = None

    def try_stages(self, stages: tuple[Stage, ...]) -> _Trial | None:
        """Simulate these stages, and keep them if they are the best; None: they are refused."""
        plan = self._plan
        num_blocks = 2 * len(stages) * plan.microbatches
        self._blocks_left -= num_blocks * len(self._rules)
        if num_blocks > MAX_BLOCKS or (self._blocks_left < 0 and self.best is not None):
            return None
        try:
            costs = self._cost.pipeline_costs(stages)
        except PlanFileError:  # two devices without a path
            return None
        runs = (SCHEDULES[rule](costs, plan.microbatches) for rule in self._rules)
        run = min(runs, key=lambda run: run.iteration_ms)
        candidate = self._changed(stages, Schedule.from_codes(run.order_SM2))
        rank = (bool(memory_excesses(candidate, self._cost)), run.iteration_ms)
        if rank < self._best_rank and not self._keep(replay_plan(candidate), rank):
            return None
        return _Trial(stages=stages, rank=rank)

    def try_groups(self, candidate: tuple[tuple[Stage, ...], Schedule]) -> None:
        """Simulate stages of which some share a group, and keep them if they are the best."""
        try:
            replayed = replay_plan(self._changed(*candidate))
        except (PlanFileError, ScheduleError):  # no path, or an order that deadlocks
            return
        plan = replayed.plan
        rank = (bool(memory_excesses(plan, replayed.cost)), plan.iteration_ms)
        if rank < self._best_rank:
            self._keep(replayed, rank)

    def _changed(self, stages: tuple[Stage, ...], schedule: Schedule) -> Plan:
        return replace(
            self._plan,
            stages=stages,
            schedule=schedule,
            planner=f"{self._plan.planner}, changed for export",
            predicted=None,
        )

    def _keep(self, replayed: Replayed, rank: tuple[bool, float]) -> bool:
        """Keep the best plan so far, unless it is refused; whether it was kept."""
        try:
            self._accept(replayed)
        except CannotExport:
            return False
        self.best, self._best_rank = replayed, rank
        return True

    def improve(self, trial: _Trial) -> None:
        """Move single cuts by one layer while that makes these stages better."""
        improved = True
        while improved:
            improved = False
            for cut in range(len(trial.stages) - 1):
                for by in (-1, 1):
                    self._moves_left -= 1
                    if self._moves_left < 0:
                        return
                    moved = _with_cut_moved(trial.stages, cut, by)
                    better = None if moved is None else self.try_stages(moved)
                    if better is not None and better.rank < trial.rank:
                        trial, improved = better, True


def _with_cut_moved(stages: tuple[Stage, ...], cut: int, by: int) -> tuple[Stage, ...] | None:
    before, behind = stages[cut], stages[cut + 1]
    place = before.layers.stop + by
    if not before.layers.start < place < behind.layers.stop:
        return None
    changed = list(stages)
    changed[cut] = replace(before, layers=range(before.layers.start, place))
    changed[cut + 1] = replace(behind, layers=range(place, behind.layers.stop))
    return tuple(changed)


def _candidates(plan: Plan) -> Iterator[tuple[Stage, ...]]:
    """The plan's own stages, then those of each number of replicas and stages."""
    if len(plan.groups) == len(plan.stages):
        yield plain_stages(plan)
    for recompute in sorted({stage.recompute for stage in plan.stages}):
        yield from _candidates_of_mode(plan, recompute)


def _candidates_of_mode(plan: Plan, recompute: bool) -> Iterator[tuple[Stage, ...]]:
    orders = _device_orders(plan)
    shapes = _shapes(plan, len(orders[0]))
    work_ms = [layer.forward_ms + layer.backward_ms for layer in plan.model.layers]
    balanced = _BalancedCuts(work_ms, max(num_stages for num_stages, _ in shapes))
    own_cuts = [stage.layers.start for stage in plan.stages] + [plan.model.num_layers]
    for num_stages, num_replicas in shapes:
        all_cuts = [balanced.of(num_stages), _even_cuts(plan.model.num_layers, num_stages)]
        if num_stages == len(plan.stages):
            all_cuts.append(own_cuts)
        for order, cuts in product(orders, all_cuts):
            yield tuple(
                Stage(
                    layers=range(first, end),
                    devices=tuple(order[n * num_replicas : (n + 1) * num_replicas]),
                    recompute=recompute,
                )
                for n, (first, end) in enumerate(pairwise(cuts))
            )


def _device_orders(plan: Plan) -> list[tuple[int, ...]]:
    """The plan's devices in its order and then the unused ones; hosts together; the cluster's."""
    devices = plan.cluster.devices
    used = dict.fromkeys(device for stage in plan.stages for device in stage.devices)
    as_planned = (*used, *(d for d in range(len(devices)) if d not in used))
    first_of: dict[str, int] = {}
    for place, device in enumerate(as_planned):
        first_of.setdefault(devices[device].host, place)
    by_host = tuple(sorted(as_planned, key=lambda device: first_of[devices[device].host]))
    return list(dict.fromkeys((as_planned, by_host, tuple(range(len(devices))))))


def _even_cuts(num_layers: int, num_stages: int) -> list[int]:
    """Equally many layers in each stage; a remainder goes to the first stages."""
    size, rest = divmod(num_layers, num_stages)
    return [n * size + min(n, rest) for n in range(num_stages + 1)]


def _shapes(plan: Plan, num_devices: int) -> list[tuple[int, int]]:
    """Numbers of stages and replicas, those that use the most devices first."""
    samples = plan.model.microbatch_size
    shapes = [
        (num_stages, num_replicas)
        for num_replicas in range(1, min(samples, num_devices) + 1)
        if samples % num_replicas == 0
        for num_stages in range(1, min(plan.model.num_layers, num_devices // num_replicas) + 1)
    ]
    shapes.sort(key=lambda shape: (-shape[0] * shape[1], shape))
    return shapes[:MAX_SHAPES]


class _BalancedCuts:
    """Where to cut so that the largest stage is as small as can be, for each number of stages.

    The first i layers in n + 1 stages: the last of them begins at `choices[n][i]`.
    """

    def __init__(self, work_ms: Sequence[float], max_stages: int) -> None:
        self._num_layers = len(work_ms)
        self._choices: list[NDArray[np.int64]] = []
        if self._num_layers * max_stages > MAX_STEPS:
            return
        sums = np.concatenate(([0.0], np.cumsum(work_ms)))
        least = sums.copy()
        least[0] = np.inf  # every stage holds a layer
        for _ in range(1, max_stages):
            longer = np.full(self._num_layers + 1, np.inf)
            choice = np.zeros(self._num_layers + 1, dtype=np.int64)
            for end in range(1, self._num_layers + 1):
                largest = np.maximum(least[:end], sums[end] - sums[:end])
                choice[end] = int(np.argmin(largest))
                longer[end] = largest[choice[end]]
            least = longer
            self._choices.append(choice)

    def of(self, num_stages: int) -> list[int]:
        """The cuts from 0 to the number of layers."""
        if num_stages - 1 > len(self._choices):  # too large a case: layers count alike
            return _even_cuts(self._num_layers, num_stages)
        cuts = [self._num_layers]
        for choice in reversed(self._choices[: num_stages - 1]):
            cuts.append(int(choice[cuts[-1]]))
        return [0, *cuts[::-1]]


def describe(nearest: Replayed, original: Replayed) -> str:
    """The nearest plan in one line, with its price."""
    plan = nearest.plan
    ms, original_ms = plan.iteration_ms, original.plan.iteration_ms
    ends = [stage.layers.stop - 1 for stage in plan.stages]
    starts = [0, *(end + 1 for end in ends[:-1])]
    ranges = [f"{first}-{last}" for first, last in zip(starts, ends, strict=True)]
    listed = "|".join(ranges[:LISTED_STAGES]) + ("|..." if len(ranges) > LISTED_STAGES else "")
    more = f" ({100 * (ms / original_ms - 1):+.1f} %)" if original_ms else ""
    groups = f" in {len(plan.groups)} groups" if len(plan.groups) < len(plan.stages) else ""
    return (
        f"{len(plan.stages)} stages{groups} x {plan.stages[0].num_replicas} replicas, layers"
        f" {listed}, {ms:.6g} ms{more}"
    )
