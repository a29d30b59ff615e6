"""The answer to Ctrl-C: one line on stderr and exit code 130."""

import os
import signal
from types import FrameType
from typing import NoReturn

__all__ = ["EXIT_INTERRUPTED", "Interrupts", "end_interrupted"]

EXIT_INTERRUPTED = 130
SHOW_CURSOR = "\x1b[?25h"
"""Terminals show the cursor again; a line of progress may have hidden it."""


def end_interrupted() -> NoReturn:
    """Say that the work was interrupted and end the process on the spot."""
    reset = SHOW_CURSOR if os.isatty(2) else ""
    os.write(2, f"{reset}pipeplan: interrupted\n".encode())
    os._exit(EXIT_INTERRUPTED)


class Interrupts:
    """The answer to Ctrl-C: the first raises KeyboardInterrupt, the second ends the process.

    During an import the first ends the process, too. Modules in C print tracebacks or turn the
    KeyboardInterrupt into something else, and there is nothing to save yet.
    """

    def __init__(self) -> None:
        self.seen = False
        self.exit_code: int | None = None
        self._previous = signal.getsignal(signal.SIGINT)
        # A process in the background may be started with SIGINT ignored: that stays so. And other
        # threads than the first may not install anything.
        self._installed = False
        if self._previous is signal.default_int_handler:
            try:
                signal.signal(signal.SIGINT, self._answer)
                self._installed = True
            except ValueError:
                pass

    def uninstall(self) -> None:
        """Restore the answer that was there before."""
        if self._installed:
            signal.signal(signal.SIGINT, self._previous)

    def _answer(self, _signal: int, frame: FrameType | None) -> None:
        if self.exit_code is not None:
            os._exit(self.exit_code)
        if self.seen or _is_importing(frame):
            end_interrupted()
        self.seen = True
        raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
