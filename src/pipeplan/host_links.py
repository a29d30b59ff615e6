"""The slowest links of device sets on large clusters of hosts, without a list of all pairs.

10,000 devices have 100 million pairs. In shorthand all pairs of a host have one bandwidth, and so
have all pairs between hosts. So the hosts that a set of devices uses say all about its links.
"""

from collections.abc import Sequence

import numpy as np

from pipeplan.cluster import Cluster, HostMatrix
from pipeplan.pipeline import Stage

__all__ = ["MAX_FULL_DEVICES", "large_host_links", "slowest_gb_per_s", "slowest_pairs"]

MAX_FULL_DEVICES = 512
"""Up to this number of devices links are kept as full matrices, which are faster to read."""


def large_host_links(cluster: Cluster) -> HostMatrix | None:
    """The links of a cluster of hosts that is too large for full matrices; else None."""
    links = cluster.bandwidth_gb_per_s
    has_one_latency = not isinstance(cluster.latency_us, tuple | list)
    is_large = cluster.num_devices > MAX_FULL_DEVICES
    return links if isinstance(links, HostMatrix) and has_one_latency and is_large else None


def slowest_gb_per_s(links: HostMatrix, devices: Sequence[int]) -> float:
    """The least bandwidth between any two of these devices, at least two of them."""
    hosts, counts = np.unique(links.host_of_D[list(devices)], return_counts=True)
    bandwidths: list[float] = links.inside_H[hosts[counts > 1]].tolist()
    if len(hosts) > 1:
        bandwidths.append(links.between)
    return min(bandwidths)


def slowest_pairs(links: HostMatrix, sender: Stage, receiver: Stage) -> list[tuple[float, float]]:
    """Pairs of devices of two stages, one of which is the slowest.

    For each the part of a microbatch that it carries, and its bandwidth: in each host that both
    stages use, and between hosts, the pair with the largest part.
    """
    largest_from, largest_to = _largest_shares(links, sender), _largest_shares(links, receiver)
    pairs = [
        (largest_from[host] * largest_to[host], float(links.inside_H[host]))
        for host in largest_from
        if host in largest_to
    ]
    firsts, seconds = (
        sorted(shares.items(), key=lambda item: -item[1])[:2]
        for shares in (largest_from, largest_to)
    )
    apart = [a * b for host, a in firsts for other, b in seconds if host != other]
    if apart:
        pairs.append((max(apart), links.between))
    return pairs


def _largest_shares(links: HostMatrix, stage: Stage) -> dict[int, float]:
    """For each host that has devices of the stage, the largest share of one of them."""
    largest: dict[int, float] = {}
    hosts = links.host_of_D[list(stage.devices)].tolist()
    for host, share in zip(hosts, stage.device_shares, strict=True):
        largest[host] = max(share, largest.get(host, 0.0))
    return largest
