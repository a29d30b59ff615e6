"""Clusters of hundreds to 10,000 devices: the same costs by hosts as by pairs, and quick ends."""

import _thread
import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

import pipeplan as pp
from instances import random_model
from pipeplan import _core
from pipeplan.cluster import Cluster, HostGroup, HostMatrix, expand_hosts
from pipeplan.cost import CostModel
from pipeplan.errors import ClusterError, PlanFileError
from pipeplan.host_links import MAX_FULL_DEVICES
from pipeplan.pipeline import Stage
from pipeplan.planning.planner.placement import placed_plan
from pipeplan.schedules import PORTFOLIO, SCHEDULES


def hosts(count: int, devices: int = 8, **changes: float) -> Cluster:
    group = HostGroup(count=count, devices=devices, bandwidth_gb_per_s=50.0)
    between = {"between_hosts_gb_per_s": 5.0, **changes}
    return expand_hosts("hosts", [group], **between)


def in_full(cluster: Cluster) -> Cluster:
    """The same cluster with a number for each pair of devices."""
    return replace(cluster, bandwidth_gb_per_s=tuple(cluster.bandwidth_gb_per_s))


def random_stages(rng: random.Random, num_layers: int, num_devices: int) -> tuple[Stage, ...]:
    devices = rng.sample(range(num_devices), num_devices)
    cut, first, second = rng.randint(1, num_layers - 1), rng.randint(1, 40), rng.randint(41, 90)
    shares = [rng.uniform(0.5, 1) for _ in range(first)]
    total = sum(shares)
    return (
        Stage(
            layers=range(cut),
            devices=tuple(sorted(devices[:first])),
            shares=tuple(x / total for x in shares) if rng.random() < 0.5 else None,
        ),
        Stage(layers=range(cut, num_layers), devices=tuple(sorted(devices[first:second]))),
    )


def mixed_hosts(rng: random.Random) -> Cluster:
    groups = [
        HostGroup(
            count=rng.randint(1, 60),
            devices=devices,
            bandwidth_gb_per_s=rng.uniform(1, 50),
            speed=rng.choice([0.5, 1.0]),
        )
        for devices in (1, 2, 8)
    ]
    groups.append(HostGroup(devices=MAX_FULL_DEVICES, bandwidth_gb_per_s=rng.uniform(1, 50)))
    return expand_hosts(
        "mixed", groups, between_hosts_gb_per_s=rng.uniform(1, 50), latency_us=rng.choice([0, 7.5])
    )


def test_costs_by_hosts_are_those_by_pairs_to_the_last_bit():
    for seed in range(10):
        rng = random.Random(seed)
        cluster, model = mixed_hosts(rng), random_model(rng, 6)
        by_hosts, by_pairs = CostModel(model, cluster), CostModel(model, in_full(cluster))
        assert by_hosts.host_links is not None
        assert by_pairs.host_links is None
        stages = random_stages(rng, 6, cluster.num_devices)
        ours, theirs = by_hosts.pipeline_costs(stages), by_pairs.pipeline_costs(stages)
        for name in ("forward_ms_S", "send_forward_ms_C", "send_backward_ms_C", "all_reduce_ms_S"):
            assert getattr(ours, name).tolist() == getattr(theirs, name).tolist(), (seed, name)
        assert (by_hosts.bytes_per_ms_DD == by_pairs.bytes_per_ms_DD).all()
        even = tuple(replace(stage, shares=None) for stage in stages)
        times = [
            _core.rule_times(instance, placed_plan(instance, even), np.inf)
            for instance in (by_hosts.kernel_instance(4), by_pairs.kernel_instance(4))
        ]
        assert times[0] == times[1]


def test_planning_on_an_order_sees_the_same_links_by_hosts_as_by_pairs():
    for seed in range(2):
        rng = random.Random(seed)
        cluster, model = mixed_hosts(rng), random_model(rng, 6)
        sizes = np.array([1, 2, 5, 8, 64], dtype=np.int32)
        found = [
            _core.plan_on_order(cost.kernel_instance(4), sizes, 2, np.inf, 3, 1, np.inf, 4)
            for cost in (CostModel(model, cluster), CostModel(model, in_full(cluster)))
        ]
        assert found[0][0] == found[1][0]
        assert [p.devices for p in found[0][1]] == [p.devices for p in found[1][1]]
        # Whole units of four devices; only the last one may be smaller.
        for placed in found[0][1]:
            for devices in placed.devices:
                assert devices[0] % 4 == 0
                assert len(devices) % 4 == 0 or devices[-1] == cluster.num_devices - 1


def test_a_matrix_of_hosts_looks_like_its_rows():
    cluster = expand_hosts(
        "few",
        [HostGroup(count=2, devices=2, bandwidth_gb_per_s=9.0), HostGroup(count=2, devices=1)],
        between_hosts_gb_per_s=3.0,
    )
    matrix, rows = cluster.bandwidth_gb_per_s, tuple(cluster.bandwidth_gb_per_s)
    assert isinstance(matrix, HostMatrix)
    assert rows[0] == (9.0, 9.0, 3.0, 3.0, 3.0, 3.0)
    assert rows[4] == rows[5] == (3.0,) * 6
    assert matrix == rows
    assert matrix != rows[:-1]
    assert matrix != (*rows[:-1], (1.0,) * 6)
    assert hash(matrix) == hash(rows)
    assert np.array(matrix).tolist() == [list(row) for row in rows]
    assert in_full(cluster) == cluster


def test_hosts_without_a_path_between_them_are_refused_by_name():
    cost = CostModel(random_model(random.Random(0), 4), hosts(80, between_hosts_gb_per_s=0))
    with pytest.raises(PlanFileError, match="'h0d0' and 'h1d0' have to exchange data"):
        cost.pipeline_costs((Stage(layers=range(4), devices=(0, 8)),))
    with pytest.raises(PlanFileError, match="'h0d0' and 'h1d0' have to exchange data"):
        cost.pipeline_costs(
            (Stage(layers=range(2), devices=(0,)), Stage(layers=range(2, 4), devices=(8,)))
        )


def test_ten_thousand_devices_are_planned_checked_and_read_again(tmp_path):
    model = random_model(random.Random(1), 12)
    made = pp.plan(model, hosts(1250), 4, effort=0.01)
    assert pp.check(made).ok
    pp.write_plan(made, tmp_path / "p.json")
    assert pp.read_plan(tmp_path / "p.json") == made
    with pytest.raises(ClusterError, match="10008 are more than the 10000 supported"):
        hosts(1251)


def test_a_full_matrix_has_fewer_devices():
    cluster = hosts(513)
    with pytest.raises(ClusterError, match=r"4104 are more than the 4096 .* shorthand `hosts`"):
        in_full(cluster)


@pytest.mark.parametrize("limit_s", [0.001, 0.3])
def test_a_time_limit_holds_at_4096_devices(limit_s):
    model, cluster = random_model(random.Random(2), 60), hosts(512)
    began_s = time.process_time()
    made = pp.plan(model, cluster, 16, time_limit_s=limit_s, effort=100, num_threads=1)
    assert time.process_time() - began_s < limit_s + 0.5  # 0.2 s, and room for slow machines
    assert pp.check(made).ok


def random_links(num_devices: int, seed: int, speeds: tuple[float, ...] = (1.0,)) -> Cluster:
    rng = random.Random(seed)
    devices = range(num_devices)
    return Cluster(
        name="random",
        devices=tuple(pp.Device(name=str(u), speed=rng.choice(speeds)) for u in devices),
        bandwidth_gb_per_s=tuple(
            tuple(10 ** rng.uniform(0, 1.5) for _ in devices) for _ in devices
        ),
    )


def seconds_after_the_limit(model, cluster, limit_s: float, **options) -> float:
    """What is computed after the limit, so that a busy machine changes nothing."""
    cpu_s: list[float] = []
    timer = threading.Timer(limit_s, lambda: cpu_s.append(time.process_time()))
    timer.start()
    one_stage = {"positions": 1, "split_backward": False, **options}
    pp.plan(model, cluster, 16, time_limit_s=limit_s, effort=100, num_threads=1, **one_stage)
    timer.join()
    return time.process_time() - cpu_s[0]


@pytest.mark.parametrize("limit_s", [0.2, 0.6])
def test_a_time_limit_holds_at_1024_devices_with_random_links(limit_s):
    model, cluster = random_model(random.Random(3), 100), random_links(1024, 3)
    assert seconds_after_the_limit(model, cluster, limit_s) < 0.4  # 0.2 s, and room


SLOW_AND_FAST = (0.4, 0.6, 1.0, 1.3, 2.0)


@pytest.mark.parametrize(
    ("num_layers", "cluster", "limit_s"),
    [
        pytest.param(1500, random_links(64, 4), 0.5, id="orders"),
        pytest.param(700, random_links(64, 5), 0.9, id="relaxed"),
        pytest.param(60, random_links(24, 6), 0.3, id="near-sets"),
        pytest.param(3000, random_links(8, 7), 0.2, id="sets"),
        pytest.param(200, random_links(20, 8, SLOW_AND_FAST), 0.6, id="prices"),
        pytest.param(100, random_links(64, 9, SLOW_AND_FAST), 0.6, id="speeds"),
        pytest.param(100, hosts(128, uplink_gb_per_s=5.0), 0.6, id="cards"),
        pytest.param(5000, random_links(16, 10), 0.2, id="layers"),
    ],
)
def test_a_time_limit_holds_wherever_it_falls(num_layers, cluster, limit_s):
    """Each of these is busy in another kernel when its time is up."""
    model = random_model(random.Random(1), num_layers)
    assert seconds_after_the_limit(model, cluster, limit_s) < 0.4


def test_ctrl_c_ends_planning_at_4096_devices():
    model, cluster = random_model(random.Random(2), 60), hosts(512)
    timer = threading.Timer(0.4, _thread.interrupt_main)
    timer.start()
    began_s = time.process_time()
    with pytest.raises(pp.PlanningInterrupted):
        pp.plan(model, cluster, 16, effort=100, num_threads=1)
    timer.join()
    assert time.process_time() - began_s < 2


def test_estimates_of_many_microbatches_are_close():
    """Plans are ranked by them; what is kept is simulated in full."""
    num = 1500
    for seed in range(15):
        model = random_model(random.Random(seed), 6)
        cost = CostModel(model, hosts(1))
        instance = cost.kernel_instance(num)
        stages = (
            Stage(layers=range(2), devices=(0,)),
            Stage(layers=range(2, 4), devices=(1, 2)),
            Stage(layers=range(4, 6), devices=(3,)),
        )
        placed = placed_plan(instance, stages)
        exact = [
            SCHEDULES[rule](cost.pipeline_costs(stages), num).iteration_ms for rule in PORTFOLIO
        ]
        rank_ms, times = _core.judge_plan(instance, placed, np.inf, np.inf)
        assert rank_ms == pytest.approx(exact[0], rel=5e-3)
        simulated = [ms for ms in times if ms < np.inf]
        assert simulated
        assert min(simulated) == pytest.approx(min(exact), rel=1e-6)
        for ms, truth in zip(times, exact, strict=True):
            assert ms == np.inf or ms == pytest.approx(truth, rel=1e-9)


def test_equal_devices_need_one_order():
    model = random_model(random.Random(3), 30)
    cluster = expand_hosts("one", [HostGroup(devices=200, bandwidth_gb_per_s=25.0)])
    cost = CostModel(model, cluster)
    assert cost.kernel_instance(4).has_equal_devices
    assert not CostModel(model, hosts(2)).kernel_instance(4).has_equal_devices
    made = pp.plan(model, cluster, 512, effort=0.1)
    assert pp.check(made).ok
