"""What the ranks settle before a step: how many rows the batch has, and of what shape.

Ranks that need no rows may give None; if any does, the first stage tells all ranks the shape in
every step, else each rank sees it by itself.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.batches import num_rows, signature

__all__ = ["BatchAgreement"]

Gave = tuple[bool, bool]
"""Whether a rank gave a batch, and targets."""


class BatchAgreement:
    """One rank's view of the batches of all steps."""

    def __init__(self, rank: int, source: int, *, is_last: bool) -> None:
        self._rank, self._source, self._is_last = rank, source, is_last
        self._gave: Gave | None = None
        self._needs_header = False

    def settle(
        self, batch: Any, targets: Any, require: Callable[[list[Gave]], None]
    ) -> tuple[int, str]:
        """The batch's number of rows, and a key for the shapes of what crosses cuts.

        `require` raises where in the first step ranks gave None that need more.
        """
        gave = (batch is not None, targets is not None)
        if self._gave is None:
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, gave)
            require(everyone)
            self._gave = gave
            self._needs_header = not all(given for given, _ in everyone)
        elif gave != self._gave:
            raise RuntimeMismatchError(
                f"batch: rank {self._rank} gave {_said(self._gave)} in the first step and"
                f" {_said(gave)} now; give the same kinds in every step"
            )
        if batch is not None:
            rows = num_rows(batch, "batch")
            text = f"{rows}:{signature(batch)}"
        if self._needs_header:
            header: list[Any] = [text if batch is not None else None]
            dist.broadcast_object_list(header, src=self._source)
            text = header[0]
            rows = int(text.partition(":")[0])
        if self._is_last and targets is not None and num_rows(targets, "targets") != rows:
            raise RuntimeMismatchError(
                f"targets: have {num_rows(targets, 'targets')} rows for the batch's {rows}"
            )
        return rows, text


def _said(gave: Gave) -> str:
    batch, targets = ("a value" if given else "None" for given in gave)
    return f"{batch} as batch and {targets} as targets"
