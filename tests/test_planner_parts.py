"""The smaller parts of planning: limits, parts of clusters, orders, what `best` starts from."""

import random
from dataclasses import replace

import numpy as np
import pytest

from instances import even_model, flat_cluster, random_cluster, random_model
from pipeplan import _core
from pipeplan.cluster import Cluster, Device
from pipeplan.cost import CostModel
from pipeplan.planning import registry
from pipeplan.planning.baselines import BASELINES, GROUP_BASELINES
from pipeplan.planning.door import make_problem, plan
from pipeplan.planning.planner.device_order import recursive_device_order
from pipeplan.planning.planner.device_orders import device_orders
from pipeplan.planning.planner.lower_bound import work_bound_ms
from pipeplan.planning.planner.partition import best_partitions
from pipeplan.planning.planner.placement import placed_stages
from pipeplan.planning.planner.settings import TABLE, Sizes, replica_counts
from pipeplan.planning.planner.spp import plan_spp
from pipeplan.schedules import run_pe


def test_the_work_bound_is_all_work_over_all_speed():
    cluster = flat_cluster(2)
    fast = replace(cluster, devices=(cluster.devices[0], Device(name="fast", speed=3.0)))
    assert work_bound_ms(CostModel(even_model(2, 1, 3), fast), 5) == 5 * 8 / 4


class TestPartitions:
    def test_no_more_stages_than_asked(self):
        cost = CostModel(even_model(6, 1, 1), flat_cluster(5))
        for most in (1, 2, 5):
            found = best_partitions(cost, range(5), 4, max_stages=most)
            assert [len(partition.stages) for partition in found] == list(range(1, most + 1))
        assert len(best_partitions(cost, range(5), 4)[-1].stages) == 5

    def test_a_deadline_holds(self):
        cost = CostModel(even_model(6, 1, 1), flat_cluster(5))
        with pytest.raises(_core.DeadlineError):
            best_partitions(cost, range(5), 4, deadline=0.0)

    def test_stages_name_the_devices_of_the_order_by_their_number(self):
        instance = CostModel(even_model(4, 1, 1), flat_cluster(3)).kernel_instance(1)
        placed = _core.PlacedPlan(instance, [1, 4], [[0, 1], [2]])
        stages = placed_stages(placed, order=(8, 2, 5), end_layer=(3, 4, 7, 9))
        assert [(stage.layers, stage.devices) for stage in stages] == [
            (range(3), (2, 8)),
            (range(3, 9), (5,)),
        ]


class TestSpp:
    def test_equals_the_best_of_all_numbers_of_stages_without_replicas(self):
        """One sample a microbatch: more stages than four are often the best."""
        many = 0
        for seed in range(40):
            rng = random.Random(seed)
            model = replace(random_model(rng, 10), microbatch_size=1)
            problem = make_problem(model, random_cluster(rng, 8), 16).within_samples()
            order = recursive_device_order(problem.cost, range(8))
            fastest = min(
                run_pe(problem.cost.pipeline_costs(partition.stages), 16).iteration_ms
                for partition in best_partitions(problem.cost, order, 16)
            )
            made = plan_spp(problem)
            many += len(made.stages) > 4
            assert made.iteration_ms == pytest.approx(fastest, rel=1e-12)
        assert many > 5

    def test_the_fastest_part_of_a_cluster_is_used(self):
        for apart in range(4):
            rates = tuple(
                tuple(float(u != apart and v != apart) for v in range(4)) for u in range(4)
            )
            devices = tuple(Device(name=str(u)) for u in range(4))
            cluster = Cluster(name="one apart", devices=devices, bandwidth_gb_per_s=rates)
            made = plan(even_model(9, 1, 1), cluster, 16, "spp")
            assert apart not in {device for stage in made.stages for device in stage.devices}

    def test_what_it_has_at_its_deadline_is_returned(self, monkeypatch):
        real, deadlines = _core.partition, []

        def once(instance, max_stages, limit_ms, num_threads, deadline):
            deadlines.append(deadline)
            if len(deadlines) > 1:
                raise _core.DeadlineError
            return real(instance, max_stages, limit_ms, num_threads, deadline)

        monkeypatch.setattr(_core, "partition", once)
        problem = make_problem(even_model(6, 1, 1), flat_cluster(3), 4, time_limit_s=600)
        made = plan_spp(problem)
        assert deadlines == [problem.deadline] * 2
        assert made.iteration_ms == 4 * 12 / 3


class TestStarts:
    def called(self, monkeypatch, num_layers, num_devices) -> set[str]:
        """Which published planners `best` asks for a start."""
        names = set()

        def spy(name):
            def planner(problem):
                names.add(name)
                return BASELINES[name](problem)

            return planner

        monkeypatch.setattr(registry, "BASELINES", {name: spy(name) for name in BASELINES})
        rng = random.Random(0)
        model, cluster = random_model(rng, num_layers), random_cluster(rng, num_devices)
        made = plan(model, cluster, 3, effort=0.01, positions=1, split_backward=False)
        assert made.bound.gap(made.iteration_ms) > 1e-6  # else no start is needed
        return names

    def test_all_published_planners_on_small_clusters(self, monkeypatch):
        assert self.called(monkeypatch, 30, 14) == set(BASELINES) - set(GROUP_BASELINES)

    def test_only_the_quickest_for_many_layers(self, monkeypatch):
        assert self.called(monkeypatch, 150, 14) == {"data-parallel", "1f1b"}


class TestOrders:
    def test_a_latency_or_a_speed_alone_makes_orders_differ(self):
        model = even_model(2, 1, 1)
        flat = flat_cluster(3)
        assert len(device_orders(CostModel(model, flat))) == 1
        latencies = ((0.0, 1.0, 9.0), (1.0, 0.0, 5.0), (9.0, 5.0, 0.0))
        assert len(device_orders(CostModel(model, replace(flat, latency_us=latencies)))) > 1
        speeds = tuple(Device(name=str(u), speed=1.0 + u) for u in range(3))
        orders = device_orders(CostModel(model, replace(flat, devices=speeds)))
        assert {(0, 1, 2), (2, 1, 0)} <= set(orders)

    def test_both_directions_of_a_link_count_in_the_order_by_cuts(self):
        """Summed over both directions device 1 has the least: 10.3 to 11.1 and 11.2."""
        rates = ((0.0, 5.0, 3.0), (0.1, 0.0, 5.0), (3.0, 0.2, 0.0))
        devices = tuple(Device(name=str(u)) for u in range(3))
        cluster = Cluster(name="three", devices=devices, bandwidth_gb_per_s=rates)
        cost = CostModel(even_model(1, 1, 1), cluster)
        assert recursive_device_order(cost, range(3)) == (0, 2, 1)
        assert (0, 2, 1) in device_orders(cost)

    def test_links_without_a_way_back_do_not_attract(self):
        """Device 2 is linked to 0 one way only; the cut separates it first."""
        rates = (
            (0.0, 1.0, 50.0, 0.0),
            (1.0, 0.0, 0.0, 0.1),
            (0.0,) * 3 + (1.0,),
            (0.0, 0.1, 1.0, 0.0),
        )
        devices = tuple(Device(name=str(u)) for u in range(4))
        cluster = Cluster(name="one way", devices=devices, bandwidth_gb_per_s=rates)
        cost = CostModel(even_model(1, 1, 1), cluster)
        assert recursive_device_order(cost, range(4)) == (0, 1, 2, 3)


@pytest.mark.parametrize("sizes", Sizes)
def test_replica_counts_rise_within_the_devices(sizes):
    for num_devices in (4, 5, 8, 12, 33, 64, 100, 1000):
        counts = replica_counts(sizes, num_devices)
        assert counts == sorted(set(counts))
        assert counts[0] == 1
        most = num_devices // 4 if sizes is Sizes.FEW_QUARTERS else num_devices
        assert counts[-1] <= most
        powers = {2**k for k in range(11) if 2**k <= most}
        assert powers <= set(counts)
        if sizes is Sizes.ALL:
            assert counts == list(range(1, num_devices + 1))


def test_every_cluster_has_a_row_of_settings():
    assert [row.max_devices for row in TABLE] == sorted({row.max_devices for row in TABLE})
    assert TABLE[-1].max_devices == np.inf
