"""Values of all ranks, each with what its rank is doing.

Ranks that call different methods would read each other's values as their own kind.
"""

from typing import Any, Final, NamedTuple

import torch.distributed as dist

from pipeplan.errors import RuntimeMismatchError

__all__ = ["MAKING", "READING_STATE", "STEPPING", "USING_CHECKPOINTS", "gather"]

MAKING: Final = "makes a pipeline"
STEPPING: Final = "runs a step or an evaluation"
READING_STATE: Final = "asks for the full state"
USING_CHECKPOINTS: Final = "saves or loads a checkpoint"
ELSEWHERE = "calls a collective of its own"


class _Said(NamedTuple):
    doing: str
    value: Any


def gather(value: Any, doing: str) -> list[Any]:
    """The values of all ranks, in the order of ranks; all of them have to call it.

    Raises:
        RuntimeMismatchError: a rank is doing something else.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, _Said(doing, value))
    for rank, said in enumerate(everyone):
        other = said.doing if isinstance(said, _Said) else ELSEWHERE
        if other != doing:
            raise RuntimeMismatchError(
                f"ranks: rank {rank} {other} while rank {dist.get_rank()} {doing}; call the same"
                " methods of the pipeline in the same order on all ranks"
            )
    return [said.value for said in everyone]
