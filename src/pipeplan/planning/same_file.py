"""Whether two paths lead to the same file."""

import os
from pathlib import Path

__all__ = ["are_same_file"]


def are_same_file(first: str | Path, second: str | Path) -> bool:
    """Whether writing to one path changes what the other one reads, links included."""
    try:
        if os.path.exists(first) and os.path.exists(second):
            return os.path.samefile(first, second)
        return Path(first).resolve() == Path(second).resolve()
    except (OSError, RuntimeError, ValueError):  # links in a circle, a NUL: reading will say so
        return False
