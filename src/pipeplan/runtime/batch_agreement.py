"""Agrees, before a step, on the number of rows of the batch and on its shapes.

Ranks that need no rows may give None. If any rank does, the first stage tells all ranks the shape
in every step. Otherwise each rank reads the shape from its own batch.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.batches import num_rows, signature

__all__ = ["BatchAgreement", "Given"]

Given = tuple[bool, bool]
"""Whether a rank gave a batch, and whether it gave targets."""


class BatchAgreement:
    """One rank's knowledge of the batches of all steps."""

    def __init__(self, rank: int, source_rank: int, *, is_last: bool) -> None:
        self._rank, self._source_rank, self._is_last = rank, source_rank, is_last
        self._given_first: Given | None = None
        self._needs_header = False

    def agree(
        self, batch: Any, targets: Any, require: Callable[[list[Given]], None]
    ) -> tuple[int, str]:
        """The number of rows of the batch, and a key for the shapes of what crosses cuts.

        `require` is called in the first step. It raises if a rank gave None but needs a value.
        """
        given = (batch is not None, targets is not None)
        if self._given_first is None:
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, given)
            require(everyone)
            self._given_first = given
            self._needs_header = not all(gave_batch for gave_batch, _ in everyone)
        elif given != self._given_first:
            raise RuntimeMismatchError(
                f"batch: rank {self._rank} gave {_describe(self._given_first)} in the first step"
                f" and {_describe(given)} now; give the same kinds in every step"
            )
        if batch is not None:
            rows = num_rows(batch, "batch")
            text = f"{rows}:{signature(batch)}"
        if self._needs_header:
            header: list[Any] = [text if batch is not None else None]
            dist.broadcast_object_list(header, src=self._source_rank)
            text = header[0]
            rows = int(text.partition(":")[0])
        if self._is_last and targets is not None and num_rows(targets, "targets") != rows:
            raise RuntimeMismatchError(
                f"targets: have {num_rows(targets, 'targets')} rows for the batch's {rows}"
            )
        return rows, text


def _describe(given: Given) -> str:
    batch, targets = ("a value" if is_given else "None" for is_given in given)
    return f"{batch} as batch and {targets} as targets"
