"""Costs equal those of an oracle that shares nothing with them, and those worked out by hand."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import oracles
from instances import even_model, flat_cluster, random_plan
from pipeplan.cluster import Cluster, Device, Duplex
from pipeplan.cost import FEW_PAIRS, CostModel, PipelineCosts, median
from pipeplan.errors import PlanFileError
from pipeplan.pipeline import Plan, Stage


def assert_costs_follow_the_contract(plan: Plan) -> None:
    """Rules 1 to 3 and the memory of every stage, all within rounding."""
    model, cluster, stages = plan.model, plan.cluster, plan.stages
    cost = CostModel(model, cluster)
    costs = cost.pipeline_costs(stages)
    near = {"rel": 1e-12, "abs": 1e-15}
    for n, stage in enumerate(stages):
        times = oracles.block_times(model, cluster, stage)
        assert (costs.forward_ms_S[n], costs.backward_ms_S[n]) == pytest.approx(times, **near)
        reduce_ms = oracles.all_reduce_time(model, cluster, stage)
        assert costs.all_reduce_ms_S[n] == pytest.approx(reduce_ms, **near)
        in_flight = plan.schedule.most_in_flight(n)
        needs = oracles.memory_needs(model, stage, plan.schedule[n])
        assert cost.memory_gb(stage, in_flight) == pytest.approx(needs, **near)
        both_ms = sum(oracles.block_times(model, cluster, stage))
        assert max(cost.device_compute_ms(stage)) == pytest.approx(both_ms, **near)
        for device, share, ms in zip(
            stage.devices, oracles.shares_of(stage), cost.device_compute_ms(stage), strict=True
        ):
            alone = Stage(layers=stage.layers, devices=(device,), recompute=stage.recompute)
            whole_ms = sum(oracles.block_times(model, cluster, alone))
            assert ms == pytest.approx(whole_ms * share, **near)
    for n, (stage, behind) in enumerate(pairwise(stages)):
        last = model.layers[stage.layers[-1]]
        there = oracles.transfer_time(cluster, stage, behind, last.output_bytes)
        back = oracles.transfer_time(cluster, behind, stage, last.gradient_bytes)
        assert costs.send_forward_ms_C[n] == pytest.approx(there, **near)
        assert costs.send_backward_ms_C[n] == pytest.approx(back, **near)
    assert costs.half_duplex == (cluster.duplex == "half")
    assert costs.num_stages == len(stages) == len(costs.send_forward_ms_C) + 1


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.full)])
def test_costs_equal_the_oracle_s(count):
    for seed in range(count):
        assert_costs_follow_the_contract(random_plan(random.Random(seed)))


@pytest.mark.parametrize("count", [150, pytest.param(3_000, marks=pytest.mark.full)])
def test_costs_equal_the_oracle_s_where_pairs_are_many(count):
    """Beyond 64 pairs costs are computed by arrays; latencies and uneven shares count there too."""
    many = uneven = 0
    for seed in range(count):
        rng = random.Random(seed)
        plan = random_plan(rng, max_layers=2, num_devices=rng.randint(17, 26), max_microbatches=2)
        assert_costs_follow_the_contract(plan)
        sizes = [stage.num_replicas for stage in plan.stages]
        pairs = [k * k for k in sizes] + [a * b for a, b in pairwise(sizes)]
        is_many = max(pairs) > FEW_PAIRS
        many += is_many and isinstance(plan.cluster.latency_us, tuple)
        uneven += is_many and any(stage.shares for stage in plan.stages)
    assert many > count / 10
    assert uneven > count / 10


def test_few_pairs_and_many_pairs_cost_the_same():
    """On both sides of the limit, one device more or less."""
    model, cluster = even_model(2, 1.0, 1.0), flat_cluster(20, 2.0, latency_us=250.0)
    for k in (8, 9):
        stages = (
            Stage(layers=range(1), devices=tuple(range(8))),
            Stage(layers=range(1, 2), devices=tuple(range(8, 8 + k))),
        )
        costs = CostModel(model, cluster).pipeline_costs(stages)
        assert costs.send_forward_ms_C.tolist() == [0.25]
        assert costs.all_reduce_ms_S.tolist() == [2 * 7 * 0.25, 2 * (k - 1) * 0.25]


def test_costs_follow_the_cost_model():
    """One stage of two devices, then one of one device; every number worked out by hand."""
    model = even_model(3, 4.0, 8.0)
    cluster = flat_cluster(3, 2.0, latency_us=500.0, duplex=Duplex.HALF)
    stages = (
        Stage(layers=range(2), devices=(0, 1), shares=(0.25, 0.75)),
        Stage(layers=range(2, 3), devices=(2,), recompute=True),
    )
    costs = CostModel(model, cluster).pipeline_costs(stages)
    assert costs.forward_ms_S.tolist() == [6.0, 4.0]  # 8 * 0.75
    assert costs.backward_ms_S.tolist() == [12.0, 12.0]  # 16 * 0.75; 8 + 4
    assert costs.send_forward_ms_C.tolist() == [0.5]  # nothing to send, but a latency to pay
    assert costs.all_reduce_ms_S.tolist() == [1.0, 0.0]  # 2 (k-1) latencies
    assert costs.channel_ms_C.tolist() == [1.0]


def test_a_channel_is_busy_with_both_directions_or_with_the_longer_one():
    there, back = np.array([1.0, 5.0]), np.array([4.0, 2.0])
    one = np.ones(3)

    def channel_ms(half: bool) -> list[float]:
        costs = PipelineCosts(
            forward_ms_S=one,
            backward_ms_S=one,
            send_forward_ms_C=there,
            send_backward_ms_C=back,
            all_reduce_ms_S=one,
            half_duplex=half,
        )
        return costs.channel_ms_C.tolist()

    assert channel_ms(half=True) == [5.0, 7.0]
    assert channel_ms(half=False) == [4.0, 5.0]


def cluster_without(num_devices: int, sender: int, receiver: int) -> Cluster:
    """All paths but one."""
    rows = [[1.0] * num_devices for _ in range(num_devices)]
    rows[sender][receiver] = 0.0
    return Cluster(
        name="gap",
        devices=tuple(Device(name=f"d{index}") for index in range(num_devices)),
        bandwidth_gb_per_s=tuple(map(tuple, rows)),
    )


@pytest.mark.parametrize("num_devices", [4, 24])
@pytest.mark.parametrize("is_within", [True, False])
@pytest.mark.parametrize("is_swapped", [True, False])
def test_a_missing_path_is_named_in_either_direction(num_devices, is_within, is_swapped):
    half = num_devices // 2
    pair = (1, half - 1 if is_within else num_devices - 1)
    if num_devices == 4 and is_within:
        pair = (0, 1)
    sender, receiver = pair[::-1] if is_swapped else pair
    stages = (
        Stage(layers=range(1), devices=tuple(range(half))),
        Stage(layers=range(1, 2), devices=tuple(range(half, num_devices))),
    )
    cost = CostModel(even_model(2, 1.0, 1.0), cluster_without(num_devices, sender, receiver))
    with pytest.raises(PlanFileError) as caught:
        cost.pipeline_costs(stages)
    first, second = (sender, receiver) if is_within else pair
    assert f"devices: 'd{first}' and 'd{second}' have to exchange data" in str(caught.value)


def test_only_pairs_with_paths_both_ways_are_connected():
    connected = CostModel(even_model(1, 1.0, 1.0), cluster_without(3, 0, 2)).connected_DD()
    assert connected.tolist() == [[True, True, False], [True, True, True], [False, True, True]]
    nothing = flat_cluster(2, 0.0)
    assert CostModel(even_model(1, 1.0, 1.0), nothing).connected_DD().tolist() == [
        [True, False],
        [False, True],
    ]


@pytest.mark.parametrize("k", [2, 12])
def test_the_slowest_link_that_the_format_allows_is_a_path(k):
    """1e-6 GB/s is one byte a millisecond."""
    model = even_model(2, 1.0, 1.0)
    layers = tuple(
        replace(layer, output_bytes=144.0, parameter_bytes=144.0) for layer in model.layers
    )
    cost = CostModel(replace(model, layers=layers), flat_cluster(2 * k, 1e-6))
    assert cost.connected_DD().all()
    stages = (
        Stage(layers=range(1), devices=tuple(range(k))),
        Stage(layers=range(1, 2), devices=tuple(range(k, 2 * k))),
    )
    costs = cost.pipeline_costs(stages)
    assert costs.send_forward_ms_C.tolist() == pytest.approx([144 / k / k])
    assert costs.all_reduce_ms_S.tolist() == pytest.approx([2 * (k - 1) / k * 144] * 2)


def test_the_limit_on_replicas_is_all_devices_unless_given():
    model, cluster = even_model(1, 1.0, 1.0), flat_cluster(3)
    assert CostModel(model, cluster).max_replicas == 3
    assert CostModel(model, cluster, max_replicas=2).max_replicas == 2


def test_medians():
    assert median([3.0]) == 3.0
    assert median([5.0, 1.0]) == 3.0
    assert median([9.0, 1.0, 2.0]) == 2.0
    assert median(iter([4.0, 1.0, 9.0, 2.0])) == 3.0
    assert median([1.0, 2.0, 4.0, 8.0, 100.0]) == 4.0
