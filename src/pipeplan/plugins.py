"""What other installed packages add, found by their entry points.

A package names its functions in its own metadata::

    [project.entry-points."pipeplan.planners"]
    mine = "my_package.planning:plan_mine"

Looking through all installed packages takes some milliseconds, so it is done only for a name that
pipeplan itself does not know, and where all names are listed.
"""

from collections.abc import Mapping
from functools import cache
from typing import TypeVar

from pipeplan.documents.text import nearest
from pipeplan.errors import InputError

__all__ = ["PLANNER_GROUP", "SCHEDULE_GROUP", "all_names", "find"]

PLANNER_GROUP = "pipeplan.planners"
SCHEDULE_GROUP = "pipeplan.schedules"

T = TypeVar("T")


def find(kind: str, name: str, own: Mapping[str, T], group: str) -> T:
    """Our own function of that name, else another package's; `kind` is the field in messages."""
    if name in own:
        return own[name]
    entry_point = _entry_points(group).get(name)
    if entry_point is None:
        names = all_names(own, group)
        raise InputError(f"{kind}: {name!r} is not known{nearest(name, names)}")
    try:
        found: T = entry_point.load()
    except Exception as problem:
        reason = " ".join(f"{type(problem).__name__}: {problem}".split())
        raise InputError(
            f"{kind}: {name!r} of {entry_point.value!r} cannot be loaded ({reason});"
            " mend or uninstall that package"
        ) from None
    return found


def all_names(own: Mapping[str, object], group: str) -> tuple[str, ...]:
    """Our own names, then those of other packages."""
    return (*own, *(name for name in _entry_points(group) if name not in own))


@cache
def _entry_points(group: str):  # type: ignore[no-untyped-def]  # EntryPoint needs a late import
    from importlib.metadata import entry_points

    return {point.name: point for point in sorted(entry_points(group=group))}
