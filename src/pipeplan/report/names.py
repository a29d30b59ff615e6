"""Names from the inputs, which may hold anything, as short plain text."""

from pipeplan.documents.text import only_printable

__all__ = ["short_text"]


def short_text(name: str, limit: int = 28, ellipsis: str = "…") -> str:
    """A name as one printable line of at most `limit` characters."""
    shown = only_printable(name[: limit + 1])
    return shown if len(shown) <= limit else f"{shown[: limit - len(ellipsis)]}{ellipsis}"
