"""The best plan so far, and a pool of good ones to search from."""

from dataclasses import dataclass, field, replace

import numpy as np

from pipeplan import _core
from pipeplan.cost import CostModel, PipelineCosts
from pipeplan.pipeline import Stage, most_in_flight
from pipeplan.planning.limits import Limits, broken_constraint
from pipeplan.planning.planner.placement import (
    placed_plan,
    placed_stages,
    shared_stage,
    stages_by_speed,
)
from pipeplan.planning.problem import Draft
from pipeplan.schedules import PORTFOLIO, SCHEDULES, schedule_guarantee_ms
from pipeplan.simulator import run_schedule

__all__ = ["Incumbent"]

WORTH_ALL_RULES = 1.03
"""A plan within this factor of the best under PE is tried under every rule."""
NUM_DEADLINES = 4
"""Schedules that are tried for a plan beyond the portfolio; the first is nearly always the best."""
REALLY_FASTER = 1 - 1e-12
"""By less than this, two plans take the same time, and the first one stays."""
AS_FAST = 1 + 1e-9
"""Among plans that are slower by less than this, the one with the least memory is taken."""
MANY_MICROBATCHES = 256
"""With so many, kernels may pass over a plan by an estimate (`_core/rule_estimate.cpp`)."""
MAX_TIED = 16
"""Of so many equally fast plans the memory is compared."""


@dataclass(slots=True)
class Incumbent:
    """Keeps the fastest plan within the limits of all that it is shown.

    Where memory counts, equally fast plans are told apart by their memory; else the first stays.
    """

    cost: CostModel
    num_microbatches: int
    instance: _core.Instance
    limits: Limits = field(default_factory=lambda: Limits(memory=False, whole_samples=False))
    iteration_ms: float = np.inf
    _stages: tuple[Stage, ...] = ()
    _rule: str = ""
    """The schedule of the best plan; empty if `_draft` brought its own."""
    _draft: Draft | None = None
    """A complete plan of somebody else, if that is the best one."""
    _pool: dict[tuple[Stage, ...], float] = field(default_factory=dict)
    _tied: list[tuple[tuple[Stage, ...], str, Draft | None]] = field(default_factory=list)
    """Plans as fast as the best one."""
    _polished: set[tuple[Stage, ...]] = field(default_factory=set)
    _as_shared: dict[Stage, Stage] = field(default_factory=dict)
    """Stages, and the same with the shares that kernels give them; most come many times."""
    _refuted: set[tuple[Stage, ...]] = field(default_factory=set)
    """Where links are shared: stages whose bound shows that no schedule of them is the fastest."""

    def offer(self, stages: tuple[Stage, ...], deadline: float = np.inf) -> None:
        """Consider stages under the whole portfolio; those that break a limit are passed over.

        Where speeds differ, also with shares in proportion to speed. Raises `DeadlineError` at the
        deadline.
        """
        if any(stage.num_replicas > self.cost.max_replicas for stage in stages):
            return
        self._offer(self._shared(stages), deadline)
        if self.instance.any_shares:
            self._offer(stages_by_speed(self.instance, stages), deadline)

    def offer_placed(self, placed: _core.PlacedPlan, deadline: float = np.inf) -> None:
        """The same for a kernel's plan.

        Where links are shared, there are hundreds, and slow ones are not kept to search from.
        """
        if self.cost.contention and not self.instance.any_shares:
            rank_ms, times_ms = self._judged(placed, deadline)
            if times_ms and min(times_ms) < np.inf:
                self._take(placed_stages(placed, self.instance), rank_ms, times_ms)
        else:
            self.offer(placed_stages(placed, self.instance), deadline)

    def _offer(self, stages: tuple[Stage, ...], deadline: float) -> None:
        if stages in self._pool or broken_constraint(stages, self.limits):
            return
        rank_ms, times_ms = self._judged(placed_plan(self.instance, stages), deadline)
        if times_ms:
            self._take(stages, rank_ms, times_ms)

    def _judged(self, placed: _core.PlacedPlan, deadline: float) -> tuple[float, list[float]]:
        """What ranks a plan, and its times under the portfolio; none if it is not possible."""
        worth_ms = self.iteration_ms * WORTH_ALL_RULES
        return _core.judge_plan(self.instance, placed, self.iteration_ms, worth_ms, deadline)

    def _take(self, stages: tuple[Stage, ...], rank_ms: float, times_ms: list[float]) -> None:
        if broken_constraint(stages, self.limits):
            return
        self._pool[stages] = rank_ms
        is_exact = self.num_microbatches < MANY_MICROBATCHES
        if self.cost.contention and is_exact and min(times_ms) == np.inf:
            self._refuted.add(stages)
        for rule, iteration_ms in zip(PORTFOLIO, times_ms, strict=True):
            self._keep(stages, rule, iteration_ms)

    def offer_found(
        self, placed: _core.PlacedPlan, rule: int, iteration_ms: float, deadline: float = np.inf
    ) -> None:
        """Consider what local search found, with the rule and the time that it found."""
        stages = placed_stages(placed, self.instance)
        if self.cost.contention:  # local search only knows the least times of transfers
            self.offer(stages, deadline)
            return
        self._pool[stages] = min(iteration_ms, self._pool.get(stages, np.inf))
        self._keep(stages, PORTFOLIO[rule], iteration_ms)

    def offer_draft(self, draft: Draft, deadline: float = np.inf) -> None:
        """Consider a complete plan, stages and schedule."""
        # The bound that comes with the result speaks of even shares, unless it speaks of any, and
        # of recomputation only where memory counts.
        has_shares = any(stage.shares is not None for stage in draft.stages)
        if has_shares and not (self.limits.whole_samples or self.instance.any_shares):
            return
        if not self.limits.memory and any(stage.recompute for stage in draft.stages):
            return
        if any(stage.num_replicas > self.cost.max_replicas for stage in draft.stages):
            return
        self.offer(draft.stages, deadline)
        if draft.stages not in self._refuted and self._keeps_limits(draft):
            if self.cost.contention:  # a draft may come from costs that know no shared links
                run = run_schedule(self.cost.pipeline_costs(draft.stages), draft.codes, deadline)
                draft = replace(draft, iteration_ms=run.iteration_ms)
            self._keep(draft.stages, "", draft.iteration_ms, draft)

    @property
    def has_plan(self) -> bool:
        """Whether any plan within the limits is known."""
        return bool(self._stages)

    def polish(self, num_plans: int, deadline: float = np.inf) -> None:
        """Look for faster schedules of the best plans (`_core/schedule_search.cpp`).

        Raises `DeadlineError` at the deadline.
        """
        for stages in self.ranked()[:num_plans]:
            if stages in self._polished or stages in self._refuted:
                continue
            self._polished.add(stages)
            _, iteration_ms, codes = _core.best_schedule(
                self.costs(stages).for_kernels(),
                self.num_microbatches,
                self.iteration_ms,
                NUM_DEADLINES,
                deadline,
            )
            if len(codes):
                found = Draft(stages=stages, codes=codes, iteration_ms=iteration_ms)
                self._keep(stages, "", iteration_ms, found)

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
        """The best plan; of equally fast ones that with the least memory."""
        assert self._stages, "there is no plan yet"
        best = self._draft_of(self._stages, self._rule, self._draft)
        if not self.limits.memory:
            return best
        tied = [self._draft_of(*plan) for plan in self._tied[:MAX_TIED]]
        as_fast = [d for d in tied if d.iteration_ms <= best.iteration_ms * AS_FAST]
        return min([best, *as_fast], key=self._peak_gb)

    def _draft_of(self, stages: tuple[Stage, ...], rule: str, draft: Draft | None) -> Draft:
        if draft is not None:
            return replace(draft, bound=None, schedule_guarantee_ms=None, notes={})
        costs = self.costs(stages)
        run = SCHEDULES[rule](costs, self.num_microbatches)
        guarantee_ms = None
        if rule == "pe" and not self._is_capped(costs):
            guarantee_ms = schedule_guarantee_ms(costs, self.num_microbatches)
        return Draft(
            stages=stages,
            codes=run.order_SM2,
            iteration_ms=run.iteration_ms,
            schedule_guarantee_ms=guarantee_ms,
        )

    def costs(self, stages: tuple[Stage, ...]) -> PipelineCosts:
        """The costs of stages, with the microbatches that each of them may hold."""
        costs = self.cost.pipeline_costs(stages)
        if not self.limits.memory:
            return costs
        caps = _core.caps(self.instance, placed_plan(self.instance, stages))
        return replace(costs, caps=tuple(caps))

    def _is_capped(self, costs: PipelineCosts) -> bool:
        """Whether memory may make PE wait, which its guarantee does not allow for."""
        return costs.caps is not None and min(costs.caps) < self.num_microbatches

    def _peak_gb(self, draft: Draft) -> float:
        """The memory of the device that needs the most."""
        return max(
            max(self.cost.memory_gb(stage, most_in_flight(codes)))
            for stage, codes in zip(draft.stages, draft.codes, strict=True)
        )

    def _shared(self, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        """The stages with the shares that kernels give them, where these may differ."""
        if not (self.limits.whole_samples or self.instance.any_shares):
            return stages
        for stage in stages:
            if stage not in self._as_shared:
                shared = shared_stage(self.instance, stage)
                self._as_shared[stage] = self._as_shared[shared] = shared
        return tuple(self._as_shared[stage] for stage in stages)

    def _keeps_limits(self, draft: Draft) -> bool:
        """Whether a complete plan of somebody else keeps all limits as it is."""
        if self._shared(draft.stages) != draft.stages:
            return False
        if broken_constraint(draft.stages, self.limits):
            return False
        caps = _core.caps(self.instance, placed_plan(self.instance, draft.stages))
        return bool(caps) and all(
            most_in_flight(codes) <= cap for codes, cap in zip(draft.codes, caps, strict=True)
        )

    def _keep(
        self, stages: tuple[Stage, ...], rule: str, iteration_ms: float, draft: Draft | None = None
    ) -> None:
        if iteration_ms < self.iteration_ms * REALLY_FASTER:
            self.iteration_ms, self._stages, self._rule = iteration_ms, stages, rule
            self._draft = draft
            self._tied.clear()
        elif iteration_ms <= self.iteration_ms * AS_FAST and iteration_ms < np.inf:
            self._tied.append((stages, rule, draft))
