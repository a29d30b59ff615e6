"""The bounds hold, `best` is close to them, and nothing depends on threads."""

import itertools
import random
import time
from dataclasses import replace

import numpy as np
import pytest

from enemies import all_orders_ms
from instances import (
    even_model,
    flat_cluster,
    model_of,
    random_cluster,
    random_costs,
    random_model,
    random_schedule,
)
from one_stage import make_problem, plan
from oracles import compositions
from pipeplan import _core, zoo
from pipeplan.checker import check
from pipeplan.cluster import Cluster, Device, HostGroup, expand_hosts
from pipeplan.cost import CostModel
from pipeplan.errors import InputError, PlanningInterrupted
from pipeplan.pipeline import Stage
from pipeplan.planning.planner.coarsening import coarsen
from pipeplan.planning.planner.device_classes import num_set_triples
from pipeplan.planning.planner.device_orders import device_orders
from pipeplan.planning.planner.every_placement import all_placements, whole_sample_variants
from pipeplan.planning.planner.exact import optimal_schedule
from pipeplan.planning.planner.lower_bound import bucket_sizes, relaxed_bound_ms, work_bound_ms
from pipeplan.planning.planner.placement import placed_stages
from pipeplan.planning.planner.plan_bound import plan_bound_ms
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.schedules import PORTFOLIO, SCHEDULES
from pipeplan.simulator import Preference, run_list, run_schedule


def staggered(most, pace, own, longest):
    return max(min(i * pace, longest) - i * own for i in range(most + 1))


def capped_ms(f, b, R, M, K):
    """The three terms of the theory page for a stage that holds at most K microbatches."""
    w = f + b
    if K >= M:
        return 0.0
    rounds = -(-M // K)
    return max(
        rounds * (w + R) + (M - 1 - (rounds - 1) * K) * max(f, b),
        R + M * w - (K - 1) * min(f, b),
        2 * R + (M - K + 1) * w,
    )


def oracle_bound_ms(costs, M, caps=None):
    """The recurrences of the theory page, written down once more."""
    f, b, reduce = costs.forward_ms_S, costs.backward_ms_S, costs.all_reduce_ms_S
    w = f + b
    R, TB, TA = 0.0, M * w[-1], M * w[-1] + reduce[-1]
    busiest = costs.num_stages - 1
    behind, lead = {busiest: 0.0}, 0.0
    for n in range(costs.num_stages - 2, -1, -1):
        cf, cb = costs.send_forward_ms_C[n], costs.send_backward_ms_C[n]
        c, Q = cf + cb, w[n + 1] + R
        X = max(c + TB, Q + max(M * cf + cb, cf + M * cb), M * c if costs.half_duplex else 0)
        s, R = busiest, c + Q
        path = w[n] + c + lead + M * w[s]
        TB = max(
            M * w[n],
            w[n] + X,
            R + max(f[n] + M * b[n], M * f[n] + b[n]),
            capped_ms(f[n], b[n], R, M, caps[n]) if caps else 0.0,
            path
            + staggered(M - 1, f[n], f[s], f[s] + behind[s])
            + staggered(M, b[n], b[s], b[s] + behind[s]),
        )
        TA = max(TB + reduce[n], f[n] + cf + TA)
        behind[n] = R
        busiest, lead = (s, w[n] + c + lead) if path > M * w[n] else (n, 0.0)
    return TA


def buckets_of(cost: CostModel):
    return bucket_sizes(cost.cluster.num_devices, cost.model.num_layers)


def placements_of(cost: CostModel):
    return [cost.pipeline_costs(stages) for stages in all_placements(cost)]


class TestFixedPlanBound:
    def test_equals_its_oracle(self):
        for seed in range(500):
            rng = random.Random(seed)
            costs = random_costs(rng)
            M = rng.randint(1, 9)
            caps = [rng.randint(1, 9) for _ in range(costs.num_stages)]
            assert plan_bound_ms(costs, M) == pytest.approx(oracle_bound_ms(costs, M), abs=1e-9)
            assert plan_bound_ms(costs, M, caps) == pytest.approx(
                oracle_bound_ms(costs, M, caps), abs=1e-9
            )

    def test_no_schedule_beats_it(self):
        for seed in range(1500):
            rng = random.Random(seed)
            costs = random_costs(rng)
            M = rng.randint(1, 7)
            bound = plan_bound_ms(costs, M) * (1 - 1e-9)
            schedule = random_schedule(rng, costs.num_stages, M)
            codes = np.array(schedule.to_codes(), dtype=np.int32)
            assert run_schedule(costs, codes).iteration_ms >= bound
            for rule in SCHEDULES.values():
                assert rule(costs, M).iteration_ms >= bound

    def test_no_capped_schedule_beats_the_capped_bound(self):
        for seed in range(500):
            rng = random.Random(seed)
            costs = random_costs(rng)
            caps = [rng.randint(1, 4) for _ in range(costs.num_stages)]
            bound = plan_bound_ms(costs, 8, caps) * (1 - 1e-9)
            for preference in Preference:
                assert run_list(costs, 8, preference, caps).iteration_ms >= bound

    def test_no_order_within_caps_beats_the_capped_bound(self):
        """Against all orders; some stages are much slower than others, so that waits differ."""
        reached = 0
        for seed in range(150):
            rng = random.Random(seed)
            costs = random_costs(rng)
            M = {1: 4, 2: 4, 3: 3}.get(costs.num_stages, 2)
            caps = [rng.randint(1, M) for _ in range(costs.num_stages)]
            if costs.num_stages > 4:
                continue
            least_ms = all_orders_ms(costs, M, caps)
            bound_ms = plan_bound_ms(costs, M, caps)
            assert bound_ms <= least_ms * (1 + 1e-9)
            reached += bound_ms > least_ms * (1 - 1e-6)
        assert reached > 60

    def test_a_faster_link_never_raises_it(self):
        for seed in range(200):
            rng = random.Random(seed)
            model, cluster = random_model(rng, 4), random_cluster(rng, 4)
            stages = tuple(Stage(layers=range(n, n + 1), devices=(n,)) for n in range(4))
            faster = Cluster(
                name="faster",
                devices=cluster.devices,
                bandwidth_gb_per_s=tuple(
                    tuple(rate * rng.choice([1, 2]) for rate in row)
                    for row in cluster.bandwidth_gb_per_s
                ),
                latency_us=cluster.latency_us,
                duplex=cluster.duplex,
            )
            before, after = (
                plan_bound_ms(CostModel(model, c).pipeline_costs(stages), 5)
                for c in (cluster, faster)
            )
            assert after <= before + 1e-9


class TestRecursions:
    def test_sets_equal_brute_force_and_the_others_bracket_them(self):
        for seed in range(60):
            rng = random.Random(seed)
            model = replace(random_model(rng, rng.randint(1, 5)), microbatch_size=12)
            cluster = random_cluster(rng, rng.randint(1, 4), gaps=seed % 2 == 0)
            cost, M = CostModel(model, cluster), rng.randint(1, 6)
            instance, V = cost.kernel_instance(M), cluster.num_devices
            least = min(plan_bound_ms(costs, M) for costs in placements_of(cost))
            everyone = list(range(V))
            on_sets, plans = _core.plan_on_sets(instance, everyone, 16, np.inf, 5, 1)
            sizes = np.arange(1, V + 1, dtype=np.int32)
            on_order, _ = _core.plan_on_order(instance, sizes, 16, np.inf, 5, 1)
            relaxed = _core.relaxed_bound(instance, sizes, 8, np.inf, 1)
            assert on_sets == pytest.approx(least, abs=1e-9)
            assert on_order >= least - 1e-9
            assert relaxed <= least + 1e-9
            assert work_bound_ms(cost, M) <= least + 1e-9
            assert plans

    def test_whole_samples_are_not_below_the_bounds(self):
        """Shares of whole samples count as even, whichever devices take one sample more."""
        below_even = 0
        for seed in range(40):
            rng = random.Random(seed)
            samples = rng.choice([2, 3, 4, 5])
            model = replace(random_model(rng, rng.randint(1, 3)), microbatch_size=samples)
            cluster = random_cluster(rng, rng.randint(2, 4))
            cost, M = CostModel(model, cluster), rng.randint(1, 4)
            even = list(all_placements(cost))
            variants = [v for stages in even for v in whole_sample_variants(cost, stages)]
            least = min(plan_bound_ms(cost.pipeline_costs(v), M) for v in (*even, *variants))
            instance, V = cost.kernel_instance(M), cluster.num_devices
            on_sets, _ = _core.plan_on_sets(instance, list(range(V)), 16, np.inf, 0, 1)
            sizes = np.arange(1, V + 1, dtype=np.int32)
            assert on_sets <= least * (1 + 1e-9)
            assert _core.relaxed_bound(instance, sizes, 8, np.inf, 1) <= least * (1 + 1e-9)
            least_even = min(plan_bound_ms(cost.pipeline_costs(v), M) for v in even)
            below_even += least < least_even * (1 - 1e-9)
        assert below_even > 3

    def test_small_numbers_count_beside_large_ones(self):
        """70 bytes behind 1e18: as a difference of prefix sums they would be 128."""
        layers = [
            LayerProfile(
                name=name, forward_ms=0, backward_ms=work, output_bytes=0, parameter_bytes=size
            )
            for name, work, size in (("large", 1.0, 1e18), ("small", 181.0, 70.0))
        ]
        model = ModelProfile(name="m", microbatch_size=4, layers=tuple(layers))
        cluster = flat_cluster(3, 1e-6)
        made = plan(model, cluster, 1)
        assert made.iteration_ms == pytest.approx(90.5 + 70, rel=1e-9)
        assert made.bound.lower_bound_ms == pytest.approx(90.5 + 70, rel=1e-9)
        assert plan(model, cluster, 1, "spp").iteration_ms == pytest.approx(90.5 + 70, rel=1e-9)

    def test_the_bound_allows_for_instants(self):
        """Ends within 1e-9 ms count as one, so tiny blocks may take less than their length."""
        model = replace(even_model(2, 3e-6, 2.99e-6), microbatch_size=1)
        devices = tuple(Device(name=f"d{n}", speed=1000.0) for n in range(2))
        cluster = replace(flat_cluster(2), devices=devices)
        stages = tuple(Stage(layers=range(n, n + 1), devices=(n,)) for n in range(2))
        costs = CostModel(model, cluster).pipeline_costs(stages)
        for count in (1, 7, 64):
            made = plan(model, cluster, count)
            for rule in SCHEDULES.values():
                assert made.bound.lower_bound_ms <= rule(costs, count).iteration_ms

    def test_narrow_fronts_and_buckets_stay_below(self):
        for seed in range(40):
            rng = random.Random(seed)
            cost = CostModel(random_model(rng, 6), random_cluster(rng, 5))
            M = rng.randint(1, 6)
            instance = cost.kernel_instance(M)
            everyone = list(range(5))
            exact, _ = _core.plan_on_sets(instance, everyone, 16, np.inf, 0, 1)
            narrow, _ = _core.plan_on_sets(instance, everyone, 1, np.inf, 0, 1)
            grouped = _core.relaxed_bound(instance, np.array([1, 3, 5], np.int32), 1, np.inf, 1)
            assert narrow <= exact + 1e-9
            assert grouped <= exact + 1e-9

    def test_a_limit_changes_nothing_below_it(self):
        for seed in range(40):
            rng = random.Random(seed)
            cost = CostModel(random_model(rng, 4), random_cluster(rng, 4))
            instance = cost.kernel_instance(4)
            everyone = list(range(4))  # few enough that no front overflows
            least, plans = _core.plan_on_sets(instance, everyone, 16, np.inf, 1, 1)
            limited, same = _core.plan_on_sets(instance, everyone, 16, least * 1.01, 1, 2)
            assert limited == pytest.approx(least, rel=1e-12)
            assert [placed_stages(p) for p in same] == [placed_stages(p) for p in plans]

    def test_a_limit_only_raises_merged_bounds(self):
        for seed in range(20):
            rng = random.Random(seed)
            cost = CostModel(random_model(rng, 8), random_cluster(rng, 5))
            problem = make_problem(cost.model, cost.cluster, 4, divisible=True)
            instance = problem.kernel_instance()
            everyone = list(range(5))
            known = plan(cost.model, cost.cluster, 4, divisible=True).iteration_ms
            free, _ = _core.plan_on_sets(instance, everyone, 2, np.inf, 0, 1)
            limited, _ = _core.plan_on_sets(instance, everyone, 2, known, 0, 1)
            assert limited <= known * (1 + 1e-9)
            assert free <= known * (1 + 1e-9)

    def test_classes_lose_nothing(self):
        cost = CostModel(zoo.model("vgg19"), zoo.cluster("4x2-10g"))
        instance = cost.kernel_instance(8)
        classes = _core.device_classes(instance)
        assert classes == [0, 0, 1, 1, 2, 2, 3, 3]
        assert num_set_triples(classes) == 10**4
        limit = plan(zoo.model("vgg19"), zoo.cluster("4x2-10g"), 8, "spp").iteration_ms
        by_class, _ = _core.plan_on_sets(instance, classes, 8, limit, 1, 1)
        one_by_one, _ = _core.plan_on_sets(instance, list(range(8)), 8, limit, 1, 1)
        assert by_class == pytest.approx(one_by_one, rel=1e-12)

    def test_buckets_cover_all_sizes(self):
        for num_devices, num_layers in itertools.product((1, 7, 32, 33, 64, 100, 128), (3, 600)):
            sizes = bucket_sizes(num_devices, num_layers)
            assert sizes == sorted(set(sizes))
            assert sizes[-1] == num_devices
        assert len(bucket_sizes(128, 3)) > len(bucket_sizes(128, 1000))
        assert bucket_sizes(16, 10_000) is None


class TestOrders:
    def test_symmetric_clusters_need_one_order(self):
        assert len(device_orders(CostModel(even_model(2, 1, 1), zoo.cluster("1x8-pcie")))) == 1

    def test_orders_are_permutations(self):
        for seed in range(20):
            rng = random.Random(seed)
            cluster = random_cluster(rng, rng.randint(1, 12), gaps=True)
            for order in device_orders(CostModel(even_model(2, 1, 1), cluster)):
                assert sorted(order) == list(range(cluster.num_devices))


class TestCoarsening:
    def test_merging_keeps_all_work(self):
        rng = random.Random(1)
        cost = CostModel(random_model(rng, 60), random_cluster(rng, 4))
        coarse = coarsen(cost, 10)
        assert len(coarse.end_layer) <= 10
        assert coarse.end_layer[-1] == 60
        assert coarse.cost.forward_ms_L.sum() == pytest.approx(cost.forward_ms_L.sum())

    def test_a_thousand_layers_plan_well(self):
        model = even_model(1200, 0.01, 0.02)
        made = plan(model, zoo.cluster("4x2-10g"), 16, divisible=True)
        assert check(made).ok
        assert made.bound.gap(made.iteration_ms) < 0.05


class TestBest:
    def test_never_slower_than_spp_and_the_bound_holds(self):
        for seed in range(60):
            rng = random.Random(seed)
            model = random_model(rng, rng.randint(2, 12))
            cluster = random_cluster(rng, rng.randint(1, 8), gaps=seed % 3 == 0)
            M = rng.randint(1, 12)
            best, spp = plan(model, cluster, M, divisible=True), plan(model, cluster, M, "spp")
            assert check(best).errors == ()
            assert best.iteration_ms <= spp.iteration_ms * (1 + 1e-9)
            assert best.bound.lower_bound_ms <= best.iteration_ms * (1 + 1e-12)

    def test_runnable_plans_have_no_more_replicas_than_samples(self):
        for seed in range(40):
            rng = random.Random(seed)
            model = random_model(rng, rng.randint(2, 8))
            cluster = random_cluster(rng, rng.randint(2, 8))
            made = plan(model, cluster, 4, runnable=True)  # an option of old; it changes nothing
            assert check(made).errors == ()
            assert all(s.num_replicas <= model.microbatch_size for s in made.stages)
            assert made == replace(plan(model, cluster, 4), options=made.options)

    def test_a_relay_is_found_and_proved(self):
        """A device without work passes data on, past a slow link; it takes both cuts around it."""
        slow, fast = 0.01, 100.0
        rates = [[0, fast, slow], [fast, 0, fast], [slow, fast, 0]]
        cluster = Cluster(
            name="relay",
            devices=tuple(Device(name=f"d{u}") for u in range(3)),
            bandwidth_gb_per_s=tuple(tuple(map(float, row)) for row in rates),
        )
        # The free layer shrinks nothing: both cuts around it send the same.
        costs = [(10, 1e6, 1e9), (0, 1e6, 0), (10, 0, 1e9)]
        model = replace(model_of(*costs), microbatch_size=1)
        # Let only the outer devices compute fast enough, so that the middle one is a mere relay.
        devices = tuple(
            replace(device, speed=0.001 if index == 1 else 1.0)
            for index, device in enumerate(cluster.devices)
        )
        made = plan(model, replace(cluster, devices=devices), 8)
        assert [stage.layers for stage in made.stages] == [range(1), range(1, 2), range(2, 3)]
        assert made.stages[1].devices == (1,)
        assert made.bound.gap(made.iteration_ms) < 1e-9

    def test_exact_keeps_the_limit_on_replicas(self):
        """Two samples in a microbatch: no plan with three replicas may be tried, or returned."""
        pytest.importorskip("ortools")
        for seed in range(6):
            rng = random.Random(seed)
            model = replace(random_model(rng, 3), microbatch_size=rng.choice([1, 2]))
            cluster = random_cluster(rng, 3)
            made = plan(model, cluster, 3, "exact")
            assert check(made).ok
            assert all(s.num_replicas <= model.microbatch_size for s in made.stages)
            best = plan(model, cluster, 3)
            assert made.iteration_ms <= best.iteration_ms * (1 + 1e-9)
            assert best.bound.lower_bound_ms <= made.iteration_ms * (1 + 1e-9)

    def test_threads_change_nothing(self):
        for seed in range(4):
            cluster = zoo.cluster("random-8", seed=seed)
            one, two, again = (
                plan(zoo.model("resnet152"), cluster, 8, num_threads=threads)
                for threads in (1, 2, 3)
            )
            assert one == two == again

    def test_more_effort_is_never_slower_and_is_recorded(self):
        for seed in range(4):
            rng = random.Random(seed)
            model, cluster = random_model(rng, 20), random_cluster(rng, rng.choice([8, 10, 13]))
            efforts = (0.01, 0.2, 0.5, 1, 1.5, 3)
            plans = [plan(model, cluster, 4, effort=effort) for effort in efforts]
            times_ms = [made.iteration_ms for made in plans]
            assert times_ms == sorted(times_ms, reverse=True)
            assert [made.options["effort"] for made in plans] == list(efforts)

    def test_more_effort_is_never_slower_on_64_devices(self):
        rng = random.Random(5)
        for cluster in (random_cluster(rng, 64), zoo.cluster("8x8-100g")):
            model = random_model(rng, 16)
            times_ms = [
                plan(model, cluster, 8, effort=effort, ignore_memory=True).iteration_ms
                for effort in (0.05, 0.3, 0.8)
            ]
            assert times_ms == sorted(times_ms, reverse=True)

    def test_a_time_limit_stops_the_search(self):
        """Effort 1,000 would take minutes; what came before the limit is a valid plan."""
        began_s = time.monotonic()
        made = plan(
            zoo.model("gpt2-xl"), zoo.cluster("8x8-100g"), 16, time_limit_s=0.3, effort=1000
        )
        assert time.monotonic() - began_s < 5
        assert check(made).ok
        assert made.options["time_limit_s"] == 0.3

    def test_a_time_limit_holds_inside_each_kernel(self):
        """A deadline that has passed ends every kernel at once, and never gives a bound."""
        cost = CostModel(zoo.model("gpt2-xl"), zoo.cluster("8x8-100g"))
        instance, sizes = cost.kernel_instance(16), np.arange(1, 65, dtype=np.int32)
        for kernel in (
            lambda: _core.plan_on_order(instance, sizes, 8, np.inf, 5, 2, 0.0),
            lambda: _core.relaxed_bound(instance, sizes, 8, np.inf, 2, 0.0),
            lambda: _core.partition(instance, 40, np.inf, 2, 0.0),
            lambda: _core.min_cut(np.ones((300, 300)), 0.0),
            lambda: _core.least_sum(np.ones((1, 9, 9)), np.ones(1, np.int32), 4, np.inf, 0.0),
            lambda: _core.place_groups(np.ones((9, 9)), np.ones(9), [[0, 1]], 1, 1, 1, 2, 0.0),
        ):
            with pytest.raises(_core.DeadlineError):
                kernel()

    def test_the_seed_decides_the_search(self):
        """Same seed, same plan; and of several seeds with little search not all find the same."""
        rng = random.Random(6)
        model, cluster = random_model(rng, 30), random_cluster(rng, 12)
        plans = [plan(model, cluster, 4, seed=seed, effort=0.3) for seed in (0, 1, 2, 2**64 - 1)]
        assert plans[-1] == plan(model, cluster, 4, seed=2**64 - 1, effort=0.3)
        assert len({made.stages for made in plans}) > 1
        with pytest.raises(InputError, match=r"seed: .*2\*\*64"):
            plan(model, cluster, 4, seed=2**64)
        with pytest.raises(InputError, match=r"seed: .*2\*\*64"):
            plan(model, cluster, 4, seed=-1)

    def test_bad_arguments(self):
        model, cluster = even_model(1, 1, 1), zoo.cluster("1x8-pcie")
        with pytest.raises(InputError, match="effort"):
            plan(model, cluster, effort=0)
        with pytest.raises(InputError, match="time_limit_s"):
            plan(model, cluster, time_limit_s=-1)

    def test_interruption_keeps_the_best_plan(self, monkeypatch):
        def interrupt(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(_core, "local_search", interrupt)
        with pytest.raises(PlanningInterrupted) as stop:
            plan(zoo.model("vgg19"), zoo.cluster("random-8"), 16)
        assert check(stop.value.plan).ok
        assert stop.value.plan.options["interrupted"] is True

    def test_kernel_rules_are_the_portfolio(self):
        """The search numbers its rules as PORTFOLIO lists them."""
        rng = random.Random(5)
        cost = CostModel(random_model(rng, 8), random_cluster(rng, 6))
        instance = cost.kernel_instance(6)
        _, plans = _core.plan_on_order(instance, np.arange(1, 7, dtype=np.int32), 4, np.inf, 5, 1)
        for ms, rule, placed in _core.local_search(instance, plans, 1, 1e6, 0.0, 1):
            costs = cost.pipeline_costs(placed_stages(placed))
            run = SCHEDULES[PORTFOLIO[rule]](costs, 6)
            assert run.iteration_ms == pytest.approx(ms, rel=1e-9)
            times = _core.rule_times(instance, placed, np.inf)
            for name, time_ms in zip(PORTFOLIO, times, strict=True):
                assert SCHEDULES[name](costs, 6).iteration_ms == pytest.approx(time_ms, rel=1e-9)
            assert min(times) == pytest.approx(ms, rel=1e-12)
            assert _core.rule_times(instance, placed, 0.0)[1:] == [np.inf] * (len(PORTFOLIO) - 1)


class TestExact:
    def tiny(self, seed: int):
        rng = random.Random(seed)
        model = random_model(rng, rng.randint(5, 7))
        return model, random_cluster(rng, 4), rng.randint(2, 5)

    def test_optimal_schedules_lie_between_bound_and_portfolio(self):
        pytest.importorskip("ortools")
        for seed in range(25):
            rng = random.Random(seed)
            costs, M = random_costs(rng), rng.randint(1, 4)
            found = optimal_schedule(costs, M)
            portfolio = min(SCHEDULES[rule](costs, M).iteration_ms for rule in PORTFOLIO)
            assert found.iteration_ms <= SCHEDULES["pe"](costs, M).iteration_ms + 1e-9
            assert plan_bound_ms(costs, M) <= found.iteration_ms + 1e-9
            if not costs.half_duplex:
                assert found.lower_bound_ms <= portfolio + 1e-9

    @pytest.mark.parametrize(
        "seeds", [range(6), pytest.param(range(6, 60), marks=pytest.mark.full)]
    )
    def test_the_bound_never_exceeds_the_joint_optimum(self, seeds):
        pytest.importorskip("ortools")
        losses = []
        for seed in seeds:
            model, cluster, M = self.tiny(seed)
            exact, best = plan(model, cluster, M, "exact"), plan(model, cluster, M)
            assert check(exact).errors == ()
            assert best.bound.lower_bound_ms <= exact.iteration_ms * (1 + 1e-6)
            assert exact.iteration_ms <= best.iteration_ms * (1 + 1e-9)
            losses.append(best.iteration_ms / exact.iteration_ms - 1)
        assert max(losses) <= 0.05
        assert np.mean(losses) <= 0.003

    def test_placements_are_all_there(self):
        """Two devices, three layers: 2 + 1 on one stage (each alone, both), 2 * 2 on two."""
        cost = CostModel(even_model(3, 1, 1), zoo.cluster("1x8-pcie"))
        small = CostModel(
            even_model(3, 1, 1),
            Cluster(
                name="two",
                devices=cost.cluster.devices[:2],
                bandwidth_gb_per_s=((1.0, 1.0), (1.0, 1.0)),
            ),
        )
        cuts = len(list(compositions(3, 2)))
        assert len(list(all_placements(small))) == 3 + 2 * cuts


def test_relaxed_bound_is_below_the_plan():
    for cluster in ("4x2-25g", "2x8-100g", "mixed-hosts"):
        cost = CostModel(zoo.model("bert-large"), zoo.cluster(cluster))
        made = plan(zoo.model("bert-large"), zoo.cluster(cluster), 8)
        assert relaxed_bound_ms(
            cost.kernel_instance(8), buckets_of(cost), np.inf, 2
        ) <= made.iteration_ms * (1 + 1e-9)


def test_a_proof_by_small_sets_ends_after_the_highest_limit():
    """It went on for ever: a proof ends a few instants below its limit, never at it."""
    cluster = expand_hosts(
        "4x4",
        (HostGroup(count=4, devices=4, bandwidth_gb_per_s=12),),
        between_hosts_gb_per_s=3.125,
    )
    made = plan(zoo.model("vgg19"), cluster, 16, divisible=True, time_limit_s=60)
    assert made.bound.gap(made.iteration_ms) < 1e-6
