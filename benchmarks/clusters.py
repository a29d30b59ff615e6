"""The clusters of the benchmarks, by name: links and speeds only.

They have no memory limits and no shared network cards, and they do not come from the zoo. So the
defaults of the zoo can change without moving a result.
"""

import math
import random
from dataclasses import replace

from pipeplan.cluster import Cluster, Device, HostGroup, expand_hosts

PCIE_GB_PER_S = 12.0
NVLINK_V100_GB_PER_S = 130.0
NVLINK_A100_GB_PER_S = 250.0
INSIDE_HOST_US = 5.0
BETWEEN_HOSTS_US = 25.0

PAIRS = (HostGroup(count=4, devices=2, bandwidth_gb_per_s=PCIE_GB_PER_S),)
HOSTS: dict[str, tuple[tuple[HostGroup, ...], float | None]] = {
    "1x8-nvlink": ((HostGroup(devices=8, bandwidth_gb_per_s=NVLINK_V100_GB_PER_S),), None),
    "1x8-pcie": ((HostGroup(devices=8, bandwidth_gb_per_s=PCIE_GB_PER_S),), None),
    "4x2-10g": (PAIRS, 1.25),
    "4x2-25g": (PAIRS, 3.125),
    "4x2-100g": (PAIRS, 12.5),
    "mixed-hosts": (
        (
            HostGroup(devices=4, bandwidth_gb_per_s=NVLINK_A100_GB_PER_S, speed=2.5),
            HostGroup(devices=4, bandwidth_gb_per_s=NVLINK_V100_GB_PER_S),
            HostGroup(devices=2, bandwidth_gb_per_s=PCIE_GB_PER_S),
            HostGroup(devices=2, bandwidth_gb_per_s=PCIE_GB_PER_S, speed=0.6),
        ),
        3.125,
    ),
}
"""By name: the hosts, and the GB/s between them."""


def hosts_cluster(name: str) -> Cluster:
    """The cluster of hosts with that name in `HOSTS`; 5 us inside a host, 25 us between hosts."""
    hosts, between_hosts_gb_per_s = HOSTS[name]
    cluster = expand_hosts(name, hosts, between_hosts_gb_per_s=between_hosts_gb_per_s)
    latency_us = tuple(
        tuple(
            0.0 if u is v else INSIDE_HOST_US if u.host == v.host else BETWEEN_HOSTS_US
            for v in cluster.devices
        )
        for u in cluster.devices
    )
    return replace(cluster, latency_us=latency_us)


def random_8(seed: int) -> Cluster:
    """Eight devices; each direction of each link 1 to 100 GB/s (log-uniform) and 5 to 50 us."""
    generator = random.Random(seed)
    bandwidth = [[0.0] * 8 for _ in range(8)]
    latency = [[0.0] * 8 for _ in range(8)]
    for u in range(8):
        for v in range(8):
            if u != v:
                log_gb_per_s = generator.uniform(math.log(1.0), math.log(100.0))
                bandwidth[u][v] = round(math.exp(log_gb_per_s), 3)
                latency[u][v] = round(generator.uniform(5.0, 50.0), 3)
    return Cluster(
        name="random-8" if seed == 0 else f"random-8, seed {seed}",
        devices=tuple(Device(name=f"d{u}") for u in range(8)),
        bandwidth_gb_per_s=tuple(map(tuple, bandwidth)),
        latency_us=tuple(map(tuple, latency)),
    )
