"""The clusters' shapes, links and seeds."""

import math
from dataclasses import replace

import pytest

from pipeplan import zoo
from pipeplan.cluster import Cluster
from pipeplan.errors import InputError
from pipeplan.zoo import clusters

NAMES = [
    "1x8-nvlink",
    "1x8-pcie",
    "4x2-10g",
    "4x2-25g",
    "4x2-100g",
    "2x8-100g",
    "8x8-100g",
    "mixed-hosts",
    "random-8",
    "4x2-10g-no-shared-card",
    "4x2-25g-no-shared-card",
    "4x2-100g-no-shared-card",
    "2x8-100g-no-shared-card",
    "8x8-100g-no-shared-card",
    "mixed-hosts-no-shared-card",
]
SHARED = [name for name in NAMES if f"{name}-no-shared-card" in NAMES]


def links(cluster: Cluster, *, inside: bool) -> set[float]:
    return {
        cluster.bandwidth_gb_per_s[i][j]
        for i, u in enumerate(cluster.devices)
        for j, v in enumerate(cluster.devices)
        if i != j and (u.host == v.host) == inside
    }


def test_the_names_are_frozen_and_are_what_the_catalogue_has() -> None:
    assert list(zoo.CLUSTER_NAMES) == NAMES == list(clusters.RECIPES)


@pytest.mark.parametrize("name", NAMES)
def test_every_pair_has_a_path_and_a_latency(name: str) -> None:
    cluster, figures = zoo.cluster(name), zoo.cluster_figures(name)
    assert cluster.name == figures.name == name
    assert figures.description
    assert "\n" not in figures.description
    every_link = links(cluster, inside=True) | links(cluster, inside=False)
    assert min(every_link) == figures.slowest_link_gb_per_s > 0
    assert max(every_link) == figures.fastest_link_gb_per_s
    assert isinstance(cluster.latency_us, tuple)
    for i, row in enumerate(cluster.latency_us):
        assert all(latency_us > 0 for j, latency_us in enumerate(row) if i != j)
    assert all(device.memory_gb for device in cluster.devices)


@pytest.mark.parametrize("name", [name for name in NAMES if "x" in name and name[0].isdigit()])
def test_the_name_says_hosts_and_devices(name: str) -> None:
    hosts, devices = (int(number) for number in name.split("-")[0].split("x"))
    figures = zoo.cluster_figures(name)
    assert (figures.num_hosts, figures.num_devices) == (hosts, hosts * devices)
    assert all(device.speed == 1 for device in zoo.cluster(name).devices)


@pytest.mark.parametrize("name", [name for name in NAMES if "0g" in name or "25g" in name])
def test_the_name_says_the_rate_between_hosts(name: str) -> None:
    gbit_per_s = int(name.split("-")[1].removesuffix("g"))
    assert links(zoo.cluster(name), inside=False) == {gbit_per_s / 8}


@pytest.mark.parametrize("name", SHARED)
def test_hosts_share_a_card_as_fast_as_a_pair_of_hosts(name: str) -> None:
    cluster = zoo.cluster(name)
    (between,) = links(cluster, inside=False)
    assert cluster.uplink_gb_per_s == between
    assert len(cluster.links) == zoo.cluster_figures(name).num_hosts
    papers = zoo.cluster(f"{name}-no-shared-card")
    assert papers.links == ()
    assert replace(papers, name=name, uplink_gb_per_s=between) == cluster


def test_links_inside_a_host() -> None:
    assert links(zoo.cluster("1x8-nvlink"), inside=True) == {130.0}
    assert links(zoo.cluster("1x8-pcie"), inside=True) == {12.0}
    assert links(zoo.cluster("4x2-10g"), inside=True) == {12.0}
    assert links(zoo.cluster("8x8-100g"), inside=True) == {250.0}


def test_latency_is_larger_between_hosts() -> None:
    cluster = zoo.cluster("4x2-10g")
    assert isinstance(cluster.latency_us, tuple)
    assert cluster.latency_us[0][:4] == (0.0, 5.0, 25.0, 25.0)
    assert cluster.latency_us[3][:4] == (25.0, 25.0, 5.0, 0.0)


def test_mixed_hosts_differ_in_everything() -> None:
    cluster, figures = zoo.cluster("mixed-hosts"), zoo.cluster_figures("mixed-hosts")
    per_host: dict[str, int] = {}
    for device in cluster.devices:
        per_host[device.host] = per_host.get(device.host, 0) + 1
    assert sorted(per_host.values()) == [2, 2, 4, 4]
    assert {device.speed for device in cluster.devices} == {2.5, 1.0, 0.6}
    assert (figures.smallest_memory_gb, figures.largest_memory_gb) == (16.0, 80.0)
    assert links(cluster, inside=True) == {250.0, 130.0, 12.0}


def test_a_random_cluster_is_its_seed() -> None:
    assert zoo.cluster("random-8") == zoo.cluster("random-8", seed=0)
    assert zoo.cluster("random-8", seed=7) == zoo.cluster("random-8", seed=7)
    first, other = zoo.cluster("random-8"), zoo.cluster("random-8", seed=7)
    assert first.bandwidth_gb_per_s != other.bandwidth_gb_per_s
    assert other.name == "random-8, seed 7"
    # 100 ** random() for the first and third draw of random.Random(0), 0.84442 and 0.42057;
    # a change here changes everybody's benchmarks.
    assert first.bandwidth_gb_per_s[0][1:3] == (48.848, 6.937)


def test_random_links_are_directed_and_log_uniform() -> None:
    every_link = [
        gb_per_s
        for seed in range(40)
        for i, row in enumerate(zoo.cluster("random-8", seed=seed).bandwidth_gb_per_s)
        for j, gb_per_s in enumerate(row)
        if i != j
    ]
    assert all(1 <= gb_per_s <= 100 for gb_per_s in every_link)
    # Log-uniform from 1 to 100: the median is 10, and the mean of the logarithm log(10).
    mean = sum(map(math.log10, every_link)) / len(every_link)
    assert mean == pytest.approx(1.0, abs=0.05)
    bandwidth = zoo.cluster("random-8").bandwidth_gb_per_s
    assert bandwidth[0][1] != bandwidth[1][0]


def test_the_seed_changes_no_other_cluster() -> None:
    assert zoo.cluster("4x2-10g", seed=5) == zoo.cluster("4x2-10g")


@pytest.mark.parametrize("seed", [None, 1.5, "one"])
def test_a_seed_that_is_no_integer_is_refused(seed: object) -> None:
    with pytest.raises(InputError, match=r"seed: .* is not an integer"):
        zoo.cluster("random-8", seed=seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [zoo.cluster, zoo.cluster_figures])
def test_an_unknown_cluster_is_refused_with_the_nearest_and_all_names(function) -> None:
    with pytest.raises(InputError) as caught:
        function("1x8-nvlnk")
    message = str(caught.value)
    assert "did you mean '1x8-nvlink'?" in message
    assert ", ".join(NAMES) in message
    assert "\n" not in message
