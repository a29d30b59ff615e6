"""The comparison with the whole model, as a pipeline uses it: once, before its first step."""

from typing import Any

import torch

from pipeplan.errors import RuntimeMismatchError
from pipeplan.pipeline import Plan
from pipeplan.runtime.placement import Placement
from pipeplan.runtime.replica_setup import Replica, ReplicaSettings
from pipeplan.runtime.stage_orders import stage_order
from pipeplan.runtime.supervision.status_board import State
from pipeplan.runtime.supervision.watchdog import Watchdog
from pipeplan.runtime.verification.loss_rows import LossOfRows
from pipeplan.runtime.verification.verdict import Verification

__all__ = ["FirstStep"]


class FirstStep:
    """Compares before the first step or evaluation, if the settings ask for it."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        placement: Placement,
        replica: Replica | None,
        optimizer: torch.optim.Optimizer,
        first_name_of: dict[str, str],
        settings: ReplicaSettings,
    ) -> None:
        self._doubt: str | None = None
        self._loss_rows: LossOfRows | None = None
        self._verification: Verification | None = None
        if settings.verifies:
            self._verification = Verification(
                rank=rank,
                replica=replica,
                optimizer=optimizer,
                stage_ranks=tuple(map(tuple, placement.ranks)),
                first_name_of=first_name_of,
                loss=settings.loss,
                num_microbatches=plan.microbatches,
                amp_dtype=settings.amp_dtype,
                recomputes=tuple(stage.recompute for stage in plan.stages),
                kinds=tuple(
                    frozenset(block.kind for block in stage_order(plan, stage))
                    for stage in range(plan.num_stages)
                ),
            )

    def verify(
        self, batch: Any, targets: Any, num_rows: int, number: int, watchdog: Watchdog
    ) -> None:
        """Compare the stages with the whole model, if that is still to be done.

        Later the last stage looks at the targets now and then: in batch 1, 2, 4, 8, ...
        """
        if self._verification is None:
            if self._loss_rows is not None and number & (number - 1) == 0:
                problem = self._loss_rows.find_problem(targets, num_rows)
                if problem is not None:
                    raise RuntimeMismatchError(problem)
            return
        watchdog.enter(State.OUTSIDE)  # it may take longer than a block
        try:
            self._doubt, self._loss_rows = self._verification.run(batch, targets, num_rows)
        except RuntimeMismatchError as error:  # all ranks raise it
            watchdog.report(error, is_mismatch=True)
            raise
        self._verification = None
        watchdog.enter(State.WAITING, "for the start of the step")

    def require_no_doubt(self, watchdog: Watchdog) -> None:
        """Refuse a step in which no stage raises, although the whole model does."""
        if self._doubt is not None:
            error = RuntimeMismatchError(self._doubt)
            watchdog.report(error, is_mismatch=True)
            raise error
