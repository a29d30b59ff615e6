"""A child process that is killed while it works."""

import os
import signal
import time
from collections.abc import Callable


def kill_while(work: Callable[[], None], seconds: float) -> None:
    """Fork a child that does the work again and again, and kill it after a while."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"x")
        while True:
            work()
    os.read(reading, 1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
