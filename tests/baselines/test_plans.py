"""Every baseline makes valid plans, whatever the model and the cluster; closed forms hold."""

import random
import subprocess
import sys
from dataclasses import replace
from time import perf_counter

import pytest

from instances import even_model, flat_cluster, random_cluster, random_model
from pipeplan import zoo
from pipeplan.checker import check
from pipeplan.cluster import Cluster, Device, HostGroup, expand_hosts
from pipeplan.cost import CostModel
from pipeplan.errors import InfeasibleError
from pipeplan.pipeline import Plan, Schedule
from pipeplan.planning.baselines import BASELINES, GROUP_BASELINES
from pipeplan.planning.baselines.view import chained_ranks, view_cluster
from pipeplan.planning.prediction import predict
from pipeplan.planning.problem import Problem

NAMES = (
    "data-parallel",
    "gpipe",
    "1f1b",
    "grid",
    "pipedream",
    "dapple",
    "hetpipe",
    "piper",
    "alpa",
)


def make_plan(model, cluster, microbatches: int, name: str) -> Plan:
    problem = Problem(cost=CostModel(model, cluster), num_microbatches=microbatches)
    draft = BASELINES[name](problem)
    return Plan(
        model=model,
        cluster=cluster,
        microbatches=microbatches,
        stages=draft.stages,
        schedule=Schedule.from_codes(draft.codes.tolist()),
        planner=name,
        predicted=predict(problem, draft),
    )


def random_hosts(rng: random.Random, cluster: Cluster) -> Cluster:
    """The same cluster with several devices a host, in mixed order, and memory limits."""
    num_hosts = rng.randint(1, cluster.num_devices)
    return replace(
        cluster,
        devices=tuple(
            replace(
                device,
                host=f"host{rng.randrange(num_hosts)}",
                memory_gb=rng.choice([None, None, rng.uniform(0.001, 0.1)]),
            )
            for device in cluster.devices
        ),
    )


def check_random(seed: int) -> None:
    rng = random.Random(seed)
    model = random_model(rng, rng.randint(1, 12))
    cluster = random_cluster(rng, rng.randint(1, 9), gaps=seed % 2 == 0)
    if seed % 3 == 0:
        cluster = random_hosts(rng, cluster)
    microbatches = rng.randint(1, 10)
    for name in NAMES:
        plan = make_plan(model, cluster, microbatches, name)
        assert check(plan).errors == (), (seed, name)


class TestValidity:
    def test_the_names(self):
        assert tuple(BASELINES) == (*NAMES, *GROUP_BASELINES)

    def test_random_instances(self):
        for seed in range(0, 1200, 11):
            check_random(seed)

    @pytest.mark.full
    def test_random_instances_in_full(self):
        for seed in range(1200):
            check_random(seed)

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("cluster", zoo.CLUSTER_NAMES)
    def test_zoo_clusters(self, cluster, name):
        for model in ("vgg19", "transformer-big"):
            plan = make_plan(zoo.model(model), zoo.cluster(cluster), 4, name)
            assert check(plan).errors == ()

    @pytest.mark.parametrize("name", NAMES)
    def test_more_devices_than_layers(self, name):
        for num_layers in (1, 2, 3):
            plan = make_plan(even_model(num_layers, 1, 2), flat_cluster(16), 4, name)
            assert check(plan).errors == ()

    @pytest.mark.parametrize("name", NAMES)
    def test_no_paths_at_all(self, name):
        plan = make_plan(even_model(4, 1, 2), flat_cluster(5, 0.0), 4, name)
        assert check(plan).errors == ()
        assert sum(stage.num_replicas for stage in plan.stages) == 1

    @pytest.mark.parametrize("name", NAMES)
    def test_hosts_without_a_path_between_them(self, name):
        cluster = expand_hosts(
            "apart",
            [
                HostGroup(devices=2, bandwidth_gb_per_s=5),
                HostGroup(devices=3, bandwidth_gb_per_s=5),
            ],
            between_hosts_gb_per_s=0.0,
        )
        plan = make_plan(even_model(6, 1, 2), cluster, 8, name)
        assert check(plan).errors == ()
        assert {d for stage in plan.stages for d in stage.devices} <= {2, 3, 4}

    @pytest.mark.parametrize("name", NAMES)
    def test_a_model_that_costs_nothing(self, name):
        assert make_plan(even_model(5, 0, 0), flat_cluster(4), 3, name).iteration_ms == 0

    @pytest.mark.parametrize("name", NAMES)
    def test_same_input_same_plan(self, name):
        model, cluster = zoo.model("vgg19"), zoo.cluster("random-8")
        assert make_plan(model, cluster, 8, name) == make_plan(model, cluster, 8, name)


class TestView:
    def test_ranks_run_host_by_host(self):
        names = ["a", "b", "a", "b"]
        cluster = replace(
            flat_cluster(4),
            devices=tuple(Device(name=str(i), host=host) for i, host in enumerate(names)),
        )
        view = view_cluster(CostModel(even_model(1, 1, 1), cluster))
        assert view.ranks == (0, 2, 1, 3)
        assert view.hosts == ((0, 2), (1, 3))

    def test_bandwidths_are_harmonic_means_of_their_pairs(self):
        cluster = expand_hosts(
            "two", [HostGroup(count=2, devices=4, bandwidth_gb_per_s=25)], between_hosts_gb_per_s=3
        )
        view = view_cluster(CostModel(even_model(1, 1, 1), cluster))
        assert (view.inside_bytes_per_ms, view.between_bytes_per_ms) == (25e6, 3e6)
        # 32 ordered pairs between hosts, 24 inside
        assert view.flat_bytes_per_ms == pytest.approx(56 / (32 / 3e6 + 24 / 25e6))

    def test_a_ring_is_a_chain_of_all_and_a_clique_of_two(self):
        near = {(u, v) for u in range(6) for v in ((u + 2) % 6, (u - 2) % 6, 5 - u)}
        bandwidth = tuple(tuple(float((u, v) in near) for v in range(6)) for u in range(6))
        cluster = replace(flat_cluster(6), bandwidth_gb_per_s=bandwidth)
        cost = CostModel(even_model(6, 1, 1), cluster)
        chain = chained_ranks(cost)
        assert sorted(chain) == list(range(6))
        assert view_cluster(cost).num_devices == 3  # 0, 2, 4 form a triangle


class TestClosedForms:
    @pytest.mark.parametrize("name", ["gpipe", "1f1b"])
    def test_even_pipelines(self, name):
        """Without communication both take (M + S - 1)(f + b) for S equal stages."""
        for num_devices in (1, 2, 4, 8):
            for microbatches in (1, 3, 16):
                plan = make_plan(
                    even_model(16, 1, 2), flat_cluster(num_devices), microbatches, name
                )
                rounds = microbatches + num_devices - 1
                assert len(plan.stages) == num_devices
                assert plan.iteration_ms == pytest.approx(rounds * 3 * 16 / num_devices)

    def test_gpipe_runs_all_forwards_first_and_1f1b_holds_few(self):
        arguments = even_model(8, 1, 2), flat_cluster(4), 8
        gpipe, one_one = make_plan(*arguments, "gpipe"), make_plan(*arguments, "1f1b")
        for order in gpipe.schedule:
            assert [str(block.kind) for block in order] == ["F"] * 8 + ["B"] * 8
        for n, order in enumerate(one_one.schedule):
            held = most = 0
            for block in order:
                held += 1 if block.kind == "F" else -1
                most = max(most, held)
            assert most == 4 - n

    def test_data_parallel(self):
        model = even_model(4, 1, 2)
        layers = tuple(replace(layer, parameter_bytes=1e6) for layer in model.layers)
        plan = make_plan(replace(model, layers=layers), flat_cluster(4, 2.0), 6, "data-parallel")
        assert plan.iteration_ms == pytest.approx(6 * 12 / 4 + 2 * 3 / 4 * 4e6 / 2e6)

    def test_the_grid_includes_data_parallel_and_the_even_pipeline(self):
        for seed in range(40):
            rng = random.Random(seed)
            model, cluster = random_model(rng, 9), random_cluster(rng, 6)
            grid = make_plan(model, cluster, 6, "grid").iteration_ms
            for name in ("data-parallel", "1f1b"):
                assert grid <= make_plan(model, cluster, 6, name).iteration_ms + 1e-9


class TestSpeed:
    @pytest.mark.parametrize("name", NAMES)
    def test_50_layers_on_16_devices_take_less_than_a_second(self, name):
        problem = Problem(
            cost=CostModel(zoo.model("bert-48"), zoo.cluster("2x8-100g")), num_microbatches=16
        )
        started_s = perf_counter()
        BASELINES[name](problem)
        assert perf_counter() - started_s < 1

    def test_importing_the_registry_loads_no_planner(self):
        code = (
            "import sys, pipeplan.planning.baselines;"
            "sys.exit(any(m.startswith('pipeplan.planning.baselines.') for m in sys.modules))"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    def test_no_baseline_imports_our_planners(self):
        code = (
            "import sys, pkgutil, importlib, pipeplan.planning.baselines as b;"
            "[importlib.import_module(f'pipeplan.planning.baselines.{m.name}')"
            " for m in pkgutil.iter_modules(b.__path__)];"
            "sys.exit(any(m.startswith(('pipeplan.planning.planner', 'pipeplan.planning.door'))"
            " for m in sys.modules))"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_infeasible_is_the_only_refusal():
    """Baselines fall back to fewer devices; none refuses a valid problem."""
    for seed in range(60):
        rng = random.Random(seed)
        model, cluster = random_model(rng, 4), random_cluster(rng, 5, gaps=True)
        for name in NAMES:
            try:
                make_plan(model, cluster, 2, name)
            except InfeasibleError:
                pytest.fail(f"{name} refused seed {seed}")
