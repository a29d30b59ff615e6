"""The best plan so far, and a pool of good ones to search from."""

from dataclasses import dataclass, field, replace

import numpy as np

from pipeplan import _core
from pipeplan.cost import CostModel
from pipeplan.pipeline import Stage
from pipeplan.planning.planner.placement import placed_plan, placed_stages
from pipeplan.planning.problem import Draft
from pipeplan.schedules import PORTFOLIO, SCHEDULES, schedule_guarantee_ms

__all__ = ["Incumbent"]

WORTH_ALL_RULES = 1.03
"""A plan within this factor of the best under PE is tried under every rule."""
REALLY_FASTER = 1 - 1e-12
"""By less than this, two plans take the same time, and the first one stays."""


@dataclass(slots=True)
class Incumbent:
    """Keeps the fastest plan of all that it is shown; ties go to the first."""

    cost: CostModel
    num_microbatches: int
    instance: _core.Instance
    iteration_ms: float = np.inf
    _stages: tuple[Stage, ...] = ()
    _rule: str = ""
    """The schedule of the best plan; empty where `_draft` brought its own."""
    _draft: Draft | None = None
    _pool: dict[tuple[Stage, ...], float] = field(default_factory=dict)

    def offer(self, stages: tuple[Stage, ...], deadline: float = np.inf) -> None:
        """Consider stages under the whole portfolio; those that lack a path are passed over.

        Raises `DeadlineError` at the deadline.
        """
        if stages in self._pool:
            return
        rank_ms, times_ms = _core.judge_plan(
            self.instance,
            placed_plan(self.instance, stages),
            self.iteration_ms,
            self.iteration_ms * WORTH_ALL_RULES,
            deadline,
        )
        if not times_ms:
            return
        self._pool[stages] = rank_ms
        for rule, iteration_ms in zip(PORTFOLIO, times_ms, strict=True):
            self._keep(stages, rule, iteration_ms)

    def offer_found(self, placed: _core.PlacedPlan, rule: int, iteration_ms: float) -> None:
        """Consider what local search found, with the rule and the time that it found."""
        stages = placed_stages(placed)
        if self.cost.contention:  # local search only knows the least times of transfers
            self.offer(stages)
            return
        self._pool[stages] = min(iteration_ms, self._pool.get(stages, np.inf))
        self._keep(stages, PORTFOLIO[rule], iteration_ms)

    def offer_draft(self, draft: Draft, deadline: float = np.inf) -> None:
        """Consider a complete plan, stages and schedule."""
        if any(stage.shares is not None or stage.recompute for stage in draft.stages):
            return  # the bound that comes with the result speaks of even shares
        if any(stage.num_replicas > self.cost.max_replicas for stage in draft.stages):
            return
        self.offer(draft.stages, deadline)
        if self._keep(draft.stages, "", draft.iteration_ms):
            self._draft = draft

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the best plan."""
        return self._stages

    def ranked(self) -> list[tuple[Stage, ...]]:
        """All plans seen, fastest first; the best one leads."""
        ranked = sorted(self._pool, key=lambda stages: self._pool[stages])
        if self._stages in self._pool:
            ranked.remove(self._stages)
            ranked.insert(0, self._stages)
        return ranked

    def draft(self) -> Draft:
        """The best plan."""
        assert self._stages, "a single device can always hold the model"
        if not self._rule:
            assert self._draft is not None
            return replace(self._draft, bound=None, schedule_guarantee_ms=None, notes={})
        costs = self.cost.pipeline_costs(self._stages)
        run = SCHEDULES[self._rule](costs, self.num_microbatches)
        guarantee_ms = None
        if self._rule == "pe":
            guarantee_ms = schedule_guarantee_ms(costs, self.num_microbatches)
        return Draft(
            stages=self._stages,
            codes=run.order_SM2,
            iteration_ms=run.iteration_ms,
            schedule_guarantee_ms=guarantee_ms,
        )

    def _keep(self, stages: tuple[Stage, ...], rule: str, iteration_ms: float) -> bool:
        is_faster = iteration_ms < self.iteration_ms * REALLY_FASTER
        if is_faster:
            self.iteration_ms, self._stages, self._rule = iteration_ms, stages, rule
        return is_faster
