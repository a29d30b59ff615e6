"""The nearest plan that another program can run: equal replicas, an order that it knows.

It keeps the order of the plan's devices. For each number of replicas and of stages it takes groups
of neighbours as stages, and the cuts that balance the compute time; where the plan has as many
stages, its own cuts too. The fastest of these is improved by moving single cuts while that helps.
Every candidate is simulated. This is a search among few plans, not a planner: no bound comes
with it.

O(L^2 S + candidates * simulation); candidates and simulations are limited.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipeplan.errors import PlanFileError
from pipeplan.interop.exported import CannotExport
from pipeplan.pipeline import Plan, Schedule, Stage
from pipeplan.replaying import Replayed, replay_plan
from pipeplan.schedules import PORTFOLIO, SCHEDULES
from pipeplan.validation import MAX_BLOCKS

__all__ = ["describe", "find_nearest"]

MAX_SHAPES = 200
"""Numbers of replicas and stages that are tried."""
MAX_MOVES = 2000
"""Cuts that are moved on trial."""
MAX_STEPS = 200_000
"""Layers times stages; with more, each layer counts alike."""
MAX_SIMULATED_BLOCKS = 40_000_000
"""A few seconds of simulation."""
LISTED_STAGES = 16


def find_nearest(
    replayed: Replayed, accept: Callable[[Replayed], object], rules: Sequence[str] = PORTFOLIO
) -> Replayed | None:
    """The fastest of the candidates that `accept` does not refuse, or None.

    `accept` raises `CannotExport` for a plan that cannot be exported; `rules` are the names of the
    orders that the other program can run.
    """
    search = _Search(replayed, accept, rules)
    for stages in _candidates(replayed.plan):
        search.try_stages(stages)
    if search.best is None:
        return None
    search.improve()
    return search.best


class _Search:
    """The fastest plan so far."""

    def __init__(
        self, replayed: Replayed, accept: Callable[[Replayed], object], rules: Sequence[str]
    ) -> None:
        self._plan, self._cost = replayed.plan, replayed.cost
        self._accept, self._rules = accept, rules
        self.best: Replayed | None = None
        self.best_ms = float("inf")
        self._blocks_left = MAX_SIMULATED_BLOCKS

    def try_stages(self, stages: tuple[Stage, ...]) -> bool:
        """Simulate these stages; keep them if they are faster and can be exported."""
        plan = self._plan
        num_blocks = 2 * len(stages) * plan.microbatches
        self._blocks_left -= num_blocks * len(self._rules)
        if num_blocks > MAX_BLOCKS or (self._blocks_left < 0 and self.best is not None):
            return False
        try:
            costs = self._cost.pipeline_costs(stages)
        except PlanFileError:  # two devices without a path
            return False
        runs = (SCHEDULES[rule](costs, plan.microbatches) for rule in self._rules)
        run = min(runs, key=lambda run: run.iteration_ms)
        if run.iteration_ms >= self.best_ms:
            return False
        candidate = replace(
            plan,
            stages=stages,
            schedule=Schedule.from_codes(run.order_SM2),
            planner=f"{plan.planner}, changed for export",
            predicted=None,
        )
        replayed = replay_plan(candidate)
        try:
            self._accept(replayed)
        except CannotExport:
            return False
        self.best, self.best_ms = replayed, run.iteration_ms
        return True

    def improve(self) -> None:
        """Move single cuts by one layer while that makes the plan faster."""
        moves_left, improved = MAX_MOVES, True
        while improved and self.best is not None:
            improved = False
            for cut in range(len(self.best.plan.stages) - 1):
                for by in (-1, 1):
                    moved = _with_cut_moved(self.best.plan.stages, cut, by)
                    moves_left -= 1
                    if moves_left < 0:
                        return
                    if moved is not None and self.try_stages(moved):
                        improved = True


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
    recompute = all(stage.recompute for stage in plan.stages)
    yield tuple(replace(stage, shares=None, recompute=recompute) for stage in plan.stages)
    used = [device for stage in plan.stages for device in stage.devices]
    unused = [d for d in range(plan.cluster.num_devices) if d not in set(used)]
    order = used + unused
    work_ms = [layer.forward_ms + layer.backward_ms for layer in plan.model.layers]
    own_cuts = [stage.layers.start for stage in plan.stages] + [plan.model.num_layers]
    shapes = _shapes(plan, len(order))
    balanced = _BalancedCuts(work_ms, max(num_stages for num_stages, _ in shapes))
    for num_stages, num_replicas in shapes:
        all_cuts = [balanced.of(num_stages)]
        if num_stages == len(plan.stages):
            all_cuts.append(own_cuts)
        for cuts in all_cuts:
            yield tuple(
                Stage(
                    layers=range(first, end),
                    devices=tuple(order[n * num_replicas : (n + 1) * num_replicas]),
                    recompute=recompute,
                )
                for n, (first, end) in enumerate(pairwise(cuts))
            )


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
            return [self._num_layers * n // num_stages for n in range(num_stages + 1)]
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
    return (
        f"{len(plan.stages)} stages x {plan.stages[0].num_replicas} replicas, layers {listed},"
        f" {ms:.6g} ms{more}"
    )
