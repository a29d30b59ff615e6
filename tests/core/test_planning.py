"""The planning kernels against all plans tried one by one, and against the cost model."""

import itertools
import random
import time
from dataclasses import replace

import numpy as np
import pytest

from instances import random_cluster, random_model, random_stages
from oracles import compositions, make_stages
from pipeplan import _core
from pipeplan.cluster import Cluster, Device, Duplex
from pipeplan.cost import CostModel
from pipeplan.errors import PlanFileError
from pipeplan.planning.planner.every_placement import all_placements
from pipeplan.planning.planner.placement import placed_plan, placed_stages
from pipeplan.planning.planner.plan_bound import plan_bound_ms
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.schedules import PORTFOLIO, SCHEDULES

MERGE_SEEDS = (35, 75, 271, 282, 1036, 1763, 3031)
DOMINANCE_SEEDS = (130, 818, 1018, 2354, 3838, 4102)

DIVISIBLE = 5040
"""Samples that every number of devices divides here, so that bounds are those of even shares."""


def sizes_upto(num_devices: int) -> np.ndarray:
    return np.arange(1, num_devices + 1, dtype=np.int32)


def random_cost(rng: random.Random, num_layers: int, num_devices: int, *, gaps: bool) -> CostModel:
    """Asymmetric links and latencies; in a third of the cases a limit on replicas."""
    return CostModel(
        replace(random_model(rng, num_layers), microbatch_size=DIVISIBLE),
        random_cluster(rng, num_devices, gaps=gaps),
        max_replicas=rng.choice([None, None, rng.randint(1, num_devices)]),
    )


def hard_cost(rng: random.Random, num_layers: int, num_devices: int) -> CostModel:
    """Few replicas, blocks of no length, long latencies: plans compete in every component."""

    def one_of(*choices: float) -> float:
        return float(rng.choice(choices))

    def matrix(*choices: float) -> tuple[tuple[float, ...], ...]:
        rows = range(num_devices)
        return tuple(tuple(one_of(*choices) for _ in rows) for _ in rows)

    layers = tuple(
        LayerProfile(
            name=str(index),
            forward_ms=one_of(0, 0, 1, 3, 10),
            backward_ms=one_of(0, 1, 3, 10),
            output_bytes=one_of(0, 1e6, 5e6),
            gradient_bytes=one_of(0, 1e6, 5e6),
            parameter_bytes=one_of(0, 0, 1e6, 1e7),
        )
        for index in range(num_layers)
    )
    devices = tuple(
        Device(name=f"d{index}", speed=one_of(0.5, 1, 1, 2)) for index in range(num_devices)
    )
    cluster = Cluster(
        name="hard",
        devices=devices,
        bandwidth_gb_per_s=matrix(1, 2, 5),
        latency_us=matrix(0, 500, 2000),
        duplex=rng.choice(list(Duplex)),
    )
    model = ModelProfile(name="hard", microbatch_size=DIVISIBLE, layers=layers)
    return CostModel(model, cluster, max_replicas=rng.choice([1, 1, 2, 3]))


def bound_of(cost: CostModel, stages, num_microbatches: int) -> float:
    """The fixed-plan bound of stages; infinite where a path is missing, or there are too many."""
    if max(stage.num_replicas for stage in stages) > cost.max_replicas:
        return float("inf")
    try:
        return plan_bound_ms(cost.pipeline_costs(stages), num_microbatches)
    except PlanFileError:
        return float("inf")


def plans_on_order(num_layers: int, num_devices: int):
    """All stages on neighbouring devices 0, 1, ...; some at both ends may stay unused."""
    for num_stages in range(1, min(num_layers, num_devices) + 1):
        for layer_counts in compositions(num_layers, num_stages):
            for used in range(num_stages, num_devices + 1):
                for first in range(num_devices - used + 1):
                    order = range(first, num_devices)
                    for replica_counts in compositions(used, num_stages):
                        yield make_stages(order, layer_counts, replica_counts)


class TestOnAnOrder:
    def test_equals_all_plans_on_the_order(self):
        """Fronts that drop points may lose a little, but hardly ever do; they never invent."""
        same = 0
        for seed in range(60):
            rng = random.Random(seed)
            L, V, M = rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 6)
            cost = random_cost(rng, L, V, gaps=seed % 2 == 0)
            least = min(bound_of(cost, stages, M) for stages in plans_on_order(L, V))
            found, plans = _core.plan_on_order(
                cost.kernel_instance(M), sizes_upto(V), 16, np.inf, 5, 1
            )
            assert found >= least * (1 - 1e-12)
            same += found == pytest.approx(least, rel=1e-9)
            bounds = [bound_of(cost, placed_stages(placed), M) for placed in plans]
            assert bounds[0] == pytest.approx(found, rel=1e-9)
            assert bounds == pytest.approx(sorted(bounds), rel=1e-9)
            assert np.isfinite(bounds).all()
        assert same >= 57

    def test_a_limit_changes_nothing_below_it(self):
        for seed in range(60):
            rng = random.Random(seed)
            L, V, M = rng.randint(2, 6), rng.randint(2, 5), rng.randint(1, 6)
            instance = random_cost(rng, L, V, gaps=False).kernel_instance(M)
            least, plans = _core.plan_on_order(instance, sizes_upto(V), 16, np.inf, 1, 1)
            limited, same = _core.plan_on_order(instance, sizes_upto(V), 16, least * 1.001, 1, 1)
            assert limited == pytest.approx(least, rel=1e-12)
            assert [placed_stages(p) for p in same] == [placed_stages(p) for p in plans]

    def test_nothing_below_a_limit_means_the_limit(self):
        for seed in range(20):
            rng = random.Random(seed)
            instance = random_cost(rng, 4, 3, gaps=False).kernel_instance(4)
            least, _ = _core.plan_on_order(instance, sizes_upto(3), 16, np.inf, 1, 1)
            limit_ms = least / 2
            found, plans = _core.plan_on_order(instance, sizes_upto(3), 16, limit_ms, 1, 1)
            assert (found, plans) == (limit_ms, [])
            assert _core.plan_on_sets(instance, [0, 1, 2], 16, limit_ms, 1, 1)[0] <= limit_ms
            assert _core.relaxed_bound(instance, sizes_upto(3), 16, limit_ms, 1) <= limit_ms


class TestOnSets:
    def test_equals_all_plans_with_limits_on_replicas_and_gaps(self):
        for seed in range(40):
            rng = random.Random(seed)
            L, V, M = rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 6)
            cost = random_cost(rng, L, V, gaps=seed % 2 == 0)
            instance = cost.kernel_instance(M)
            least = min(bound_of(cost, stages, M) for stages in all_placements(cost))
            found, plans = _core.plan_on_sets(instance, list(range(V)), 16, np.inf, 3, 1)
            assert found == pytest.approx(least, rel=1e-9)
            bounds = [bound_of(cost, placed_stages(placed), M) for placed in plans]
            assert bounds[0] == pytest.approx(found, rel=1e-9)
            assert np.isfinite(bounds).all()
            for limit_ms in (np.inf, least * 1.001):
                bound = _core.relaxed_bound(instance, sizes_upto(V), 16, limit_ms, 1)
                assert bound <= least * (1 + 1e-9)

    def test_a_limit_just_above_the_best_plan_drops_none_that_is_better(self):
        """Long all-reduces in the middle overlap what is in front of them."""
        for seed in range(60):
            rng = random.Random(seed)
            V, M = 4, rng.randint(1, 6)
            cost = hard_cost(rng, rng.randint(3, 6), V)
            instance = cost.kernel_instance(M)
            least, _ = _core.plan_on_sets(instance, list(range(V)), 16, np.inf, 0, 1)
            limited, _ = _core.plan_on_sets(instance, list(range(V)), 16, least * (1 + 1e-6), 0, 1)
            assert limited == pytest.approx(least, rel=1e-9), seed

    def test_merged_fronts_and_groups_stay_below_every_plan(self):
        """Narrow fronts are merged all the time here; what comes out must hold for each plan."""
        for seed in range(30):
            rng = random.Random(seed)
            L, V, M = 7, 4, rng.randint(2, 6)
            cost = random_cost(rng, L, V, gaps=seed % 3 == 0)
            instance = cost.kernel_instance(M)
            exact, _ = _core.plan_on_sets(instance, list(range(V)), 16, np.inf, 0, 1)
            for capacity in (1, 2, 3, 5):
                narrow, _ = _core.plan_on_sets(instance, list(range(V)), capacity, np.inf, 0, 1)
                assert narrow <= exact * (1 + 1e-9)
                for buckets in ([4], [1, 4], [2, 4], [3, 4], [1, 2, 4]):
                    largest = np.array(buckets, dtype=np.int32)
                    bound = _core.relaxed_bound(instance, largest, capacity, exact * 1.001, 1)
                    assert bound <= exact * (1 + 1e-9)

    @pytest.mark.parametrize("seed", MERGE_SEEDS)
    def test_merged_suffixes_are_the_least_in_every_component(self, seed):
        """Each seed is one where a merge that forgot one component gave too high a bound."""
        rng = random.Random(seed)
        L, V, M = rng.randint(3, 8), rng.randint(3, 4), rng.randint(1, 8)
        cost = hard_cost(rng, L, V)
        instance = cost.kernel_instance(M)
        least = float("inf")  # of plans that exist: the best on every order of the devices
        for order in itertools.permutations(range(V)):
            _, plans = _core.plan_on_order(
                instance.on_devices(order), sizes_upto(V), 16, np.inf, 3, 1
            )
            for placed in plans:
                least = min(least, bound_of(cost, placed_stages(placed, order=order), M))
        for capacity in (1, 2, 3, 16):
            bound, _ = _core.plan_on_sets(instance, list(range(V)), capacity, np.inf, 0, 1)
            assert bound <= least * (1 + 1e-9)

    @pytest.mark.parametrize("seed", DOMINANCE_SEEDS)
    def test_suffixes_are_compared_in_every_component(self, seed):
        """Each seed is one where a comparison that forgot one component lost the best plan."""
        rng = random.Random(seed)
        L, V, M = rng.randint(3, 6), 3, rng.randint(1, 8)
        cost = hard_cost(rng, L, V)
        least = min(bound_of(cost, stages, M) for stages in all_placements(cost))
        found, _ = _core.plan_on_sets(cost.kernel_instance(M), [0, 1, 2], 16, np.inf, 0, 1)
        assert found == pytest.approx(least, rel=1e-9)

    def test_exchangeable_devices_count_as_one_kind(self):
        """Two hosts of equal devices: with classes the same value as device by device."""
        for seed in range(20):
            rng = random.Random(seed)
            first, second = rng.choice([(2, 2), (3, 1), (1, 3), (3, 2)])
            V, M = first + second, rng.randint(1, 5)
            host_of = [0] * first + [1] * second
            rates = [[rng.uniform(0.5, 4) for _ in range(2)] for _ in range(2)]
            latencies = [[rng.uniform(0, 0.5) for _ in range(2)] for _ in range(2)]
            speeds = [rng.uniform(0.5, 2), rng.uniform(0.5, 2)]
            rng.shuffle(host_of)
            hosts = np.ix_(host_of, host_of)
            model = random_model(rng, 4)
            cost = CostModel(model, random_cluster(rng, V))
            instance = _core.Instance(
                forward_ms=cost.forward_ms_L,
                backward_ms=cost.backward_ms_L,
                output_bytes=cost.output_bytes_L,
                gradient_bytes=cost.gradient_bytes_L,
                parameter_bytes=cost.parameter_bytes_L,
                speed=np.array(speeds)[host_of],
                bytes_per_ms=1e6 * np.array(rates)[hosts],
                latency_ms=np.array(latencies)[hosts],
                half_duplex=seed % 2 == 0,
                num_microbatches=M,
                microbatch_size=DIVISIBLE,
                max_replicas=rng.choice([V, 2]),
            )
            classes = _core.device_classes(instance)
            assert [classes[u] == classes[0] for u in range(V)] == [
                host_of[u] == host_of[0] for u in range(V)
            ]
            by_class, plans = _core.plan_on_sets(instance, classes, 16, np.inf, 3, 1)
            one_by_one, _ = _core.plan_on_sets(instance, list(range(V)), 16, np.inf, 0, 1)
            limited, _ = _core.plan_on_sets(instance, classes, 16, one_by_one * 1.001, 0, 1)
            assert by_class == pytest.approx(one_by_one, rel=1e-9)
            assert limited == pytest.approx(one_by_one, rel=1e-9)
            for placed in plans:
                assert min(_core.rule_times(instance, placed, np.inf)) >= by_class * (1 - 1e-9)

    def test_threads_change_nothing(self):
        def on_sets(num_threads):
            return _core.plan_on_sets(few, list(range(6)), 4, np.inf, 9, num_threads)

        def on_order(num_threads):
            return _core.plan_on_order(many, sizes_upto(24), 4, np.inf, 9, num_threads)

        for seed in range(3):
            rng = random.Random(seed)
            few = random_cost(rng, 20, 6, gaps=False).kernel_instance(4)
            many = random_cost(rng, 20, 24, gaps=False).kernel_instance(4)
            for kernel in (on_sets, on_order):
                (one, plans), (same, others) = kernel(1), kernel(3)
                assert one == same
                assert [placed_stages(p) for p in plans] == [placed_stages(p) for p in others]

    def test_too_many_sets_are_refused(self):
        rng = random.Random(0)
        instance = random_cost(rng, 1, 12, gaps=False).kernel_instance(1)
        with pytest.raises(ValueError, match="too many different sets"):
            _core.plan_on_sets(instance, list(range(12)), 1, np.inf, 0, 1)


class TestClasses:
    """Two devices that differ in one respect only are not of one class."""

    def classes(self, **changes) -> list[int]:
        arrays = {
            "speed": np.ones(3),
            "bytes_per_ms": np.ones((3, 3)),
            "latency_ms": np.ones((3, 3)),
        }
        for name, (place, value) in changes.items():
            arrays[name][place] = value
        layer = np.ones(1)
        return _core.device_classes(
            _core.Instance(
                forward_ms=layer,
                backward_ms=layer,
                output_bytes=layer,
                gradient_bytes=layer,
                parameter_bytes=layer,
                **arrays,
                half_duplex=False,
                num_microbatches=1,
                microbatch_size=DIVISIBLE,
                max_replicas=3,
            )
        )

    def test_equal_devices_are_of_one_class(self):
        assert self.classes() == [0, 0, 0]
        assert self.classes(bytes_per_ms=((1, 1), 7.0)) == [0, 0, 0]  # no link to oneself
        assert self.classes(speed=(2, 7.0)) == [0, 0, 1]

    @pytest.mark.parametrize("name", ["bytes_per_ms", "latency_ms"])
    def test_one_link_in_one_direction_makes_a_difference(self, name):
        # A link from 0 to 1 is unlike that from 1 to 0, and unlike those that 2 has.
        assert self.classes(**{name: ((0, 1), 7.0)}) == [0, 1, 2]
        assert self.classes(**{name: ((0, 2), 7.0)}) == [0, 1, 2]
        assert self.classes(**{name: ((2, 0), 7.0)}) == [0, 1, 2]


def test_rule_times_follow_the_cost_model():
    """Any sets, gaps, latencies in both directions, limits on replicas: the same as `cost` says."""
    refused = 0
    for seed in range(150):
        rng = random.Random(seed)
        L, V, M = rng.randint(1, 6), rng.randint(1, 6), rng.randint(1, 6)
        cost = random_cost(rng, L, V, gaps=seed % 2 == 0)
        instance, stages = cost.kernel_instance(M), random_stages(rng, L, V)
        times = _core.rule_times(instance, placed_plan(instance, stages), np.inf)
        if np.isinf(bound_of(cost, stages, M)):
            refused += 1
            assert times == []
            continue
        costs = cost.pipeline_costs(stages)
        expected = [SCHEDULES[rule](costs, M).iteration_ms for rule in PORTFOLIO]
        assert times == pytest.approx(expected, rel=1e-9)
        # Exactly as long as it may take is not too long; a little less is.
        assert _core.rule_times(instance, placed_plan(instance, stages), times[0]) == times
        shorter = times[0] * (1 - 1e-9) - 1e-300
        rest = _core.rule_times(instance, placed_plan(instance, stages), shorter)[1:]
        assert rest == [np.inf] * (len(PORTFOLIO) - 1)
    assert refused > 20


class TestLocalSearch:
    def start(self, rng: random.Random, cost: CostModel, instance: _core.Instance):
        while True:
            stages = random_stages(rng, len(cost.forward_ms_L), len(cost.speed_D))
            if np.isfinite(bound_of(cost, stages, 1)):
                return placed_plan(instance, stages)

    def test_what_it_finds_is_true_and_never_worse_than_its_start(self):
        """Costs that a move forgets to renew would give times that no plan has."""
        better = 0
        for seed in range(40):
            rng = random.Random(seed)
            L, V, M = rng.randint(2, 9), rng.randint(2, 7), rng.randint(1, 6)
            cost = random_cost(rng, L, V, gaps=seed % 4 == 0)
            instance = cost.kernel_instance(M)
            starts = [self.start(rng, cost, instance) for _ in range(3)]
            found = _core.local_search(instance, starts, seed, 1e6, 0.0, 1)
            for start, (ms, rule, placed) in zip(starts, found, strict=True):
                times = _core.rule_times(instance, placed, np.inf)
                assert times[rule] == pytest.approx(ms, rel=1e-12)
                started_ms = min(_core.rule_times(instance, start, np.inf))
                assert ms <= started_ms
                better += ms < started_ms * 0.999
        assert better > 60

    def test_links_that_it_keeps_are_right(self):
        """With one latency it keeps the slowest links of sets; wrong ones give other times."""
        for seed in range(20):
            rng = np.random.default_rng(seed)
            rates = 10 ** rng.uniform(0, 2, (20, 20))
            layers = [tuple(rng.uniform(1, 9, 5)) for _ in range(12)]
            instance = one_instance(layers=layers, rates=rates)
            start = _core.PlacedPlan(instance, [4, 8, 12], [range(6), range(6, 12), range(12, 18)])
            ((ms, rule, placed),) = _core.local_search(instance, [start], seed, 2e6, 0.0, 1)
            times = _core.rule_times(instance, placed, np.inf)
            assert times[rule] == pytest.approx(ms, rel=1e-12)
            assert ms < 0.9 * min(_core.rule_times(instance, start, np.inf))

    def test_devices_that_are_alike_move_together(self):
        """Hosts of six devices that are far apart: whole hosts have to change their places."""
        for seed in range(10):
            rng = np.random.default_rng(seed)
            host = np.arange(24) // 6
            between = rng.uniform(0.05, 1, (4, 4))
            rates = np.where(host[:, None] == host, 1000.0, between[host][:, host])
            instance = one_instance(layers=[(9, 9, 90, 90, 9)] * 12, rates=rates)
            sets = [host_of.tolist() for host_of in np.arange(24).reshape(4, 6)]
            plans = (
                _core.PlacedPlan(instance, [3, 6, 9, 12], order)
                for order in itertools.permutations(sets)
            )
            best_ms = min(min(_core.rule_times(instance, plan, np.inf)) for plan in plans)
            start = _core.PlacedPlan(instance, [3, 6, 9, 12], sets)
            ((ms, rule, placed),) = _core.local_search(instance, [start], seed, 6e5, 0.0, 1)
            assert _core.rule_times(instance, placed, np.inf)[rule] == pytest.approx(ms, rel=1e-12)
            used = [device for devices in placed.devices for device in devices]
            assert len(used) == len(set(used))
            assert ms <= best_ms * (1 + 1e-9)

    def test_a_stage_that_is_split_costs_less(self):
        """All-reduces take 1,000 ms: two stages of one device each are the way out."""
        instance = one_instance(layers=[(10, 10, 0, 0, 500)] * 2, rates=np.ones((2, 2)))
        start = _core.PlacedPlan(instance, [2], [[0, 1]])
        ((ms, _, placed),) = _core.local_search(instance, [start], 0, 1e6, 0.0, 1)
        assert (ms, placed.end_layer) == (10 + 4 * 20 + 10, [1, 2])

    def test_through_plans_that_do_not_fit_to_plans_that_do(self):
        """Only all small devices together have room for the second layer; one of them has none."""
        MB, small = 1e6, 6
        limits = _core.PlanLimits(
            memory_bytes=[100 * MB] + [4 * MB] * small, state_bytes_per_parameter_byte=1.0
        )
        rates = np.random.default_rng(0).uniform(1e9, 2e9, (small + 1, small + 1))
        instance = one_instance(
            layers=[(1, 1, MB, MB, 50 * MB), (6, 12, MB, MB, 0)],
            rates=rates,
            activation_bytes=[MB, small * 3.9 * MB],
            limits=limits,
        )
        start = _core.PlacedPlan(instance, [2], [[0]])
        started_ms = min(_core.rule_times(instance, start, np.inf))
        found = []
        for seed in range(8):
            refused = _core.local_search(instance, [start], seed, 1e6, 0.0, 1)
            assert refused[0][0] == started_ms
            ((ms, rule, placed),) = _core.local_search(
                instance, [start], seed, 1e6, 0.0, 1, known_ms=started_ms, hottest=0.4,
                overflow_price=1.0,
            )  # fmt: skip
            assert ms <= started_ms
            assert _core.caps(instance, placed)
            assert _core.rule_times(instance, placed, np.inf)[rule] == pytest.approx(ms, rel=1e-12)
            found.append(ms)
        assert sum(ms < 0.5 * started_ms for ms in found) >= 6

    def test_it_stops_at_its_target(self):
        """A start that is good enough is returned as it came, whatever the budget."""
        rng = random.Random(3)
        cost = random_cost(rng, 9, 7, gaps=False)
        instance = cost.kernel_instance(4)
        start = self.start(rng, cost, instance)
        target_ms = min(_core.rule_times(instance, start, np.inf))
        began_s = time.monotonic()
        ((ms, _, placed),) = _core.local_search(instance, [start], 1, 1e12, target_ms, 1)
        assert time.monotonic() - began_s < 5
        assert (ms, placed.end_layer) == (target_ms, start.end_layer)

    def test_it_stops_at_its_deadline_with_what_it_has(self):
        rng = random.Random(3)
        cost = random_cost(rng, 9, 7, gaps=False)
        instance = cost.kernel_instance(4)
        start = self.start(rng, cost, instance)
        began_s = time.monotonic()
        for num_threads in (1, 2):
            found = _core.local_search(
                instance, [start] * 2, 1, 1e15, 0.0, num_threads, began_s + 0.05
            )
            for ms, _, _ in found:
                assert ms <= min(_core.rule_times(instance, start, np.inf))
        assert time.monotonic() - began_s < 5


def test_partitions_of_many_devices_use_all_of_them():
    """From 32 devices on, threads share the work; each must do its part."""
    V, M = 33, 3
    instance = _core.Instance(
        forward_ms=np.ones(V),
        backward_ms=np.ones(V),
        output_bytes=np.zeros(V),
        gradient_bytes=np.zeros(V),
        parameter_bytes=np.zeros(V),
        speed=np.ones(V),
        bytes_per_ms=np.ones((V, V)),
        latency_ms=np.zeros((V, V)),
        half_duplex=False,
        num_microbatches=M,
        microbatch_size=DIVISIBLE,
        max_replicas=1,
    )
    for num_threads in (1, 2):
        found = _core.partition(instance, V, np.inf, num_threads)
        assert [ms for ms, _ in found] == [2.0 * M * -(-V // x) for x in range(1, V + 1)]
        assert found[-1][1].devices == [[u] for u in range(V)]


def test_least_sums_equal_all_ways_to_cut():
    for seed in range(60):
        rng = random.Random(seed)
        L, D = rng.randint(1, 5), rng.randint(1, 6)
        sizes = sorted(rng.sample(range(1, 5), rng.randint(1, 3)))
        shape = (len(sizes), L + 1, L + 1)
        times = np.array([float(rng.randint(0, 9)) for _ in range(np.prod(shape))]).reshape(shape)
        limit_ms = float(rng.choice([9, 6, 3]))
        least = float("inf")
        for num_stages in range(1, L + 1):
            for counts in compositions(L, num_stages):
                ends = list(itertools.accumulate(counts))
                for chosen in itertools.product(range(len(sizes)), repeat=num_stages):
                    stages = zip(chosen, [0, *ends], ends, strict=False)
                    stage_ms = [times[k][first][end] for k, first, end in stages]
                    if max(stage_ms) <= limit_ms and sum(sizes[k] for k in chosen) == D:
                        least = min(least, sum(stage_ms))
        found, ends, used = _core.least_sum(times, np.array(sizes, np.int32), D, limit_ms)
        assert found == least
        if np.isfinite(least):
            stages = zip(used, [0, *ends], ends, strict=False)
            stage_ms = [times[sizes.index(size)][first][end] for size, first, end in stages]
            assert sum(used) == D
            assert sum(stage_ms) == least
            assert max(stage_ms) <= limit_ms


def one_instance(*, layers, rates, latencies=0.0, speed=None, half=False, M=4, most=None, **more):
    """Layers of (forward, backward, output, gradient, parameters) on devices with such links."""
    costs = np.array(layers, dtype=float).T.copy()
    V = len(rates)
    return _core.Instance(
        forward_ms=costs[0],
        backward_ms=costs[1],
        output_bytes=costs[2],
        gradient_bytes=costs[3],
        parameter_bytes=costs[4],
        speed=np.ones(V) if speed is None else np.array(speed, dtype=float),
        bytes_per_ms=np.array(rates, dtype=float),
        latency_ms=np.zeros((V, V)) + latencies,
        half_duplex=half,
        num_microbatches=M,
        microbatch_size=DIVISIBLE,
        max_replicas=V if most is None else most,
        **more,
    )


class TestByHand:
    def test_both_directions_of_a_full_duplex_channel_may_be_busy_at_once(self):
        """Two stages of 20 ms, 15 ms in each direction: both directions together are no limit."""
        instance = one_instance(
            layers=[(10, 10, 15, 15, 0)] * 2, rates=np.ones((2, 2)), M=8, most=1
        )
        # First forward, there, the second stage's 8 rounds, back, first backward: or a round trip
        # and 8 blocks. One stage alone would take 8 * 40.
        least = 10 + 15 + 8 * 20 + 15 + 10
        for limit_ms in (np.inf, least * 1.05):
            for found in (
                _core.plan_on_order(instance, sizes_upto(2), 16, limit_ms, 1, 1)[0],
                _core.plan_on_sets(instance, [0, 0], 16, limit_ms, 1, 1)[0],
                _core.relaxed_bound(instance, sizes_upto(2), 16, limit_ms, 1),
            ):
                assert found == pytest.approx(least, rel=1e-12)

    @pytest.mark.parametrize("latencies", [[[0, 1], [9, 0]], [[0, 9], [1, 0]]])
    def test_the_relaxed_bound_takes_the_least_latency(self, latencies):
        instance = one_instance(
            layers=[(10, 10, 0, 0, 0)] * 2, rates=np.ones((2, 2)), latencies=latencies, most=1
        )
        bound = _core.relaxed_bound(instance, sizes_upto(2), 16, np.inf, 1)
        assert bound == pytest.approx(10 + 1 + 4 * 20 + 1 + 10)

    def test_the_relaxed_bound_takes_the_fastest_devices_of_a_group(self):
        instance = one_instance(
            layers=[(10, 10, 0, 0, 1e9)], rates=np.ones((2, 2)), speed=[10.0, 1.0]
        )
        alone, _ = _core.plan_on_sets(instance, [0, 1], 16, np.inf, 1, 1)
        assert alone == pytest.approx(4 * 20 / 10)
        assert _core.relaxed_bound(instance, np.array([2], np.int32), 16, np.inf, 1) <= alone

    def test_the_relaxed_bound_shares_what_groups_send(self):
        """At most two replicas: two stages of two devices are a plan, and take 70 ms."""
        instance = one_instance(layers=[(10, 10, 40, 40, 0)] * 2, rates=np.ones((4, 4)), most=2)
        plan = _core.PlacedPlan(instance, [1, 2], [[0, 1], [2, 3]])
        exists_ms = 5 + 10 + 4 * 10 + 10 + 5
        assert min(_core.rule_times(instance, plan, np.inf)) == pytest.approx(exists_ms)
        for buckets in ([2, 4], [2, 3, 4], [1, 2, 4]):
            bound = _core.relaxed_bound(instance, np.array(buckets, np.int32), 16, np.inf, 1)
            assert bound <= exists_ms * (1 + 1e-9)

    def test_the_relaxed_bound_knows_stars(self):
        """One device has fast links to three, which have slow ones: just enough for two stages."""
        rates = np.full((4, 4), 0.01)
        rates[0, :] = rates[:, 0] = 100.0
        layers = [(10, 10, 100, 100, 1e9), (30, 30, 0, 0, 0)]
        plan_ms = 10 + 1 / 3 + 4 * 20 + 1 / 3 + 10
        instance = one_instance(layers=layers, rates=rates)
        plan = _core.PlacedPlan(instance, [1, 2], [[0], [1, 2, 3]])
        assert min(_core.rule_times(instance, plan, np.inf)) == pytest.approx(plan_ms)
        assert _core.relaxed_bound(instance, sizes_upto(4), 16, np.inf, 1) <= plan_ms * (1 + 1e-9)

    def test_the_relaxed_bound_knows_that_a_chain_is_no_star(self):
        """Fast links from one device to the next: none has three, so three cannot send to one."""
        rates = np.full((4, 4), 0.01)
        for u in range(3):
            rates[u, u + 1] = rates[u + 1, u] = 100.0
        layers = [(30, 30, 100, 100, 0), (10, 10, 0, 0, 1e9)]
        instance = one_instance(layers=layers, rates=rates)
        bound = _core.relaxed_bound(instance, sizes_upto(4), 16, np.inf, 1)
        assert bound >= 4 * 60 / 2  # the first layer on two devices

    def test_a_link_without_a_way_back_is_no_link(self):
        for rates in ([[0, 1], [0, 0]], [[0, 0], [1, 0]]):
            instance = one_instance(layers=[(10, 10, 0, 0, 0)] * 2, rates=rates)
            single = 4 * 40
            for found in (
                _core.plan_on_order(instance, sizes_upto(2), 16, np.inf, 1, 1)[0],
                _core.plan_on_sets(instance, [0, 1], 16, np.inf, 1, 1)[0],
                _core.relaxed_bound(instance, sizes_upto(2), 16, np.inf, 1),
                _core.partition(instance, 1, np.inf, 1)[0][0],
            ):
                assert found == pytest.approx(single)
            assert len(_core.partition(instance, 2, np.inf, 1)) == 1
            for _, plans in (
                _core.plan_on_order(instance, sizes_upto(2), 16, np.inf, 9, 1),
                _core.plan_on_sets(instance, [0, 1], 16, np.inf, 9, 1),
            ):
                assert all(len(placed.devices) == len(placed.devices[0]) == 1 for placed in plans)

    def test_few_sizes_see_every_link(self):
        """Sizes that are no neighbours add several devices at once; each of their links counts."""
        two_stages = 0
        for seed in range(80):
            rng = random.Random(seed)
            V, size = 6, rng.choice([2, 3])
            sends = [rng.uniform(1e6, 1e8) for _ in range(2)]
            layers = tuple(
                LayerProfile(
                    name=name,
                    forward_ms=40,
                    backward_ms=40,
                    output_bytes=sends[0],
                    gradient_bytes=sends[1],
                    parameter_bytes=0,
                )
                for name in "ab"
            )
            cluster = replace(random_cluster(rng, V), duplex=Duplex.FULL)
            if seed % 2:
                latencies = tuple(
                    tuple(rng.choice([0.0, rng.uniform(0, 9000)]) for _ in range(V))
                    for _ in range(V)
                )
                cluster = replace(cluster, latency_us=latencies)
            cost = CostModel(ModelProfile(name="m", microbatch_size=1, layers=layers), cluster)
            every = [make_stages(range(u, V), (2,), (size,)) for u in range(V - size + 1)]
            every += [
                make_stages(range(u, V), (1, 1), (size, size)) for u in range(V - 2 * size + 1)
            ]
            least = min(bound_of(cost, stages, 2) for stages in every)
            found, plans = _core.plan_on_order(
                cost.kernel_instance(2), np.array([size], dtype=np.int32), 16, np.inf, 1, 1
            )
            two_stages += len(plans[0].end_layer) == 2
            assert found == pytest.approx(least, rel=1e-9)
        assert two_stages > 15
