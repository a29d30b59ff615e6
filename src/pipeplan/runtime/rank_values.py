"""Values that a rank may have of its own: times, its number, a flag of the main rank."""

import math
import time
from typing import Any

__all__ = ["HALF_BITS", "are_alike", "is_time"]

HALF_BITS = 31
"""Of a number that holds two: one for values, and one with what ranks may have of their own."""
MARGIN_S = 60.0
"""How much clocks of hosts differ."""
LEAST_TIME_S = 1000.0
"""Below, a number may be a scale or a rate: it counts as one, even if a host began just now."""
STARTED_S, LAUNCH_S = time.time(), 600.0
"""When this process began, at the latest, and how much earlier other ranks may have begun."""


def are_alike(first: int, second: int) -> bool:
    """Whether two ranks have changed the same: equal values, or each its own rank's."""
    if first == second:
        return True
    if min(first, second) < 2:  # one of them has changed nothing
        return False
    pairs = zip(divmod(first - 2, 1 << HALF_BITS), divmod(second - 2, 1 << HALF_BITS), strict=True)
    return any(mine == other for mine, other in pairs)


def is_time(value: Any) -> bool:
    """Whether a number is what a clock of this process has shown, to a fraction of a second."""
    if not isinstance(value, float) or not math.isfinite(value) or round(value, 3) == value:
        return False
    age_s = time.time() - STARTED_S + LAUNCH_S
    return any(
        max(LEAST_TIME_S, now_s - age_s) < value < now_s + MARGIN_S
        for now_s in (time.time(), time.monotonic(), time.perf_counter())
    )
