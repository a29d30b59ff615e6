"""A host that other programs describe, as a cluster: in shorthand where all pairs are equal."""

from collections.abc import Mapping, Sequence

from pipeplan.cluster import Cluster, Device, HostGroup, expand_hosts
from pipeplan.documents.text import nearest
from pipeplan.errors import InputError
from pipeplan.validation import MAX_LISTED_DEVICES

__all__ = [
    "ASSUMED_GB_PER_S",
    "assumed_bandwidths",
    "equal_hosts",
    "host_cluster",
    "require_devices",
    "require_host_size",
    "summary_of",
]

ASSUMED_GB_PER_S = {"NV": 20.0, "PCIE": 12.0, "SYS": 10.0, "CPU": 1.5}
"""NCCL's figures: one NVLink of a V100 or A100, PCIe 3.0 x16, the link between two sockets; and
what gloo reaches between two processes of one machine."""

MOST_HOST_DEVICES = 512


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


def require_host_size(num_devices: int) -> None:
    """Refuse more GPUs than any host has, before all pairs are looked at."""
    if not num_devices:
        raise InputError("there is no GPU in it")
    if num_devices > MOST_HOST_DEVICES:
        raise InputError(f"has {num_devices} GPUs; a host has at most {MOST_HOST_DEVICES}")


def host_cluster(
    name: str, device_names: Sequence[str], rows_gb_per_s: Sequence[Sequence[float]]
) -> Cluster:
    """One host with these devices; the shorthand is easy to change into several hosts."""
    bandwidth = _only_bandwidth(rows_gb_per_s)
    if bandwidth is not None:
        group = HostGroup(devices=len(device_names), bandwidth_gb_per_s=bandwidth)
        return expand_hosts(name, [group])
    return Cluster(
        name=name,
        devices=tuple(Device(name=each, host="h0") for each in device_names),
        bandwidth_gb_per_s=tuple(
            tuple(0.0 if row == column else value for column, value in enumerate(values))
            for row, values in enumerate(rows_gb_per_s)
        ),
    )


def _only_bandwidth(rows_gb_per_s: Sequence[Sequence[float]]) -> float | None:
    """The bandwidth of all pairs, or None if they differ or there is none."""
    pairs = {
        bandwidth
        for row, bandwidths in enumerate(rows_gb_per_s)
        for column, bandwidth in enumerate(bandwidths)
        if row != column
    }
    return pairs.pop() if len(pairs) == 1 else None


def equal_hosts(
    name: str,
    host_names: Sequence[str],
    rows_gb_per_s: Sequence[Sequence[float]],
    *,
    memory_gb: Sequence[float | None],
    between_gb_per_s: float | None,
    uplink_gb_per_s: float | None,
) -> Cluster:
    """Hosts with these names and equal devices, `<host>d0` and so on; in shorthand if possible."""
    each, bandwidth = len(rows_gb_per_s), _only_bandwidth(rows_gb_per_s)
    require_devices(each * len(host_names))
    if len(set(memory_gb)) == 1 and (bandwidth is not None or each == 1):
        group = HostGroup(
            devices=each,
            count=len(host_names),
            bandwidth_gb_per_s=bandwidth,
            memory_gb=memory_gb[0],
            uplink_gb_per_s=uplink_gb_per_s,
            names=tuple(host_names),
        )
        return expand_hosts(
            name,
            [group],
            between_hosts_gb_per_s=between_gb_per_s if len(host_names) > 1 else None,
        )
    between = between_gb_per_s or 0.0
    return Cluster(
        name=name,
        devices=tuple(
            Device(name=f"{host}d{index}", host=host, memory_gb=memory_gb[index])
            for host in host_names
            for index in range(each)
        ),
        bandwidth_gb_per_s=tuple(
            tuple(
                (0.0 if a == b else rows_gb_per_s[a][b]) if host == other else between
                for other in host_names
                for b in range(each)
            )
            for host in host_names
            for a in range(each)
        ),
        uplink_gb_per_s=uplink_gb_per_s,
    )


def summary_of(cluster: Cluster) -> str:
    """The cluster in a few words: devices, hosts, the range of bandwidths, shared links."""
    num_hosts = len({device.host for device in cluster.devices})
    rates = [
        rate
        for row, rates in enumerate(cluster.bandwidth_gb_per_s)
        for column, rate in enumerate(rates)
        if row != column
    ]
    words = f"{_counted(cluster.num_devices, 'device')} on {_counted(num_hosts, 'host')}"
    if rates:
        words += f", {min(rates):.3g} to {max(rates):.3g} GB/s"
    if cluster.links and num_hosts > 1:
        words += f", {_counted(len(cluster.links), 'shared card')}"
    return words


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
