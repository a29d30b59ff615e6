"""Values that are allowed but look like another unit: 24576 GB of memory is probably 24576 MB.

These are notes, never errors. Each names the field, the value and the unit that the format wants.
"""

from pipeplan.cluster import Cluster
from pipeplan.host_matrix import HostMatrix
from pipeplan.profile import ModelProfile

__all__ = ["suspicious_units"]

MOST_MEMORY_GB = 2_000.0
"""No device has more; the largest accelerators have some hundred GB."""
FASTEST_LINK_GB_PER_S = 5_000.0
"""The fastest links between accelerators carry about 2,000 GB/s."""
LONGEST_MICROBATCH_MS = 3.6e6
"""An hour for one microbatch."""
SHORTEST_MICROBATCH_MS = 1e-3
"""A microsecond for one microbatch through all layers."""


def suspicious_units(model: ModelProfile, cluster: Cluster) -> list[str]:
    """One line for each kind of value that looks like another unit."""
    notes = []
    memory_gb = max((device.memory_gb or 0.0 for device in cluster.devices), default=0.0)
    if memory_gb > MOST_MEMORY_GB:
        notes.append(f"memory_gb: {memory_gb:g} GB is more than devices have; is it in MB?")
    fastest = _fastest_gb_per_s(cluster)
    if fastest > FASTEST_LINK_GB_PER_S:
        notes.append(
            f"bandwidth_gb_per_s: {fastest:g} GB/s is faster than links are;"
            " is it in MB/s or Mbit/s?"
        )
    work_ms = sum(layer.forward_ms + layer.backward_ms for layer in model.layers)
    if work_ms > LONGEST_MICROBATCH_MS:
        notes.append(
            f"forward_ms, backward_ms: {work_ms:g} ms for one microbatch is long; are they in us?"
        )
    elif 0 < work_ms < SHORTEST_MICROBATCH_MS:
        notes.append(
            f"forward_ms, backward_ms: {work_ms:g} ms for one microbatch is short;"
            " are they in seconds?"
        )
    return notes


def _fastest_gb_per_s(cluster: Cluster) -> float:
    """The fastest link; a cluster of hosts has too many pairs to look at each."""
    matrix = cluster.bandwidth_gb_per_s
    if isinstance(matrix, HostMatrix):
        return float(max(matrix.between, matrix.inside_H.max()))
    return max(
        (rate for u, row in enumerate(matrix) for v, rate in enumerate(row) if u != v), default=0.0
    )
