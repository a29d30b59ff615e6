"""Planners and schedules of other installed packages, found by their entry points.

A package names its functions in its own `pyproject.toml`::

    [project.entry-points."pipeplan.planners"]
    mine = "my_package.planning:plan_mine"

Searching all installed packages takes some milliseconds. So it is done only for names that pipeplan
itself does not know, and where all names are listed. CONTRIBUTING.md has a complete example.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

from pipeplan._core import DeadlineError
from pipeplan.documents.text import nearest, printable
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.validation import require_text

__all__ = ["PLANNER_GROUP", "SCHEDULE_GROUP", "all_names", "find", "foreign_code"]

PLANNER_GROUP = "pipeplan.planners"
SCHEDULE_GROUP = "pipeplan.schedules"

T = TypeVar("T")


def find(kind: str, name: str, own: Mapping[str, T], group: str) -> T:
    """Our own function of that name, else another package's; `kind` is the field in messages."""
    require_text(InputError, kind, name)
    if name in own:
        return own[name]
    entry_point = _entry_points(group).get(name)
    if entry_point is None:
        names = all_names(own, group)
        raise InputError(f"{kind}: {name!r} is not known{nearest(name, names)}")
    try:
        found: T = entry_point.load()
    except (Exception, SystemExit) as problem:
        raise InputError(
            f"{kind}: {name!r} of {entry_point.value!r} cannot be loaded ({_reason(problem)});"
            " mend or uninstall that package"
        ) from problem
    return found


def all_names(own: Mapping[str, object], group: str) -> tuple[str, ...]:
    """Our own names, then those of other packages."""
    return (*own, *(name for name in _entry_points(group) if name not in own))


@contextmanager
def foreign_code(kind: str, name: str) -> Iterator[None]:
    """Report a failure of another package's function in one line, as an `InputError`.

    The function may still say that no plan exists, that time is up, or that memory is.
    """
    try:
        yield
    except (InfeasibleError, DeadlineError, MemoryError):
        raise
    except (Exception, SystemExit) as problem:
        raise InputError(
            f"{kind}: {name!r} failed ({_reason(problem)}); mend or uninstall its package"
        ) from problem


def _reason(problem: BaseException) -> str:
    return printable(f"{type(problem).__name__}: {problem}")


@cache
def _entry_points(group: str):  # type: ignore[no-untyped-def]  # EntryPoint needs a late import
    from importlib.metadata import entry_points

    return {point.name: point for point in sorted(entry_points(group=group))}
