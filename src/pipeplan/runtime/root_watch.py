"""Notices that a program changes attributes of the modules around its layers, such as a flag.

Their code decides which layers are called, and how often. A stage leaves it at its cut, so it does
not see what comes behind. If such an attribute changes, all ranks run the whole model once more
(`verification.rechecks`): at its first change, its second, fourth, eighth, and so on, since some
change in each step (counters, schedules).
"""

from operator import is_
from typing import Any

from torch import nn

__all__ = ["RootWatch"]

PLAIN = (bool, int, float, complex, str, bytes, type(None))


class RootWatch:
    """One rank's view; nothing is noted but which objects attributes are."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._spaces = [vars(module) for module in modules]
        self._marks: list[dict[str, Any]] | None = None
        self._num_changes: dict[tuple[int, str], int] = {}

    def have_changed(self) -> bool:
        """Whether it is time to look at the whole model, since attributes have changed."""
        marks, self._marks = self._marks, [dict(space) for space in self._spaces]
        if marks is None:
            return False
        is_due = False
        for place, (mark, space) in enumerate(zip(marks, self._spaces, strict=True)):
            if len(mark) == len(space) and all(map(is_, mark.values(), space.values())):
                continue
            for name in dict.fromkeys((*mark, *space)):
                if not _are_alike(mark.get(name), space.get(name)):
                    count = self._num_changes.get((place, name), 0) + 1
                    self._num_changes[place, name] = count
                    is_due = is_due or count & (count - 1) == 0
        return is_due


def _are_alike(before: Any, now: Any) -> bool:
    """Whether it is the same object, or an equal plain value."""
    if before is now:
        return True
    return type(before) is type(now) and isinstance(now, PLAIN) and bool(before == now)
