"""Whether two paths lead to the same file."""

import os
from pathlib import Path

__all__ = ["are_same_file"]


def are_same_file(first: str | Path, second: str | Path) -> bool:
    """Whether the two paths are one file; links are followed."""
    try:
        if os.path.exists(first) and os.path.exists(second):
            return os.path.samefile(first, second)
        return Path(first).resolve() == Path(second).resolve()
    except (OSError, RuntimeError, ValueError):  # links in a circle, a NUL: readers say so
        return False
