"""The emulated network: ranks, the rate of each pair, and links that they share.

Each used device is a rank. Ranks stand in the order of the cluster, but those of a host together:
gloo's ring of a stage is then the one of the cost model.

Shared links have to be nested: two of them have no device in common, or one has all of the other.
Then they are a tree, and so are the emulated switches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.cluster import Cluster, Duplex
from pipeplan.cost import BYTES_IN_GB
from pipeplan.errors import InputError
from pipeplan.pipeline import Plan

__all__ = ["MOST_PACKET_BYTES", "SharedSwitch", "Topology", "find_topology", "topology_of"]

MOST_RANKS = 64
PACKET_S = 250e-6
LEAST_PACKET_BYTES, MOST_PACKET_BYTES = 3000, 32_000
"""With much larger ones, lengths do not fit the filter of small packets."""
US_IN_S = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSwitch:
    """A shared link: all that its ranks exchange with others goes through it."""

    ranks: tuple[int, ...]
    out_bytes_per_s: float
    in_bytes_per_s: float
    parent: int | None
    """The next larger link that has all its ranks; None: the switch that joins all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Who is connected with whom, and how fast."""

    devices: tuple[int, ...]
    """The cluster's device of each rank."""
    bytes_per_s: tuple[tuple[float, ...], ...]
    """From rank to rank; 0 where there is no path."""
    latency_s: tuple[tuple[float, ...], ...]
    switches: tuple[SharedSwitch, ...]

    def packet_bytes(self, source: int, target: int) -> int:
        """The largest packet from rank to rank.

        A packet passes a limit at once, and the next one waits for it. So a message is early by
        the time of one packet, which has to be short. But each packet costs the machine time, too.
        """
        rate = self.bytes_per_s[source][target]
        for switch in self.switches:
            if source in switch.ranks and target not in switch.ranks:
                rate = min(rate, switch.out_bytes_per_s)
            elif target in switch.ranks and source not in switch.ranks:
                rate = min(rate, switch.in_bytes_per_s)
        return round(min(max(LEAST_PACKET_BYTES, rate * PACKET_S), MOST_PACKET_BYTES))

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.devices)

    @property
    def has_latency(self) -> bool:
        """Whether any pair has a latency."""
        return any(latency for row in self.latency_s for latency in row)


def find_topology(plan: Plan) -> Topology:
    """The network that a plan's devices need.

    Raises:
        InputError: too many devices, shared links that overlap, or half duplex.
    """
    if plan.cluster.duplex is Duplex.HALF and plan.num_stages > 1:
        raise InputError(
            "duplex: is half; the testbed's links carry both directions at once; measure a plan for"
            " the same cluster with duplex full"
        )
    used = sorted({device for stage in plan.stages for device in stage.devices})
    return topology_of(plan.cluster, used)


def topology_of(cluster: Cluster, used: Sequence[int]) -> Topology:
    """The network between some devices of a cluster.

    Raises:
        InputError: too many devices, or shared links that overlap.
    """
    if len(used) > MOST_RANKS:
        raise InputError(
            f"stages: use {len(used)} devices; the testbed emulates {MOST_RANKS} at most"
        )
    first_of: dict[str, int] = {}
    for device in used:
        first_of.setdefault(cluster.devices[device].host, device)
    devices = sorted(used, key=lambda d: (first_of[cluster.devices[d].host], d))
    rates, latency = cluster.bandwidth_gb_per_s, cluster.latency_us
    return Topology(
        devices=tuple(devices),
        bytes_per_s=tuple(
            tuple(0.0 if u == v else rates[u][v] * BYTES_IN_GB for v in devices) for u in devices
        ),
        latency_s=tuple(
            tuple(
                0.0
                if u == v
                else (latency if isinstance(latency, int | float) else latency[u][v]) / US_IN_S
                for v in devices
            )
            for u in devices
        ),
        switches=_switches(cluster, devices),
    )


def _switches(cluster: Cluster, devices: Sequence[int]) -> tuple[SharedSwitch, ...]:
    """The shared links that these devices can feel, the largest first."""
    found = []
    for link in cluster.links:
        ranks = frozenset(rank for rank, device in enumerate(devices) if device in link.devices)
        if ranks and len(ranks) < len(devices):
            found.append((ranks, link))
    found.sort(key=lambda each: -len(each[0]))
    switches: list[SharedSwitch] = []
    for index, (ranks, link) in enumerate(found):
        parent = None
        for before, (others, other) in enumerate(found[:index]):
            if ranks <= others:
                parent = before  # the last one is the smallest
            elif ranks & others:
                raise InputError(
                    f"cluster: the shared links {other.name!r} and {link.name!r} overlap; the"
                    " testbed emulates nested ones only"
                )
        switches.append(
            SharedSwitch(
                ranks=tuple(sorted(ranks)),
                out_bytes_per_s=link.out_gb_per_s * BYTES_IN_GB,
                in_bytes_per_s=link.in_gb_per_s * BYTES_IN_GB,
                parent=parent,
            )
        )
    return tuple(switches)
