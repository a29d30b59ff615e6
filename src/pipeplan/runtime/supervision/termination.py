"""Notices SIGTERM at once, even while the main thread is blocked.

torchrun sends SIGTERM to all ranks as soon as one of them is gone. A rank that dies of it says
nothing. A rank that waits for a message inside torch runs no Python handler. But the interpreter
writes the number of every signal to a wakeup file at once, and a thread can read that file. Forked
processes, such as those of a DataLoader, do not take part.
"""

import contextlib
import os
import select
import signal
import threading
from types import FrameType

__all__ = ["Termination"]

NO_FILE = -1


class Termination:
    """A pipe from the signal to the thread that calls `wait`."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._is_open = True
        self._installed = False
        self.is_asked = False
        """Whether SIGTERM has arrived."""
        in_main = threading.current_thread() is threading.main_thread()
        if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return  # the program handles SIGTERM itself
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before != NO_FILE:
            signal.set_wakeup_fd(before)
            return
        signal.signal(signal.SIGTERM, self._handle)
        self._installed = True
        _INSTALLED.add(self)

    def wait(self, timeout_s: float) -> bool:
        """Wait for SIGTERM or `wake`; returns whether SIGTERM has arrived."""
        ready, _, _ = select.select([self._read], [], [], timeout_s)
        if ready:
            with contextlib.suppress(BlockingIOError):
                self.is_asked |= int(signal.SIGTERM) in os.read(self._read, 4096)
        return self.is_asked

    def wake(self) -> None:
        """Make `wait` return."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"\0")

    def close(self) -> None:
        """Restore the signal handlers; call this only after `wait` has returned."""
        self._is_open = False
        if self._installed and threading.current_thread() is threading.main_thread():
            self._uninstall()
        if not self._installed:
            os.close(self._read)
            os.close(self._write)

    def _uninstall(self) -> None:
        signal.set_wakeup_fd(NO_FILE)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._installed = False
        _INSTALLED.discard(self)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Leave the ending to the thread that waits; without such a thread, end by SIGTERM."""
        if not self._is_open:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


_INSTALLED: set[Termination] = set()


def _uninstall_in_child() -> None:
    for termination in list(_INSTALLED):
        termination._uninstall()


os.register_at_fork(after_in_child=_uninstall_in_child)
