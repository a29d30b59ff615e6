"""The second input: devices, and the bandwidth and latency between every two of them."""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

import numpy as np

from pipeplan.errors import ClusterError
from pipeplan.host_matrix import HostMatrix
from pipeplan.shared_links import LinkMembers, SharedLink, Uplinks, members_of_links
from pipeplan.validation import (
    BANDWIDTH_GB_PER_S,
    COUNT,
    LATENCY_US,
    MAX_DEVICES,
    MAX_LISTED_DEVICES,
    MEMORY_GB,
    SHARED_GB_PER_S,
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
    uplink_gb_per_s: float | None = None
    """What each host's devices together can send to other hosts, and likewise receive."""
    name: str | None = None
    """Of the only host of the group, instead of `h<host>`."""
    names: tuple[str, ...] | None = None
    """The same, one for each host of the group."""

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
        if self.uplink_gb_per_s is not None:
            require_number(ClusterError, "uplink_gb_per_s", self.uplink_gb_per_s, SHARED_GB_PER_S)
        self._require_names()

    def _require_names(self) -> None:
        if self.name is not None:
            require_text(ClusterError, "name", self.name)
            if self.names is not None:
                raise ClusterError("name: stands beside names; keep one of them")
            if self.count != 1:
                raise ClusterError(f"name: names one host, not {self.count}; give names instead")
        if self.names is not None:
            if len(self.names) != self.count:
                raise ClusterError(f"names: has {len(self.names)} for {self.count} hosts")
            for index, name in enumerate(self.names):
                require_text(ClusterError, f"names[{index}]", name)

    def host_names(self, first: int) -> Sequence[str]:
        """The names of the group's hosts; `first` is the number of the first one."""
        given = self.names if self.name is None else (self.name,)
        return given or [f"h{first + i}" for i in range(self.count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices with arbitrary connectivity between them."""

    name: str
    devices: tuple[Device, ...]
    bandwidth_gb_per_s: Matrix | HostMatrix
    """0 = no path; the diagonal is ignored; need not be symmetric."""
    latency_us: float | Matrix = 0.0
    duplex: Duplex = Duplex.FULL
    uplink_gb_per_s: Uplinks = None
    """What a host's devices together can send to other hosts, and likewise receive."""
    shared: tuple[SharedLink, ...] = ()
    """Other links that devices share."""
    links: tuple[LinkMembers, ...] = field(default=(), init=False, compare=False, repr=False)
    """All shared links, uplinks included, with the numbers of their devices."""
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
        links = members_of_links(
            [device.name for device in self.devices],
            [device.host for device in self.devices],
            self.uplink_gb_per_s,
            self.shared,
        )
        object.__setattr__(self, "links", links)

    def __repr__(self) -> str:
        num_hosts = len({device.host for device in self.devices})
        return (
            f"<Cluster {reprlib.repr(self.name)}: devices {self.num_devices}, hosts {num_hosts},"
            f" shared links {len(self.links)}>"
        )

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
    uplink_gb_per_s: Uplinks = None,
    shared: tuple[SharedLink, ...] = (),
) -> Cluster:
    """The cluster that the `hosts` shorthand stands for; it is written in shorthand too.

    Devices are named `h<host>d<device>` from 0 in the order of `hosts`; a host that has a name has
    it instead of `h<host>`.

    Examples:
        >>> import pipeplan as pp
        >>> hosts = [
        ...     pp.HostGroup(devices=4, bandwidth_gb_per_s=50),
        ...     pp.HostGroup(devices=2, bandwidth_gb_per_s=12, speed=0.5),
        ... ]
        >>> cluster = pp.expand_hosts("uneven", hosts, between_hosts_gb_per_s=3)
        >>> [device.name for device in cluster.devices]
        ['h0d0', 'h0d1', 'h0d2', 'h0d3', 'h1d0', 'h1d1']
        >>> float(cluster.bandwidth_gb_per_s[0][4])
        3.0
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
    names = _names_of_hosts(hosts)
    cluster = Cluster(
        name=name,
        devices=tuple(
            Device(name=f"{host}d{i}", host=host, memory_gb=group.memory_gb, speed=group.speed)
            for host, group in zip(names, each_host, strict=True)
            for i in range(group.devices)
        ),
        bandwidth_gb_per_s=_bandwidth_of_hosts(each_host, between_hosts_gb_per_s or 0.0),
        latency_us=latency_us,
        duplex=duplex,
        uplink_gb_per_s=_uplinks_of_hosts(names, each_host, uplink_gb_per_s),
        shared=shared,
    )
    given = {
        "between_hosts_gb_per_s": between_hosts_gb_per_s,
        "latency_us": None if latency_us == 0 else latency_us,
        "duplex": None if cluster.duplex is Duplex.FULL else cluster.duplex,
        "uplink_gb_per_s": uplink_gb_per_s,
        "shared": [_given_fields(link) for link in shared] or None,
    }
    document: dict[str, Any] = {
        "format": CLUSTER_FORMAT,
        "name": name,
        "hosts": [_given_fields(group) for group in hosts],
        **{field: value for field, value in given.items() if value is not None},
    }
    object.__setattr__(cluster, "document", document)
    return cluster


def _names_of_hosts(hosts: Sequence[HostGroup]) -> list[str]:
    names: list[str] = []
    for group in hosts:
        names.extend(group.host_names(len(names)))
    seen: dict[str, int] = {}
    for number, host in enumerate(names):
        if seen.setdefault(host, number) != number:
            raise ClusterError(f"hosts: {host!r} is the name of two hosts; names are unique")
    return names


def _uplinks_of_hosts(
    names: Sequence[str], each_host: Sequence[HostGroup], given: Uplinks
) -> Uplinks:
    """The uplink of each host: by its name, else of its group, else the number for all hosts."""
    if isinstance(given, dict):
        of_groups = zip(names, (group.uplink_gb_per_s for group in each_host), strict=True)
        return {**{host: uplink for host, uplink in of_groups if uplink is not None}, **given}
    if all(group.uplink_gb_per_s is None for group in each_host):
        return given
    uplinks = {
        host: given if group.uplink_gb_per_s is None else group.uplink_gb_per_s
        for host, group in zip(names, each_host, strict=True)
    }
    return {host: uplink for host, uplink in uplinks.items() if uplink is not None}


def _bandwidth_of_hosts(each_host: Sequence[HostGroup], between_gb_per_s: float) -> HostMatrix:
    return HostMatrix(
        sizes=[group.devices for group in each_host],
        inside=[
            (group.bandwidth_gb_per_s or 0.0) if group.devices > 1 else between_gb_per_s
            for group in each_host
        ],
        between=between_gb_per_s,
    )


def _given_fields(noun: HostGroup | SharedLink) -> dict[str, Any]:
    """The fields of a host group or a shared link that differ from their defaults."""
    return {
        each.name: getattr(noun, each.name)
        for each in fields(noun)
        if getattr(noun, each.name) != each.default
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
