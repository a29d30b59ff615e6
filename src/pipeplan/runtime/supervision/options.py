"""How patient the ranks of a pipeline are with each other."""

import math
from dataclasses import dataclass, fields

from pipeplan.errors import InputError

__all__ = ["WatchdogOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogOptions:
    """How patient the ranks are with each other.

    A time in which a rank got no processor does not count, so a busy machine needs no other limits.
    """

    beat_s: float = 1.0
    """The time between two signs of life."""
    beat_timeout_s: float = 15.0
    """A rank without a sign of life for so long counts as dead. A rank that sits in a collective
    outside of the pipeline for so long, while others wait inside, counts as stuck."""
    hang_timeout_s: float = 20.0
    """The limit of one block. Raise this where one block may take longer."""
    first_block_timeout_s: float = 600.0
    """The same for the first block of its kind and shape, which may compile."""
    outside_timeout_s: float = 600.0
    """How long others wait for a rank that is busy outside of `step`, or that saves."""
    notice_s: float = 30.0
    """While ranks wait for another one, a line says so after this time, and then again."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or not value > 0 or math.isnan(value):
                raise InputError(f"{field.name}: is {value!r}; give a number of seconds above 0")
