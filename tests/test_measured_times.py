"""Times at several microbatch sizes (`layers[].at`): files, rule 1, kernels, bounds, batches."""

import itertools
import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest

import pipeplan as pp
from core.test_any_shares import hostile_cluster, optimum_ms
from instances import random_cluster, random_model, random_stages
from one_stage import make_problem, plan
from pipeplan import _core
from pipeplan.cost import CostModel
from pipeplan.errors import InputError, PlanFileError
from pipeplan.pipeline import Stage
from pipeplan.planning.global_batch import scaled_model
from pipeplan.planning.planner.coarsening import merged_model
from pipeplan.planning.planner.placement import (
    placed_plan,
    placed_stages,
    shared_stage,
    stages_by_speed,
)
from pipeplan.profile import TimesAt
from pipeplan.schedules import PORTFOLIO, SCHEDULES


def measured_model(rng: random.Random, num_layers: int):
    """Some layers with times at other sizes, which rise, fall or jump."""
    model = replace(random_model(rng, num_layers), microbatch_size=rng.choice([2, 3, 4, 6]))
    sizes = [size for size in (1, 2, 3, 4, 5, 6, 8, 100) if size != model.microbatch_size]
    layers = []
    for layer in model.layers:
        chosen = rng.sample(sizes, rng.randint(0, 3))
        at = tuple(
            TimesAt(
                microbatch_size=size,
                forward_ms=round(layer.forward_ms * size * rng.choice([0.01, 0.2, 0.3, 1, 5]), 6),
                backward_ms=round(rng.uniform(0, 4), 6),
            )
            for size in chosen
        )
        layers.append(replace(layer, at=at))
    return replace(model, layers=tuple(layers))


def time_of(layer, own_size: int, samples: float, kind: str) -> float:
    """t(n) of the contract, read off the points one by one."""
    points = [(own_size, getattr(layer, kind))]
    points += [(times.microbatch_size, getattr(times, kind)) for times in layer.at]
    points.sort()
    if samples <= points[0][0]:
        return points[0][1] * samples / points[0][0]
    for (n0, t0), (n1, t1) in itertools.pairwise(points):
        if samples <= n1:
            return t0 + (t1 - t0) * (samples - n0) / (n1 - n0)
    return points[-1][1] * samples / points[-1][0]


def stage_times(model, cluster, stage: Stage) -> tuple[float, float]:
    """Rule 1, device by device."""
    forward, backward = [], []
    for device, share in zip(stage.devices, stage.device_shares, strict=True):
        samples, speed = share * model.microbatch_size, cluster.devices[device].speed
        layers = [model.layers[index] for index in stage.layers]
        own = model.microbatch_size
        f = sum(time_of(layer, own, samples, "forward_ms") for layer in layers)
        b = sum(time_of(layer, own, samples, "backward_ms") for layer in layers)
        forward.append(f / speed)
        backward.append((b + f if stage.recompute else b) / speed)
    return max(forward), max(backward)


class TestRuleOne:
    def test_each_device_takes_the_time_of_its_samples(self):
        rng = random.Random(1)
        for _ in range(300):
            model, cluster = measured_model(rng, 4), random_cluster(rng, 4)
            cost = CostModel(model, cluster)
            for stage in random_stages(rng, 4, 4, shares=True):
                forward_ms, backward_ms = stage_times(model, cluster, stage)
                assert cost.forward_ms(stage) == pytest.approx(forward_ms, rel=1e-12, abs=1e-15)
                assert cost.backward_ms(stage) == pytest.approx(backward_ms, rel=1e-12, abs=1e-15)
                assert max(cost.device_compute_ms(stage)) <= (forward_ms + backward_ms) * (1 + 1e-9)

    def test_by_hand(self):
        """1 sample 1 ms, 4 samples 2 ms: 2 samples take 4/3 ms, 8 take 4, half a sample a half."""
        layer = pp.LayerProfile(
            name="a",
            forward_ms=2.0,
            backward_ms=0.0,
            output_bytes=0,
            parameter_bytes=0,
            at=(TimesAt(microbatch_size=1, forward_ms=1.0, backward_ms=0.0),),
        )
        for size, expected in ((1, 1.0), (2, 4 / 3), (4, 2.0), (8, 4.0)):
            model = scaled_model(
                pp.ModelProfile(name="m", microbatch_size=4, layers=(layer,)), size
            )
            assert model.layers[0].forward_ms == pytest.approx(expected)
            cost = CostModel(model, random_cluster(random.Random(0), 1))
            assert cost.forward_ms(Stage(layers=range(1), devices=(0,))) == pytest.approx(
                expected / float(cost.speed_D[0])
            )

    @pytest.mark.parametrize("divisible", [False, True])
    def test_kernels_agree(self, divisible):
        rng = random.Random(2)
        for _ in range(200):
            model, cluster = measured_model(rng, 4), hostile_cluster(rng, 5)
            problem = make_problem(model, cluster, 3, divisible=divisible).within_samples()
            instance = problem.kernel_instance()
            stages = random_stages(rng, 4, 5)
            if any(stage.num_replicas > problem.cost.max_replicas for stage in stages):
                continue
            stages = tuple(
                shared_stage(instance, replace(stage, recompute=rng.random() < 0.3))
                for stage in stages
            )
            if rng.random() < 0.5:
                stages = stages_by_speed(instance, stages)
            times = _core.rule_times(instance, placed_plan(instance, stages), np.inf)
            try:
                costs = problem.cost.pipeline_costs(stages)
            except PlanFileError:
                assert not times
                continue
            for rule, ms in zip(PORTFOLIO, times, strict=True):
                assert math.isclose(SCHEDULES[rule](costs, 3).iteration_ms, ms, rel_tol=1e-9)

    def test_merged_layers_take_the_time_of_their_layers(self):
        rng = random.Random(3)
        for _ in range(50):
            model, cluster = measured_model(rng, 5), random_cluster(rng, 3)
            cost = CostModel(model, cluster)
            merged = cost.with_model(merged_model(cost, [2, 5]))
            for devices in ((0,), (0, 1), (0, 1, 2)):
                whole = Stage(layers=range(5), devices=devices)
                both = Stage(layers=range(2), devices=devices)
                assert merged.forward_ms(both) == pytest.approx(cost.forward_ms(whole), rel=1e-12)
                assert merged.backward_ms(both) == pytest.approx(cost.backward_ms(whole), rel=1e-12)


class TestMeasuredBounds:
    @pytest.mark.parametrize("whole", [True, False])
    @pytest.mark.parametrize("same_speed", [True, False])
    @pytest.mark.parametrize(
        "count", [12, pytest.param(400, marks=pytest.mark.full)], ids=["few", "many"]
    )
    def test_no_certificate_is_above_a_known_plan(self, whole, same_speed, count):
        rng = random.Random(4)
        losses = []
        for _ in range(count):
            model, cluster = measured_model(rng, rng.randint(1, 3)), hostile_cluster(rng, 3)
            if same_speed:
                devices = tuple(replace(device, speed=1.0) for device in cluster.devices)
                cluster = replace(cluster, devices=devices)
            problem = make_problem(model, cluster, 2, divisible=not whole).within_samples()
            optimum = optimum_ms(rng, problem, whole=whole)
            made = plan(model, cluster, 2, divisible=not whole)
            assert not pp.check(made).errors
            assert made.bound.lower_bound_ms <= optimum * (1 + 1e-9)
            losses.append(made.iteration_ms / optimum - 1 if optimum else 0.0)
        assert sum(losses) / len(losses) < 0.05

    def test_kernels_of_bounds_refuse_other_times(self):
        rng = random.Random(5)
        problem = make_problem(measured_model(rng, 3), random_cluster(rng, 3), 2)
        instance = problem.kernel_instance()
        with pytest.raises(ValueError, match="proportion"):
            _core.relaxed_bound(instance, np.array([1, 2, 3], dtype=np.int32), 4, 1e9, 1)
        with pytest.raises(ValueError, match="proportion"):
            _core.plan_on_sets(instance, [0, 1, 2], 4, np.inf, 0, 1)


class TestFiles:
    def test_a_model_comes_back_as_it_was(self, tmp_path):
        model = measured_model(random.Random(6), 4)
        pp.write_model(model, tmp_path / "m.model.json")
        assert pp.read_model(tmp_path / "m.model.json") == model
        assert any(layer.at for layer in model.layers)

    def test_a_plan_embeds_the_measurements(self, tmp_path):
        rng = random.Random(7)
        made = plan(measured_model(rng, 4), random_cluster(rng, 3), 2)
        pp.write_plan(made, tmp_path / "p.plan.json")
        again = pp.read_plan(tmp_path / "p.plan.json")
        assert again.model == made.model
        assert pp.check(again).errors == ()

    @pytest.mark.parametrize(
        ("at", "message"),
        [
            ([{"microbatch_size": 4, "forward_ms": 1, "backward_ms": 1}], "profile's own"),
            ([{"microbatch_size": 2, "forward_ms": 1, "backward_ms": 1}] * 2, "stands twice"),
            ([{"microbatch_size": 0, "forward_ms": 1, "backward_ms": 1}], "microbatch_size"),
            ([{"microbatch_size": 2, "forward_ms": -1, "backward_ms": 1}], "negative"),
            ([{"microbatch_size": 2, "forward_ms": 1}], "backward_ms"),
            ([{"microbatch_size": 2, "forward_ms": 1, "backward_ms": 1, "x": 1}], "known field"),
            ({"2": 1}, "at"),
        ],
    )
    def test_wrong_measurements_are_refused_in_one_line(self, at, message, tmp_path):
        layer = {
            "name": "a", "forward_ms": 1, "backward_ms": 2, "output_bytes": 1,
            "parameter_bytes": 1, "at": at,
        }  # fmt: skip
        document = {
            "format": "pipeplan.model/1", "name": "m", "microbatch_size": 4, "layers": [layer],
        }  # fmt: skip
        path = tmp_path / "m.model.json"
        path.write_text(json.dumps(document))
        with pytest.raises(InputError, match=message) as error:
            pp.read_model(path)
        assert "\n" not in str(error.value)
        assert "layers[0].at" in str(error.value)


def test_a_global_batch_follows_the_measurements():
    """Two samples take hardly longer than one: larger microbatches are worth it."""
    layers = tuple(
        pp.LayerProfile(
            name=f"l{index}",
            forward_ms=1.0,
            backward_ms=2.0,
            output_bytes=1000,
            parameter_bytes=1000,
            at=(TimesAt(microbatch_size=8, forward_ms=1.5, backward_ms=3.0),),
        )
        for index in range(4)
    )
    model = pp.ModelProfile(name="m", microbatch_size=1, layers=layers)
    cluster = pp.expand_hosts("c", [pp.HostGroup(devices=2, bandwidth_gb_per_s=10)])
    made = pp.plan_global_batch(model, cluster, 32)
    plain = replace(model, layers=tuple(replace(layer, at=()) for layer in layers))
    assert made.model.microbatch_size > 1
    assert made.iteration_ms < pp.plan_global_batch(plain, cluster, 32).iteration_ms / 2
    own = made.model.layers[0]
    assert {1, 8} - {made.model.microbatch_size} <= {t.microbatch_size for t in own.at}


@pytest.mark.parametrize("same_speed", [True, False])
def test_local_search_counts_the_true_times(same_speed):
    rng = random.Random(9)
    for _ in range(10):
        model, cluster = measured_model(rng, 6), random_cluster(rng, 6)
        if same_speed:
            devices = tuple(replace(device, speed=1.0) for device in cluster.devices)
            cluster = replace(cluster, devices=devices, latency_us=0.0)
        problem = make_problem(model, cluster, 4).within_samples()
        instance = problem.kernel_instance()
        start = placed_plan(instance, (Stage(layers=range(6), devices=(0,)),))
        for ms, rule, placed in _core.local_search(instance, [start], 1, 3e6, 0.0, 1):
            costs = problem.cost.pipeline_costs(placed_stages(placed, instance))
            assert SCHEDULES[PORTFOLIO[rule]](costs, 4).iteration_ms == pytest.approx(ms, rel=1e-9)
