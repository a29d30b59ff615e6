"""The checks of single numbers that both inputs share."""

import math

from pipeplan.errors import InputError

__all__ = ["require_magnitude", "require_positive"]


def require_magnitude(error: type[InputError], name: str, number: float) -> None:
    """Refuse what is not finite or is negative, with `error`."""
    if not math.isfinite(number):
        raise error(f"{name}: {number} is not a finite number")
    if number < 0:
        raise error(f"{name}: {number:g} is negative")


def require_positive(error: type[InputError], name: str, number: float) -> None:
    """Refuse what is not finite or is not above zero, with `error`."""
    require_magnitude(error, name, number)
    if number == 0:
        raise error(f"{name}: 0 is not above zero")
