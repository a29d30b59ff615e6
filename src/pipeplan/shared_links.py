"""Links that several devices share: a host's network card, a switch, an oversubscribed spine.

A shared link has members. It limits what all of them together send to devices that are no members,
and what they receive from these. Members of one link do not use it among themselves. A host's
uplink is the shared link whose members are the host's devices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeplan.errors import ClusterError
from pipeplan.validation import SHARED_GB_PER_S, require_number, require_text

__all__ = ["LinkMembers", "SharedLink", "Uplinks", "members_of_links"]

Uplinks = float | dict[str, float] | None
"""One number for every host, or one for each host that is named; None: no limit."""

MAX_MEMBERS = 1_000_000
"""Of all shared links together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLink:
    """What some hosts or devices together can send to all others, and receive from them."""

    name: str
    members: tuple[str, ...]
    """Names of hosts and devices."""
    gb_per_s: float
    in_gb_per_s: float | None = None
    """What they can receive; None: as much as they can send."""

    def __post_init__(self) -> None:
        require_text(ClusterError, "name", self.name)
        if not self.members:
            raise ClusterError("members: is empty; a shared link has at least one member")
        for index, member in enumerate(self.members):
            require_text(ClusterError, f"members[{index}]", member)
        require_number(ClusterError, "gb_per_s", self.gb_per_s, SHARED_GB_PER_S)
        if self.in_gb_per_s is not None:
            require_number(ClusterError, "in_gb_per_s", self.in_gb_per_s, SHARED_GB_PER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMembers:
    """A shared link with its members as the numbers of devices."""

    name: str
    devices: frozenset[int]
    out_gb_per_s: float
    in_gb_per_s: float


def members_of_links(
    device_names: Sequence[str],
    host_names: Sequence[str],
    uplinks: Uplinks,
    shared: Sequence[SharedLink],
) -> tuple[LinkMembers, ...]:
    """All shared links of a cluster, uplinks first; `host_names` has the host of each device."""
    devices_of: dict[str, list[int]] = {}
    for device, host in enumerate(host_names):
        devices_of.setdefault(host, []).append(device)
    links = [
        LinkMembers(
            name=f"uplink of {host}",
            devices=frozenset(devices_of[host]),
            out_gb_per_s=gb_per_s,
            in_gb_per_s=gb_per_s,
        )
        for host, gb_per_s in _uplink_of_host(uplinks, devices_of).items()
    ]
    device_of = {name: device for device, name in enumerate(device_names)}
    num_members = 0
    for index, link in enumerate(shared):
        devices = frozenset(
            device
            for position, member in enumerate(link.members)
            for device in _devices_of_member(
                f"shared[{index}].members[{position}]", member, devices_of, device_of
            )
        )
        num_members += len(devices)
        if num_members > MAX_MEMBERS:
            raise ClusterError(f"shared: has more than {MAX_MEMBERS:,} members in all")
        links.append(
            LinkMembers(
                name=link.name,
                devices=devices,
                out_gb_per_s=link.gb_per_s,
                in_gb_per_s=link.gb_per_s if link.in_gb_per_s is None else link.in_gb_per_s,
            )
        )
    return tuple(links)


def _uplink_of_host(uplinks: Uplinks, hosts: Mapping[str, object]) -> dict[str, float]:
    if uplinks is None:
        return {}
    if not isinstance(uplinks, dict):
        require_number(ClusterError, "uplink_gb_per_s", uplinks, SHARED_GB_PER_S)
        return dict.fromkeys(hosts, uplinks)
    for host, gb_per_s in uplinks.items():
        if host not in hosts:
            raise ClusterError(f"uplink_gb_per_s: {host!r} is no host of the cluster")
        require_number(ClusterError, f"uplink_gb_per_s[{host!r}]", gb_per_s, SHARED_GB_PER_S)
    return uplinks


def _devices_of_member(
    path: str, member: str, devices_of: Mapping[str, list[int]], device_of: Mapping[str, int]
) -> list[int]:
    in_host, device = devices_of.get(member), device_of.get(member)
    if in_host is None and device is None:
        raise ClusterError(f"{path}: {member!r} is no host and no device of the cluster")
    if in_host is not None and device is not None and in_host != [device]:
        raise ClusterError(
            f"{path}: {member!r} is the name of a host and of another device; name the host's"
            " devices instead, or rename one of the two"
        )
    return in_host if in_host is not None else [device] if device is not None else []
