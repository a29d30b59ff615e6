"""The clusters of the zoo.

`HxD` is H hosts with D devices each. `10g` is a line rate of 10 Gbit/s between hosts, which is 1.25
GB/s. All devices of a host share one network card, which sends and receives at this rate (the
host's uplink). In the clusters whose names end in `-no-shared-card` each pair of devices has a link
of its own, as in the papers: two pairs never slow each other down.

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
    *hosts: HostGroup, between_hosts_gb_per_s: float | None = None, shares_card: bool = True
) -> Callable[[str, int], Cluster]:
    """A cluster of hosts, with its latencies; a host's card is as fast as a pair of hosts."""

    def build(name: str, _seed: int) -> Cluster:
        cluster = expand_hosts(
            name,
            hosts,
            between_hosts_gb_per_s=between_hosts_gb_per_s,
            uplink_gb_per_s=between_hosts_gb_per_s if shares_card else None,
        )
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
_A100_HOST = HostGroup(devices=8, bandwidth_gb_per_s=_NVLINK_A100_GB_PER_S, memory_gb=80.0)

_SEVERAL_HOSTS: Mapping[str, tuple[tuple[HostGroup, ...], float, str]] = {
    "4x2-10g": (
        (_V100_PCIE_PAIRS,),
        1.25,
        "4 hosts with 2 V100 16 GB on PCIe 3.0, 10 Gbit/s between hosts",
    ),
    "4x2-25g": (
        (_V100_PCIE_PAIRS,),
        3.125,
        "4 hosts with 2 V100 16 GB on PCIe 3.0, 25 Gbit/s between hosts",
    ),
    "4x2-100g": (
        (_V100_PCIE_PAIRS,),
        12.5,
        "4 hosts with 2 V100 16 GB on PCIe 3.0, 100 Gbit/s between hosts",
    ),
    "2x8-100g": (
        (replace(_A100_HOST, count=2),),
        12.5,
        "2 hosts with 8 A100 80 GB on NVLink, 100 Gbit/s between hosts",
    ),
    "8x8-100g": (
        (replace(_A100_HOST, count=8),),
        12.5,
        "8 hosts with 8 A100 80 GB on NVLink, 100 Gbit/s between hosts",
    ),
    # Speeds are relative to a V100: choose that device for the model's profile.
    "mixed-hosts": (
        (
            replace(_A100_HOST, devices=4, speed=2.5),
            HostGroup(devices=4, bandwidth_gb_per_s=_NVLINK_V100_GB_PER_S, memory_gb=32.0),
            HostGroup(devices=2, bandwidth_gb_per_s=_PCIE_GB_PER_S, memory_gb=16.0),
            HostGroup(devices=2, bandwidth_gb_per_s=_PCIE_GB_PER_S, memory_gb=16.0, speed=0.6),
        ),
        3.125,
        "4 unequal hosts: 4 fast, 4 and 2 plain, 2 slow devices, 25 Gbit/s between",
    ),
}
"""By name: the hosts, the GB/s between them, and a description."""


def _recipe_of_hosts(name: str, *, shares_card: bool) -> ClusterRecipe:
    hosts, between_hosts_gb_per_s, description = _SEVERAL_HOSTS[name]
    return ClusterRecipe(
        build=_hosts(
            *hosts, between_hosts_gb_per_s=between_hosts_gb_per_s, shares_card=shares_card
        ),
        description=description if shares_card else f"{name}, each pair with a link of its own",
    )


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
        **{name: _recipe_of_hosts(name, shares_card=True) for name in _SEVERAL_HOSTS},
        "random-8": ClusterRecipe(
            build=_random,
            description="8 hosts with one device, each direction 1 to 100 GB/s by its seed",
        ),
        **{
            f"{name}-no-shared-card": _recipe_of_hosts(name, shares_card=False)
            for name in _SEVERAL_HOSTS
        },
    }
)
"""The clusters by name."""
