"""Talks with the store in a thread of its own, because a store that was stopped never answers."""

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from pipeplan.splitting.torch_private import without_torch_log

__all__ = ["ANSWER_S", "Courier", "Errand", "StoreError"]

ANSWER_S = 3.0
"""How long the end of a run waits for one answer of the store."""

Result = TypeVar("Result")


class StoreError(Exception):
    """The store is gone, or does not answer."""


class Errand(Generic[Result]):
    """Something that the courier does with the store."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self._is_done = threading.Event()
        self._result: Result | None = None
        self._error: Exception | None = None

    @property
    def is_done(self) -> bool:
        """Whether the store has answered, or has failed to."""
        return self._is_done.is_set()

    def run(self) -> None:
        """Do it; called by the courier."""
        try:
            with without_torch_log():
                self._result = self._function()
        except Exception as error:
            self._error = error
        self._is_done.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the store has answered, or has failed to; whether it has."""
        return self._is_done.wait(timeout_s)

    def result(self, timeout_s: float) -> Result:
        """What came back from the store.

        Raises:
            StoreError: it is gone, or has not answered within this time.
        """
        if not self._is_done.wait(timeout_s):
            raise StoreError(f"the store has not answered for {timeout_s:.0f} s")
        if self._error is not None:
            raise StoreError("the store is gone") from self._error
        return self._result  # type: ignore[return-value]


class Courier:
    """Runs errands one after the other."""

    def __init__(self) -> None:
        self._errands: queue.SimpleQueue[Errand[object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pipeplan-courier", daemon=True)
        self._thread.start()

    def send(self, function: Callable[[], Result]) -> Errand[Result]:
        """Have this done, and do not wait for it."""
        errand = Errand(function)
        self._errands.put(errand)  # type: ignore[arg-type]
        return errand

    def ask(self, function: Callable[[], Result]) -> Result:
        """What the store says to this.

        Raises:
            StoreError: it is gone, or does not answer soon.
        """
        return self.send(function).result(ANSWER_S)

    def close(self, timeout_s: float) -> None:
        """End the thread, if the store lets it."""
        self._errands.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (errand := self._errands.get()) is not None:
            errand.run()
