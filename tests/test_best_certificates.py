"""What `best` and `exact` promise about their plans: starts, bounds, names, guarantees, limits."""

import itertools
import math
import random
import time
from dataclasses import replace

import numpy as np
import pytest

from instances import (
    even_model,
    flat_cluster,
    random_cluster,
    random_costs,
    random_model,
    random_stages,
)
from one_stage import make_problem, plan
from pipeplan import _core
from pipeplan.cluster import Cluster, Device, Duplex
from pipeplan.cost import CostModel
from pipeplan.errors import PlanFileError
from pipeplan.pipeline import Bound, BoundScope, Stage
from pipeplan.planning.planner import exact
from pipeplan.planning.planner.best import plan_best
from pipeplan.planning.planner.coarsening import coarsen
from pipeplan.planning.planner.every_placement import all_placements
from pipeplan.planning.planner.incumbent import Incumbent
from pipeplan.planning.planner.lower_bound import relaxed_bound_ms, work_bound_ms
from pipeplan.planning.planner.placement import placed_plan
from pipeplan.planning.planner.plan_bound import plan_bound_ms
from pipeplan.planning.planner.spp import execute_pe
from pipeplan.planning.problem import Draft
from pipeplan.schedules import PORTFOLIO, SCHEDULES, run_pe, schedule_guarantee_ms

FASTER_THAN_PE = (25, 105, 116, 140)
"""Seeds of pipelines for which there is a faster order than PE's."""
ONE_STAGE = (Stage(layers=range(4), devices=(0,)),)


def draft_of(stages=ONE_STAGE, iteration_ms=1.0, num_microbatches=2, **fields) -> Draft:
    """A draft that runs all forwards first, whatever time it claims to take."""
    row = [*range(num_microbatches), *range(-1, -1 - num_microbatches, -1)]
    codes = np.array([row] * len(stages), dtype=np.int32)
    return Draft(stages=stages, codes=codes, iteration_ms=iteration_ms, **fields)


def open_problem(seed: int = 6):
    """A problem of which `best` cannot prove the optimum."""
    rng = random.Random(seed)
    model, cluster = random_model(rng, 30), random_cluster(rng, 14)
    return make_problem(model, cluster, 3, effort=0.05, divisible=True)


class TestIncumbent:
    def incumbent(self, num_devices=3, max_replicas=None) -> Incumbent:
        cost = CostModel(even_model(4, 1, 1), flat_cluster(num_devices), max_replicas=max_replicas)
        return Incumbent(cost, 2, cost.kernel_instance(2))

    def test_drafts_outside_the_bounds_scope_do_not_count(self):
        made = self.incumbent(max_replicas=2)
        made.offer(ONE_STAGE)
        uneven = replace(ONE_STAGE[0], devices=(0, 1), shares=(0.25, 0.75))
        for stage in (
            uneven,
            replace(ONE_STAGE[0], recompute=True),
            replace(ONE_STAGE[0], devices=(0, 1, 2)),
        ):
            made.offer_draft(draft_of((stage,), 0.1))
        assert made.iteration_ms == 16
        assert made.draft().stages == ONE_STAGE

    def test_every_rule_of_the_portfolio_is_tried(self):
        other_rules = 0
        for seed in range(40):
            rng = random.Random(seed)
            cost = CostModel(random_model(rng, 6), random_cluster(rng, 5))
            made = Incumbent(cost, 5, cost.kernel_instance(5))
            stages = random_stages(rng, 6, 5)
            made.offer(stages)
            costs = cost.pipeline_costs(stages)
            times = [SCHEDULES[rule](costs, 5).iteration_ms for rule in PORTFOLIO]
            assert made.iteration_ms == pytest.approx(min(times), rel=1e-9)
            other_rules += min(times) < times[0] * (1 - 1e-6)
        assert other_rules > 3

    def test_a_slower_draft_replaces_nothing(self):
        made = self.incumbent()
        made.offer_draft(draft_of(iteration_ms=3.0, notes={"who": "first"}))
        other = (Stage(layers=range(4), devices=(2,)),)
        made.offer_draft(draft_of(other, 5.0))
        made.offer_draft(draft_of(other, 3.0))  # ties go to the first
        assert made.draft().stages == ONE_STAGE
        assert made.iteration_ms == made.draft().iteration_ms == 3.0

    def test_a_draft_brings_no_promises_along(self):
        """Bound, guarantee and notes of another planner say nothing about the search's result."""
        made = self.incumbent()
        bound = Bound(lower_bound_ms=2.0, scope=BoundScope.ANY)
        made.offer_draft(draft_of(bound=bound, schedule_guarantee_ms=9.0, notes={"a": 1}))
        kept = made.draft()
        assert (kept.bound, kept.schedule_guarantee_ms, kept.notes) == (None, None, {})

    def test_the_first_of_equal_plans_stays(self):
        made = self.incumbent()
        for device in range(3):
            made.offer((Stage(layers=range(4), devices=(device,)),))
        assert made.draft().stages == ONE_STAGE

    def test_what_it_returns_takes_the_time_it_keeps_and_guarantees_only_pe(self):
        others = 0
        for seed in range(60):
            rng = random.Random(seed)
            cost = CostModel(random_model(rng, 6), random_cluster(rng, 5))
            instance = cost.kernel_instance(5)
            made = Incumbent(cost, 5, instance)
            for _ in range(4):
                made.offer(random_stages(rng, 6, 5))
            starts = [placed_plan(instance, stages) for stages in made.ranked()[:2]]
            for ms, rule, placed in _core.local_search(instance, starts, seed, 3e5, 0.0, 1):
                made.offer_found(placed, rule, ms)
            draft = made.draft()
            costs = cost.pipeline_costs(draft.stages)
            assert draft.iteration_ms == pytest.approx(made.iteration_ms, rel=1e-9)
            times = [rule(costs, 5).iteration_ms for rule in SCHEDULES.values()]
            if draft.schedule_guarantee_ms is None:
                others += 1
                assert draft.iteration_ms < run_pe(costs, 5).iteration_ms
            else:
                assert draft.codes.tolist() == run_pe(costs, 5).order_SM2.tolist()
                assert draft.schedule_guarantee_ms == schedule_guarantee_ms(costs, 5)
            assert draft.iteration_ms <= min(times) * (1 + 1e-9)
        assert others > 3

    def test_the_ranking_has_the_best_first(self):
        made = self.incumbent()
        for devices in ((0,), (0, 1), (0, 1, 2), (2,)):
            made.offer((Stage(layers=range(4), devices=devices),))
        ranked = [stages[0].devices for stages in made.ranked()]
        assert ranked[:2] == [(0, 1, 2), (0, 1)]
        assert len(ranked) == 4
        # A complete plan that is the best comes first, however its stages do under our rules.
        made.offer_draft(draft_of((Stage(layers=range(4), devices=(2,)),), 0.5))
        assert made.ranked()[0][0].devices == (2,)


class TestBest:
    def test_a_start_that_is_faster_is_returned(self):
        problem = open_problem()
        usual = plan_best(problem)
        assert usual.bound.gap(usual.iteration_ms) > 1e-6
        stages = (Stage(layers=range(30), devices=(3,)),)
        # Its word counts here, even below the bound; the door looks at what it really takes.
        fast = draft_of(stages, usual.bound.lower_bound_ms / 2, 3)
        made = plan_best(problem, [fast])
        assert made.stages == stages
        assert made.codes.tolist() == fast.codes.tolist()
        assert made.bound.lower_bound_ms <= made.iteration_ms

    def test_almost_optimal_is_not_optimal(self):
        """A start within three percent of the bound does not end the search for a better one."""
        problem = open_problem()
        bound_ms = plan_best(problem).bound.lower_bound_ms
        near, nearer = (
            draft_of((Stage(layers=range(30), devices=(device,)),), factor * bound_ms, 3)
            for device, factor in ((1, 1.0 + 1e-4), (2, 1.0 + 1e-6))
        )
        assert plan_best(problem, [near, nearer]).stages == nearer.stages

    def test_starts_are_not_made_once_the_optimum_is_known(self):
        def never():
            raise AssertionError
            yield

        problem = make_problem(even_model(1, 1, 1), flat_cluster(3), 4)
        made = plan_best(problem, never())
        assert made.bound.gap(made.iteration_ms) < 1e-6

    def test_the_bound_is_the_one_that_its_name_says(self):
        names = set()
        for seed in range(24):
            rng = random.Random(seed)
            V = rng.choice([3, 4, 10])
            model, cluster = random_model(rng, rng.randint(2, 8)), random_cluster(rng, V)
            made = plan(model, cluster, 3, effort=0.05, divisible=True)
            cost = CostModel(model, cluster)
            instance = make_problem(model, cluster, 3, divisible=True).kernel_instance()
            bound_ms, name = made.bound.lower_bound_ms, made.options["bound"]
            names.add(name)
            work_ms = work_bound_ms(cost, 3)
            relaxed_ms = relaxed_bound_ms(instance, range(1, V + 1), made.iteration_ms, 1)
            assert bound_ms >= min(work_ms, made.iteration_ms) * (1 - 1e-6)
            if name == "work":
                assert bound_ms == pytest.approx(min(work_ms, made.iteration_ms))
            if name == "exact-sets":
                sets_ms, _ = _core.plan_on_sets(
                    instance, list(range(V)), 16, made.iteration_ms, 0, 1
                )
                proved_ms, _, _ = _core.prove_on_sets(
                    instance, list(range(V)), 16, made.iteration_ms, 0, 2e6, 1
                )
                assert bound_ms >= min(sets_ms, made.iteration_ms) * (1 - 1e-6)
                assert bound_ms == pytest.approx(min(proved_ms, made.iteration_ms), rel=1e-6)
            if name == "relaxed":
                assert bound_ms <= relaxed_ms * (1 + 1e-9)
        assert "exact-sets" in names

    def test_a_weaker_bound_never_replaces_a_stronger_one(self, monkeypatch):
        monkeypatch.setattr(_core, "relaxed_bound", lambda *_, **__: 0.0)
        problem = open_problem()
        made = plan_best(problem)
        assert made.bound.lower_bound_ms >= work_bound_ms(problem.cost, 3) * (1 - 1e-6)

    def test_effort_decides_how_much_is_searched(self, monkeypatch):
        searched, targets = [], []
        real = _core.local_search

        def spy(instance, starts, seed, budget, target_ms, num_threads, deadline, known_ms, *rest):
            searched.append((budget, deadline))
            targets.append(target_ms)
            budget = min(budget, 1e5)
            return real(
                instance, starts, seed, budget, target_ms, num_threads, math.inf, known_ms, *rest
            )

        monkeypatch.setattr(_core, "local_search", spy)
        problem = open_problem()
        budgets = {}
        for effort in (0.3, 1.0, 4.0):
            searched.clear()
            made = plan_best(replace(problem, effort=effort))
            assert max(targets, default=0.0) <= made.bound.lower_bound_ms * (1 + 1e-6)
            budgets[effort] = sum(budget for budget, _ in searched)
            assert all(deadline == math.inf for _, deadline in searched)
        assert budgets[0.3] < 0.5 * budgets[1.0]
        assert budgets[4.0] > 2.5 * budgets[1.0]
        searched.clear()
        deadline = time.monotonic() + 60
        plan_best(replace(problem, deadline=deadline, effort=1.0))
        assert {until for _, until in searched} == {deadline}

    def test_orders_of_devices_are_translated_back(self, monkeypatch):
        """Three hosts of six in any order: the same time, without any search."""
        monkeypatch.setattr(_core, "local_search", lambda *_: [])
        rng = random.Random(1)
        model = random_model(rng, 12)
        times = []
        for _ in range(2):
            hosts = [0] * 6 + [1] * 6 + [2] * 6
            if times:
                rng.shuffle(hosts)
            rates = tuple(tuple(20.0 if a == b else 0.3 for b in hosts) for a in hosts)
            devices = tuple(Device(name=f"d{index}") for index in range(18))
            cluster = Cluster(name="hosts", devices=devices, bandwidth_gb_per_s=rates)
            times.append(plan_best(make_problem(model, cluster, 6)).iteration_ms)
        assert times[1] == pytest.approx(times[0], rel=0.01)

    def test_most_small_problems_are_solved_and_proved(self):
        """Stopping early would leave gaps where there are none."""
        proved = 0
        for seed in range(30):
            rng = random.Random(seed)
            model, cluster = random_model(rng, rng.randint(2, 6)), random_cluster(rng, 4)
            model = replace(model, microbatch_size=12)
            devices = tuple(replace(device, speed=1.0) for device in cluster.devices)
            made = plan(model, replace(cluster, devices=devices, duplex=Duplex.FULL), 3)
            proved += made.bound.gap(made.iteration_ms) < 1e-6
        assert proved >= 26


class TestCoarsening:
    def test_merged_layers_cost_what_their_layers_cost(self):
        rng = random.Random(4)
        cost = CostModel(random_model(rng, 40), random_cluster(rng, 4), max_replicas=2)
        coarse = coarsen(cost, 9)
        assert len(coarse.end_layer) == 9
        assert coarse.cost.max_replicas == 2
        first = 0
        for layer, end in zip(coarse.cost.model.layers, coarse.end_layer, strict=True):
            held = cost.model.layers[first:end]
            assert layer.output_bytes == held[-1].output_bytes
            assert layer.gradient_bytes == held[-1].gradient_bytes
            for name in ("forward_ms", "backward_ms", "parameter_bytes", "activation_bytes"):
                total = sum(getattr(one, name) for one in held)
                assert getattr(layer, name) == pytest.approx(total)
            first = end


class TestExact:
    def tiny(self, seed: int, duplex=Duplex.FULL):
        rng = random.Random(seed)
        cluster = replace(random_cluster(rng, 3), duplex=duplex)
        return random_model(rng, 3), cluster

    def test_a_bound_from_a_search_cut_short_still_holds(self):
        pytest.importorskip("ortools")
        open_gaps = 0
        for seed in range(8):
            model, cluster = self.tiny(seed)
            best = plan(model, cluster, 3, "exact")
            short = plan(model, cluster, 3, "exact", time_limit_s=1e-6)
            assert short.bound.lower_bound_ms <= best.iteration_ms * (1 + 1e-9)
            assert best.bound.lower_bound_ms <= short.iteration_ms * (1 + 1e-9)
            open_gaps += short.iteration_ms > best.iteration_ms * (1 + 1e-6)
        assert open_gaps > 0

    def test_what_the_solver_cannot_prove_is_not_promised(self, monkeypatch):
        pytest.importorskip("ortools")
        deadlines = []

        def unsure(costs, num_microbatches, *, deadline):
            run = run_pe(costs, num_microbatches)
            deadlines.append(deadline)
            return exact.OptimalSchedule(
                codes=run.order_SM2, iteration_ms=run.iteration_ms, lower_bound_ms=0.125
            )

        monkeypatch.setattr(exact, "optimal_schedule", unsure)
        problems = [
            make_problem(*self.tiny(seed, Duplex.HALF), 3, time_limit_s=600, divisible=True)
            for seed in range(12)
        ]
        bounds = [exact.plan_exact(problem).bound.lower_bound_ms for problem in problems]
        assert any(bound == pytest.approx(0.125, abs=1e-6) for bound in bounds)
        assert set(deadlines) <= {problem.deadline for problem in problems}

    @pytest.mark.parametrize("seed", FASTER_THAN_PE)
    def test_a_solver_that_stops_early_proves_less(self, seed):
        pytest.importorskip("ortools")
        costs = random_costs(random.Random(seed))
        short, found = (
            exact.optimal_schedule(costs, 5, limit=1e-4),
            exact.optimal_schedule(costs, 5),
        )
        assert short.iteration_ms > found.iteration_ms * (1 + 1e-6)
        assert short.lower_bound_ms <= found.iteration_ms * (1 + 1e-6)

    def test_it_finds_what_is_a_little_better_than_best(self, monkeypatch):
        """From a plan that is hardly slower than the optimum it still gets to the optimum."""
        pytest.importorskip("ortools")
        tried = 0
        for seed in (10, 15, 28, 29):
            problem = make_problem(*self.tiny(seed), 3, divisible=True)
            optimum_ms = exact.plan_exact(problem).iteration_ms
            slower = [
                draft
                for stages in all_placements(problem.cost)
                if 1.0001 * optimum_ms
                < (draft := execute_pe(problem.cost, stages, 3)).iteration_ms
                < 1.025 * optimum_ms
            ]
            if not slower:
                continue
            tried += 1
            with monkeypatch.context() as patched:
                patched.setattr(exact, "plan_best", lambda _, drafts=slower: drafts[0])
                made = exact.plan_exact(problem)
            assert made.iteration_ms == pytest.approx(optimum_ms, rel=1e-6)
        assert tried > 1

    def test_the_solver_knows_all_that_the_fixed_plan_bound_knows(self):
        """With half duplex too, where both directions share the channel, and with all-reduces."""
        pytest.importorskip("ortools")
        for seed in range(40):
            costs = random_costs(random.Random(seed))
            found = exact.optimal_schedule(costs, 3)
            assert found.lower_bound_ms >= plan_bound_ms(costs, 3) * (1 - 1e-6)
            assert found.iteration_ms <= run_pe(costs, 3).iteration_ms
            assert found.lower_bound_ms <= found.iteration_ms

    @pytest.mark.parametrize("seed", FASTER_THAN_PE)
    def test_larger_problems_get_the_optimal_schedule_and_no_false_guarantee(
        self, seed, monkeypatch
    ):
        """The order changes where that is faster, and then PE's guarantee is gone."""
        pytest.importorskip("ortools")
        monkeypatch.setattr(exact, "MAX_PLACEMENTS", 0)
        rng = random.Random(seed)
        num_layers, num_devices = rng.randint(1, 7), rng.randint(1, 7)
        model, cluster = random_model(rng, num_layers), random_cluster(rng, num_devices)
        stages = random_stages(rng, num_layers, num_devices)
        problem = make_problem(model, cluster, 5)
        draft = execute_pe(problem.cost, stages, 5)
        monkeypatch.setattr(exact, "plan_best", lambda _: draft)
        monkeypatch.setattr(exact, "plan_best_shares", lambda _: draft)
        made = exact.plan_exact(problem)
        assert made.iteration_ms < draft.iteration_ms
        assert made.schedule_guarantee_ms is None
        # A schedule that is better than all that the solver may find stays as it is.
        monkeypatch.setattr(exact, "plan_best", lambda _: replace(draft, iteration_ms=0.001))
        assert exact.plan_exact(problem).iteration_ms == 0.001

    def test_placements_with_gaps_are_all_there(self):
        for seed in range(6):
            rng = random.Random(seed)
            cost = CostModel(random_model(rng, 3), random_cluster(rng, 3, gaps=True))
            expected = set()
            for stage_of in itertools.product((None, 0, 1, 2), repeat=3):
                used = sorted({n for n in stage_of if n is not None})
                if not used or used != list(range(len(used))):
                    continue
                sets = [tuple(u for u in range(3) if stage_of[u] == n) for n in used]
                for cuts in itertools.combinations((1, 2), len(used) - 1):
                    ends = (*cuts, 3)
                    stages = tuple(
                        Stage(layers=range(first, end), devices=devices)
                        for first, end, devices in zip((0, *cuts), ends, sets, strict=True)
                    )
                    try:
                        cost.pipeline_costs(stages)
                    except PlanFileError:
                        continue
                    expected.add(stages)
            found = list(all_placements(cost))
            assert len(found) == len(set(found))
            assert set(found) == expected
