"""Progress on stderr, for what takes longer than people like to wait without a word."""

import sys
import time
from collections.abc import Callable

__all__ = ["progress_line"]

QUIET_S = 2.0
"""Nothing is said before this, and no more often than this where lines cannot be overwritten."""


def progress_line() -> Callable[[str], None]:
    """Something to tell progress to: one line that is overwritten on terminals."""
    begin = last = time.monotonic()
    in_place = sys.stderr.isatty()

    def report(message: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - begin < QUIET_S or (not in_place and now - last < QUIET_S):
            return
        last = now
        text = f"pipeplan: {message} ({now - begin:.0f} s)"
        sys.stderr.write(f"\r{text[:78]:<78}\r" if in_place else f"{text}\n")
        sys.stderr.flush()

    return report
