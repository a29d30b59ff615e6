"""RDO, PRM, PE and SPP against their oracles."""

import random
from dataclasses import replace
from itertools import pairwise, permutations

import networkx as nx
import numpy as np
import pytest

from instances import (
    even_model,
    flat_cluster,
    random_cluster,
    random_costs,
    random_model,
)
from oracles import bottleneck_ms, cut_weight, least_bottleneck_ms, least_cut_weight, pe_orders
from pipeplan import _core, schedules, zoo
from pipeplan.checker import check, replay
from pipeplan.cluster import Cluster, Device, Duplex
from pipeplan.cost import CostModel
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.pipeline import Schedule, Stage
from pipeplan.planning.door import plan
from pipeplan.planning.planner.device_order import connected_parts, recursive_device_order
from pipeplan.planning.planner.every_placement import all_placements
from pipeplan.planning.planner.partition import best_partitions
from pipeplan.schedules import PORTFOLIO, SCHEDULES, run_pe, schedule_guarantee_ms
from pipeplan.simulator import Preference, run_list


def random_weights(rng: random.Random, num_vertices: int) -> np.ndarray:
    weights = np.zeros((num_vertices, num_vertices))
    for u in range(num_vertices):
        for v in range(u):
            weights[u, v] = weights[v, u] = rng.choice([0.0, 1.0, 2.0, rng.uniform(0, 5)])
    return weights


class TestMinCut:
    def test_equals_all_cuts_tried(self):
        for seed in range(200):
            weights = random_weights(random.Random(seed), random.Random(seed).randint(2, 8))
            weight, side = _core.min_cut(weights)
            assert weight == pytest.approx(least_cut_weight(weights), abs=1e-9)
            assert cut_weight(weights, side) == pytest.approx(weight, abs=1e-9)
            assert 0 < side.sum() < len(weights)

    def test_equals_networkx(self):
        for seed in range(60):
            rng = random.Random(seed)
            weights = random_weights(rng, rng.randint(2, 40))
            graph = nx.from_numpy_array(weights)
            expected = nx.stoer_wagner(graph)[0] if nx.is_connected(graph) else 0.0
            assert _core.min_cut(weights)[0] == pytest.approx(expected, abs=1e-9)


class TestDeviceOrder:
    def test_devices_of_a_host_are_neighbours(self):
        cluster = zoo.cluster("8x8-100g")
        shuffled = list(range(64))
        random.Random(3).shuffle(shuffled)
        bandwidth = cluster.bandwidth_gb_per_s
        mixed = Cluster(
            name="shuffled",
            devices=tuple(cluster.devices[u] for u in shuffled),
            bandwidth_gb_per_s=tuple(tuple(bandwidth[u][v] for v in shuffled) for u in shuffled),
        )
        order = recursive_device_order(CostModel(even_model(1, 1, 1), mixed), range(64))
        hosts = [mixed.devices[device].host for device in order]
        changes = sum(a != b for a, b in pairwise(hosts))
        assert sorted(order) == list(range(64))
        assert changes == 7

    def test_parts_without_a_path_are_separate(self):
        bandwidth = ((0, 1, 0), (1, 0, 0), (0, 5, 0))  # one way only is no path
        cluster = Cluster(
            name="parts",
            devices=tuple(Device(name=str(i)) for i in range(3)),
            bandwidth_gb_per_s=bandwidth,
        )
        assert connected_parts(CostModel(even_model(1, 1, 1), cluster)) == [[0, 1], [2]]


class TestPartition:
    def test_equals_brute_force(self):
        compared = 0
        for seed in range(500):
            rng = random.Random(seed)
            model = random_model(rng, rng.randint(1, 5))
            cluster = random_cluster(rng, rng.randint(1, 5), gaps=seed % 3 == 0)
            cost = CostModel(model, cluster)
            order = tuple(rng.sample(range(cluster.num_devices), cluster.num_devices))
            microbatches = rng.randint(1, 6)
            found = {
                len(partition.stages): partition
                for partition in best_partitions(cost, order, microbatches)
            }
            for num_stages in range(1, min(model.num_layers, cluster.num_devices) + 1):
                expected = least_bottleneck_ms(cost, order, num_stages, microbatches)
                if np.isinf(expected):
                    assert num_stages not in found
                    continue
                partition = found[num_stages]
                assert partition.bottleneck_ms == pytest.approx(expected, abs=1e-9)
                assert bottleneck_ms(cost, partition.stages, microbatches) == pytest.approx(
                    expected, abs=1e-9
                )
                compared += 1
        assert compared > 1000

    def test_a_limit_leaves_out_only_what_is_above_it(self):
        for seed in range(100):
            rng = random.Random(seed)
            cost = CostModel(random_model(rng, 8), random_cluster(rng, 6))
            everything = best_partitions(cost, range(6), 4)
            limit_ms = rng.choice(everything).bottleneck_ms
            within = best_partitions(cost, range(6), 4, limit_ms=limit_ms)
            assert [p.bottleneck_ms for p in within] == [
                p.bottleneck_ms for p in everything if p.bottleneck_ms <= limit_ms
            ]


class TestExecutionOrder:
    def test_guarantee_holds(self):
        for seed in range(5000):
            rng = random.Random(seed)
            costs = random_costs(rng)
            microbatches = rng.randint(1, 12)
            run = run_pe(costs, microbatches)
            assert run.iteration_ms <= schedule_guarantee_ms(costs, microbatches) + 1e-9, seed

    def test_the_drawing_on_top_of_the_file(self):
        """Two stages, everything takes one unit."""
        units = even_model(2, 1, 1)
        stages = (Stage(layers=range(1), devices=(0,)), Stage(layers=range(1, 2), devices=(1,)))
        costs = CostModel(units, flat_cluster(2, latency_us=1000.0)).pipeline_costs(stages)
        run = run_pe(costs, 4)
        lines = []
        for codes, starts in zip(run.order_SM2, run.block_start_ms_SM2, strict=True):
            lane = ["."] * 12
            for code, start in zip(codes.tolist(), starts.tolist(), strict=True):
                lane[round(start)] = f"F{code}" if code >= 0 else f"B{-1 - code}"
            lines.append(lane)
        drawn = [line.split()[2:] for line in schedules.__doc__.splitlines() if "  stage" in line]
        assert lines == drawn

    def test_equals_its_oracle(self):
        for seed in range(600):
            rng = random.Random(seed)
            costs = random_costs(rng)
            microbatches = rng.randint(1, 6)
            assert run_pe(costs, microbatches).order_SM2.tolist() == pe_orders(costs, microbatches)


class TestSchedules:
    @pytest.mark.parametrize("rule", SCHEDULES)
    def test_every_rule_makes_a_complete_schedule_that_replays(self, rule):
        for seed in range(200):
            rng = random.Random(seed)
            costs = random_costs(rng)
            microbatches = rng.randint(1, 8)
            run = SCHEDULES[rule](costs, microbatches)
            schedule = Schedule.from_codes(run.order_SM2.tolist())
            assert all(len(set(order)) == 2 * microbatches for order in schedule)
            ends = replay(costs, schedule.to_codes())
            reduce_ms = costs.all_reduce_ms_S
            last = max(max(row) + reduce_ms[stage] for stage, row in enumerate(ends))
            assert run.iteration_ms == pytest.approx(last, abs=1e-9)

    def test_caps_hold(self):
        for seed in range(200):
            rng = random.Random(seed)
            costs = random_costs(rng)
            caps = [rng.randint(1, 4) for _ in range(costs.num_stages)]
            for preference in Preference:
                run = run_list(costs, 8, preference, caps)
                held = (2 * (run.order_SM2 >= 0) - 1).cumsum(axis=1).max(axis=1)
                assert (held <= caps).all()


class TestPlan:
    def test_every_plan_passes_the_checker(self):
        for seed in range(300):
            rng = random.Random(seed)
            model = random_model(rng, rng.randint(1, 12))
            cluster = random_cluster(rng, rng.randint(1, 8), gaps=seed % 2 == 0)
            for planner in ("best", "spp"):
                made = plan(model, cluster, rng.randint(1, 10), planner)
                assert check(made).errors == (), (seed, planner)

    @pytest.mark.parametrize("cluster", zoo.CLUSTER_NAMES)
    def test_zoo_plans_pass_the_checker(self, cluster):
        for model in zoo.MODEL_NAMES:
            made = plan(zoo.model(model), zoo.cluster(cluster), 8, "spp")
            assert check(made).errors == ()

    def test_any_stages_run_under_any_schedule(self):
        model, cluster = zoo.model("vgg19"), zoo.cluster("4x2-10g")
        times = {}
        for rule in (*SCHEDULES, "portfolio"):
            made = plan(model, cluster, 8, "dapple", schedule=rule)
            assert check(made).errors == ()
            assert (made.predicted.schedule_guarantee_ms is not None) or rule != "pe"
            times[rule] = made.iteration_ms
        assert times["portfolio"] == min(times.values())
        with pytest.raises(InputError, match="did you mean '1f1b'"):
            plan(model, cluster, schedule="1f1bb")

    def test_spp_keeps_the_fastest_number_of_stages(self):
        for seed in range(50):
            rng = random.Random(seed)
            cost = CostModel(random_model(rng, 8), random_cluster(rng, 6))
            order = recursive_device_order(cost, range(6))
            fastest = min(
                run_pe(cost.pipeline_costs(partition.stages), 8).iteration_ms
                for partition in best_partitions(cost, order, 8)
            )
            made = plan(cost.model, cost.cluster, 8, "spp")
            assert made.iteration_ms == pytest.approx(fastest)

    def test_the_guarantee_against_the_bottleneck_holds(self):
        """(1 + (4S - 4)/M) * W + max AR, with W the bottleneck, all-reduce included."""
        for seed in range(200):
            rng = random.Random(seed)
            made = plan(random_model(rng, 8), random_cluster(rng, 6), rng.randint(1, 16), "spp")
            cost = CostModel(made.model, made.cluster)
            bottleneck = bottleneck_ms(cost, made.stages, made.microbatches)
            reduce_ms = cost.pipeline_costs(made.stages).all_reduce_ms_S.max()
            factor = 1 + 4 * (len(made.stages) - 1) / made.microbatches
            assert bottleneck <= made.iteration_ms * (1 + 1e-9)
            assert made.iteration_ms <= factor * bottleneck + reduce_ms + 1e-9

    def test_the_guarantee_against_any_plan_holds(self):
        """((1 + (4S* - 4)/M) * rho + rho) * T*, for every plan of S* stages that takes T*."""
        for seed in range(60):
            rng = random.Random(seed)
            model = replace(random_model(rng, rng.randint(1, 4)), microbatch_size=840)
            rates = [rng.choice([1.0, 2.0, rng.uniform(1, 20)]) for _ in range(16)]
            rows = tuple(tuple(rng.choice(rates) for _ in range(4)) for _ in range(4))
            cluster = replace(flat_cluster(4), bandwidth_gb_per_s=rows, duplex=Duplex.FULL)
            used = [rows[u][v] for u, v in permutations(range(4), 2)]
            M, rho = rng.choice([1, 2, 8]), max(used) / min(used)
            made_ms = plan(model, cluster, M, "spp").iteration_ms
            cost = CostModel(model, cluster)
            for stages in all_placements(cost):
                costs = cost.pipeline_costs(stages)
                own_ms = min(SCHEDULES[rule](costs, M).iteration_ms for rule in PORTFOLIO)
                factor = (1 + 4 * (len(stages) - 1) / M) * rho + rho
                assert made_ms <= factor * own_ms + 1e-9, seed

    def test_unconnected_devices_are_never_used_together(self):
        cluster = flat_cluster(4, 0.0)
        made = plan(even_model(8, 1, 1), cluster, 4)
        assert [stage.num_replicas for stage in made.stages] == [1]

    def test_the_larger_part_is_used_whatever_its_place(self):
        bandwidth = tuple(tuple(float(u > 0 and v > 0) for v in range(4)) for u in range(4))
        cluster = Cluster(
            name="one apart",
            devices=tuple(Device(name=str(i)) for i in range(4)),
            bandwidth_gb_per_s=bandwidth,
        )
        made = plan(even_model(9, 1, 1), cluster, 16)
        assert {device for stage in made.stages for device in stage.devices} == {1, 2, 3}

    def test_same_input_same_plan(self):
        first, second = (plan(zoo.model("vgg19"), zoo.cluster("random-8"), 16) for _ in range(2))
        assert first == second

    def test_a_layer_that_fits_nowhere_is_infeasible(self):
        cluster = Cluster(
            name="tiny", devices=(Device(name="a", memory_gb=0.001),), bandwidth_gb_per_s=((0,),)
        )
        with pytest.raises(InfeasibleError, match=r"more than any device"):
            plan(zoo.model("bert-large"), cluster)

    def test_bad_arguments(self):
        model, cluster = even_model(1, 1, 1), flat_cluster(1)
        with pytest.raises(InputError, match="did you mean 'spp'"):
            plan(model, cluster, planner="sppp")
        with pytest.raises(InputError, match="microbatches: 0"):
            plan(model, cluster, 0)


# ------------------------------------------------------------------------------ arguments


def test_whole_numbers_of_any_kind_are_taken():
    model, cluster = zoo.model("vgg19"), zoo.cluster("4x2-10g")
    given = {"microbatches": np.int32(4), "seed": np.int64(5), "num_threads": np.uint8(1)}
    made = plan(model, cluster, planner="spp", effort=np.float64(1), **given)
    assert made == plan(model, cluster, 4, "spp", seed=5)
    assert type(made.seed) is type(made.microbatches) is int


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_threads": 1025}, "num_threads: 1025 is above 1024"),
        ({"num_threads": 0}, "num_threads: 0 is not at least 1"),
        ({"num_threads": 1.5}, "num_threads: 1.5 is not a whole number"),
        ({"effort": "1"}, "effort: '1' is not a number"),
        ({"effort": None}, "effort: None is not a number"),
        ({"effort": 10**400}, "effort: a number of about 400 digits is not a number within"),
        ({"time_limit_s": "1"}, "time_limit_s: '1' is not a number"),
        ({"time_limit_s": 10**400}, "time_limit_s: a number of about 400 digits is not"),
        ({"planner": None}, "planner: None is not text"),
        ({"planner": []}, "planner: .. is not text"),
        ({"schedule": 5}, "schedule: 5 is not text"),
    ],
)
def test_arguments_of_another_kind_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        plan(zoo.model("vgg19"), zoo.cluster("4x2-10g"), **arguments)
