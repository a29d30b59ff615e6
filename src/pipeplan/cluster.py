"""The second input: devices, and the bandwidth and latency between every two of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from typing import Any, overload

import numpy as np

from pipeplan.errors import ClusterError
from pipeplan.validation import (
    BANDWIDTH_GB_PER_S,
    COUNT,
    LATENCY_US,
    MAX_DEVICES,
    MAX_LISTED_DEVICES,
    MEMORY_GB,
    SPEED,
    Limits,
    number_text,
    require_choice,
    require_count,
    require_figure,
    require_number,
    require_text,
)

__all__ = [
    "CLUSTER_FORMAT",
    "Cluster",
    "Device",
    "Duplex",
    "HostGroup",
    "HostMatrix",
    "Matrix",
    "expand_hosts",
]

Matrix = tuple[tuple[float, ...], ...]
"""One number for each ordered pair of devices: row = sender, column = receiver."""


class HostMatrix(Sequence[tuple[float, ...]]):
    """The matrix of a cluster of hosts: one number inside each host, one between all hosts.

    It looks like a tuple of rows, but makes a row only when asked. So 10,000 devices take no more
    room than their list. Devices of a host share one row, and so do all lone devices: the diagonal
    is ignored, so a lone device needs no row of its own.
    """

    def __init__(self, sizes: Sequence[int], inside: Sequence[float], between: float) -> None:
        self.between = float(between)
        """Between devices of different hosts."""
        self.inside_H = np.array(inside, dtype=np.float64)
        """Inside each host; between hosts for a lone device."""
        self.host_of_D = np.repeat(np.arange(len(sizes)), sizes)
        self._start_H = [0, *np.cumsum(sizes).tolist()]
        self._last: tuple[int, tuple[float, ...]] = (-1, ())

    def __len__(self) -> int:
        return len(self.host_of_D)

    @overload
    def __getitem__(self, index: int) -> tuple[float, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[float, ...], ...]: ...
    def __getitem__(self, index: int | slice) -> tuple[float, ...] | tuple[tuple[float, ...], ...]:
        if isinstance(index, slice):
            return tuple(self[row] for row in range(*index.indices(len(self))))
        return self._row_of_host(int(self.host_of_D[index]))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, HostMatrix):
            return (
                self.between == other.between
                and self._start_H == other._start_H
                and bool((self.inside_H == other.inside_H).all())
            )
        if not isinstance(other, tuple | list) or len(other) != len(self):
            return False
        return all(mine == tuple(theirs) for mine, theirs in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"HostMatrix({len(self.inside_H)} hosts, {len(self)} devices)"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        same_host = self.host_of_D[:, None] == self.host_of_D[None, :]
        full = np.where(same_host, self.inside_H[self.host_of_D][:, None], self.between)
        return full if dtype is None else full.astype(dtype, copy=False)

    @cached_property
    def is_connected(self) -> bool:
        """Whether every two devices have a path."""
        return bool(self.inside_H.min() > 0) and (len(self.inside_H) == 1 or self.between > 0)

    def _row_of_host(self, host: int) -> tuple[float, ...]:
        start, end = self._start_H[host], self._start_H[host + 1]
        key = host if end - start > 1 else -2  # all lone devices share a row
        if self._last[0] != key:
            row = [self.between] * len(self)
            if end - start > 1:
                row[start:end] = [float(self.inside_H[host])] * (end - start)
            self._last = (key, tuple(row))
        return self._last[1]


CLUSTER_FORMAT = "pipeplan.cluster/1"
"""What a cluster's file says under `format`."""


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
        require_text(ClusterError, "name", self.name)
        if self.host is None or self.host == "":
            object.__setattr__(self, "host", self.name)
        require_text(ClusterError, "host", self.host)
        if self.memory_gb is not None:
            require_number(ClusterError, "memory_gb", self.memory_gb, MEMORY_GB)
        require_number(ClusterError, "speed", self.speed, SPEED)


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
            require_count(ClusterError, name, getattr(self, name), COUNT)
        if self.bandwidth_gb_per_s is not None:
            require_number(
                ClusterError, "bandwidth_gb_per_s", self.bandwidth_gb_per_s, BANDWIDTH_GB_PER_S
            )
        elif self.devices > 1:
            raise ClusterError(
                f"bandwidth_gb_per_s: is missing; a host with {self.devices} devices needs it"
            )
        if self.memory_gb is not None:
            require_number(ClusterError, "memory_gb", self.memory_gb, MEMORY_GB)
        require_number(ClusterError, "speed", self.speed, SPEED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices with arbitrary connectivity between them."""

    name: str
    devices: tuple[Device, ...]
    bandwidth_gb_per_s: Matrix | HostMatrix
    """0 = no path; the diagonal is ignored; need not be symmetric."""
    latency_us: float | Matrix = 0.0
    duplex: Duplex = Duplex.FULL
    document: dict[str, Any] | None = field(default=None, init=False, compare=False, repr=False)
    """The file's content in the form it was given; None for a cluster made in Python."""

    def __post_init__(self) -> None:
        require_text(ClusterError, "name", self.name)
        duplex = require_choice(ClusterError, "duplex", self.duplex, Duplex)
        object.__setattr__(self, "duplex", duplex)
        if not self.devices:
            raise ClusterError("devices: is empty; a cluster has at least one device")
        _require_device_count(len(self.devices), self.bandwidth_gb_per_s)
        first_with: dict[str, int] = {}
        for index, device in enumerate(self.devices):
            first = first_with.setdefault(device.name, index)
            if first != index:
                raise ClusterError(
                    f"devices[{index}].name: {device.name!r} is taken by devices[{first}];"
                    " names are unique"
                )
        _require_matrix(
            "bandwidth_gb_per_s", self.bandwidth_gb_per_s, len(self.devices), BANDWIDTH_GB_PER_S
        )
        if isinstance(self.latency_us, tuple | list):
            _require_matrix("latency_us", self.latency_us, len(self.devices), LATENCY_US)
        else:
            require_number(ClusterError, "latency_us", self.latency_us, LATENCY_US)

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
    """The cluster that the `hosts` shorthand stands for; it is written in shorthand too.

    Devices are named `h<host>d<device>` from 0 in the order of `hosts`.
    """
    if not hosts:
        raise ClusterError("hosts: is empty; a cluster has at least one host")
    _require_device_count(sum(group.count * group.devices for group in hosts), None)
    each_host = [group for group in hosts for _ in range(group.count)]
    if between_hosts_gb_per_s is not None:
        require_number(
            ClusterError, "between_hosts_gb_per_s", between_hosts_gb_per_s, BANDWIDTH_GB_PER_S
        )
    elif len(each_host) > 1:
        raise ClusterError(f"between_hosts_gb_per_s: is missing; {len(each_host)} hosts need it")
    cluster = Cluster(
        name=name,
        devices=tuple(
            Device(
                name=f"h{host}d{i}", host=f"h{host}", memory_gb=group.memory_gb, speed=group.speed
            )
            for host, group in enumerate(each_host)
            for i in range(group.devices)
        ),
        bandwidth_gb_per_s=_bandwidth_of_hosts(each_host, between_hosts_gb_per_s or 0.0),
        latency_us=latency_us,
        duplex=duplex,
    )
    document: dict[str, Any] = {
        "format": CLUSTER_FORMAT,
        "name": name,
        "hosts": [_given_fields(group) for group in hosts],
    }
    if between_hosts_gb_per_s is not None:
        document["between_hosts_gb_per_s"] = between_hosts_gb_per_s
    if latency_us != 0:
        document["latency_us"] = latency_us
    if cluster.duplex is not Duplex.FULL:
        document["duplex"] = cluster.duplex
    object.__setattr__(cluster, "document", document)
    return cluster


def _bandwidth_of_hosts(each_host: Sequence[HostGroup], between_gb_per_s: float) -> HostMatrix:
    return HostMatrix(
        sizes=[group.devices for group in each_host],
        inside=[
            (group.bandwidth_gb_per_s or 0.0) if group.devices > 1 else between_gb_per_s
            for group in each_host
        ],
        between=between_gb_per_s,
    )


def _given_fields(group: HostGroup) -> dict[str, Any]:
    """The fields of a host group that differ from their defaults."""
    return {
        each.name: getattr(group, each.name)
        for each in fields(group)
        if getattr(group, each.name) != each.default
    }


def _require_device_count(num_devices: int, matrix: Matrix | HostMatrix | None) -> None:
    if num_devices > MAX_DEVICES:
        raise ClusterError(
            f"devices: {number_text(num_devices)} are more than the {MAX_DEVICES} supported"
        )
    if num_devices > MAX_LISTED_DEVICES and isinstance(matrix, tuple | list):
        raise ClusterError(
            f"devices: {num_devices} are more than the {MAX_LISTED_DEVICES} supported with a full"
            " matrix; give the cluster in shorthand `hosts`"
        )


def _require_matrix(
    name: str, matrix: Matrix | HostMatrix, num_devices: int, limits: Limits
) -> None:
    """Refuse a matrix of another shape, or with a number outside its limits.

    The diagonal is ignored: there, any number that is finite as a float will do.
    """
    if len(matrix) != num_devices:
        raise ClusterError(f"{name}: has {len(matrix)} rows for {num_devices} devices")
    if isinstance(matrix, HostMatrix):
        for number in {matrix.between, *matrix.inside_H.tolist()}:
            require_number(ClusterError, name, number, limits)
        return
    checked: set[int] = set()  # rows may be shared
    for row, numbers in enumerate(matrix):
        if id(numbers) in checked:
            continue
        if len(numbers) != num_devices:
            raise ClusterError(
                f"{name}[{row}]: has {len(numbers)} columns for {num_devices} devices"
            )
        if _within(numbers, limits):
            checked.add(id(numbers))
            continue
        _require_any_number(f"{name}[{row}][{row}]", numbers[row])
        others = (*numbers[:row], 0.0, *numbers[row + 1 :])
        if not _within(others, limits):
            for column, number in enumerate(others):
                require_number(ClusterError, f"{name}[{row}][{column}]", number, limits)


def _require_any_number(name: str, number: Any) -> None:
    require_figure(ClusterError, name, number, may_be_negative=True)
    try:
        float(number)
    except OverflowError:
        raise ClusterError(f"{name}: {number_text(number)} is too large a number") from None


def _within(numbers: Sequence[Any], limits: Limits) -> bool:
    """Whether all these are plain numbers, each 0 or within its limits."""
    if not set(map(type, numbers)) <= {float, int}:
        return False
    try:
        numbers_D = np.array(numbers, dtype=np.float64)
    except OverflowError:  # a whole number too long for a float
        return False
    fits = (numbers_D == 0) | ((numbers_D >= limits.least) & (numbers_D <= limits.most))
    return bool(fits.all())
