"""The scaled plan is the given one in other units."""

import random
from dataclasses import replace

import pytest

import pipeplan as pp
from instances import flat_cluster, random_plan
from pipeplan import zoo
from pipeplan.cost import CostModel
from pipeplan.pipeline import Stage
from pipeplan.replaying import simulate
from pipeplan.runtime.rows import divide_rows
from pipeplan.testbed.door import find_paces
from pipeplan.testbed.scaling import (
    MEMORY_BYTES,
    MOST_MS,
    MOST_ROWS,
    SAFE_GB_PER_S,
    Scale,
    _peak_gb_per_s,
    choose_scale,
    scale_plan,
)
from pipeplan.testbed.topology import find_topology


@pytest.mark.parametrize("seed", range(30))
def test_the_prediction_is_the_plans_own_times_the_factor(seed):
    plan = random_plan(random.Random(seed))
    if simulate(plan).iteration_ms == 0:
        pytest.skip("takes no time")
    scale = Scale(time_factor=3.7, byte_factor=0.25, rows=plan.model.microbatch_size)
    # Sizes below four bytes cannot be a quarter.
    layers = tuple(
        replace(layer, output_bytes=1e6, gradient_bytes=5e5, parameter_bytes=2e6, at=())
        for layer in plan.model.layers
    )
    plan = replace(plan, model=replace(plan.model, layers=layers), predicted=None)
    predicted_ms = simulate(plan).iteration_ms
    assert simulate(scale_plan(plan, scale)).iteration_ms == pytest.approx(3.7 * predicted_ms)


def test_shared_links_are_scaled_too():
    cluster = pp.Cluster(
        name="c",
        devices=tuple(pp.Device(name=f"d{i}", host=f"h{i // 2}") for i in range(4)),
        bandwidth_gb_per_s=((1.0,) * 4,) * 4,
        latency_us=((5.0,) * 4,) * 4,
        uplink_gb_per_s={"h0": 0.5},
        shared=(pp.SharedLink(name="s", members=("h1",), gb_per_s=0.4, in_gb_per_s=0.2),),
    )
    plan = pp.plan(zoo.model("vgg19"), cluster, 4)
    scaled = scale_plan(plan, Scale(time_factor=2.0, byte_factor=0.1, rows=32))
    assert simulate(scaled).iteration_ms == pytest.approx(2 * plan.iteration_ms, rel=1e-6)


@pytest.mark.parametrize("model", ["vgg19", "bert-large", "llama-70b"])
def test_the_machine_carries_what_is_chosen(model):
    devices = tuple(replace(d, memory_gb=None) for d in zoo.cluster("4x2-10g").devices)
    plan = pp.plan(zoo.model(model), replace(zoo.cluster("4x2-10g"), devices=devices), 8)
    timeline = simulate(plan)
    scale = choose_scale(plan, timeline)
    scaled = scale_plan(plan, scale)
    assert _peak_gb_per_s(scaled, simulate(scaled)) <= SAFE_GB_PER_S * 1.01
    held = sum(
        plan.model.layers[layer].parameter_bytes * stage.num_replicas
        for stage in plan.stages
        for layer in stage.layers
    )
    assert 2 * held * scale.byte_factor <= MEMORY_BYTES
    assert timeline.iteration_ms * scale.time_factor <= MOST_MS * 1.01


def test_rows_divide_into_exact_shares():
    cluster = flat_cluster(6)
    stages = (
        Stage(layers=range(1), devices=(0, 1, 2)),
        Stage(layers=range(1, 2), devices=(3, 4), shares=(0.25, 0.75)),
        Stage(layers=range(2, 3), devices=(5,)),
    )
    model = zoo.model("vgg19")
    model = replace(model, layers=model.layers[:3], microbatch_size=4)
    plan = pp.plan(model, cluster, 2, planner="gpipe")
    kinds = (pp.Kind.FORWARD, pp.Kind.BACKWARD)
    order = [[pp.Block(kind, s, m) for kind in kinds for m in range(2)] for s in range(3)]
    plan = replace(plan, stages=stages, schedule=pp.Schedule(order))
    rows = choose_scale(plan, simulate(plan)).rows
    assert rows % 4 == 0
    assert rows <= MOST_ROWS
    division = divide_rows(stages, rows)
    exact = [[x * y * rows for y in stages[1].device_shares] for x in stages[0].device_shares]
    for lengths, wanted in zip(division.runs[0], exact, strict=True):
        assert lengths == pytest.approx(wanted)
    assert choose_scale(plan, simulate(plan), whole_samples=True).rows == 4


def test_a_real_model_keeps_its_bytes():
    plan = pp.plan(zoo.model("vgg19"), zoo.cluster("4x2-100g"), 4)
    timeline = simulate(plan)
    scale = choose_scale(plan, timeline, keeps_bytes=True)
    assert scale.byte_factor == 1.0
    scaled = scale_plan(plan, scale)
    assert _peak_gb_per_s(scaled, simulate(scaled)) <= SAFE_GB_PER_S * 1.01


@pytest.mark.parametrize("seed", range(20))
def test_blocks_last_as_long_as_the_cost_model_says(seed):
    """Of the plan itself, whatever its rows: times may have been measured at several sizes."""
    plan = random_plan(random.Random(seed))
    cost = CostModel(plan.model, plan.cluster)
    topology = find_topology(replace(plan, cluster=replace(plan.cluster, duplex=pp.Duplex.FULL)))
    paces = dict(zip(topology.devices, find_paces(plan, topology, 2.0), strict=True))
    for stage in plan.stages:
        mine = [paces[device][0] for device in stage.devices]
        assert max(pace.seconds["F"] for pace in mine) * 500 == pytest.approx(
            cost.forward_ms(stage)
        )
        assert max(pace.seconds["B"] for pace in mine) * 500 == pytest.approx(
            cost.backward_ms(stage)
        )
        both_ms = [500 * (pace.seconds["F"] + pace.seconds["B"]) for pace in mine]
        assert both_ms == pytest.approx(cost.device_compute_ms(stage))
