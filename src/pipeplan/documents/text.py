"""Words about what stands in a file, whoever wrote it: one short line, safe on any terminal."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

__all__ = ["excerpt", "nearest", "printable"]


def nearest(name: str, known: Iterable[str]) -> str:
    """What to add to "... is not known": the nearest known name, or all of them."""
    names = list(known)
    close = get_close_matches(name[:64], names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(names)}"


def excerpt(value: Any) -> str:
    """Something out of a file, which may be anything, as one short line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def printable(text: str) -> str:
    """The text as one line that no terminal takes for a command."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
