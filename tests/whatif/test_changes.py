"""Changes of a cluster: how they are written, and the cluster that comes out."""

import random

import numpy as np
import pytest

from instances import random_cluster
from pipeplan.cluster import Cluster, Device, HostGroup, HostMatrix, expand_hosts
from pipeplan.documents.files import read_cluster, write_cluster
from pipeplan.errors import ClusterError, InputError
from pipeplan.planning.whatif.changed_cluster import apply_changes, known_names
from pipeplan.planning.whatif.changes import AddedHosts, Changes
from pipeplan.planning.whatif.copied_devices import with_copies
from pipeplan.planning.whatif.parsing import parse_added, parse_changes


def pairs(count: int = 3, **fields) -> Cluster:
    """Hosts of two devices, 12 GB/s inside and 1.25 between."""
    group = HostGroup(count=count, devices=2, bandwidth_gb_per_s=12.0, **fields)
    return expand_hosts("pairs", [group], between_hosts_gb_per_s=1.25, latency_us=5.0)


def matrix(cluster: Cluster) -> np.ndarray:
    full = np.array(cluster.bandwidth_gb_per_s, dtype=float)
    np.fill_diagonal(full, 0.0)
    return full


# ------------------------------------------------------------------------------ parsing


def test_options_become_changes():
    changes = parse_changes(
        known_names(pairs()),
        slower=["h1d0=0.5"],
        links=["h0,h1=2.5"],
        lose=["h0d1"],
        add=["2x4:12,memory=24,speed=0.5,between=3,latency=7"],
    )
    assert changes.slower == {"h1d0": 0.5}
    assert changes.links == {("h0", "h1"): 2.5}
    assert changes.lose == ("h0d1",)
    assert changes.add == (
        AddedHosts(
            count=2,
            devices=4,
            bandwidth_gb_per_s=12.0,
            memory_gb=24.0,
            speed=0.5,
            between_gb_per_s=3.0,
            latency_us=7.0,
        ),
    )
    assert changes.title == (
        "2 hosts of 4 devices added, h1d0 at 0.5x speed, h0 to h1 at 2.5 GB/s, h0d1 lost"
    )


def test_names_may_hold_commas_and_equals_signs():
    known = ["a,b", "c=1", "a"]
    changes = parse_changes(known, slower=["c=1=0.5"], links=["a,b,c=1=3"])
    assert changes.slower == {"c=1": 0.5}
    assert changes.links == {("a,b", "c=1"): 3.0}


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("slower", "h1d0", "has no '='"),
        ("slower", "=0.5", "has no '='"),
        ("slower", "h1d0=fast", "'fast' in 'h1d0=fast' is no number"),
        ("slower", "h1d0=0", "is not above zero"),
        ("slower", "h1d0=nan", "is not a finite number"),
        ("links", "h0=1", "is not two names"),
        ("links", "h0,h1=-1", "is negative"),
        ("links", "h0,h1=1e-9", "is below"),
        ("add", "many", "does not begin with hosts x devices"),
        ("add", "2x", "does not begin with hosts x devices"),
        ("add", "2x4,color=3", "'color' is none of between, memory, speed, latency"),
        ("add", "2x4,speed=1,speed=2", "'speed' is given twice"),
        ("add", "0x4", "count: 0 is not at least 1"),
        ("add", "1x4:0.0000001", "is below"),
    ],
)
def test_wrong_options_are_refused(option, text, message):
    with pytest.raises(InputError, match=message):
        parse_changes(known_names(pairs()), **{option: [text]})


@pytest.mark.parametrize("twice", [{"slower": ["a=1", "a=2"]}, {"links": ["a,b=1", "b,a=2"]}])
def test_one_thing_is_changed_once(twice):
    with pytest.raises(InputError, match="is given twice"):
        parse_changes(["a", "b"], **twice)


# ----------------------------------------------------------------------------- applying


def test_a_link_changes_in_both_directions_between_all_devices_of_two_hosts():
    changed = apply_changes(pairs(), Changes(links={("h0", "h2"): 3.0, ("h1d0", "h1d1"): 1.0}))
    expected = matrix(pairs())
    expected[0:2, 4:6] = expected[4:6, 0:2] = 3.0
    expected[2, 3] = expected[3, 2] = 1.0
    assert (matrix(changed.cluster) == expected).all()
    assert changed.index_of == {n: n for n in range(6)}
    assert changed.cluster.name == "pairs, h0 to h2 at 3 GB/s, h1d0 to h1d1 at 1 GB/s"


def test_speeds_are_multiplied_and_a_host_means_its_devices():
    cluster = pairs(speed=2.0)
    changed = apply_changes(cluster, Changes(slower={"h1": 0.5, "h2d0": 1.5})).cluster
    assert [device.speed for device in changed.devices] == [2, 2, 1, 1, 3, 2]
    with pytest.raises(InputError, match="'h1d0' is meant by 'h1' and by 'h1d0'"):
        apply_changes(cluster, Changes(slower={"h1": 0.5, "h1d0": 0.5}))
    with pytest.raises(ClusterError, match=r"speed: 0\.0002 is below 0\.001"):
        apply_changes(pairs(speed=0.2), Changes(slower={"h1d0": 0.001}))


def test_lost_devices_leave_the_others_as_they_were():
    cluster = pairs()
    changed = apply_changes(cluster, Changes(lose=("h0d1", "h2")))
    assert [device.name for device in changed.cluster.devices] == ["h0d0", "h1d0", "h1d1"]
    assert changed.index_of == {0: 0, 2: 1, 3: 2}
    kept = np.ix_([0, 2, 3], [0, 2, 3])
    assert (matrix(changed.cluster) == matrix(cluster)[kept]).all()
    with pytest.raises(ClusterError, match="no device is left"):
        apply_changes(cluster, Changes(lose=("h0", "h1", "h2")))


@pytest.mark.parametrize("seed", range(20))
def test_random_losses_agree_with_the_full_matrix(seed):
    rng = random.Random(seed)
    cluster = random_cluster(rng, rng.randint(2, 7), gaps=True)
    lost = rng.sample(range(cluster.num_devices), rng.randint(1, cluster.num_devices - 1))
    kept = [n for n in range(cluster.num_devices) if n not in lost]
    names = tuple(cluster.devices[n].name for n in lost)
    changed = apply_changes(cluster, Changes(lose=names)).cluster
    assert (matrix(changed) == matrix(cluster)[np.ix_(kept, kept)]).all()
    if not isinstance(cluster.latency_us, float):
        latency = np.array(cluster.latency_us)[np.ix_(kept, kept)]
        assert (np.array(changed.latency_us) == latency).all()
    assert changed.duplex is cluster.duplex


def test_new_hosts_are_like_the_old_ones():
    changed = apply_changes(pairs(memory_gb=16.0), Changes(add=(parse_added("2x4"),))).cluster
    expected = expand_hosts(
        "",
        [
            HostGroup(count=3, devices=2, bandwidth_gb_per_s=12, memory_gb=16.0),
            HostGroup(count=2, devices=4, bandwidth_gb_per_s=12, memory_gb=16.0),
        ],
        between_hosts_gb_per_s=1.25,
        latency_us=5.0,
    )
    assert changed.devices == expected.devices
    assert isinstance(changed.bandwidth_gb_per_s, HostMatrix)
    assert (matrix(changed) == matrix(expected)).all()
    assert changed.latency_us == 5.0


def test_new_hosts_with_settings_of_their_own():
    added = parse_added("1x2:6,between=2,memory=8,speed=0.5,latency=50")
    changed = apply_changes(pairs(), Changes(add=(added,))).cluster
    assert [device.name for device in changed.devices[6:]] == ["h3d0", "h3d1"]
    assert {(d.memory_gb, d.speed) for d in changed.devices[6:]} == {(8.0, 0.5)}
    links = matrix(changed)
    assert (links[:6, :6] == matrix(pairs())).all()
    assert links[6, 7] == links[7, 6] == 6.0
    assert set(links[:6, 6:].ravel()) == set(links[6:, :6].ravel()) == {2.0}
    latency = np.array(changed.latency_us)
    assert (latency[:6, :6] == 5.0).all()
    assert set(latency[6:, :].ravel()) == {50.0}


def test_new_hosts_can_be_changed_too_and_take_free_names():
    renamed = tuple(
        Device(name=name, host=host) for name, host in (("h1", "h1"), ("h2d0", "x"), ("y", "y"))
    )
    cluster = Cluster(name="odd", devices=renamed, bandwidth_gb_per_s=((1.0,) * 3,) * 3)
    changes = Changes(add=(parse_added("2x1"),), slower={"h4d0": 0.5}, links={("h4", "h3"): 9.0})
    changed = apply_changes(cluster, changes).cluster
    assert [device.name for device in changed.devices[3:]] == ["h3d0", "h4d0"]
    assert changed.devices[4].speed == 0.5
    assert changed.bandwidth_gb_per_s[3][4] == changed.bandwidth_gb_per_s[4][3] == 9.0


@pytest.mark.parametrize(
    ("groups", "added", "message"),
    [
        ([HostGroup(devices=2, bandwidth_gb_per_s=12)], "1x2", "between hosts are not known"),
        ([HostGroup(devices=1, count=2)], "1x2", "inside a host are not known"),
        (
            [HostGroup(devices=1, memory_gb=16.0), HostGroup(devices=1)],
            "1x1",
            "memories of the devices differ.*,memory=",
        ),
        ([HostGroup(devices=1, speed=2.0), HostGroup(devices=1)], "1x1", "speeds .* differ"),
    ],
)
def test_what_is_not_alike_has_to_be_given(groups, added, message):
    cluster = expand_hosts("c", groups, between_hosts_gb_per_s=1.0)
    if len(groups) == 1 and groups[0].count == 1:
        cluster = expand_hosts("c", groups)
    with pytest.raises(InputError, match=message):
        apply_changes(cluster, Changes(add=(parse_added(added),)))


def test_an_ambiguous_name_is_refused():
    devices = (Device(name="a", host="b"), Device(name="c", host="a"))
    cluster = Cluster(name="c", devices=devices, bandwidth_gb_per_s=((0.0, 1.0), (1.0, 0.0)))
    with pytest.raises(InputError, match="'a' is a device of host 'b' and also a host"):
        apply_changes(cluster, Changes(lose=("a",)))


def test_a_changed_cluster_can_be_written_and_read(tmp_path):
    changes = Changes(lose=("h0d1",), links={("h0", "h1"): 3.0}, add=(parse_added("1x2"),))
    changed = apply_changes(pairs(memory_gb=16.0), changes).cluster
    write_cluster(changed, tmp_path / "c.json")
    read = read_cluster(tmp_path / "c.json")
    assert read.devices == changed.devices
    assert (matrix(read) == matrix(changed)).all()


def test_thousands_of_devices_keep_their_short_form():
    group = HostGroup(count=1200, devices=8, bandwidth_gb_per_s=100.0)
    cluster = expand_hosts("large", [group], between_hosts_gb_per_s=10.0)
    changed = apply_changes(cluster, Changes(lose=("h3d4", "h7"), slower={"h9d0": 0.5})).cluster
    assert isinstance(changed.bandwidth_gb_per_s, HostMatrix)
    assert changed.num_devices == 9591
    links = changed.bandwidth_gb_per_s
    hosts = [device.host for device in changed.devices]
    for u, v in ((24, 30), (30, 31), (55, 56), (60, 9590)):
        assert links[u][v] == (100.0 if hosts[u] == hosts[v] else 10.0)
    with pytest.raises(ClusterError, match="9,600 devices are more than the 4,096"):
        apply_changes(cluster, Changes(links={("h0", "h1"): 1.0}))


# ------------------------------------------------------------------------------- copies


def test_a_copy_in_its_host_has_its_links():
    grown = with_copies(pairs(), [2], "h1")
    assert grown.devices[6].name == "h1d2"
    assert grown.devices[6].host == "h1"
    links = matrix(grown)
    assert links[6].tolist() == [1.25, 1.25, 12, 12, 1.25, 1.25, 0]
    assert (links == links.T).all()


def test_a_copied_host_reaches_its_original_like_other_hosts():
    grown = with_copies(pairs(), [2, 3], None)
    assert [(d.name, d.host) for d in grown.devices[6:]] == [("new0d0", "new0"), ("new0d1", "new0")]
    links = matrix(grown)
    assert links[6].tolist() == [1.25] * 6 + [0, 12]
    assert (links == links.T).all()
