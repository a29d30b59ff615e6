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
        for link, (out_ms, in_ms) in zip(self._links, self._latencies_ms, strict=True):
            sent = _share_in(sender, link.devices)
            received = _share_in(receiver, link.devices)
            out_bytes = num_bytes * sent * (1 - received)
            in_bytes = num_bytes * received * (1 - sent)
            if out_bytes > 0 and not link.devices.issuperset(receiver.devices):
                rate = link.out_gb_per_s * BYTES_PER_MS_IN_GB_PER_S
                slowest_ms = max(slowest_ms, out_ms + out_bytes / rate)
            if in_bytes > 0 and not link.devices.issuperset(sender.devices):
                rate = link.in_gb_per_s * BYTES_PER_MS_IN_GB_PER_S
                slowest_ms = max(slowest_ms, in_ms + in_bytes / rate)
        return slowest_ms

    def ring_ms_per_byte(self, devices: Sequence[int]) -> float:
        """The time that each byte of a ring's flows takes at least, because of shared links."""
        ring = self.ring(devices)
        slowest = 0.0
        for link in self._links:
            inside = np.array([device in link.devices for device in ring])
            leaving = int((inside & ~np.roll(inside, -1)).sum())
            # A ring enters the members as often as it leaves them.
            least_gb_per_s = min(link.out_gb_per_s, link.in_gb_per_s)
            slowest = max(slowest, leaving / (least_gb_per_s * BYTES_PER_MS_IN_GB_PER_S))
        return slowest

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


def _share_in(stage: Stage, members: frozenset[int]) -> float:
    """The part of a microbatch that the stage's devices in a set take together."""
    shares = zip(stage.devices, stage.device_shares, strict=True)
    return min(1.0, sum(share for device, share in shares if device in members))
