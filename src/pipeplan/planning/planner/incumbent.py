"""The best plan so far, and a pool of good ones to search from."""

from dataclasses import dataclass, field

import numpy as np

from pipeplan.cost import CostModel
from pipeplan.errors import PlanFileError
from pipeplan.pipeline import Stage
from pipeplan.planning.problem import Draft
from pipeplan.schedules import PORTFOLIO, SCHEDULES, run_pe, schedule_guarantee_ms
from pipeplan.simulator import Codes

__all__ = ["Incumbent", "placed_stages"]

WORTH_ALL_RULES = 1.03
"""A plan within this factor of the best under PE is tried under every rule."""

Placed = list[tuple[int, list[int]]]
"""As kernels write plans: for each stage one past its last layer, and its devices."""


def placed_stages(placed: Placed) -> tuple[Stage, ...]:
    """The stages of a plan that a kernel wrote."""
    first_layers = [0, *(end for end, _ in placed[:-1])]
    return tuple(
        Stage(layers=range(first, end), devices=tuple(sorted(devices)))
        for first, (end, devices) in zip(first_layers, placed, strict=True)
    )


@dataclass(slots=True)
class Incumbent:
    """Keeps the fastest plan of all that it is shown; ties go to the first."""

    cost: CostModel
    num_microbatches: int
    iteration_ms: float = np.inf
    _stages: tuple[Stage, ...] = ()
    _codes: Codes | None = None
    _rule: str = ""
    _pool: dict[tuple[Stage, ...], float] = field(default_factory=dict)

    def offer(self, stages: tuple[Stage, ...]) -> None:
        """Consider stages under the whole portfolio; those that lack a path are passed over."""
        if stages in self._pool or not self._allowed(stages):
            return
        try:
            costs = self.cost.pipeline_costs(stages)
        except PlanFileError:
            return
        run = run_pe(costs, self.num_microbatches)
        self._pool[stages] = run.iteration_ms
        self._keep(stages, "pe", run.order_SM2, run.iteration_ms)
        if run.iteration_ms <= self.iteration_ms * WORTH_ALL_RULES:
            for rule in PORTFOLIO[1:]:
                run = SCHEDULES[rule](costs, self.num_microbatches)
                self._keep(stages, rule, run.order_SM2, run.iteration_ms)

    def offer_draft(self, draft: Draft) -> None:
        """Consider a complete plan, stages and schedule."""
        if any(stage.shares is not None or stage.recompute for stage in draft.stages):
            return  # the bound that comes with the result speaks of even shares
        if not self._allowed(draft.stages):
            return
        self.offer(draft.stages)
        self._keep(draft.stages, "", draft.codes, draft.iteration_ms)

    def pool(self, count: int) -> list[Placed]:
        """The best different plans seen, as kernels read them; the best one first."""
        ranked = sorted(self._pool, key=lambda stages: self._pool[stages])
        if self._stages in self._pool:
            ranked.remove(self._stages)
            ranked.insert(0, self._stages)
        return [
            [(stage.layers.stop, list(stage.devices)) for stage in stages]
            for stages in ranked[:count]
        ]

    def draft(self) -> Draft:
        """The best plan."""
        assert self._codes is not None, "a single device can always hold the model"
        guarantee_ms = None
        if self._rule == "pe":
            costs = self.cost.pipeline_costs(self._stages)
            guarantee_ms = schedule_guarantee_ms(costs, self.num_microbatches)
        return Draft(
            stages=self._stages,
            codes=self._codes,
            iteration_ms=self.iteration_ms,
            schedule_guarantee_ms=guarantee_ms,
        )

    def _allowed(self, stages: tuple[Stage, ...]) -> bool:
        return all(stage.num_replicas <= self.cost.max_replicas for stage in stages)

    def _keep(
        self, stages: tuple[Stage, ...], rule: str, codes: Codes, iteration_ms: float
    ) -> None:
        if iteration_ms < self.iteration_ms * (1 - 1e-12):
            self.iteration_ms = iteration_ms
            self._stages, self._codes, self._rule = stages, codes, rule
