"""Texts from files and names, which may hold anything, as short lines that are safe to print."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

__all__ = ["excerpt", "nearest", "only_printable", "printable"]


MAX_NAMES = 40
"""How many known names a message lists."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message "... is not known": the nearest known name, or all of them."""
    names = list(known)
    close = get_close_matches(name[:64], names, n=1)
    if close:
        return f"; did you mean {excerpt(close[0])}?"
    listed = [n if n.isprintable() and len(n) <= 60 else excerpt(n) for n in names[:MAX_NAMES]]
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"; known are {', '.join(listed)}{more}"


def excerpt(value: Any) -> str:
    """Any value from a file as one short line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def printable(text: str) -> str:
    """The text as one line without control characters."""
    return only_printable(" ".join(text.split()))


def only_printable(text: str) -> str:
    """The text with `?` for each character that is not printable.

    These are line ends, escape sequences, and marks that turn the direction of writing. A terminal
    or a browser could obey them.
    """
    return "".join(c if c.isprintable() else "?" for c in text)
