"""The second input: devices, and the bandwidth and latency between every two of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from pipeplan.errors import ClusterError
from pipeplan.validation import require_magnitude, require_positive

__all__ = ["Cluster", "Device", "Duplex", "HostGroup", "Matrix", "expand_hosts"]

Matrix = tuple[tuple[float, ...], ...]
"""One number for each ordered pair of devices: row = sender, column = receiver."""

MAX_DEVICES = 4096
"""A cluster beyond this is refused: its matrices alone would take hundreds of megabytes."""


class Duplex(StrEnum):
    """Whether the two directions between neighbouring stages disturb each other."""

    FULL = "full"
    HALF = "half"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device that computes one block at a time."""

    name: str
    host: str = ""
    """Where it lives; by default the device's own name."""
    memory_gb: float | None = None
    """None: unlimited."""
    speed: float = 1.0
    """2.0 computes twice as fast as the reference device of the model profile."""

    def __post_init__(self) -> None:
        if not self.host:
            object.__setattr__(self, "host", self.name)
        if self.memory_gb is not None:
            require_magnitude(ClusterError, "memory_gb", self.memory_gb)
        require_positive(ClusterError, "speed", self.speed)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """The shorthand for `count` equal hosts."""

    devices: int
    count: int = 1
    bandwidth_gb_per_s: float | None = None
    """Between the devices of one host; needed where a host has more than one."""
    memory_gb: float | None = None
    speed: float = 1.0

    def __post_init__(self) -> None:
        for name in ("devices", "count"):
            if getattr(self, name) < 1:
                raise ClusterError(f"{name}: {getattr(self, name)} is not at least 1")
        if self.bandwidth_gb_per_s is not None:
            require_magnitude(ClusterError, "bandwidth_gb_per_s", self.bandwidth_gb_per_s)
        elif self.devices > 1:
            raise ClusterError(
                f"bandwidth_gb_per_s: is missing; a host with {self.devices} devices needs it"
            )
        if self.memory_gb is not None:
            require_magnitude(ClusterError, "memory_gb", self.memory_gb)
        require_positive(ClusterError, "speed", self.speed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices with arbitrary connectivity between them."""

    name: str
    devices: tuple[Device, ...]
    bandwidth_gb_per_s: Matrix
    """0 = no path; the diagonal is ignored; need not be symmetric."""
    latency_us: float | Matrix = 0.0
    duplex: Duplex = Duplex.FULL
    document: dict[str, Any] | None = field(default=None, init=False, compare=False, repr=False)
    """The file's content in the form it was given; None for a cluster made in Python."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise ClusterError("devices: is empty; a cluster has at least one device")
        _require_device_count(len(self.devices))
        first_with: dict[str, int] = {}
        for index, device in enumerate(self.devices):
            first = first_with.setdefault(device.name, index)
            if first != index:
                raise ClusterError(
                    f"devices[{index}].name: {device.name!r} is taken by devices[{first}];"
                    " names are unique"
                )
        _require_matrix("bandwidth_gb_per_s", self.bandwidth_gb_per_s, len(self.devices))
        if isinstance(self.latency_us, tuple):
            _require_matrix("latency_us", self.latency_us, len(self.devices))
        else:
            require_magnitude(ClusterError, "latency_us", self.latency_us)

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return len(self.devices)


def expand_hosts(
    name: str,
    hosts: Sequence[HostGroup],
    *,
    between_hosts_gb_per_s: float | None = None,
    latency_us: float | Matrix = 0.0,
    duplex: Duplex = Duplex.FULL,
) -> Cluster:
    """The cluster that the `hosts` shorthand stands for.

    Devices are named `h<host>d<device>` from 0 in the order of `hosts`.
    """
    if not hosts:
        raise ClusterError("hosts: is empty; a cluster has at least one host")
    _require_device_count(sum(group.count * group.devices for group in hosts))
    each_host = [group for group in hosts for _ in range(group.count)]
    if between_hosts_gb_per_s is None:
        if len(each_host) > 1:
            raise ClusterError(
                f"between_hosts_gb_per_s: is missing; {len(each_host)} hosts need it"
            )
        between_hosts_gb_per_s = 0.0
    require_magnitude(ClusterError, "between_hosts_gb_per_s", between_hosts_gb_per_s)
    devices = tuple(
        Device(name=f"h{host}d{i}", host=f"h{host}", memory_gb=group.memory_gb, speed=group.speed)
        for host, group in enumerate(each_host)
        for i in range(group.devices)
    )
    host_of = [host for host, group in enumerate(each_host) for _ in range(group.devices)]
    inside = [group.bandwidth_gb_per_s or 0.0 for group in each_host]
    bandwidth = tuple(
        tuple(inside[u] if u == v else between_hosts_gb_per_s for v in host_of) for u in host_of
    )
    return Cluster(
        name=name,
        devices=devices,
        bandwidth_gb_per_s=bandwidth,
        latency_us=latency_us,
        duplex=duplex,
    )


def _require_device_count(num_devices: int) -> None:
    if num_devices > MAX_DEVICES:
        raise ClusterError(f"devices: {num_devices} are more than the {MAX_DEVICES} supported")


def _require_matrix(name: str, matrix: Matrix, num_devices: int) -> None:
    """Refuse a matrix of another shape, or with a number that cannot be off its diagonal."""
    if len(matrix) != num_devices:
        raise ClusterError(f"{name}: has {len(matrix)} rows for {num_devices} devices")
    for row, numbers in enumerate(matrix):
        if len(numbers) != num_devices:
            raise ClusterError(
                f"{name}[{row}]: has {len(numbers)} columns for {num_devices} devices"
            )
    numbers_DD = np.array(matrix)
    wrong = np.argwhere(~np.isfinite(numbers_DD) | (numbers_DD < 0))
    for row, column in wrong.tolist():
        require_magnitude(ClusterError, f"{name}[{row}][{column}]", matrix[row][column])
