"""Writes a new file of a checkpoint, and waits until it is on the disk."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

from pipeplan.errors import CheckpointError
from pipeplan.runtime.checkpoints.reading import shown

__all__ = ["write_synced"]

T = TypeVar("T")


def write_synced(path: Path, fill: Callable[[BinaryIO], T]) -> T:
    """What `fill` returns when it has written the file.

    Raises:
        CheckpointError: the file exists, or cannot be written.
    """
    try:
        with open(path, "xb") as file:
            result = fill(file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as problem:
        reason = problem.strerror or type(problem).__name__
        raise CheckpointError(f"{shown(path)}: cannot be written: {reason}") from None
    return result
