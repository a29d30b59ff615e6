"""What an export is asked, what it gives back, and how it refuses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pipeplan.errors import InfeasibleError
from pipeplan.replaying import Replayed

__all__ = ["CannotExport", "ExportSettings", "Exported", "Exporter"]


class CannotExport(InfeasibleError):
    """The plan has something that the other program cannot express."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings:
    """What the plan itself does not say."""

    stem: str = "plan"
    """The output's name without its last suffix, by which files refer to each other."""
    layer_map: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """For layers by name: their role, or the names of their modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The files of an export, and what they do not say."""

    data: bytes
    """The main file."""
    others: Mapping[str, bytes] = field(default_factory=dict)
    """Files beside it, by name."""
    notes: tuple[str, ...] = ()
    """One line each: what the other program does differently."""


Exporter = Callable[[Replayed, ExportSettings], Exported]
"""From a valid plan to files of another program; what cannot be expressed is `CannotExport`."""
