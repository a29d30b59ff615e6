"""Links that devices share: the format, simulator and plain replay, the rules by hand."""

import random
from dataclasses import replace

import numpy as np
import pytest

import pipeplan
from pipeplan import checker
from pipeplan.cluster import Cluster, Device, Duplex, HostGroup, expand_hosts
from pipeplan.cost import CostModel
from pipeplan.documents.inputs import cluster_document, parse_cluster
from pipeplan.documents.json_text import parse_json, to_json
from pipeplan.errors import InputError
from pipeplan.pipeline import Plan, Schedule, Stage
from pipeplan.plain_flows import longest_times, replay_flows
from pipeplan.plain_sharing import Sharing
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.report.analysis.items import make_items
from pipeplan.schedules import run_pe, schedule_guarantee_ms
from pipeplan.shared_links import SharedLink
from pipeplan.simulator import Preference, run_list, run_plan, run_schedule, timeline_of

# ---------------------------------------------------------------------------- random plans


def random_cluster(rng: random.Random) -> Cluster:
    num_devices = rng.randint(2, 9)
    hosts = [f"h{rng.randrange(max(1, num_devices // 2))}" for _ in range(num_devices)]
    if rng.random() < 0.5:
        hosts.sort()
    devices = tuple(
        Device(name=f"d{i}", host=host, speed=rng.choice([1, 1, 2, 0.5]))
        for i, host in enumerate(hosts)
    )
    everyone = range(num_devices)
    rates = [
        [rng.choice([1.0, 2.0, 4.0, 10 ** rng.uniform(-1, 1)]) for _ in everyone] for _ in everyone
    ]
    waits = [[rng.choice([0.0, 5.0, 100.0]) for _ in everyone] for _ in everyone]
    named = {host: rng.choice([0.5, 1.0, 3.0]) for host in sorted(set(hosts)) if rng.random() < 0.7}
    uplinks = rng.choice([None, 1.0, 2.0, named or None])
    shared = tuple(
        SharedLink(
            name=f"s{i}",
            members=tuple(rng.sample([d.name for d in devices], rng.randint(1, num_devices))),
            gb_per_s=rng.choice([0.5, 1.0, 2.0, 5.0]),
            in_gb_per_s=rng.choice([None, 0.7, 3.0]),
        )
        for i in range(rng.randint(0 if uplinks else 1, 3))
    )
    return Cluster(
        name="random",
        devices=devices,
        bandwidth_gb_per_s=tuple(map(tuple, rates)),
        latency_us=rng.choice([0.0, 50.0, tuple(map(tuple, waits))]),
        duplex=rng.choice(list(Duplex)),
        uplink_gb_per_s=uplinks,
        shared=shared,
    )


def random_model(rng: random.Random) -> ModelProfile:
    def some_bytes() -> float:
        return rng.choice([0.0, 1e6, 2e6, 5e6, float(rng.randint(1, 10**7))])

    def some_ms() -> float:
        return rng.choice([0.0, 1.0, 2.0, rng.uniform(0.1, 5)])

    return ModelProfile(
        name="random",
        microbatch_size=8,
        layers=tuple(
            LayerProfile(
                name=str(i),
                forward_ms=some_ms(),
                backward_ms=some_ms(),
                output_bytes=some_bytes(),
                gradient_bytes=some_bytes(),
                parameter_bytes=some_bytes(),
            )
            for i in range(rng.randint(1, 8))
        ),
    )


def random_stages(rng: random.Random, model: ModelProfile, cluster: Cluster) -> tuple[Stage, ...]:
    num_layers, num_devices = len(model.layers), cluster.num_devices
    num_stages = rng.randint(1, min(num_layers, num_devices))
    cuts = [0, *sorted(rng.sample(range(1, num_layers), num_stages - 1)), num_layers]
    order = rng.sample(range(num_devices), num_devices)
    used = rng.randint(num_stages, num_devices)
    sets = [0, *sorted(rng.sample(range(1, used), num_stages - 1)), used]
    stages = []
    for n in range(num_stages):
        devices = tuple(order[sets[n] : sets[n + 1]])
        parts = [rng.randint(1, 4) for _ in devices]
        shares = tuple(part / sum(parts) for part in parts) if rng.random() < 0.4 else None
        stages.append(Stage(layers=range(cuts[n], cuts[n + 1]), devices=devices, shares=shares))
    return tuple(stages)


def random_plan(seed: int, preference: Preference | None = None) -> Plan:
    rng = random.Random(seed)
    cluster, model = random_cluster(rng), random_model(rng)
    stages = random_stages(rng, model, cluster)
    microbatches = rng.randint(1, 12)
    costs = CostModel(model, cluster).pipeline_costs(stages)
    caps = [rng.randint(1, microbatches) for _ in stages]
    chosen = preference or rng.choice(list(Preference))
    run = run_list(costs, microbatches, chosen, caps)
    return Plan(
        planner="test",
        model=model,
        cluster=cluster,
        microbatches=microbatches,
        stages=stages,
        schedule=Schedule.from_codes(run.order_SM2),
    )


COUNTS = [pytest.param(250, id="some"), pytest.param(6000, id="many", marks=pytest.mark.full)]


@pytest.mark.parametrize("count", COUNTS)
def test_simulator_and_plain_replay_agree(count):
    for seed in range(count):
        plan = random_plan(seed)
        costs, run = run_plan(plan)
        block_ends, ring_ends = replay_flows(plan, costs)
        assert run.end_ms_S.tolist() == pytest.approx(ring_ends, rel=1e-9, abs=1e-9), seed
        ends = timeline_of(costs, run).block_end_ms_SM2.tolist()
        for mine, theirs in zip(ends, block_ends, strict=True):
            assert mine == pytest.approx(list(theirs), rel=1e-9, abs=1e-9), seed


@pytest.mark.parametrize("count", COUNTS)
def test_every_sharing_is_fair(count, monkeypatch):
    """No link above its capacity; who is below its limit uses a full link and is fastest there."""
    share_links = Sharing.share_links
    sharings = 0

    def judged(self: Sharing) -> None:
        nonlocal sharings
        if not self.has_changed:
            return
        share_links(self)
        sharings += 1
        used = dict.fromkeys(self.capacity, 0.0)
        fastest = dict.fromkeys(self.capacity, 0.0)
        for each in self.under_way:
            assert 0 < each.rate <= each.kind.limit * (1 + 1e-9)
            for side in each.kind.sides:
                used[side] += each.count * each.rate
                fastest[side] = max(fastest[side], each.rate)
        assert all(used[side] <= self.capacity[side] * (1 + 1e-9) for side in used)
        for each in self.under_way:
            assert each.rate >= each.kind.limit * (1 - 1e-9) or any(
                used[side] >= self.capacity[side] * (1 - 1e-9)
                and fastest[side] <= each.rate * (1 + 1e-9)
                for side in each.kind.sides
            )

    monkeypatch.setattr(Sharing, "share_links", judged)
    for seed in range(count // 2):
        plan = random_plan(seed)
        replay_flows(plan, run_plan(plan)[0])
    assert sharings > count


@pytest.mark.parametrize("count", COUNTS)
def test_guarantee_of_pe_and_least_times_hold(count):
    for seed in range(count):
        plan = random_plan(seed, Preference.UNIT_PIPELINE)
        costs = CostModel(plan.model, plan.cluster).pipeline_costs(plan.stages)
        run = run_pe(costs, plan.microbatches)
        guarantee_ms = schedule_guarantee_ms(costs, plan.microbatches)
        assert run.iteration_ms <= guarantee_ms * (1 + 1e-9), seed
        channels_ms, rings_ms = longest_times(plan)
        busiest_ms = max([*(costs.forward_ms_S + costs.backward_ms_S), *channels_ms])
        rounds = plan.microbatches + 4 * (len(plan.stages) - 1)
        assert guarantee_ms == pytest.approx(rounds * busiest_ms + max(rings_ms)), seed
        timeline = timeline_of(costs, run)
        for transfer in timeline.transfers:
            at_least = (
                costs.send_forward_ms_C[transfer.channel]
                if transfer.kind.value == "F"
                else costs.send_backward_ms_C[transfer.channel]
            )
            assert transfer.end_ms - transfer.start_ms >= at_least * (1 - 1e-9) - 1e-9, seed
        reduced_ms = timeline.all_reduce_end_ms_S - timeline.all_reduce_start_ms_S
        assert (reduced_ms >= costs.all_reduce_ms_S * (1 - 1e-9) - 1e-9).all(), seed


def test_links_that_never_bind_change_nothing():
    for seed in range(60):
        plan = random_plan(seed)
        plain = replace(plan.cluster, uplink_gb_per_s=None, shared=())
        wide = replace(plain, uplink_gb_per_s=1e9)
        alone, shared = (
            run_plan(replace(plan, cluster=cluster))[1].iteration_ms for cluster in (plain, wide)
        )
        assert shared == pytest.approx(alone, rel=1e-12), seed


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
