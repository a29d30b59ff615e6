"""Names from the inputs, which may hold anything, as short plain text."""

__all__ = ["short_text"]


def short_text(name: str, limit: int = 28, ellipsis: str = "…") -> str:
    """A name as one line of at most `limit` characters that no terminal or browser obeys.

    Each character that is not printable becomes `?`: line ends, escape sequences, marks that turn
    the direction of writing.
    """
    shown = "".join(c if c.isprintable() else "?" for c in name[: limit + 1])
    return shown if len(shown) <= limit else f"{shown[: limit - len(ellipsis)]}{ellipsis}"
