"""Where memory is short: plans that fit are found, shares follow memory, no more is claimed."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from instances import even_model, flat_cluster
from one_stage import make_problem, plan
from pipeplan.checker import check
from pipeplan.cluster import Cluster, Device
from pipeplan.cost import BYTES_IN_GB
from pipeplan.errors import NoPlanError, PipeplanError
from pipeplan.planning.comparison import compare
from pipeplan.planning.planner.fitting import stages_that_fit
from pipeplan.planning.registry import PLANNERS
from pipeplan.profile import LayerProfile, ModelProfile

MB = 1e6


def model_of(layers, microbatch_size=6, output_bytes=MB) -> ModelProfile:
    """Layers of (parameter_bytes, activation_bytes); state is four times the parameters."""
    return ModelProfile(
        name="planted",
        microbatch_size=microbatch_size,
        layers=tuple(
            LayerProfile(
                name=f"l{index}",
                forward_ms=1,
                backward_ms=2,
                output_bytes=output_bytes,
                parameter_bytes=parameters,
                activation_bytes=activations,
            )
            for index, (parameters, activations) in enumerate(layers)
        ),
    )


def cluster_of(memory_gb, links=None) -> Cluster:
    """Devices with this memory; `links` are the pairs that have a path, by default all."""
    number = len(memory_gb)
    links = set(itertools.permutations(range(number), 2)) if links is None else links
    return Cluster(
        name="planted",
        devices=tuple(Device(name=f"d{u}", memory_gb=gb) for u, gb in enumerate(memory_gb)),
        bandwidth_gb_per_s=tuple(
            tuple(10.0 if (u, v) in links else 0.0 for v in range(number)) for u in range(number)
        ),
    )


def planted(rng, num_devices, *, largest_set, slack, is_path):
    """A model and a cluster with just the memory that some plan needs, times `slack`."""
    left = rng.sample(range(num_devices), num_devices)
    sets, layers, memory_gb = [], [], [0.0] * num_devices
    while left:
        size = min(len(left), rng.choice((1, 1, 2, 3)[: largest_set + 1]))
        sets.append(left[:size])
        del left[:size]
        mine = [
            (rng.choice((1, 2, 3, 5, 8)) * MB, rng.choice((1, 6, 12)) * MB)
            for _ in range(rng.choice((1, 1, 2)))
        ]
        layers += mine
        needed = sum(4 * parameters + activations / size for parameters, activations in mine)
        for u in sets[-1]:
            memory_gb[u] = needed / BYTES_IN_GB * slack
    links = None
    if is_path:
        near = [*sets, *(one + other for one, other in itertools.pairwise(sets))]
        links = {pair for group in near for pair in itertools.permutations(group, 2)}
    return model_of(layers), cluster_of(memory_gb, links)


class TestPlantedPlans:
    @pytest.mark.parametrize("slack", [1.0, 1.1, 1.3])
    @pytest.mark.parametrize(("largest_set", "is_path"), [(1, False), (1, True), (3, True)])
    def test_a_plan_is_found_wherever_one_was_planted(self, slack, largest_set, is_path):
        for seed in range(8):
            rng = random.Random(seed)
            model, cluster = planted(
                rng, rng.randint(10, 14), largest_set=largest_set, slack=slack, is_path=is_path
            )
            made = plan(model, cluster, 2, num_threads=1)
            assert check(made, strict_memory=True).errors == (), seed

    def test_constraints_are_kept(self):
        for seed in range(6):
            rng = random.Random(seed)
            model, cluster = planted(rng, 10, largest_set=1, slack=1.0, is_path=False)
            first = plan(model, cluster, 2, num_threads=1)
            wanted = {
                "stages": first.num_stages,
                "first_on": f"d{first.stages[0].devices[0]}",
                "last_on": f"d{first.stages[-1].devices[0]}",
            }
            made = plan(model, cluster, 2, num_threads=1, **wanted)
            assert check(made, strict_memory=True).errors == (), seed


def fits_somehow(model, memory_bytes, first=0, used=frozenset()) -> bool:
    """By trial of all cuts, sets and whole samples."""
    if first == model.num_layers:
        return True
    free = [u for u in range(len(memory_bytes)) if u not in used]
    for end in range(first + 1, model.num_layers + 1):
        layers = model.layers[first:end]
        state = sum(4 * layer.parameter_bytes for layer in layers)
        activations = sum(layer.activation_bytes for layer in layers)
        for size in range(1, min(len(free), model.microbatch_size) + 1):
            for devices in itertools.combinations(free, size):
                each = activations / model.microbatch_size
                most = [math.floor((memory_bytes[u] - state) / each + 1e-9) for u in devices]
                has_room = min(most) >= 1 and sum(most) >= model.microbatch_size
                if has_room and fits_somehow(model, memory_bytes, end, used | set(devices)):
                    return True
    return False


class TestProof:
    def test_found_wherever_anything_fits_and_else_proved(self):
        outcomes = []
        for seed in range(150):
            rng = random.Random(seed)
            layers = [(rng.randint(0, 4) * MB, rng.randint(1, 9) * MB) for _ in range(3)]
            model = model_of(layers, microbatch_size=rng.randint(1, 4))
            memory_bytes = [rng.randint(4, 24) * MB for _ in range(rng.randint(1, 4))]
            cluster = cluster_of([count / BYTES_IN_GB for count in memory_bytes])
            problem = make_problem(model, cluster, 2).within_samples()
            found = stages_that_fit(problem, free_shares=True)
            fits = fits_somehow(model, memory_bytes)
            assert bool(found.plans) == fits, seed
            assert found.plans or found.is_complete, seed
            outcomes.append(fits)
            if fits:
                made = plan(model, cluster, 2, num_threads=1)
                assert check(made, strict_memory=True).errors == (), seed
            else:
                with pytest.raises(NoPlanError):
                    plan(model, cluster, 2, num_threads=1)
        assert 30 < sum(outcomes) < 120

    def test_only_what_is_proved_is_claimed(self):
        model = model_of([(MB, MB)] * 4)
        proved = cluster_of([0.003, 0.002])
        with pytest.raises(NoPlanError, match="nothing fits"):
            plan(model, proved, 2)
        # On a path not all fronts are tried.
        unproved = cluster_of([0.004, 0.03, 0.004], links={(0, 1), (1, 0), (1, 2), (2, 1)})
        larger = model_of([(MB, MB)] * 7)
        with pytest.raises(NoPlanError, match="found no plan that fits"):
            plan(larger, unproved, 2)


class TestSharesByMemory:
    def test_whole_samples_follow_memory(self):
        model = model_of([(0, 5 * MB)], microbatch_size=5)
        made = plan(model, cluster_of([0.004, 0.001]), 1)
        assert made.stages[0].device_shares == (0.8, 0.2)
        assert check(made, strict_memory=True).errors == ()
        assert made.bound is None

    def test_samples_that_may_be_split_follow_memory(self):
        model = model_of([(0, 8 * MB)], microbatch_size=1)
        made = plan(model, cluster_of([0.0061, 0.0021]), 3, divisible=True)
        assert check(made, strict_memory=True).errors == ()
        with pytest.raises(NoPlanError):
            plan(model, cluster_of([0.0058, 0.0021]), 3, divisible=True)


class TestExact:
    def test_blocks_without_length_keep_memory(self):
        pytest.importorskip("ortools")
        layers = model_of([(0, MB), (0, 4 * MB)], output_bytes=0).layers
        times = ((1, 0), (2, 1))
        model = ModelProfile(
            name="short",
            microbatch_size=1,
            layers=tuple(
                replace(layer, forward_ms=forward, backward_ms=backward)
                for layer, (forward, backward) in zip(layers, times, strict=True)
            ),
        )
        cluster = cluster_of([0.001, 0.004])
        fast = replace(cluster.devices[1], speed=2)
        made = plan(model, replace(cluster, devices=(cluster.devices[0], fast)), 2, "exact")
        assert check(made, strict_memory=True).errors == ()
        assert made.iteration_ms == pytest.approx(5.0)
        assert made.bound.lower_bound_ms <= made.iteration_ms


class TestDoor:
    def test_a_plan_of_ours_that_breaks_a_limit_is_refused(self, monkeypatch):
        monkeypatch.setitem(PLANNERS, "best", PLANNERS["data-parallel"])
        with pytest.raises(PipeplanError, match="defect of pipeplan"):
            plan(model_of([(MB, MB)] * 4), cluster_of([0.005] * 4), 2)
        with pytest.raises(PipeplanError, match="has 1 stages"):
            plan(even_model(4, 1, 2), flat_cluster(1), 2, divisible=True, stages=2, positions=2)

    def test_a_time_limit_of_best_does_not_advise_best(self):
        cluster = cluster_of([0.009, 0.008, 0.007, 0.03, 0.004])
        with pytest.raises(PipeplanError, match=r"allow more time$"):
            plan(model_of([(MB, MB)] * 8), cluster, 4, time_limit_s=1e-9)

    def test_plans_that_lack_a_path_are_rows_with_a_reason(self):
        star = {(0, 2), (2, 0), (1, 2), (2, 1)}
        cluster = cluster_of([1.0] * 3, links=star)
        found = compare(model_of([(MB, MB)] * 6), cluster, 3, ["interleaved-1f1b", "spp"])
        reasons = {row.planner: row.infeasible_reason for row in found.rows}
        assert reasons["spp"] is None
        assert "no path" in reasons["interleaved-1f1b"]


class TestSchedules:
    def test_more_stages_asked_for_are_no_faster(self):
        """The best plan needs an order that no rule of the portfolio gives."""
        times = ((953.5, 1991.7), (1472, 1890.4), (1807.2, 1558.8), (1971, 654.9), (1685.6, 603.6))
        parameters = (0.196e9, 19.42e9, 15.64e9, 24.76e9, 5.55e9)
        outputs = (4.74e9, 3.16e9, 6.32e9, 3.16e9, 1.58e9)
        model = ModelProfile(
            name="slow",
            microbatch_size=2,
            layers=tuple(
                LayerProfile(
                    name=f"l{index}",
                    forward_ms=forward,
                    backward_ms=backward,
                    output_bytes=outputs[index],
                    parameter_bytes=parameters[index],
                )
                for index, (forward, backward) in enumerate(times)
            ),
        )
        cluster = replace(
            cluster_of([None] * 3),
            bandwidth_gb_per_s=((0, 3, 3), (3, 0, 4), (3, 4, 0)),
            latency_us=10_000.0,
        )
        free = plan(model, cluster, 4, last_on="d0")
        asked = plan(model, cluster, 4, last_on="d0", stages=3)
        assert free.iteration_ms <= asked.iteration_ms * (1 + 1e-9)
