"""Changes of a cluster, as data and in words: slower devices, other links, losses, new hosts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from pipeplan.errors import ClusterError, InputError
from pipeplan.validation import (
    BANDWIDTH_GB_PER_S,
    COUNT,
    LATENCY_US,
    MEMORY_GB,
    SPEED,
    number_text,
    require_count,
    require_number,
    require_text,
)

__all__ = ["AddedHosts", "Changes"]

MAX_WORDS = 4
"""Of more changes a description names the first ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedHosts:
    """New hosts; what is None is as in the hosts that the cluster has."""

    devices: int
    """In each of the hosts."""
    count: int = 1
    bandwidth_gb_per_s: float | None = None
    """Between the devices of one new host."""
    between_gb_per_s: float | None = None
    """Between a new host and every other host."""
    latency_us: float | None = None
    """On every new link."""
    memory_gb: float | None = None
    speed: float | None = None

    def __post_init__(self) -> None:
        for name in ("devices", "count"):
            require_count(ClusterError, f"add: {name}", getattr(self, name), COUNT)
        for name, limits in (
            ("bandwidth_gb_per_s", BANDWIDTH_GB_PER_S),
            ("between_gb_per_s", BANDWIDTH_GB_PER_S),
            ("latency_us", LATENCY_US),
            ("memory_gb", MEMORY_GB),
            ("speed", SPEED),
        ):
            if getattr(self, name) is not None:
                require_number(ClusterError, f"add: {name}", getattr(self, name), limits)

    @property
    def words(self) -> str:
        """`2 hosts of 4 devices added`."""
        hosts = "1 host" if self.count == 1 else f"{self.count} hosts"
        devices = "1 device" if self.devices == 1 else f"{self.devices} devices"
        return f"{hosts} of {devices} added"


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """All changes of one question. Names are those of devices or hosts.

    New hosts come first, then slower devices and links, and losses last.
    """

    slower: Mapping[str, float] = field(default_factory=dict)
    """By name the factor of the speed: 0.5 computes half as fast; above 1 is faster."""
    links: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """By two names the bandwidth in both directions; 0 is no path."""
    lose: Sequence[str] = ()
    add: Sequence[AddedHosts] = ()

    def __post_init__(self) -> None:
        for name in chain(self.slower, self.lose, *self.links):
            require_text(InputError, "name", name)
        for name, factor in self.slower.items():
            require_number(InputError, f"slower[{name!r}]", factor, SPEED)
        for pair, gb_per_s in self.links.items():
            require_number(InputError, f"links[{pair!r}]", gb_per_s, BANDWIDTH_GB_PER_S)

    def __bool__(self) -> bool:
        return bool(self.slower or self.links or self.lose or self.add)

    @property
    def words(self) -> tuple[str, ...]:
        """Each change in a few words."""
        return (
            *(hosts.words for hosts in self.add),
            *(f"{name} at {number_text(factor)}x speed" for name, factor in self.slower.items()),
            *(
                f"{a} to {b} at {number_text(gb_per_s)} GB/s" if gb_per_s else f"{a} to {b} cut"
                for (a, b), gb_per_s in self.links.items()
            ),
            *(f"{name} lost" for name in self.lose),
        )

    @property
    def title(self) -> str:
        """All changes in one line; of many the first ones."""
        words = self.words
        more = f" and {len(words) - MAX_WORDS} more" if len(words) > MAX_WORDS else ""
        return ", ".join(words[:MAX_WORDS]) + more
