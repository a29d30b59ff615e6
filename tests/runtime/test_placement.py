"""Ranks find their devices, or it is explained why not."""

import pytest

pytest.importorskip("torch")

from instances import flat_cluster
from pipeplan.cluster import Cluster, Device
from pipeplan.errors import RuntimeMismatchError
from pipeplan.pipeline import Plan, Stage
from pipeplan.runtime.placement import Place, place_ranks
from runtime.samples import cut_plan


def plan_on(hosts, stage_devices):
    """A plan whose devices live on these hosts."""
    template = cut_plan(list("abcd"), [0, 1], [1, 1], 1, 4)
    row = (1.0,) * len(hosts)
    cluster = Cluster(
        name="hosts",
        devices=tuple(Device(name=f"g{i}", host=host) for i, host in enumerate(hosts)),
        bandwidth_gb_per_s=(row,) * len(hosts),
    )
    return Plan(
        model=template.model,
        cluster=cluster,
        microbatches=1,
        stages=tuple(
            Stage(layers=range(2 * n, 2 * n + 2), devices=devices)
            for n, devices in enumerate(stage_devices)
        ),
        schedule=template.schedule,
        planner="test",
    )


def places(*hosts):
    return [Place(host=host) for host in hosts]


def test_one_machine_maps_in_order():
    plan = plan_on(["a", "a", "b", "b"], [(2, 0), (3, 1)])
    placement = place_ranks(plan, places(*["here"] * 4), {})
    assert placement.ranks == ((2, 0), (3, 1))
    assert placement.find(3) == (1, 0)


def test_one_machine_with_ranks_for_used_devices_only():
    plan = plan_on(["a", "a", "b", "b"], [(3,), (1,)])
    placement = place_ranks(plan, places("here", "here"), {})
    assert placement.ranks == ((1,), (0,))
    assert placement.device_of == {0: "g1", 1: "g3"}


def test_hosts_by_name_whatever_the_order_of_ranks():
    plan = plan_on(["a", "a", "b", "b"], [(0, 2), (1, 3)])
    placement = place_ranks(plan, places("b", "a", "b", "a"), {})
    assert placement.ranks == ((1, 0), (3, 2))
    assert placement.local_index == (0, 0, 1, 1)


def test_real_names_of_hosts():
    plan = plan_on(["a", "b"], [(0,), (1,)])
    placement = place_ranks(plan, places("node2", "node1"), {"a": "node1", "b": "node2"})
    assert placement.ranks == ((1,), (0,))


def test_ranks_may_say_what_they_are():
    plan = plan_on(["a", "b"], [(0,), (1,)])
    said = [Place(host="x", device_name="g1"), Place(host="y", device_name="g0")]
    assert place_ranks(plan, said, {}).ranks == ((1,), (0,))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (places("x", "y"), r"hosts: the plan names a, b, but ranks run on x \(1\), y \(1\)"),
        (places("a", "a"), "devices: 'g1' on host 'b' has no rank"),
        (places("here"), "ranks: 1 for a plan on 2 devices"),
        (
            [Place(host="x", device_name="g0"), Place(host="x", device_name="g0")],
            "ranks: 0 and 1 are both 'g0'",
        ),
        (
            [Place(host="x", device_name="g0"), Place(host="x", device_name="g9")],
            "ranks: 1 says it is 'g9'",
        ),
    ],
)
def test_mismatch_is_explained(given, message):
    with pytest.raises(RuntimeMismatchError, match=message):
        place_ranks(plan_on(["a", "b"], [(0,), (1,)]), given, {})


def test_samples_are_flat():
    assert flat_cluster(2).num_devices == 2
