"""What links that several devices share cost at least: the closed form of rules 8-12.

A transfer sends a known part of a microbatch out of the members of a shared link, and a known part
into them. However the flows take turns, these bytes need their time at the link's capacity, and
none of these flows starts before the least of their latencies. In a ring the flows that leave and
enter the members are counted. Both are lower bounds on the true times, which the simulator finds.
They are exact where nothing else uses the link.
"""

from collections.abc import Sequence

import numpy as np

from pipeplan import _core
from pipeplan.cluster import Cluster
from pipeplan.pipeline import Stage

__all__ = ["BYTES_PER_MS_IN_GB_PER_S", "Contention"]

BYTES_PER_MS_IN_GB_PER_S = 1e6
MS_IN_US = 1e-3


class Contention:
    """The shared links of a cluster that has some."""

    def __init__(self, cluster: Cluster) -> None:
        self._links = cluster.links
        numbers: dict[str, int] = {}
        self._latencies_ms = _least_latencies_ms(cluster)
        self._links_of_D: list[list[int]] = [[] for _ in cluster.devices]
        for number, link in enumerate(self._links):
            for device in sorted(link.devices):
                self._links_of_D[device].append(number)
        self._host_of_D = [numbers.setdefault(each.host, len(numbers)) for each in cluster.devices]
        self.for_kernels = _core.SharedLinks(
            members=[sorted(link.devices) for link in self._links],
            out_bytes_per_ms=[link.out_gb_per_s * BYTES_PER_MS_IN_GB_PER_S for link in self._links],
            in_bytes_per_ms=[link.in_gb_per_s * BYTES_PER_MS_IN_GB_PER_S for link in self._links],
            host_of=self._host_of_D,
            out_latency_ms=[out_ms for out_ms, _ in self._latencies_ms],
            in_latency_ms=[in_ms for _, in_ms in self._latencies_ms],
        )
        """The same as planning kernels read it."""

    def transfer_ms(self, num_bytes: float, sender: Stage, receiver: Stage) -> float:
        """No transfer between these stages is shorter than this."""
        slowest_ms = 0.0
        sent, received = self._shares_in(sender), self._shares_in(receiver)
        for number in sorted({*sent, *received}):
            link, (out_ms, in_ms) = self._links[number], self._latencies_ms[number]
            before, behind = sent.get(number, 0.0), received.get(number, 0.0)
            out_bytes = num_bytes * before * (1 - behind)
            in_bytes = num_bytes * behind * (1 - before)
            if out_bytes > 0 and not link.devices.issuperset(receiver.devices):
                rate = link.out_gb_per_s * BYTES_PER_MS_IN_GB_PER_S
                slowest_ms = max(slowest_ms, out_ms + out_bytes / rate)
            if in_bytes > 0 and not link.devices.issuperset(sender.devices):
                rate = link.in_gb_per_s * BYTES_PER_MS_IN_GB_PER_S
                slowest_ms = max(slowest_ms, in_ms + in_bytes / rate)
        return slowest_ms

    def _shares_in(self, stage: Stage) -> dict[int, float]:
        """The part of a microbatch that a stage's devices among each link's members take."""
        shares: dict[int, float] = {}
        for device, share in zip(stage.devices, stage.device_shares, strict=True):
            for number in self._links_of_D[device]:
                shares[number] = min(1.0, shares.get(number, 0.0) + share)
        return shares

    def ring_ms_per_byte(self, devices: Sequence[int]) -> float:
        """The time that each byte of a ring's flows takes at least, because of shared links."""
        ring = self.ring(devices)
        leaving: dict[int, int] = {}
        for device, after in zip(ring, [*ring[1:], ring[0]], strict=True):
            for number in self._links_of_D[device]:
                if after not in self._links[number].devices:
                    leaving[number] = leaving.get(number, 0) + 1
        # A ring enters the members as often as it leaves them.
        return max(
            (
                count / (min(link.out_gb_per_s, link.in_gb_per_s) * BYTES_PER_MS_IN_GB_PER_S)
                for link, count in ((self._links[number], n) for number, n in leaving.items())
            ),
            default=0.0,
        )

    def ring(self, devices: Sequence[int]) -> list[int]:
        """The devices as the ring has them: as in the cluster, but those of a host together."""
        first_of: dict[int, int] = {}
        for device in sorted(devices):
            first_of.setdefault(self._host_of_D[device], device)
        return sorted(devices, key=lambda device: (first_of[self._host_of_D[device]], device))


def _least_latencies_ms(cluster: Cluster) -> list[tuple[float, float]]:
    """For each shared link the least latency of what leaves its members, and what enters them."""
    if not isinstance(cluster.latency_us, tuple | list):
        return [(cluster.latency_us * MS_IN_US,) * 2 for _ in cluster.links]
    latency_ms_DD = np.array(cluster.latency_us, dtype=np.float64) * MS_IN_US
    least = []
    for link in cluster.links:
        inside = sorted(link.devices)
        outside = [u for u in range(cluster.num_devices) if u not in link.devices]
        out_ms_DD, in_ms_DD = (
            latency_ms_DD[np.ix_(*ends)] for ends in ((inside, outside), (outside, inside))
        )
        # A link that all devices are members of carries nothing.
        least.append((float(out_ms_DD.min()), float(in_ms_DD.min())) if outside else (0.0, 0.0))
    return least
