"""Values that a rank may have of its own: times, its number, a flag of the main rank."""

import math
import time
import zlib
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

__all__ = ["Likeness", "as_number", "compare_changes", "is_time"]

PART_BITS = 20
LARGEST = (1 << PART_BITS) - 1
"""Of each view, in a number that holds three."""
MARGIN_S = 60.0
"""How much clocks of hosts differ."""
LEAST_TIME_S = 1000.0
"""Below, a number may be a scale or a rate: it counts as one, even if a host began just now."""
STARTED_S, LAUNCH_S = time.time(), 600.0
"""When this process began, at the latest, and how much earlier other ranks may have begun."""


class Likeness(Enum):
    """What two ranks' changes are to each other."""

    SAME = auto()
    DOUBTFUL = auto()
    """They differ in what ranks may have of their own; computing has to tell whether it matters."""
    OTHER = auto()


def as_number(*views: Sequence[Any], training: bool) -> int:
    """One number for what a rank has changed; 0 for nothing.

    The views are texts: of all of it, of what has to be alike, and of the same with equal texts for
    what names the rank.
    """
    number = 0
    if training and not any(views):  # as in almost all steps
        return number
    for texts in views:
        crc = zlib.crc32(repr((training, texts)).encode(errors="replace"))
        number = (number << PART_BITS) + (1 + crc % LARGEST if texts or not training else 0)
    return number


def compare_changes(first: int, second: int) -> Likeness:
    """Compare the numbers of two ranks."""
    parts = [
        first >> shift & LARGEST == second >> shift & LARGEST
        for shift in (2 * PART_BITS, PART_BITS, 0)
    ]
    if parts[0]:
        return Likeness.SAME
    return Likeness.DOUBTFUL if any(parts) else Likeness.OTHER


def is_time(value: Any) -> bool:
    """Whether a number is what a clock of this process has shown, to a fraction of a second."""
    if not isinstance(value, float) or not math.isfinite(value) or round(value, 3) == value:
        return False
    age_s = time.time() - STARTED_S + LAUNCH_S
    return any(
        max(LEAST_TIME_S, now_s - age_s) < value < now_s + MARGIN_S
        for now_s in (time.time(), time.monotonic(), time.perf_counter())
    )
