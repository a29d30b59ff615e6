"""Shared links of a cluster whose devices change: lost members go, copies join like originals."""

from collections.abc import Mapping
from dataclasses import replace

from pipeplan.cluster import Cluster, Device
from pipeplan.errors import InputError
from pipeplan.shared_links import SharedLink, Uplinks
from pipeplan.validation import SHARED_GB_PER_S

__all__ = [
    "copied_shared",
    "copied_uplinks",
    "left_shared",
    "left_uplinks",
    "new_uplinks",
    "with_faster_cards",
]


def left_uplinks(cluster: Cluster, devices: tuple[Device, ...]) -> Uplinks:
    """The uplinks of the hosts that are left."""
    uplinks, hosts = cluster.uplink_gb_per_s, {device.host for device in devices}
    if not isinstance(uplinks, dict):
        return uplinks
    return {host: gb_per_s for host, gb_per_s in uplinks.items() if host in hosts}


def left_shared(cluster: Cluster, devices: tuple[Device, ...]) -> tuple[SharedLink, ...]:
    """The shared links with the members that are left; a link without any is gone."""
    names = {name for device in devices for name in (device.name, device.host)}
    kept = [
        (link, tuple(member for member in link.members if member in names))
        for link in cluster.shared
    ]
    return tuple(replace(link, members=members) for link, members in kept if members)


def new_uplinks(cluster: Cluster, devices: list[Device]) -> Uplinks:
    """The uplinks with those of new hosts: like all others, where these are alike."""
    uplinks = cluster.uplink_gb_per_s
    if not isinstance(uplinks, dict) or not uplinks:
        return uplinks
    hosts = {device.host for device in cluster.devices}
    if len(set(uplinks.values())) > 1 or set(uplinks) != hosts:
        raise InputError(
            "add: the uplinks of the hosts differ in this cluster; write the hosts into the"
            " cluster's file with their uplink_gb_per_s, and plan anew"
        )
    gb_per_s = next(iter(uplinks.values()))
    return {**uplinks, **{device.host: gb_per_s for device in devices}}


def with_faster_cards(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with faster uplinks, and with faster shared links around whole hosts."""
    uplinks = cluster.uplink_gb_per_s
    if isinstance(uplinks, dict):
        uplinks = {host: _times(gb_per_s, factor) for host, gb_per_s in uplinks.items()}
    elif uplinks is not None:
        uplinks = _times(uplinks, factor)
    hosts = {device.host for device in cluster.devices}
    shared = tuple(
        replace(
            link,
            gb_per_s=_times(link.gb_per_s, factor),
            in_gb_per_s=None if link.in_gb_per_s is None else _times(link.in_gb_per_s, factor),
        )
        if hosts.issuperset(link.members)
        else link
        for link in cluster.shared
    )
    return replace(cluster, uplink_gb_per_s=uplinks, shared=shared)


def _times(gb_per_s: float, factor: float) -> float:
    return min(gb_per_s * factor, SHARED_GB_PER_S.most)


def copied_uplinks(cluster: Cluster, original: str, copy: str) -> Uplinks:
    """The uplinks with that of a copied host."""
    uplinks = cluster.uplink_gb_per_s
    if not isinstance(uplinks, dict) or original not in uplinks:
        return uplinks
    return {**uplinks, copy: uplinks[original]}


def copied_shared(cluster: Cluster, copy_of: Mapping[str, list[str]]) -> tuple[SharedLink, ...]:
    """The shared links; a copy joins each link that names its original, device or host."""
    return tuple(
        replace(
            link,
            members=(
                *link.members,
                *(copy for member in link.members for copy in copy_of.get(member, ())),
            ),
        )
        for link in cluster.shared
    )
