"""Which rank is which device of the plan.

The plan names devices and their hosts. At the start, every rank says where it really runs::

    real host has the plan's name   the i-th rank there is the plan's i-th device of that host
    all ranks on one host           ranks are the plan's devices in the order of the cluster
    ranks say their device          that one; a rank that says none stays unused
    anything else                   refused: name the hosts, or say each rank's device

Devices that the plan does not use may have a rank, but need none.
"""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeplan.documents.text import printable
from pipeplan.errors import RuntimeMismatchError
from pipeplan.pipeline import Plan
from pipeplan.runtime.gathering import MAKING, gather

__all__ = ["Place", "Placement", "find_placement", "name_stages", "place_ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank really runs."""

    host: str
    device_name: str | None = None
    """The device of the plan that this rank says it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The ranks of every stage, in the order of the stage's devices."""

    ranks: tuple[tuple[int, ...], ...]
    device_of: dict[int, str]
    """The name of each rank's device."""
    local_index: tuple[int, ...]
    """For each rank, its index among the ranks of its host."""

    def places(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The stages of a rank, rising, each with the rank's replica there; they are one group."""
        return tuple(
            (stage, ranks.index(rank)) for stage, ranks in enumerate(self.ranks) if rank in ranks
        )

    def find(self, rank: int) -> tuple[int, int] | None:
        """The first stage and the replica of a rank; None if the plan does not use it."""
        return next(iter(self.places(rank)), None)

    def rank_names(self, num_ranks: int) -> list[str]:
        """What messages call each rank."""
        names = []
        for rank in range(num_ranks):
            stages = [stage for stage, _ in self.places(rank)]
            on_device = printable(self.device_of.get(rank, ""))
            names.append(
                f"{name_stages(stages)} on {on_device}" if stages else "unused by the plan"
            )
        return names


def name_stages(stages: Sequence[int]) -> str:
    """What messages call the stages of a rank."""
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def find_placement(
    plan: Plan, device_name: str | None, real_hosts: Mapping[str, str] | None
) -> Placement:
    """The placement of all ranks, from what each of them says about itself."""
    places = gather((socket.gethostname(), device_name), MAKING)
    return place_ranks(
        plan, [Place(host=host, device_name=name) for host, name in places], real_hosts or {}
    )


def place_ranks(plan: Plan, places: Sequence[Place], real_hosts: Mapping[str, str]) -> Placement:
    """The placement, given where each rank runs.

    Raises:
        RuntimeMismatchError: a device that the plan uses has no rank, or has two.
    """
    local_index = tuple(
        sum(other.host == place.host for other in places[:rank])
        for rank, place in enumerate(places)
    )
    used = sorted({device for stage in plan.stages for device in stage.devices})
    names = [device.name for device in plan.cluster.devices]
    if len(places) < len(used):
        raise RuntimeMismatchError(
            f"ranks: {len(places)} for a plan on {len(used)} devices;"
            f" start {len(used)} ranks or plan for {len(places)} device(s)"
        )
    device_of = _devices(plan, places, real_hosts, local_index, used)
    rank_of: dict[int, int] = {}
    for rank, device in device_of.items():
        if device in rank_of:
            raise RuntimeMismatchError(
                f"ranks: {rank_of[device]} and {rank} are both {names[device]!r};"
                " each device has one rank"
            )
        rank_of[device] = rank
    for device in used:
        if device not in rank_of:
            host = plan.cluster.devices[device].host
            raise RuntimeMismatchError(
                f"devices: {names[device]!r} on host {host!r} has no rank; ranks are"
                f" on {_listed(places)}; start one there or plan without it"
            )
    return Placement(
        ranks=tuple(tuple(rank_of[device] for device in stage.devices) for stage in plan.stages),
        device_of={rank: names[device] for rank, device in device_of.items()},
        local_index=local_index,
    )


def _devices(
    plan: Plan,
    places: Sequence[Place],
    real_hosts: Mapping[str, str],
    local_index: Sequence[int],
    used: list[int],
) -> dict[int, int]:
    """The index of each rank's device."""
    devices = plan.cluster.devices
    claims = [place.device_name for place in places]
    if any(claims):
        index_of = {device.name: index for index, device in enumerate(devices)}
        for rank, claim in enumerate(claims):
            if claim is not None and claim not in index_of:
                raise RuntimeMismatchError(
                    f"ranks: {rank} says it is {claim!r}, which the plan does not know;"
                    f" its devices are {printable(', '.join(list(index_of)[:8]))}"
                )
        return {rank: index_of[claim] for rank, claim in enumerate(claims) if claim is not None}
    on_host: dict[str, list[int]] = {}
    for index, device in enumerate(devices):
        on_host.setdefault(real_hosts.get(device.host, device.host), []).append(index)
    if {place.host for place in places} & set(on_host):
        found = {}
        for rank, place in enumerate(places):
            candidates = on_host.get(place.host, [])
            if local_index[rank] < len(candidates):
                found[rank] = candidates[local_index[rank]]
        return found
    if len({place.host for place in places}) == 1:
        order = used if len(places) < len(devices) else list(range(len(devices)))
        return dict(enumerate(order[: len(places)]))
    raise RuntimeMismatchError(
        f"hosts: the plan names {printable(', '.join(sorted(on_host)))}, but ranks run on"
        f" {_listed(places)}; give the cluster these host names,"
        " or say real_hosts={plan's: real}"
    )


def _listed(places: Sequence[Place]) -> str:
    counts: dict[str, int] = {}
    for place in places:
        counts[place.host] = counts.get(place.host, 0) + 1
    return printable(", ".join(f"{host} ({count})" for host, count in counts.items()))
