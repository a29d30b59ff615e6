"""A host that other programs describe, as a cluster: in shorthand where all pairs are equal."""

from collections.abc import Mapping, Sequence

from pipeplan.cluster import Cluster, Device, HostGroup, expand_hosts
from pipeplan.documents.text import nearest
from pipeplan.errors import InputError
from pipeplan.validation import MAX_LISTED_DEVICES

__all__ = ["ASSUMED_GB_PER_S", "assumed_bandwidths", "host_cluster", "require_devices"]

ASSUMED_GB_PER_S = {"NV": 20.0, "PCIE": 12.0, "SYS": 10.0}
"""NCCL's figures: one NVLink of a V100 or A100, PCIe 3.0 x16, the link between two sockets."""


def assumed_bandwidths(given: Mapping[str, float]) -> dict[str, float]:
    """The bandwidth of each kind of link, those that were given in place of ours."""
    for kind in given:
        if kind not in ASSUMED_GB_PER_S:
            raise InputError(f"assume: {kind!r} is no kind{nearest(kind, ASSUMED_GB_PER_S)}")
    return ASSUMED_GB_PER_S | dict(given)


def require_devices(num_devices: int) -> None:
    """Refuse more devices than a matrix may have, before the matrix is made."""
    if not num_devices:
        raise InputError("there is no GPU in it")
    if num_devices > MAX_LISTED_DEVICES:
        raise InputError(f"has {num_devices} GPUs, more than the {MAX_LISTED_DEVICES} supported")


def host_cluster(
    name: str, device_names: Sequence[str], rows_gb_per_s: Sequence[Sequence[float]]
) -> Cluster:
    """One host with these devices; the shorthand is easy to change into several hosts."""
    pairs = {
        bandwidth
        for row, bandwidths in enumerate(rows_gb_per_s)
        for column, bandwidth in enumerate(bandwidths)
        if row != column
    }
    if len(pairs) == 1:
        group = HostGroup(devices=len(device_names), bandwidth_gb_per_s=pairs.pop())
        return expand_hosts(name, [group])
    return Cluster(
        name=name,
        devices=tuple(Device(name=each, host="h0") for each in device_names),
        bandwidth_gb_per_s=tuple(
            tuple(0.0 if row == column else value for column, value in enumerate(values))
            for row, values in enumerate(rows_gb_per_s)
        ),
    )
