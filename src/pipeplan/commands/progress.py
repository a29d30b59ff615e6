"""Progress on stderr for work that takes longer than two seconds, in one style for all commands.

Terminals get one line that moves. Elsewhere (a log file, a pipe) there are a few plain lines, each
after at least as long a pause as all the work before it.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pipeplan.commands.shared import is_quiet
from pipeplan.documents.text import printable

__all__ = ["Progress", "progress"]

QUIET_S = 2.0
"""Nothing is said before this."""
REFRESH_S = 0.1
LONGEST_PAUSE_S = 60.0


class Progress:
    """What a command tells about its work, and since when it works."""

    def __init__(self, label: str) -> None:
        self.begin_s = time.monotonic()
        self.num_done = 0
        self.num_all: int | None = None
        self._label = label
        self._message = ""

    def tell(self, message: str) -> None:
        """Show this beside the label from now on."""
        self._message = message

    def count(self, num_done: int, num_all: int) -> None:
        """Show how many of all pieces are done."""
        self.num_done, self.num_all = num_done, num_all

    @property
    def text(self) -> str:
        """The label and the last message, as one line that is safe on terminals."""
        return printable(": ".join(filter(None, (self._label, self._message))))


@contextmanager
def progress(label: str) -> Iterator[Progress]:
    """Show the progress of the work within the block, if it takes long."""
    work = Progress(label)
    stop = threading.Event()
    if is_quiet():
        yield work
        return
    thread = threading.Thread(target=_show, args=(work, stop), daemon=True)
    thread.start()
    try:
        yield work
    finally:
        stop.set()
        thread.join(timeout=1.0)


def _show(work: Progress, stop: threading.Event) -> None:
    if stop.wait(QUIET_S) or sys.stderr is None:
        return
    if sys.stderr.isatty():
        _show_moving_line(work, stop)
    else:
        _write_lines(work, stop)


def _write_lines(work: Progress, stop: threading.Event) -> None:
    while True:
        elapsed_s = time.monotonic() - work.begin_s
        counted = "" if work.num_all is None else f", {work.num_done} of {work.num_all}"
        sys.stderr.write(f"pipeplan: {work.text}{counted} ({elapsed_s:.0f} s)\n")
        sys.stderr.flush()
        if stop.wait(min(elapsed_s, LONGEST_PAUSE_S)):
            return


def _show_moving_line(work: Progress, stop: threading.Event) -> None:
    from rich import progress as rich_progress
    from rich.console import Console

    columns: list[rich_progress.ProgressColumn] = [
        rich_progress.SpinnerColumn(),
        rich_progress.TextColumn("{task.description}", markup=False),
    ]
    if work.num_all is not None:
        columns += [rich_progress.BarColumn(), rich_progress.MofNCompleteColumn()]
    columns.append(rich_progress.TimeElapsedColumn())
    with rich_progress.Progress(
        *columns,
        console=Console(stderr=True, markup=False, highlight=False, emoji=False),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        get_time=lambda: time.monotonic(),
    ) as bar:
        task = bar.add_task("", total=work.num_all)
        bar.tasks[0].start_time = work.begin_s
        while True:
            bar.update(task, description=work.text, completed=work.num_done, total=work.num_all)
            bar.refresh()
            if stop.wait(REFRESH_S):
                return
