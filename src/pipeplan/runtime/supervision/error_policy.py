"""Which rank is to blame when one of them raises.

When a rank ends, the others raise errors of broken connections. Those are not their own errors.
So a rank with such an error waits for the watchdog, which knows better and ends this process. Any
other error is the rank's own, and it tells the others.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from pipeplan.errors import PipeplanError, RuntimeMismatchError
from pipeplan.runtime.supervision.connections import is_of_connection
from pipeplan.runtime.supervision.watchdog import Watchdog

__all__ = ["blame_for_error", "in_collective", "in_set_up", "in_step"]


@contextmanager
def in_step(watchdog: Watchdog, name: str = "step") -> Iterator[None]:
    """Inside a step or evaluation: an error is this rank's own, unless a connection broke."""
    with watchdog.call(name):
        try:
            yield
        except BaseException as error:
            blame_for_error(watchdog, error)
            raise


@contextmanager
def in_collective(watchdog: Watchdog, name: str = "a method") -> Iterator[None]:
    """Inside what all ranks do between steps; `name` is the method that they all call."""
    with watchdog.call(name):
        try:
            yield
        except RuntimeMismatchError:
            raise  # all ranks raise it
        except BaseException as error:
            blame_for_error(watchdog, error)
            raise


@contextmanager
def in_set_up(
    watchdog: Watchdog,
    name: str = "set-up",
    of_all: type[PipeplanError] = RuntimeMismatchError,
) -> Iterator[None]:
    """Before the first step: usually all ranks raise an error `of_all`, each by itself."""
    with watchdog.call(name):
        try:
            yield
        except of_all as error:
            watchdog.report(error, is_mismatch=True)
            watchdog.close()
            raise
        except BaseException as error:
            blame_for_error(watchdog, error)
            watchdog.close()
            raise


def blame_for_error(watchdog: Watchdog, error: BaseException) -> None:
    """Tell the others of this rank's error, unless another rank has caused it."""
    watchdog.await_end()
    if watchdog.failure is None:
        if is_of_connection(error) or _is_of_all_ranks(error):
            watchdog.await_verdict()
        watchdog.report(error)


def _is_of_all_ranks(error: BaseException) -> bool:
    """Whether it is torch's CheckpointException, which tells the errors of others, too."""
    return not isinstance(error, Exception | KeyboardInterrupt | SystemExit)
