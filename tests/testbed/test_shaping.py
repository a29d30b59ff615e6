"""The emulated network: who is where, and what each command says."""

from dataclasses import replace

import pytest

import pipeplan as pp
from instances import flat_cluster
from pipeplan import zoo
from pipeplan.errors import InputError
from pipeplan.testbed.shaping import rank_link, rank_shaping, switch_links, switch_shaping
from pipeplan.testbed.topology import find_topology


def plan_on(cluster):
    return pp.plan(zoo.model("vgg19"), cluster, 4, planner="data-parallel")


def hosts(links=(), **fields):
    """Four devices on two hosts, listed in turns."""
    devices = tuple(pp.Device(name=f"d{i}", host=f"h{i % 2}") for i in range(4))
    return replace(flat_cluster(4, 2.0), devices=devices, shared=links, **fields)


def test_ranks_of_a_host_are_together():
    topology = find_topology(plan_on(hosts()))
    assert topology.devices == (0, 2, 1, 3)
    assert topology.bytes_per_s[0] == (0.0, 2e9, 2e9, 2e9)
    assert topology.switches == ()


def test_nested_links_are_a_tree():
    rack = pp.SharedLink(name="rack", members=("d0", "d1", "d2"), gb_per_s=3.0)
    topology = find_topology(plan_on(hosts((rack,), uplink_gb_per_s={"h0": 1.0})))
    assert [switch.ranks for switch in topology.switches] == [(0, 1, 2), (0, 1)]
    assert [switch.parent for switch in topology.switches] == [None, 0]


def test_a_link_of_all_devices_limits_nothing():
    all_of_them = pp.SharedLink(name="all", members=("h0", "h1"), gb_per_s=0.1)
    assert find_topology(plan_on(hosts((all_of_them,)))).switches == ()


def test_links_that_overlap_are_refused():
    links = tuple(
        pp.SharedLink(name=name, members=members, gb_per_s=1.0)
        for name, members in (("a", ("d0", "d1")), ("b", ("d1", "d2")))
    )
    with pytest.raises(InputError, match="'a' and 'b' overlap"):
        find_topology(plan_on(hosts(links)))


def test_half_duplex_is_refused():
    cluster = replace(flat_cluster(4), duplex=pp.Duplex.HALF)
    with pytest.raises(InputError, match="duplex: is half"):
        find_topology(pp.plan(zoo.model("vgg19"), cluster, 4, planner="gpipe"))
    find_topology(plan_on(cluster))  # one stage has no channel


def test_each_pair_has_its_rate():
    cluster = replace(flat_cluster(2), bandwidth_gb_per_s=((0.0, 0.1), (0.02, 0.0)))
    topology = find_topology(plan_on(cluster))
    lines = list(rank_shaping(topology, 0))
    # 0.1 GB/s of data in packets of 25,000 bytes, of which 66 are headers.
    assert topology.packet_bytes(0, 1) == 25_000
    rate = round(8e8 * 25_014 / 24_948)
    assert any(f"classid 1:11 htb rate {rate}bit ceil {rate}bit" in line for line in lines)
    assert sum("match ip dst 10.77.0.2/32" in line for line in lines) == 1
    assert topology.packet_bytes(1, 0) == 5000
    routes = [line for line in rank_link(topology, 1) if line.startswith("route")]
    assert len(routes) == 1
    assert routes[0].startswith("route add 10.77.0.1/32 dev eth0 mtu lock 5000 ")


def test_a_shared_link_has_a_class_for_each_pair_that_crosses_it():
    topology = find_topology(plan_on(hosts(uplink_gb_per_s={"h0": 1.0})))
    links = list(switch_links(topology, [11, 12, 13, 14]))
    assert "link set up0 master shared0 up" in links
    assert "link set down0 master switch up" in links
    assert "link set port1 master shared0 up" in links
    assert "link set port2 master switch up" in links
    assert any("peer name eth0" in line and line.endswith("netns 13") for line in links)
    lines = [line for line in switch_shaping(topology) if "match ip src" in line]
    assert sum("dev up0" in line for line in lines) == 4
    assert any(
        "dev down0" in line and "src 10.77.0.3/32 match ip dst 10.77.0.1/32" in line
        for line in lines
    )
