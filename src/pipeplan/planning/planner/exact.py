"""The optimum, by constraint programming: for tiny instances, and as an oracle for tests.

It answers two questions. For fixed stages: which schedule is the fastest? For a tiny instance:
which plan is the fastest? The second answer tries all cuts and all sets of devices in the order of
their fixed-plan bound. It asks the first question about each that could still win.

The constraint model has an interval for each block and each transfer. It fixes two orders without
loss (docs/theory.md, section 8). All microbatches cost the same, so they go through every stage in
one order. Transfers in one direction take equally long, so they are served in the order of arrival.
Times are rounded down to whole ticks, so the solver's bound holds for the real costs. With half
duplex, the solver may order the two directions of a channel freely, but the cost model has a rule
for it. So there the solver's answer is only a lower bound; the simulation follows the rule.

Needs the extra `exact` (ortools). One worker solves it with a deterministic limit, so that the same
input gives the same plan.
"""

import itertools
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeplan.bound_checks import has_even_shares
from pipeplan.checker import has_whole_samples
from pipeplan.cost import PipelineCosts
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.pipeline import Stage, most_in_flight
from pipeplan.planning.limits import broken_constraint
from pipeplan.planning.planner.best import plan_best
from pipeplan.planning.planner.best_shares import plan_best_shares
from pipeplan.planning.planner.every_placement import all_placements, whole_sample_variants
from pipeplan.planning.planner.lower_bound import certificate
from pipeplan.planning.planner.plan_bound import plan_bound_ms
from pipeplan.planning.planner.stage_caps import capped_costs
from pipeplan.planning.problem import Draft, Problem
from pipeplan.schedules import run_pe
from pipeplan.simulator import Codes, run_schedule

__all__ = ["OptimalSchedule", "optimal_schedule", "plan_exact"]

TICKS = 10_000_000
"""Ticks in the longest schedule, about."""
MAX_PLACEMENTS = 200_000
"""Up to this number of plans, all are tried."""
DETERMINISTIC_LIMIT = 60.0
"""For one schedule, in the solver's own seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimalSchedule:
    """The fastest order found for given costs, with a lower bound on all orders."""

    codes: Codes
    iteration_ms: float
    lower_bound_ms: float
    """No order of blocks takes less."""


def optimal_schedule(
    costs: PipelineCosts,
    num_microbatches: int,
    *,
    limit: float = DETERMINISTIC_LIMIT,
    deadline: float = math.inf,
) -> OptimalSchedule:
    """The fastest schedule of fixed stages.

    At `deadline`, on the clock of `time.monotonic`, the solver stops with its best result so far.
    """
    cp_model = _import_cp_model()
    pe = run_pe(costs, num_microbatches)
    ticks_per_ms = TICKS / pe.iteration_ms if pe.iteration_ms else 1.0
    problem = _ScheduleModel(cp_model.CpModel(), costs, num_microbatches, ticks_per_ms)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = limit
    if deadline < math.inf:
        solver.parameters.max_time_in_seconds = max(0.001, deadline - time.monotonic())
    status = _solve(solver, problem.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        bound_ms = plan_bound_ms(costs, num_microbatches, costs.caps)
        return OptimalSchedule(
            codes=pe.order_SM2, iteration_ms=pe.iteration_ms, lower_bound_ms=bound_ms
        )
    codes = problem.codes(solver)
    run = run_schedule(costs, codes)
    # Because of rounding, or of the rule for half duplex, PE may be better after all.
    if pe.iteration_ms < run.iteration_ms or not _keeps_caps(costs, codes):
        run = pe
    return OptimalSchedule(
        codes=run.order_SM2,
        iteration_ms=run.iteration_ms,
        lower_bound_ms=min(solver.best_objective_bound / ticks_per_ms, run.iteration_ms),
    )


def _keeps_caps(costs: PipelineCosts, codes: Codes) -> bool:
    """Whether no stage holds more microbatches than it may."""
    return costs.caps is None or all(
        most_in_flight(row) <= cap for row, cap in zip(codes, costs.caps, strict=True)
    )


def _solve(solver: Any, model: Any) -> Any:
    """The status of the solver; Ctrl-C stops it and raises KeyboardInterrupt.

    By itself the solver ends early at Ctrl-C, and its last schedule would look like the result.
    Only another thread can stop the solver, so it runs in a thread of its own.
    """
    solver.parameters.catch_sigint_signal = False
    solved: Future[Any] = Future()

    def solve() -> None:
        try:
            solved.set_result(solver.solve(model))
        except BaseException as problem:
            solved.set_exception(problem)

    # A daemon, because the solver does not notice `stop_search` while it simplifies the model.
    threading.Thread(target=solve, daemon=True).start()
    try:
        return solved.result()
    except KeyboardInterrupt:
        solver.stop_search()
        raise


class _ScheduleModel:
    """One pipeline iteration as intervals: blocks, transfers, all-reduces."""

    def __init__(
        self, model: Any, costs: PipelineCosts, num_microbatches: int, ticks_per_ms: float
    ) -> None:
        self.model = model
        self.num_stages, self.num_microbatches = costs.num_stages, num_microbatches

        def ticks(ms: float) -> int:
            return math.floor(float(ms) * ticks_per_ms)

        stages, microbatches = range(costs.num_stages), range(num_microbatches)
        self.forward, self.backward = (
            [[model.new_int_var(0, 2 * TICKS, "") for _ in microbatches] for _ in stages]
            for _ in range(2)
        )
        self.lengths: list[tuple[int, int]] = []
        """Ticks of each stage's forward and backward."""
        end = model.new_int_var(0, 2 * TICKS, "end")
        caps = costs.caps or (num_microbatches,) * costs.num_stages
        for n in stages:
            forward, backward = ticks(costs.forward_ms_S[n]), ticks(costs.backward_ms_S[n])
            self.lengths.append((forward, backward))
            intervals = [
                model.new_fixed_size_interval_var(start, length, "")
                for starts, length in ((self.forward[n], forward), (self.backward[n], backward))
                for start in starts
            ]
            model.add_no_overlap(intervals)
            for m in range(caps[n], num_microbatches):  # a forward waits for memory
                model.add(self.forward[n][m] >= self.backward[n][m - caps[n]] + backward)
            for starts, length in ((self.forward[n], forward), (self.backward[n], backward)):
                for first, second in itertools.pairwise(starts):
                    model.add(second >= first + length)
            reduce = ticks(costs.all_reduce_ms_S[n])
            model.add(end >= self.backward[n][-1] + backward + reduce)
            if n == costs.num_stages - 1:
                for m in microbatches:
                    model.add(self.backward[n][m] >= self.forward[n][m] + forward)
        for c in range(costs.num_stages - 1):
            there = self._send(
                [start + ticks(costs.forward_ms_S[c]) for start in self.forward[c]],
                self.forward[c + 1],
                ticks(costs.send_forward_ms_C[c]),
            )
            back = self._send(
                [start + ticks(costs.backward_ms_S[c + 1]) for start in self.backward[c + 1]],
                self.backward[c],
                ticks(costs.send_backward_ms_C[c]),
            )
            if costs.half_duplex:
                model.add_no_overlap(there + back)
        model.minimize(end)

    def _send(self, ready: list[Any], needed: list[Any], length: int) -> list[Any]:
        """Transfers in order, one at a time, each between its two blocks."""
        starts = [self.model.new_int_var(0, 2 * TICKS, "") for _ in ready]
        for start, source, target in zip(starts, ready, needed, strict=True):
            self.model.add(start >= source)
            self.model.add(target >= start + length)
        for first, second in itertools.pairwise(starts):
            self.model.add(second >= first + length)
        return [self.model.new_fixed_size_interval_var(start, length, "") for start in starts]

    def codes(self, solver: Any) -> Codes:
        """The order of blocks in the solution.

        Of blocks that start together, those without length come first: the others would end later.
        Among these the microbatches go one by one. So no block comes before one that it waits for,
        nor a forward before the backward that frees its memory.
        """
        rows = []
        for n in range(self.num_stages):
            blocks = [
                (solver.value(start), self.lengths[n][kind] > 0, m, kind)
                for kind, starts in enumerate((self.forward[n], self.backward[n]))
                for m, start in enumerate(starts)
            ]
            rows.append([m if kind == 0 else -1 - m for _, _, m, kind in sorted(blocks)])
        return np.array(rows, dtype=np.int32)


def plan_exact(problem: Problem) -> Draft:
    """The optimum of a tiny instance; else the best plan under its optimal schedule.

    Keeps all limits but those that `reduction` takes out of a problem beforehand. It tries even
    shares only. Where speeds differ, the best plan with other shares is taken if it is faster.
    """
    _import_cp_model()
    if not problem.any_shares:
        return _plan_with_even_shares(problem)
    uneven = _with_optimal_schedule(problem, plan_best_shares(problem))
    try:
        even_only = replace(problem, limits=replace(problem.limits, shares=False))
        even = _plan_with_even_shares(even_only)
    except InfeasibleError:
        return uneven
    return even if even.iteration_ms <= uneven.iteration_ms * (1 + 1e-12) else uneven


def _plan_with_even_shares(problem: Problem) -> Draft:
    problem = problem.within_samples()
    best = plan_best(problem)
    size = problem.model.microbatch_size
    if not all(has_even_shares(stage, size) for stage in best.stages):  # only these shares fit
        return _with_optimal_schedule(problem, best)
    num_microbatches = problem.num_microbatches
    if _num_placements(problem) > MAX_PLACEMENTS:
        return _with_optimal_schedule(problem, best)
    open_plans, others_ms = _list_plans(problem, best.iteration_ms)
    lower_ms = min(best.iteration_ms, others_ms)
    for bound_ms, stages, costs in open_plans:
        if bound_ms >= best.iteration_ms * (1 - 1e-9):
            break
        if time.monotonic() >= problem.deadline:
            lower_ms = min(lower_ms, bound_ms)  # this one and all after it are open
            break
        found = optimal_schedule(costs, num_microbatches, deadline=problem.deadline)
        lower_ms = min(lower_ms, found.lower_bound_ms)
        if found.iteration_ms < best.iteration_ms * (1 - 1e-12):
            best = Draft(stages=stages, codes=found.codes, iteration_ms=found.iteration_ms)
    return replace(
        best,
        bound=certificate(problem, lower_ms, best.iteration_ms),
        notes={"bound": "exact"},
    )


def _list_plans(
    problem: Problem, known_ms: float
) -> tuple[list[tuple[float, tuple[Stage, ...], PipelineCosts]], float]:
    """All plans within the limits whose bound is below `known_ms`, by their bounds.

    And a time below which no other plan is that the certificate speaks of: where samples may be
    split, whole samples count as even too.
    """
    cost, limits = problem.cost, problem.limits
    plans, others_ms = [], math.inf

    def add(stages: tuple[Stage, ...]) -> None:
        costs = capped_costs(problem, stages)
        if costs is not None:
            bound_ms = plan_bound_ms(costs, problem.num_microbatches, costs.caps)
            if bound_ms < known_ms * (1 - 1e-9):
                plans.append((bound_ms, stages, costs))

    for stages in all_placements(cost):
        if broken_constraint(stages, limits):
            continue
        samples = cost.model.microbatch_size
        is_even = not any(samples % stage.num_replicas for stage in stages)
        for modes in _all_modes(problem, stages):
            if is_even or not limits.whole_samples:
                add(modes)
            for variant in whole_sample_variants(cost, modes):
                if not limits.whole_samples:
                    costs = capped_costs(problem, variant)
                    if costs is not None:
                        bound_ms = plan_bound_ms(costs, problem.num_microbatches, costs.caps)
                        others_ms = min(others_ms, bound_ms)
                elif all(has_whole_samples(stage, samples) for stage in variant):
                    add(variant)
    plans.sort(key=lambda plan: plan[0])
    return plans, others_ms


def _all_modes(problem: Problem, stages: tuple[Stage, ...]) -> Iterator[tuple[Stage, ...]]:
    """The stages with each choice of those that recompute; only where memory counts."""
    if not (problem.limits_memory and problem.limits.recompute):
        yield stages
        return
    for chosen in itertools.product((False, True), repeat=len(stages)):
        yield tuple(
            replace(stage, recompute=recompute)
            for stage, recompute in zip(stages, chosen, strict=True)
        )


def _with_optimal_schedule(problem: Problem, draft: Draft) -> Draft:
    costs = capped_costs(problem, draft.stages)
    assert costs is not None, "the best plan fits"
    found = optimal_schedule(costs, problem.num_microbatches, deadline=problem.deadline)
    if found.iteration_ms >= draft.iteration_ms * (1 - 1e-12):
        return draft
    return replace(
        draft,
        codes=found.codes,
        iteration_ms=found.iteration_ms,
        schedule_guarantee_ms=None,
    )


def _num_placements(problem: Problem) -> int:
    """An upper bound on the number of plans to list, ways to share samples aside."""
    num_layers, num_devices = problem.model.num_layers, problem.cluster.num_devices
    modes = 2 if problem.limits_memory and problem.limits.recompute else 1
    return sum(
        (num_stages + 1) ** num_devices
        * math.comb(num_layers - 1, num_stages - 1)
        * modes**num_stages
        for num_stages in range(1, min(num_layers, num_devices) + 1)
    )


def _import_cp_model() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise InputError(
            "planner: 'exact' needs ortools; install it with pip install 'pipeplan[exact]'"
        ) from None
    return cp_model
