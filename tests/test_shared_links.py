"""Links that devices share: the rules by hand, the format, reports."""

import random
from dataclasses import replace

import numpy as np
import pytest

import pipeplan
from pipeplan import checker
from pipeplan.cluster import Cluster, Device, HostGroup, expand_hosts
from pipeplan.cost import CostModel
from pipeplan.documents.inputs import cluster_document, parse_cluster
from pipeplan.documents.json_text import parse_json, to_json
from pipeplan.errors import InputError
from pipeplan.pipeline import Stage
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.report.analysis.items import make_items
from pipeplan.simulator import run_plan, run_schedule, timeline_of
from shared_plans import random_cluster, random_plan

# ---------------------------------------------------------------------------- by hand


def two_hosts(devices: int, uplink: float | None, **more) -> Cluster:
    return expand_hosts(
        "two hosts",
        [HostGroup(count=2, devices=devices, bandwidth_gb_per_s=100.0)],
        between_hosts_gb_per_s=1.0,
        uplink_gb_per_s=uplink,
        **more,
    )


def two_layers(output_bytes: float = 0.0, parameter_bytes: float = 0.0) -> ModelProfile:
    layer = LayerProfile(
        name="a",
        forward_ms=1,
        backward_ms=1,
        output_bytes=output_bytes,
        gradient_bytes=0,
        parameter_bytes=parameter_bytes,
    )
    return ModelProfile(name="two", microbatch_size=4, layers=(layer, replace(layer, name="b")))


def run_of(model: ModelProfile, cluster: Cluster, stages: list[Stage], codes) -> object:
    costs = CostModel(model, cluster).pipeline_costs(stages)
    return timeline_of(costs, run_schedule(costs, np.array(codes, dtype=np.int32)))


def test_four_pairs_over_one_card():
    # 4 MB in four flows of 1 MB. Alone each would take 1 ms at 1 GB/s; the card carries 1 GB/s.
    stages = [Stage(layers=range(1), devices=(0, 1)), Stage(layers=range(1, 2), devices=(2, 3))]
    timeline = run_of(two_layers(4e6), two_hosts(2, 1.0), stages, [[0, -1], [0, -1]])
    assert timeline.transfer_end_ms_C2M[0, 0, 0] - timeline.transfer_start_ms_C2M[0, 0, 0] == 4.0


def test_ring_crosses_each_card_once():
    # Four devices, 2 * 3/4 * 4 MB = 6 MB in each flow, and one of them leaves each host.
    stages = [Stage(layers=range(2), devices=(0, 2, 1, 3))]
    timeline = run_of(two_layers(0.0, 2e6), two_hosts(2, 0.5), stages, [[0, -1]])
    assert timeline.all_reduce_end_ms_S[0] - timeline.all_reduce_start_ms_S[0] == 12.0


def test_hosts_of_a_ring_stay_together_however_devices_are_listed():
    # In the order of the list alone, a, b, a, b, two flows would leave each host.
    devices = tuple(Device(name=f"{h}{i}", host=h) for i in range(2) for h in "ab")
    cluster = Cluster(
        name="mixed",
        devices=devices,
        bandwidth_gb_per_s=((1.0,) * 4,) * 4,
        uplink_gb_per_s=0.5,
    )
    stages = [Stage(layers=range(2), devices=(0, 1, 2, 3))]
    timeline = run_of(two_layers(0.0, 2e6), cluster, stages, [[0, -1]])
    assert timeline.all_reduce_end_ms_S[0] - timeline.all_reduce_start_ms_S[0] == 12.0


def test_a_flow_that_ends_leaves_its_part_to_the_others():
    # Both stages' rings leave host h0 together: 1 MB and 3 MB, 1 GB/s for both. Each has half until
    # the smaller one ends after 2 ms; the other one then has 2 MB left, and all of the card.
    model = ModelProfile(
        name="two",
        microbatch_size=4,
        layers=tuple(
            LayerProfile(
                name=str(i), forward_ms=2, backward_ms=2, output_bytes=0, parameter_bytes=size
            )
            for i, size in enumerate((1e6, 3e6))
        ),
    )
    stages = [Stage(layers=range(1), devices=(0, 2)), Stage(layers=range(1, 2), devices=(1, 3))]
    cluster = two_hosts(2, 1.0)
    timeline = run_of(model, cluster, stages, [[0, -1], [0, -1]])
    # Stage 1 ends its backward at 3 and stage 0 at 4: for 1 ms the larger ring is alone.
    assert timeline.all_reduce_start_ms_S.tolist() == [4.0, 3.0]
    assert timeline.all_reduce_end_ms_S.tolist() == [6.0, 7.0]


def test_nothing_is_taken_before_the_latency_is_over():
    stages = [Stage(layers=range(1), devices=(0,)), Stage(layers=range(1, 2), devices=(2,))]
    cluster = two_hosts(2, 0.5, latency_us=500.0)
    timeline = run_of(two_layers(1e6), cluster, stages, [[0, -1], [0, -1]])
    assert timeline.transfer_end_ms_C2M[0, 0, 0] - timeline.transfer_start_ms_C2M[0, 0, 0] == 2.5


def test_devices_of_a_host_do_not_use_its_card():
    stages = [Stage(layers=range(1), devices=(0,)), Stage(layers=range(1, 2), devices=(1,))]
    timeline = run_of(two_layers(1e8), two_hosts(2, 1e-3), stages, [[0, -1], [0, -1]])
    assert timeline.transfer_end_ms_C2M[0, 0, 0] - timeline.transfer_start_ms_C2M[0, 0, 0] == 1.0


def test_plans_are_checked_by_the_true_times():
    cluster = two_hosts(2, 0.1)
    made = pipeplan.plan(pipeplan.zoo.model("vgg19"), cluster, 8, planner="gpipe")
    assert checker.check(made).ok
    wide = replace(cluster, uplink_gb_per_s=None)
    assert not checker.check(replace(made, cluster=wide)).ok


# ---------------------------------------------------------------------------- the format


def shorthand(**fields):
    return {
        "format": "pipeplan.cluster/1",
        "name": "c",
        "hosts": [{"count": 2, "devices": 2, "bandwidth_gb_per_s": 10}, {"devices": 1}],
        "between_hosts_gb_per_s": 1,
        **fields,
    }


def links_of(document) -> dict[str, tuple[list[int], float, float]]:
    return {
        link.name: (sorted(link.devices), link.out_gb_per_s, link.in_gb_per_s)
        for link in parse_cluster(document).links
    }


def test_one_uplink_for_all_hosts():
    assert links_of(shorthand(uplink_gb_per_s=2)) == {
        "uplink of h0": ([0, 1], 2, 2),
        "uplink of h1": ([2, 3], 2, 2),
        "uplink of h2": ([4], 2, 2),
    }


def test_uplinks_by_name_go_before_the_groups_and_these_before_the_one_number():
    hosts = [
        {"count": 2, "devices": 2, "bandwidth_gb_per_s": 10, "uplink_gb_per_s": 3},
        {"devices": 1},
    ]
    by_name = links_of(shorthand(hosts=hosts, uplink_gb_per_s={"h1": 5}))
    assert {name: numbers[1] for name, numbers in by_name.items()} == {
        "uplink of h0": 3,
        "uplink of h1": 5,
    }
    for_all = links_of(shorthand(hosts=hosts, uplink_gb_per_s=7))
    assert [numbers[1] for numbers in for_all.values()] == [3, 3, 7]


def test_shared_links_of_hosts_and_devices():
    shared = [{"name": "rack", "members": ["h0", "h2d0"], "gb_per_s": 4, "in_gb_per_s": 6}]
    assert links_of(shorthand(shared=shared)) == {"rack": ([0, 1, 4], 4, 6)}


def test_names_of_hosts():
    hosts = [
        {"name": "fast", "devices": 2, "bandwidth_gb_per_s": 1},
        {"count": 2, "names": ["x", "y"], "devices": 1},
        {"devices": 1},
    ]
    cluster = parse_cluster(shorthand(hosts=hosts))
    assert [device.name for device in cluster.devices] == ["fastd0", "fastd1", "xd0", "yd0", "h3d0"]
    assert [device.host for device in cluster.devices] == ["fast", "fast", "x", "y", "h3"]


def test_written_and_read_again():
    for seed in range(40):
        cluster = random_cluster(random.Random(seed))
        again = parse_cluster(parse_json(to_json(cluster_document(cluster))))
        assert again == cluster
        assert again.links == cluster.links


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"uplink_gb_per_s": 0}, "uplink_gb_per_s: 0 is not above zero"),
        ({"uplink_gb_per_s": {"h9": 1}}, "uplink_gb_per_s: 'h9' is no host of the cluster"),
        ({"uplink_gb_per_s": {"h0": -1}}, "uplink_gb_per_s['h0']: -1 is negative"),
        ({"uplink_gb_per_s": "fast"}, 'uplink_gb_per_s: "fast" is text, not a number or an object'),
        ({"uplink_gb_per_s": [1]}, "uplink_gb_per_s: is a list, not a number or an object"),
        ({"shared": [{"name": "x", "members": [], "gb_per_s": 1}]}, "shared[0].members: is empty"),
        (
            {"shared": [{"name": "x", "members": ["h7"], "gb_per_s": 1}]},
            "shared[0].members[0]: 'h7' is no host and no device of the cluster",
        ),
        (
            {"shared": [{"name": "x", "members": ["h0"], "gb_per_s": 0}]},
            "shared[0].gb_per_s: 0 is not above zero",
        ),
        ({"shared": [{"name": "x", "members": ["h0"]}]}, "shared[0].gb_per_s: is missing"),
        (
            {"hosts": [{"count": 2, "devices": 1, "name": "x"}]},
            "hosts[0].name: names one host, not 2; give names instead",
        ),
        (
            {"hosts": [{"count": 2, "devices": 1, "names": ["x"]}]},
            "hosts[0].names: has 1 for 2 hosts",
        ),
        (
            {"hosts": [{"count": 2, "devices": 1, "names": ["x", "x"]}]},
            "hosts: 'x' is the name of two hosts; names are unique",
        ),
    ],
)
def test_refused(fields, message):
    with pytest.raises(InputError) as caught:
        parse_cluster(shorthand(**fields))
    assert message in str(caught.value)


# ---------------------------------------------------------------------------- the report


def test_the_report_shows_the_true_times(tmp_path):
    """Transfers are drawn as long as they take beside others; a page and a trace can be made."""
    for seed in range(12):
        plan = random_plan(seed)
        costs, run = run_plan(plan)
        transfers = timeline_of(costs, run).transfer_end_ms_C2M.ravel()
        items = make_items(costs, run)
        first = run.order_SM2.size
        assert items.end_ms_N[first : first + transfers.size].tolist() == transfers.tolist()
    made = pipeplan.plan(pipeplan.zoo.model("vgg19"), two_hosts(2, 1.0), 8)
    pipeplan.write_report(made, tmp_path / "page.html")
    pipeplan.write_trace(made, tmp_path / "trace.json")
