"""Shared links under changes: lost members, new hosts, copies."""

from dataclasses import replace

import pytest

from one_stage import plan
from pipeplan import zoo
from pipeplan.checker import check
from pipeplan.cluster import Cluster, HostGroup, expand_hosts
from pipeplan.errors import InputError
from pipeplan.planning.whatif.changed_cluster import apply_changes
from pipeplan.planning.whatif.changes import Changes
from pipeplan.planning.whatif.copied_devices import with_copies
from pipeplan.planning.whatif.outlook import outlook
from pipeplan.planning.whatif.parsing import parse_added
from pipeplan.planning.whatif.question import whatif
from pipeplan.shared_links import SharedLink


def crowded(uplinks=1.25) -> Cluster:
    """Three hosts of two devices with uplinks, a rack of two hosts, and a switch in the third."""
    cluster = expand_hosts(
        "crowded",
        [HostGroup(count=3, devices=2, bandwidth_gb_per_s=12.0)],
        between_hosts_gb_per_s=1.25,
        shared=(
            SharedLink(name="rack", members=("h0", "h1"), gb_per_s=2.0),
            SharedLink(name="switch", members=("h2d0",), gb_per_s=6.0),
        ),
    )
    return replace(cluster, uplink_gb_per_s=uplinks)


def members(cluster: Cluster) -> dict[str, tuple[str, ...]]:
    return {link.name: link.members for link in cluster.shared}


def test_lost_members_leave_their_links():
    cluster = crowded({"h0": 1.0, "h2": 2.0})
    changed = apply_changes(cluster, Changes(lose=("h0", "h2d0"))).cluster
    assert changed.uplink_gb_per_s == {"h2": 2.0}
    assert members(changed) == {"rack": ("h1",)}
    assert apply_changes(crowded(), Changes(lose=("h0d1",))).cluster.uplink_gb_per_s == 1.25


def test_new_hosts_have_the_uplink_of_all_others():
    added = Changes(add=(parse_added("1x2"),))
    assert apply_changes(crowded(), added).cluster.uplink_gb_per_s == 1.25
    alike = crowded({"h0": 2.0, "h1": 2.0, "h2": 2.0})
    assert apply_changes(alike, added).cluster.uplink_gb_per_s == dict.fromkeys(
        ("h0", "h1", "h2", "h3"), 2.0
    )
    for uplinks in ({"h0": 1.0}, {"h0": 1.0, "h1": 2.0, "h2": 2.0}):
        with pytest.raises(InputError, match="the uplinks of the hosts differ"):
            apply_changes(crowded(uplinks), added)


def test_copies_join_the_links_of_their_originals():
    host = with_copies(crowded({"h0": 1.0}), [0, 1], None)
    assert host.uplink_gb_per_s == {"h0": 1.0, "new0": 1.0}
    assert members(host)["rack"] == ("h0", "h1", "new0")
    device = with_copies(crowded(), [4], "h2")
    assert members(device)["switch"] == ("h2d0", "h2d2")


def test_a_question_about_a_cluster_with_shared_links():
    made = plan(zoo.model("bert-large"), crowded(), 4, effort=0.1)
    answer = whatif(made, lose=["h1d0"], effort=0.1)
    assert check(answer.replanned).ok
    assert answer.kept is None or check(answer.kept).ok
    assert all(each.replanned_ms for each in outlook(made).prospects)
