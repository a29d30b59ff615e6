"""What all ranks have to agree on before they train: one error, one plan, one model."""

import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from pipeplan.errors import (
    InfeasibleError,
    InputError,
    PipeplanError,
    RuntimeMismatchError,
)

__all__ = ["from_first", "gather", "on_all", "require_same"]

Result = TypeVar("Result")


def gather(value: Any) -> list[Any]:
    """What every rank says."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def on_all(work: Callable[[], Result]) -> list[Result]:
    """What `work` returns on every rank; if it fails on one, all raise the same error."""
    try:
        found: tuple[Any, int, str] = (work(), 0, "")
    except PipeplanError as error:
        found = (None, error.exit_code, str(error))
    everyone = gather(found)
    for rank, (_, exit_code, message) in enumerate(everyone):
        if exit_code:
            alike = all(each[2] == message for each in everyone)
            raise _error_of(exit_code)(message if alike else f"rank {rank}: {message}")
    return [result for result, _, _ in everyone]


def from_first(work: Callable[[], Result]) -> Result:
    """What `work` returns on rank 0, on every rank; its error, too."""
    own: PipeplanError | None = None
    found: list[Any] = [None, 0, ""]
    if dist.get_rank() == 0:
        try:
            found[0] = work()
        except PipeplanError as error:
            own, found[1:] = error, [error.exit_code, str(error)]
    dist.broadcast_object_list(found)
    result, exit_code, message = found
    if exit_code:
        raise own or _error_of(exit_code)(message)
    first: Result = result
    return first


def _error_of(exit_code: int) -> type[PipeplanError]:
    return InfeasibleError if exit_code == InfeasibleError.exit_code else InputError


def require_same(values: dict[str, str]) -> None:
    """Refuse ranks that differ in something; the message names it."""
    everyone = gather({name: zlib.crc32(text.encode()) for name, text in values.items()})
    for name, first in everyone[0].items():
        for rank, other in enumerate(everyone):
            if other[name] != first:
                raise RuntimeMismatchError(
                    f"{name}: that of rank {rank} differs from that of rank 0; call auto in the"
                    " same way on every rank"
                )
