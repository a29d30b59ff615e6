"""Where the thread that drives the pipeline is, and since when it sits in one collective there."""

import os
import sys
import threading
from types import FrameType

from pipeplan.runtime.supervision.patient_clock import thread_run_s

__all__ = ["Driver"]

COLLECTIVES = "torch.distributed"
FILES = "torch.distributed.checkpoint"
"""Modules that wait for disks, not for ranks."""
STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
IDLE_SHARE = 0.05
"""A thread that runs for less of its time is idle."""


class Driver:
    """Follows one thread from another one."""

    def __init__(self) -> None:
        self._ident, self._task = threading.get_ident(), threading.get_native_id()
        self._run_s: float | None = None
        self._collective = ""
        self.where = ""
        """The line of the program that it runs."""
        self.held_s = 0.0
        """How long it has been idle inside the same collective."""
        self.is_idle = False

    def take_over(self) -> None:
        """Say that the calling thread drives from now on."""
        if self._ident != threading.get_ident():
            self._ident, self._task = threading.get_ident(), threading.get_native_id()
            self._run_s = None

    def look(self, counted_s: float) -> None:
        """See where it is; `counted_s` is the time since the last look."""
        frame = sys._current_frames().get(self._ident)
        collective = _collective_of(frame)
        self.where = _line_of(frame)
        run_s, before_s = thread_run_s(self._task), self._run_s
        self._run_s = run_s
        if run_s is None:
            self.is_idle = True  # the kernel does not tell; the place alone has to do
        else:
            self.is_idle = before_s is not None and run_s - before_s <= IDLE_SHARE * counted_s
        place = f"{collective} at {self.where}" if collective else ""
        self.held_s = self.held_s + counted_s if self.is_idle and place == self._collective else 0.0
        self._collective = place
        if not place:
            self.held_s = 0.0

    @property
    def collective(self) -> str:
        """The collective that it sits in, and where the program called it; empty if none."""
        return self._collective if self.held_s else ""


def _is_of_library(frame: FrameType) -> bool:
    """Whether a frame is of Python's own files, of an installed package or of this one."""
    file = frame.f_code.co_filename
    return (
        file.startswith(("<", STANDARD_LIBRARY))
        or "site-packages" in file
        or _module_of(frame).split(".")[0] == "pipeplan"
    )


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _collective_of(frame: FrameType | None) -> str:
    """The function of torch.distributed that a thread waits in; empty if it waits in none."""
    name = ""
    while frame is not None:
        module = _module_of(frame)
        if not module.startswith(COLLECTIVES) or module.startswith(FILES):
            break
        if frame.f_code.co_name != "wrapper":
            name = frame.f_code.co_name
        frame = frame.f_back
    return name


def _line_of(frame: FrameType | None) -> str:
    """The innermost line of the user's own files; if there is none, of any file."""
    first = frame
    while frame is not None and _is_of_library(frame):
        frame = frame.f_back
    frame = frame or first
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
