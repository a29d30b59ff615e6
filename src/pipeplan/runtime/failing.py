"""How an error of one rank becomes the end of all, with one message.

An error may be this rank's own, or only what it stumbles over when another one is gone. In the
second case it waits for the watchdog, which knows better and ends this process.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.watchdog import Watchdog

__all__ = ["failing_alone", "failing_together", "report_failure", "setting_up"]

CONNECTION_WORDS = ("gloo", "connection", "nccl", "socket", "broken pipe")


@contextmanager
def failing_alone(watchdog: Watchdog) -> Iterator[None]:
    """What a rank does in a step: an error is its own, unless it is of a connection."""
    try:
        yield
    except BaseException as error:
        report_failure(watchdog, error)
        raise


@contextmanager
def failing_together(watchdog: Watchdog) -> Iterator[None]:
    """What all ranks do outside of a step: an error is most likely another rank's end."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        report_failure(watchdog, error)
        raise
    except RuntimeMismatchError:
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        if watchdog.failure is None:
            watchdog.await_verdict()
            watchdog.report(error)
        raise


@contextmanager
def setting_up(watchdog: Watchdog) -> Iterator[None]:
    """What ranks do before the first step; what does not fit together, all of them find out."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, RuntimeMismatchError):
            report_failure(watchdog, error)
        watchdog.close()
        raise
    watchdog.enter("outside")


def report_failure(watchdog: Watchdog, error: BaseException) -> None:
    """Tell the others, unless it is another rank's end that this one stumbles over."""
    if isinstance(error, SystemExit) and not error.code:
        return
    if watchdog.failure is None:
        if _is_of_connection(error):
            watchdog.await_verdict()
        watchdog.report(error)


def _is_of_connection(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(
        word in text for word in CONNECTION_WORDS
    )
