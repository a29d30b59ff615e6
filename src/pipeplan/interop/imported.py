"""What an import is asked, and what it gives back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pipeplan.cluster import Cluster
from pipeplan.profile import ModelProfile

__all__ = ["ImportSettings", "Imported", "Reader"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSettings:
    """What the file itself does not say."""

    name: str
    """The name of the model or the cluster."""
    microbatch_size: int | None = None
    """Samples in the profiled microbatch; None: the file says it, or 1 is assumed."""
    assumed_gb_per_s: Mapping[str, float] = field(default_factory=dict)
    """Bandwidths by kind of link, for files that name only the kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A model or a cluster, and what was assumed to get it."""

    result: ModelProfile | Cluster
    notes: tuple[str, ...] = ()
    """One line each: what the file does not say, and what was taken instead."""


Reader = Callable[[str, ImportSettings], Imported]
"""From the text of a file to a model or a cluster; impossible text raises `InputError`."""
