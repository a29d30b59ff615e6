"""Work that each rank does by itself, with an end that all ranks share."""

from collections.abc import Callable
from typing import Any, TypeVar

from pipeplan.errors import CheckpointError
from pipeplan.runtime.checkpoints.reading import shown
from pipeplan.runtime.gathering import USING_CHECKPOINTS, gather

__all__ = ["together"]

T = TypeVar("T")


def together(work: Callable[[], T]) -> list[T]:
    """What `work` returns on each rank; if it fails on any, all ranks raise the same error.

    All ranks have to call it.
    """
    outcome: tuple[Any, str | None]
    try:
        outcome = (work(), None)
    except CheckpointError as problem:
        outcome = (None, str(problem))
    except OSError as problem:
        name = f"{shown(problem.filename)}: " if problem.filename else ""
        outcome = (None, f"{name}cannot be used: {problem.strerror or problem}")
    everyone = gather(outcome, USING_CHECKPOINTS)
    for _, reason in everyone:
        if reason is not None:
            raise CheckpointError(reason)
    return [result for result, _ in everyone]
