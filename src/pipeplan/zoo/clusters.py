"""The clusters of the zoo.

`HxD` is H hosts with D devices each. `10g` is a line rate of 10 Gbit/s between hosts, which is 1.25
GB/s. Each pair of devices has its own bandwidth, as everywhere in the cost model: pairs that share
a network card do not slow each other down.

Bandwidths inside a host are what large copies reach, rounded down:

    PCIe 3.0 x16          12 GB/s   of 15.75 per direction
    NVLink 2 (V100)      130 GB/s   of 150 per direction, all six links through a switch
    NVLink 3 (A100)      250 GB/s   of 300 per direction, all twelve links through a switch

Latencies are assumptions: 5 us inside a host, 25 us between hosts.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from pipeplan.cluster import Cluster, Device, HostGroup, expand_hosts

__all__ = ["RECIPES", "ClusterRecipe"]

_PCIE_GB_PER_S = 12.0
_NVLINK_V100_GB_PER_S = 130.0
_NVLINK_A100_GB_PER_S = 250.0
_INSIDE_HOST_US = 5.0
_BETWEEN_HOSTS_US = 25.0

_RANDOM_DEVICES = 8
_RANDOM_GB_PER_S = (1.0, 100.0)
_RANDOM_LATENCY_US = (5.0, 50.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRecipe:
    """A cluster of the zoo: the function that makes it, and a description in one line."""

    build: Callable[[str, int], Cluster]
    """Makes the cluster from its name and a seed; only random clusters use the seed."""
    description: str


def _hosts(
    *hosts: HostGroup, between_hosts_gb_per_s: float | None = None
) -> Callable[[str, int], Cluster]:
    """A cluster of hosts, with its latencies."""

    def build(name: str, _seed: int) -> Cluster:
        cluster = expand_hosts(name, hosts, between_hosts_gb_per_s=between_hosts_gb_per_s)
        return replace(cluster, latency_us=_latencies(cluster.devices))

    return build


def _latencies(devices: Sequence[Device]) -> tuple[tuple[float, ...], ...]:
    return tuple(
        tuple(
            0.0 if u is v else _INSIDE_HOST_US if u.host == v.host else _BETWEEN_HOSTS_US
            for v in devices
        )
        for u in devices
    )


def _random(name: str, seed: int) -> Cluster:
    """Eight devices; each direction of each link is drawn separately, bandwidth log-uniform."""
    generator = random.Random(seed)
    low, high = (math.log(gb_per_s) for gb_per_s in _RANDOM_GB_PER_S)
    numbers = range(_RANDOM_DEVICES)
    bandwidth = [[0.0] * _RANDOM_DEVICES for _ in numbers]
    latency = [[0.0] * _RANDOM_DEVICES for _ in numbers]
    for u in numbers:
        for v in numbers:
            if u != v:
                # Rounded, so that a file shows the same number that the planner gets.
                bandwidth[u][v] = round(math.exp(generator.uniform(low, high)), 3)
                latency[u][v] = round(generator.uniform(*_RANDOM_LATENCY_US), 3)
    return Cluster(
        name=name if seed == 0 else f"{name}, seed {seed}",
        devices=tuple(Device(name=f"d{u}", memory_gb=32.0) for u in numbers),
        bandwidth_gb_per_s=tuple(map(tuple, bandwidth)),
        latency_us=tuple(map(tuple, latency)),
    )


_V100_PCIE_PAIRS = HostGroup(count=4, devices=2, bandwidth_gb_per_s=_PCIE_GB_PER_S, memory_gb=16.0)

RECIPES: Mapping[str, ClusterRecipe] = MappingProxyType(
    {
        "1x8-nvlink": ClusterRecipe(
            build=_hosts(
                HostGroup(devices=8, bandwidth_gb_per_s=_NVLINK_V100_GB_PER_S, memory_gb=32.0)
            ),
            description="one host, 8 V100 32 GB behind an NVLink switch",
        ),
        "1x8-pcie": ClusterRecipe(
            build=_hosts(HostGroup(devices=8, bandwidth_gb_per_s=_PCIE_GB_PER_S, memory_gb=16.0)),
            description="one host, 8 V100 16 GB on PCIe 3.0",
        ),
        "4x2-10g": ClusterRecipe(
            build=_hosts(_V100_PCIE_PAIRS, between_hosts_gb_per_s=1.25),
            description="4 hosts with 2 V100 16 GB on PCIe 3.0, 10 Gbit/s between hosts",
        ),
        "4x2-25g": ClusterRecipe(
            build=_hosts(_V100_PCIE_PAIRS, between_hosts_gb_per_s=3.125),
            description="4 hosts with 2 V100 16 GB on PCIe 3.0, 25 Gbit/s between hosts",
        ),
        "4x2-100g": ClusterRecipe(
            build=_hosts(_V100_PCIE_PAIRS, between_hosts_gb_per_s=12.5),
            description="4 hosts with 2 V100 16 GB on PCIe 3.0, 100 Gbit/s between hosts",
        ),
        "2x8-100g": ClusterRecipe(
            build=_hosts(
                HostGroup(
                    count=2, devices=8, bandwidth_gb_per_s=_NVLINK_A100_GB_PER_S, memory_gb=80.0
                ),
                between_hosts_gb_per_s=12.5,
            ),
            description="2 hosts with 8 A100 80 GB on NVLink, 100 Gbit/s between hosts",
        ),
        "8x8-100g": ClusterRecipe(
            build=_hosts(
                HostGroup(
                    count=8, devices=8, bandwidth_gb_per_s=_NVLINK_A100_GB_PER_S, memory_gb=80.0
                ),
                between_hosts_gb_per_s=12.5,
            ),
            description="8 hosts with 8 A100 80 GB on NVLink, 100 Gbit/s between hosts",
        ),
        # Speeds are relative to a V100: choose that device for the model's profile.
        "mixed-hosts": ClusterRecipe(
            build=_hosts(
                HostGroup(
                    devices=4,
                    bandwidth_gb_per_s=_NVLINK_A100_GB_PER_S,
                    memory_gb=80.0,
                    speed=2.5,
                ),
                HostGroup(devices=4, bandwidth_gb_per_s=_NVLINK_V100_GB_PER_S, memory_gb=32.0),
                HostGroup(devices=2, bandwidth_gb_per_s=_PCIE_GB_PER_S, memory_gb=16.0),
                HostGroup(devices=2, bandwidth_gb_per_s=_PCIE_GB_PER_S, memory_gb=16.0, speed=0.6),
                between_hosts_gb_per_s=3.125,
            ),
            description="4 unequal hosts: 4 fast, 4 and 2 plain, 2 slow devices, 25 Gbit/s between",
        ),
        "random-8": ClusterRecipe(
            build=_random,
            description="8 hosts with one device, each direction 1 to 100 GB/s by its seed",
        ),
    }
)
"""The clusters by name."""
