"""Words about what stands in a file, whoever wrote it: one short line, safe on any terminal."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

__all__ = ["excerpt", "nearest", "printable"]


MAX_NAMES = 40
"""How many known names a message lists."""


def nearest(name: str, known: Iterable[str]) -> str:
    """What to add to "... is not known": the nearest known name, or all of them."""
    names = list(known)
    close = get_close_matches(name[:64], names, n=1)
    if close:
        return f"; did you mean {excerpt(close[0])}?"
    listed = [n if n.isprintable() and len(n) <= 60 else excerpt(n) for n in names[:MAX_NAMES]]
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"; known are {', '.join(listed)}{more}"


def excerpt(value: Any) -> str:
    """Something out of a file, which may be anything, as one short line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def printable(text: str) -> str:
    """The text as one line that no terminal takes for a command."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
