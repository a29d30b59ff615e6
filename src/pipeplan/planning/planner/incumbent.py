"""The best plan so far, and a pool of good plans from which local search starts."""

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
"""A plan replaces the best one only if it is faster by this factor; ties keep the first."""


@dataclass(slots=True)
class Incumbent:
    """Keeps the fastest of all plans offered to it; ties go to the first."""

    cost: CostModel
    num_microbatches: int
    instance: _core.Instance
    iteration_ms: float = np.inf
    _stages: tuple[Stage, ...] = ()
    _rule: str = ""
    """The schedule of the best plan; empty if `_draft` is the best plan."""
    _draft: Draft | None = None
    _pool: dict[tuple[Stage, ...], float] = field(default_factory=dict)

    def offer(self, stages: tuple[Stage, ...]) -> None:
        """Try the stages under all schedules of the portfolio, unless a path is missing."""
        if stages in self._pool:
            return
        placed = placed_plan(self.instance, stages)
        times_ms = _core.rule_times(self.instance, placed, self.iteration_ms * WORTH_ALL_RULES)
        if not times_ms:
            return
        self._pool[stages] = times_ms[0]
        for rule, iteration_ms in zip(PORTFOLIO, times_ms, strict=True):
            self._keep(stages, rule, iteration_ms)

    def offer_found(self, placed: _core.PlacedPlan, rule: int, iteration_ms: float) -> None:
        """Take a plan that local search found, with its schedule and its time."""
        stages = placed_stages(placed)
        self._pool[stages] = min(iteration_ms, self._pool.get(stages, np.inf))
        self._keep(stages, PORTFOLIO[rule], iteration_ms)

    def offer_draft(self, draft: Draft) -> None:
        """Take a complete plan, with its own schedule."""
        if any(stage.shares is not None or stage.recompute for stage in draft.stages):
            return  # the bound of the result holds for even shares only
        if any(stage.num_replicas > self.cost.max_replicas for stage in draft.stages):
            return
        self.offer(draft.stages)
        if self._keep(draft.stages, "", draft.iteration_ms):
            self._draft = draft

    def pool(self, count: int) -> list[_core.PlacedPlan]:
        """The best `count` different plans so far, as kernels read them; the best one first."""
        ranked = sorted(self._pool, key=lambda stages: self._pool[stages])
        if self._stages in self._pool:
            ranked.remove(self._stages)
            ranked.insert(0, self._stages)
        return [placed_plan(self.instance, stages) for stages in ranked[:count]]

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
