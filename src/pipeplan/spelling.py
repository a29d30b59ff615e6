"""The known name that somebody may have meant."""

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["nearest"]


def nearest(name: str, known: Iterable[str]) -> str:
    """What to add to "... is not known": the nearest known name, or all of them."""
    names = list(known)
    close = get_close_matches(name[:64], names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(names)}"
