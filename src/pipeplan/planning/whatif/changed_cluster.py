"""A cluster after changes, and where its old devices went.

Links of new hosts are as those of the cluster's own hosts where these are all alike; else they have
to be given. Axes: D devices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipeplan.cluster import Cluster, Device, HostMatrix, Matrix
from pipeplan.documents.text import excerpt, nearest
from pipeplan.errors import ClusterError, InputError
from pipeplan.planning.whatif.changed_shared_links import (
    left_shared,
    left_uplinks,
    new_uplinks,
)
from pipeplan.planning.whatif.changes import AddedHosts, Changes
from pipeplan.validation import MAX_DEVICES, MAX_LISTED_DEVICES

__all__ = ["ChangedCluster", "apply_changes", "devices_named", "known_names"]

Floats = NDArray[np.float64]
LONGEST_NAME = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedCluster:
    """The cluster after the changes."""

    cluster: Cluster
    index_of: dict[int, int]
    """For each device of the old cluster that is left, its number in the new one."""


def known_names(cluster: Cluster) -> tuple[str, ...]:
    """The names of devices and hosts."""
    devices = cluster.devices
    return tuple(dict.fromkeys([*(d.name for d in devices), *(d.host for d in devices)]))


def devices_named(cluster: Cluster, option: str, name: str) -> list[int]:
    """The device of that name, or all devices of that host; an unknown name is refused."""
    as_device = [i for i, device in enumerate(cluster.devices) if device.name == name]
    as_host = [i for i, device in enumerate(cluster.devices) if device.host == name]
    if as_device and as_host and as_device != as_host:
        raise InputError(
            f"{option}: {excerpt(name)} is a device of host"
            f" {excerpt(cluster.devices[as_device[0]].host)} and also a host; rename one of them"
        )
    if not as_device and not as_host:
        near = nearest(name, known_names(cluster))
        raise InputError(f"{option}: {excerpt(name)} is neither a device nor a host{near}")
    return as_host or as_device


def apply_changes(cluster: Cluster, changes: Changes) -> ChangedCluster:
    """The cluster after the changes; its name tells of them."""
    changed = cluster
    for hosts in changes.add:
        changed = _with_hosts(changed, hosts)
    changed = _with_speeds(changed, changes)
    if changes.links:
        changed = _with_links(changed, changes)
    lost = _lost_devices(changed, changes)
    kept = [i for i in range(changed.num_devices) if i not in lost]
    if not kept:
        raise ClusterError("lose: no device is left; keep at least one")
    if lost:
        changed = _restricted(changed, kept)
    title = f"{cluster.name}, {changes.title}" if changes else cluster.name
    if len(title) > LONGEST_NAME:
        title = f"{title[: LONGEST_NAME - 3]}..."
    new_index = {old: new for new, old in enumerate(kept)}
    return ChangedCluster(
        cluster=replace(changed, name=title),
        index_of={old: new_index[old] for old in range(cluster.num_devices) if old in new_index},
    )


def _with_speeds(cluster: Cluster, changes: Changes) -> Cluster:
    devices = list(cluster.devices)
    slowed: dict[int, str] = {}
    for name, factor in changes.slower.items():
        for index in devices_named(cluster, "slower", name):
            if index in slowed:
                raise InputError(
                    f"slower: {excerpt(devices[index].name)} is meant by {excerpt(slowed[index])}"
                    f" and by {excerpt(name)}; name it once"
                )
            slowed[index] = name
            devices[index] = replace(devices[index], speed=devices[index].speed * factor)
    return replace(cluster, devices=tuple(devices))


def _with_links(cluster: Cluster, changes: Changes) -> Cluster:
    matrix = _full(cluster, cluster.bandwidth_gb_per_s)
    for (first, second), gb_per_s in changes.links.items():
        senders = devices_named(cluster, "link", first)
        receivers = devices_named(cluster, "link", second)
        if len({*senders, *receivers}) < 2:
            raise InputError(
                f"link: {excerpt(first)} and {excerpt(second)} are one device; name two"
            )
        matrix[np.ix_(senders, receivers)] = gb_per_s
        matrix[np.ix_(receivers, senders)] = gb_per_s
    return replace(cluster, bandwidth_gb_per_s=_matrix(matrix))


def _lost_devices(cluster: Cluster, changes: Changes) -> set[int]:
    return {i for name in changes.lose for i in devices_named(cluster, "lose", name)}


def _restricted(cluster: Cluster, kept: Sequence[int]) -> Cluster:
    """The cluster without the devices that are not kept."""
    links = cluster.bandwidth_gb_per_s
    bandwidth: Matrix | HostMatrix
    if isinstance(links, HostMatrix):
        counts = np.bincount(links.host_of_D[list(kept)], minlength=len(links.inside_H))
        left = np.flatnonzero(counts)
        bandwidth = HostMatrix(
            sizes=counts[left].tolist(), inside=links.inside_H[left].tolist(), between=links.between
        )
    else:
        bandwidth = tuple(tuple(links[u][v] for v in kept) for u in kept)
    latency = cluster.latency_us
    if isinstance(latency, tuple | list):
        latency = tuple(tuple(latency[u][v] for v in kept) for u in kept)
    devices = tuple(cluster.devices[u] for u in kept)
    return replace(
        cluster,
        devices=devices,
        bandwidth_gb_per_s=bandwidth,
        latency_us=latency,
        uplink_gb_per_s=left_uplinks(cluster, devices),
        shared=left_shared(cluster, devices),
    )


# -------------------------------------------------------------------------- new hosts


def _with_hosts(cluster: Cluster, added: AddedHosts) -> Cluster:
    """The cluster with the new hosts behind its own."""
    num_new = added.count * added.devices
    if cluster.num_devices + num_new > MAX_DEVICES:
        raise ClusterError(
            f"add: {cluster.num_devices + num_new:,} devices are more than the {MAX_DEVICES:,}"
            " supported"
        )
    devices = _new_devices(cluster, added)
    return replace(
        cluster,
        devices=(*cluster.devices, *devices),
        bandwidth_gb_per_s=_bandwidth_with(cluster, added),
        latency_us=_latency_with(cluster, added),
        uplink_gb_per_s=new_uplinks(cluster, devices),
    )


def _new_devices(cluster: Cluster, added: AddedHosts) -> list[Device]:
    """The new devices, named as in the shorthand; their numbers go on behind the hosts' number."""
    taken = set(known_names(cluster))
    memory_gb = added.memory_gb
    if memory_gb is None:
        memory_gb = _one_of("memory", {device.memory_gb for device in cluster.devices})
    speed = added.speed or _one_of("speed", {device.speed for device in cluster.devices}) or 1.0
    devices: list[Device] = []
    number = len({device.host for device in cluster.devices})
    for _ in range(added.count):
        while any(f"h{number}{end}" in taken for end in ("", "d0")):
            number += 1
        devices += [
            Device(name=f"h{number}d{i}", host=f"h{number}", memory_gb=memory_gb, speed=speed)
            for i in range(added.devices)
        ]
        number += 1
    return devices


def _bandwidth_with(cluster: Cluster, added: AddedHosts) -> Matrix | HostMatrix:
    links = cluster.bandwidth_gb_per_s
    inside, between = _own_links(cluster)
    new_between = added.between_gb_per_s
    if new_between is None:
        new_between = _one_of("between", between)
    new_inside = new_between or 0.0
    if added.devices > 1:
        given = added.bandwidth_gb_per_s
        new_inside = (_one_of("", inside) if given is None else given) or 0.0
    if isinstance(links, HostMatrix) and new_between == links.between:
        sizes = np.bincount(links.host_of_D).tolist()
        return HostMatrix(
            sizes=[*sizes, *[added.devices] * added.count],
            inside=[*links.inside_H.tolist(), *[new_inside] * added.count],
            between=links.between,
        )
    old = cluster.num_devices
    count = old + added.count * added.devices
    matrix = np.full((count, count), new_between)
    matrix[:old, :old] = _full(cluster, links)
    for host in range(added.count):
        mine = slice(old + host * added.devices, old + (host + 1) * added.devices)
        matrix[mine, mine] = new_inside
    return _matrix(matrix)


def _own_links(cluster: Cluster) -> tuple[set[float], set[float]]:
    """The bandwidths between devices of one host, and between hosts."""
    links = cluster.bandwidth_gb_per_s
    if isinstance(links, HostMatrix):
        sizes = np.bincount(links.host_of_D)
        between = {links.between} if len(sizes) > 1 else set()
        return set(links.inside_H[sizes > 1].tolist()), between
    matrix = _full(cluster, links)
    hosts = list(dict.fromkeys(device.host for device in cluster.devices))
    host_of = np.array([hosts.index(device.host) for device in cluster.devices])
    same = host_of[:, None] == host_of[None, :]
    np.fill_diagonal(matrix, math.nan)
    inside, between_hosts = matrix[same], matrix[~same]
    return set(inside[~np.isnan(inside)].tolist()), set(between_hosts.tolist())


def _one_of(setting: str, values: "set[float] | set[float | None]") -> float | None:
    """What all have in common; where they differ, the question has to say it."""
    if len(values) == 1:
        return next(iter(values))
    what = {
        "": "the links inside a host",
        "between": "the links between hosts",
        "memory": "the memories of the devices",
        "speed": "the speeds of the devices",
    }[setting]
    example = f",{setting}=..." if setting else ":..., as in 2x4:12"
    state = "differ in this cluster" if values else "are not known from this cluster"
    raise InputError(f"add: {what} {state}; say which the new hosts have: {example}")


def _latency_with(cluster: Cluster, added: AddedHosts) -> float | Matrix:
    """The latencies with those of the new links: as between old hosts, the longest of them."""
    latency = cluster.latency_us
    if not isinstance(latency, tuple | list):
        if added.latency_us in (None, latency):
            return latency
        latency = ((latency,) * cluster.num_devices,) * cluster.num_devices
    old = cluster.num_devices
    count = old + added.count * added.devices
    matrix = np.array(latency, dtype=np.float64)
    longest = float((matrix - np.diag(np.diag(matrix))).max()) if old > 1 else 0.0
    full = np.full((count, count), longest if added.latency_us is None else added.latency_us)
    full[:old, :old] = matrix
    return _matrix(full)


def _full(cluster: Cluster, links: Matrix | HostMatrix) -> Floats:
    if cluster.num_devices > MAX_LISTED_DEVICES:
        raise ClusterError(
            f"link: {cluster.num_devices:,} devices are more than the {MAX_LISTED_DEVICES:,} whose"
            " links can be set one by one; ask about a part of the cluster"
        )
    return np.array(links, dtype=np.float64)


def _matrix(numbers: Floats) -> Matrix:
    return tuple(map(tuple, numbers.tolist()))
