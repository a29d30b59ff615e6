"""A pipe that a child process reads: open it once the child does, and never wait for ever."""

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOST_SECONDS = 60


@contextmanager
def opened_once_read(fifo: Path, child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Hold the writing end open, from the moment at which the child has opened the reading end."""
    deadline = time.monotonic() + MOST_SECONDS
    while True:
        try:
            descriptor = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
            break
        except OSError as problem:
            if problem.errno != errno.ENXIO:  # nobody reads it yet
                raise
        assert child.poll() is None, f"ended with {child.returncode}: {child.stderr.read()!r}"
        assert time.monotonic() < deadline, "the child never opened the pipe"
        time.sleep(0.01)
    time.sleep(0.1)  # from opening the pipe to reading it: a signal in between waits for data
    try:
        yield
    finally:
        os.close(descriptor)
