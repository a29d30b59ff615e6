"""Shares in proportion to speed; bounds for plans with any shares, against all ways to share."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

import pipeplan as pp
from instances import random_cluster, random_model, random_stages
from one_stage import make_problem, plan
from pipeplan import _core
from pipeplan.cluster import Cluster, Device
from pipeplan.cost import CostModel
from pipeplan.errors import PlanFileError
from pipeplan.pipeline import BoundScope, Stage
from pipeplan.planning.door import attempt
from pipeplan.planning.planner import best_shares
from pipeplan.planning.planner.best import plan_best
from pipeplan.planning.planner.every_placement import all_placements
from pipeplan.planning.planner.placement import placed_plan, shared_stage, stages_by_speed
from pipeplan.planning.planner.plan_bound import plan_bound_ms
from pipeplan.planning.problem import SearchInterrupted
from pipeplan.schedules import PORTFOLIO, SCHEDULES
from tight_memory import fastest_ms, most_in_flight

HOSTILE_SPEEDS = ((1.0, 0.4), (1.0, 1000.0), (1e-3, 1e3), (1.0, 0.4, 0.7), (3.0, 1.0))


def hostile_cluster(rng: random.Random, num_devices: int) -> Cluster:
    """Speeds of few kinds, slow pairs, links that are fast in one direction only."""
    cluster = random_cluster(rng, num_devices, gaps=rng.random() < 0.1)
    speeds = rng.choice(HOSTILE_SPEEDS)
    rates = [list(row) for row in cluster.bandwidth_gb_per_s]
    for _ in range(rng.randint(0, 2)):
        u, v = rng.sample(range(num_devices), 2)
        rates[u][v] *= rng.choice([0.01, 0.1, 100])
    devices = [Device(name=f"d{u}", speed=rng.choice(speeds)) for u in range(num_devices)]
    if len({device.speed for device in devices}) == 1:
        fastest = max(speeds)
        devices[0] = replace(devices[0], speed=0.5 if devices[0].speed == fastest else fastest)
    return replace(
        cluster, devices=tuple(devices), bandwidth_gb_per_s=tuple(tuple(row) for row in rates)
    )


def whole_shares(size: int, samples: int):
    """Every way to give `size` devices whole samples."""
    for cuts in itertools.combinations(range(1, samples), size - 1):
        ends = (*cuts, samples)
        yield tuple((end - first) / samples for first, end in zip((0, *cuts), ends, strict=True))


def some_shares(rng: random.Random, cost: CostModel, stage: Stage):
    """Even shares, shares by speed, nearly all on one device, and random ones."""
    size = stage.num_replicas
    if size == 1:
        yield (1.0,)
        return
    speeds = [float(cost.speed_D[u]) for u in stage.devices]
    yield (1 / size,) * size
    if min(speeds) / sum(speeds) >= 1e-6:
        yield tuple(speed / sum(speeds) for speed in speeds)
    for favourite in range(size):
        yield tuple(1 - 1e-6 * (size - 1) if k == favourite else 1e-6 for k in range(size))
    for _ in range(3):
        parts = [max(1e-4, rng.random() ** 3) for _ in stage.devices]
        yield tuple(part / sum(parts) for part in parts)


def plans_with_shares(rng: random.Random, cost: CostModel, *, whole: bool):
    """Stages with all ways to share whole samples, or with some ways to share at all."""
    for stages in all_placements(cost):
        choices = [
            list(whole_shares(stage.num_replicas, cost.model.microbatch_size))
            if whole
            else list(some_shares(rng, cost, stage))
            for stage in stages
        ]
        for shares in itertools.product(*choices):
            yield tuple(
                replace(stage, shares=None if len(mine) == 1 else mine)
                for stage, mine in zip(stages, shares, strict=True)
            )


def tiny_problem(rng: random.Random, *, whole: bool, memory: bool = False):
    model = random_model(rng, rng.randint(1, 3))
    model = replace(model, microbatch_size=rng.choice([2, 3, 4, 5]))
    cluster = hostile_cluster(rng, rng.choice([2, 3, 3]))
    if memory:
        state = 4 * sum(layer.parameter_bytes for layer in model.layers)
        kept = sum(layer.activation_bytes for layer in model.layers)
        whole_gb = max((state + 2 * kept) / 1e9, 1e-5)
        devices = tuple(
            replace(device, memory_gb=round(whole_gb * rng.uniform(0.2, 1.2), 9))
            for device in cluster.devices
        )
        cluster = replace(cluster, devices=devices)
    problem = make_problem(model, cluster, rng.choice([1, 2, 3]), divisible=not whole)
    return problem.within_samples()


class TestSharesBySpeed:
    def test_no_other_whole_samples_are_done_earlier(self):
        rng = random.Random(1)
        for _ in range(300):
            size, samples = rng.randint(1, 4), rng.randint(4, 9)
            speeds = [rng.choice([1.0, 0.4, 1000.0, rng.uniform(0.1, 3)]) for _ in range(size)]
            cluster = Cluster(
                name="c",
                devices=tuple(Device(name=f"d{k}", speed=s) for k, s in enumerate(speeds)),
                bandwidth_gb_per_s=((1.0,) * size,) * size,
            )
            model = replace(random_model(rng, 1), microbatch_size=samples)
            instance = make_problem(model, cluster, 1).kernel_instance()
            stage = Stage(layers=range(1), devices=tuple(range(size)))
            (made,) = stages_by_speed(instance, (stage,))
            assert math.isclose(sum(made.device_shares), 1)
            taken = dict(zip(made.devices, made.device_shares, strict=True))
            mine = max(taken[u] / speeds[u] for u in range(size))
            least = min(
                max(x / s for x, s in zip(shares, speeds, strict=True))
                for shares in whole_shares(size, samples)
            )
            assert math.isclose(mine, least, rel_tol=1e-12)

    def test_they_do_not_depend_on_the_order_of_devices(self):
        rng = random.Random(2)
        for _ in range(100):
            cluster = hostile_cluster(rng, 4)
            model = replace(random_model(rng, 1), microbatch_size=rng.randint(4, 9))
            problem = make_problem(model, cluster, 1, divisible=rng.random() < 0.5)
            instance = problem.kernel_instance()
            made = {
                stages_by_speed(instance, (Stage(layers=range(1), devices=tuple(order)),))
                for order in (range(4), (3, 1, 0, 2))
            }
            assert len(made) == 1
            (stages,) = made
            assert tuple(shared_stage(instance, stage) for stage in stages) == stages

    def test_shares_too_small_for_files_are_even(self):
        devices = (Device(name="a", speed=1e3), Device(name="b", speed=1e-3))
        cluster = Cluster(name="c", devices=devices, bandwidth_gb_per_s=((1.0, 1.0), (1.0, 1.0)))
        model = random_model(random.Random(3), 2)
        instance = make_problem(model, cluster, 1, divisible=True).kernel_instance()
        (stage,) = stages_by_speed(instance, (Stage(layers=range(2), devices=(0, 1)),))
        assert stage.shares is None

    @pytest.mark.parametrize("divisible", [False, True])
    def test_kernels_cost_them_as_the_cost_model_does(self, divisible):
        rng = random.Random(4)
        num_uneven = 0
        for _ in range(200):
            model = replace(random_model(rng, 4), microbatch_size=rng.randint(2, 9))
            cluster = hostile_cluster(rng, 5)
            problem = make_problem(model, cluster, 3, divisible=divisible).within_samples()
            instance = problem.kernel_instance()
            stages = random_stages(rng, 4, 5)
            if any(stage.num_replicas > problem.cost.max_replicas for stage in stages):
                continue
            stages = tuple(
                stages_by_speed(instance, (stage,))[0]
                if rng.random() < 0.7
                else shared_stage(instance, stage)
                for stage in stages
            )
            num_uneven += any(stage.shares is not None for stage in stages)
            times = _core.rule_times(instance, placed_plan(instance, stages), np.inf)
            try:
                costs = problem.cost.pipeline_costs(stages)
            except PlanFileError:
                assert not times
                continue
            for rule, ms in zip(PORTFOLIO, times, strict=True):
                assert math.isclose(SCHEDULES[rule](costs, 3).iteration_ms, ms, rel_tol=1e-9)
        assert num_uneven > 40


class TestBounds:
    """No plan is below a bound, however it shares microbatches."""

    @pytest.mark.parametrize("whole", [True, False])
    @pytest.mark.parametrize(
        "count", [40, pytest.param(2000, marks=pytest.mark.full)], ids=["few", "many"]
    )
    def test_no_plan_is_below_the_recursions(self, whole, count):
        rng = random.Random(5)
        for _ in range(count):
            problem = tiny_problem(rng, whole=whole)
            M, cost = problem.num_microbatches, problem.cost
            least = min(
                plan_bound_ms(cost.pipeline_costs(stages), M)
                for stages in plans_with_shares(rng, cost, whole=whole)
            )
            instance = problem.kernel_instance()
            classes = _core.device_classes(instance)
            sets_ms, _ = _core.plan_on_sets(instance, classes, 16, np.inf, 0, 1)
            sizes = np.arange(1, instance.num_devices + 1, dtype=np.int32)
            relaxed_ms = _core.relaxed_bound(instance, sizes, 8, least * 2 + 1, 1)
            assert sets_ms <= least * (1 + 1e-9)
            assert relaxed_ms <= least * (1 + 1e-9)

    @pytest.mark.parametrize("whole", [True, False])
    @pytest.mark.parametrize("memory", [False, True])
    @pytest.mark.parametrize(
        "count", [15, pytest.param(500, marks=pytest.mark.full)], ids=["few", "many"]
    )
    def test_no_certificate_is_above_a_known_plan(self, whole, memory, count):
        rng = random.Random(6)
        for _ in range(count):
            problem = tiny_problem(rng, whole=whole, memory=memory)
            optimum = optimum_ms(rng, problem, whole=whole)
            for dp_steps in (2e3, 1e7):  # the fewer, the more sets are known by their size only
                near_ms, _, _ = _core.prove_on_near_sets(
                    problem.kernel_instance(), 2, 1e-3, 2 * optimum + 1, dp_steps, 1e4, 1
                )
                assert near_ms <= max(1e-3, optimum * (1 + 1e-9))
            try:
                made = plan(
                    problem.model, problem.cluster, problem.num_microbatches, divisible=not whole
                )
            except pp.InfeasibleError:
                continue
            assert not pp.check(made, strict_memory=True).errors
            if made.bound is None:  # shares by memory, where no other plan fits: nothing is claimed
                assert optimum == math.inf or any(stage.shares for stage in made.stages)
                continue
            assert made.bound.scope is BoundScope.ANY
            assert made.bound.lower_bound_ms <= optimum * (1 + 1e-9)


def optimum_ms(rng: random.Random, problem, *, whole: bool) -> float:
    """The fastest of all plans that `plans_with_shares` lists, under all orders of blocks."""
    cost, M = problem.cost, problem.num_microbatches
    plans = []
    for stages in plans_with_shares(rng, cost, whole=whole):
        for again in itertools.product((False, True), repeat=len(stages)):
            if any(again) and not problem.limits_memory:
                continue
            modes = tuple(replace(s, recompute=r) for s, r in zip(stages, again, strict=True))
            caps = [M] * len(modes)
            if problem.limits_memory:
                caps = [most_in_flight(cost, stage, M) for stage in modes]
            if min(caps) < 1:
                continue
            costs = cost.pipeline_costs(modes)
            plans.append((plan_bound_ms(costs, M, caps), caps, costs))
    plans.sort(key=lambda plan: plan[0])
    best_ms = math.inf
    for bound_ms, caps, costs in plans:
        if bound_ms >= best_ms * (1 - 1e-9):
            break
        best_ms = min(best_ms, fastest_ms(costs, M, caps, bound_ms))
    return best_ms


def one_layer(samples: int, **fields) -> pp.ModelProfile:
    costs = {"forward_ms": 5.0, "backward_ms": 10.0, "output_bytes": 0, "parameter_bytes": 1e6}
    layer = pp.LayerProfile(name="a", **{**costs, **fields})
    return pp.ModelProfile(name="m", microbatch_size=samples, layers=(layer,))


def pair_of_devices(slow: float = 0.25, memory_gb: float | None = None) -> Cluster:
    devices = (
        Device(name="slow", speed=slow),
        Device(name="fast", speed=1.0, memory_gb=memory_gb),
    )
    return Cluster(name="c", devices=devices, bandwidth_gb_per_s=((0.0, 100.0), (100.0, 0.0)))


class TestPlans:
    def test_a_device_of_four_times_the_speed_takes_four_samples_of_five(self):
        made = plan(one_layer(5), pair_of_devices(), 4)
        (stage,) = made.stages
        assert (stage.devices, stage.shares) == ((1, 0), (0.8, 0.2))
        assert made.iteration_ms == pytest.approx(4 * 15 * 0.8 + 0.01)  # and the all-reduce
        assert made.bound.scope is BoundScope.ANY
        assert made.bound.gap(made.iteration_ms) < 1e-6

    def test_memory_counts_with_the_shares(self):
        """3/4 of the activations do not fit the fast device. Half of a microbatch does."""
        model = one_layer(4, activation_bytes=1e9)
        free = plan(model, pair_of_devices(0.4), 4)
        (stage,) = free.stages
        assert stage.device_shares == (0.75, 0.25)
        made = plan(model, pair_of_devices(0.4, 0.6), 4)
        assert pp.check(made, strict_memory=True).errors == ()
        assert made.iteration_ms > free.iteration_ms
        assert made.bound.lower_bound_ms <= made.iteration_ms

    def test_equal_speeds_keep_even_shares_and_their_bound(self):
        cluster = pair_of_devices()
        devices = tuple(replace(device, speed=0.25) for device in cluster.devices)
        made = plan(one_layer(5), replace(cluster, devices=devices), 4)
        assert made.bound.scope is BoundScope.EVEN_SHARES

    def test_never_slower_than_with_even_shares(self):
        rng = random.Random(8)
        faster = 0
        for _ in range(8):
            model = replace(random_model(rng, rng.randint(3, 10)), microbatch_size=8)
            problem = make_problem(model, random_cluster(rng, 7), 4, effort=0.1)
            even_only = replace(problem, limits=replace(problem.limits, shares=False))
            best, even = (attempt(one, "best").plan for one in (problem, even_only))
            assert best.iteration_ms <= even.iteration_ms * (1 + 1e-12)
            assert even.bound.scope is BoundScope.EVEN_SHARES
            faster += best.iteration_ms < even.iteration_ms * 0.99
        assert faster >= 3

    def test_exact_is_not_slower_than_best(self):
        pytest.importorskip("ortools")
        rng = random.Random(9)
        for _ in range(4):
            problem = tiny_problem(rng, whole=True)
            best, exact = (
                plan(problem.model, problem.cluster, problem.num_microbatches, planner)
                for planner in ("best", "exact")
            )
            assert exact.iteration_ms <= best.iteration_ms * (1 + 1e-9)
            assert pp.check(exact).errors == ()

    def test_an_interruption_of_the_second_search_keeps_the_faster_plan(self, monkeypatch):
        draft = replace(plan_best(make_problem(one_layer(5), pair_of_devices(), 4)), notes={})
        loose = replace(draft, bound=replace(draft.bound, lower_bound_ms=1.0))
        for even_ms, expected in ((draft.iteration_ms * 2, loose), (1.5, None)):
            found = iter([loose, replace(draft, iteration_ms=even_ms)])

            def stop_second(*_, found=found):
                made = next(found)
                if made is loose:
                    return made
                raise SearchInterrupted(made)

            monkeypatch.setattr(best_shares, "plan_best", stop_second)
            with pytest.raises(SearchInterrupted) as stop:
                best_shares.plan_best_shares(make_problem(one_layer(5), pair_of_devices(), 4))
            kept = stop.value.draft
            assert kept.notes == {"interrupted": True}
            assert kept.bound.scope is BoundScope.ANY
            assert kept.bound.lower_bound_ms == 1.0
            assert kept.iteration_ms == (expected.iteration_ms if expected else even_ms)
