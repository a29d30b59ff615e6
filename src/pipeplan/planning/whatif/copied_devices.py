"""A cluster with copies of some of its devices: what one more device or host would be."""

from dataclasses import replace

import numpy as np

from pipeplan.cluster import Cluster, Device, Matrix
from pipeplan.cost import Floats
from pipeplan.planning.whatif.changed_shared_links import copied_shared, copied_uplinks

__all__ = ["with_copies"]


def with_copies(cluster: Cluster, copied: list[int], host: str | None) -> Cluster:
    """The cluster with copies of some devices of one host, in that host or in a new one (None).

    A copy has the links of its original to all other devices. The link between a copy and its
    original's host is new: in the same host as slow as the slowest there, from a new host as slow
    as the slowest to another host. Latencies likewise.
    """
    rows = [*range(cluster.num_devices), *copied]
    bandwidth = np.array(cluster.bandwidth_gb_per_s, dtype=np.float64)
    _fill_diagonal(bandwidth)
    latency: float | Matrix = cluster.latency_us
    own = cluster.devices[copied[0]].host
    mates = [i for i, device in enumerate(cluster.devices) if device.host == own]
    others = [i for i, device in enumerate(cluster.devices) if device.host != own]
    like = (mates, mates) if host is not None else (mates, others)
    if isinstance(latency, tuple | list):
        latencies = np.array(latency, dtype=np.float64)
        _fill_diagonal(latencies)
        slowest = float(np.nanmax(latencies[np.ix_(*like)]))
        latency = _copied_links(latencies, rows, mates, slowest, is_new_host=host is None)
    least = float(np.nanmin(bandwidth[np.ix_(*like)]))
    devices = _new_devices(cluster, copied, host, len(mates))
    copy_of: dict[str, list[str]] = {} if host is not None else {own: [devices[0].host]}
    for origin, device in zip(copied, devices, strict=True):
        copy_of.setdefault(cluster.devices[origin].name, []).append(device.name)
    return replace(
        cluster,
        devices=(*cluster.devices, *devices),
        uplink_gb_per_s=copied_uplinks(cluster, own, devices[0].host),
        shared=copied_shared(cluster, copy_of),
        bandwidth_gb_per_s=_copied_links(bandwidth, rows, mates, least, is_new_host=host is None),
        latency_us=latency,
    )


def _fill_diagonal(numbers: Floats) -> None:
    """The diagonal is ignored, so it may hold anything; no minimum may see it."""
    np.fill_diagonal(numbers, np.nan)


def _copied_links(
    numbers: Floats, rows: list[int], mates: list[int], new: float, *, is_new_host: bool
) -> Matrix:
    """The matrix with its copied rows and columns; `new` between copies and the old host."""
    old = len(numbers)
    full = numbers[np.ix_(rows, rows)]
    news = list(range(old, len(rows)))
    full[np.ix_(news, mates)] = new
    full[np.ix_(mates, news)] = new
    if not is_new_host:
        full[np.ix_(news, news)] = new
    full[np.isnan(full)] = 0.0
    return tuple(map(tuple, full.tolist()))


def _new_devices(
    cluster: Cluster, copied: list[int], host: str | None, num_mates: int
) -> list[Device]:
    taken = {name for device in cluster.devices for name in (device.name, device.host)}
    home = host if host is not None else _free_name("new", taken, 0)
    taken.add(home)
    devices: list[Device] = []
    for number, origin in enumerate(copied, 0 if host is None else num_mates):
        name = _free_name(f"{home}d", taken, number)
        taken.add(name)
        devices.append(replace(cluster.devices[origin], name=name, host=home))
    return devices


def _free_name(start: str, taken: set[str], number: int) -> str:
    while f"{start}{number}" in taken:
        number += 1
    return f"{start}{number}"
