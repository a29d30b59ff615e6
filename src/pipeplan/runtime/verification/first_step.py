"""The comparison with the whole model, as a pipeline uses it: before its first step, and later."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from pipeplan.errors import RuntimeMismatchError
from pipeplan.pipeline import Plan
from pipeplan.runtime.execution import StageRunner
from pipeplan.runtime.placement import Placement
from pipeplan.runtime.replica_setup import Replica, ReplicaSettings
from pipeplan.runtime.stage_orders import stage_order
from pipeplan.runtime.supervision.status_board import State
from pipeplan.runtime.supervision.watchdog import Watchdog
from pipeplan.runtime.verification.loss_rows import LossOfRows
from pipeplan.runtime.verification.verdict import Verdict, Verification

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
        self._verdict: Verdict | None = None
        self._looked_at = {0}
        """Numbers of batches; evaluations in between have the same."""
        self._new_rows: list[int] = []
        """Rows of this batch that hold something new."""
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
                activation_bytes=sum(layer.activation_bytes for layer in plan.model.layers),
            )

    def verify(
        self, batch: Any, targets: Any, num_rows: int, number: int, watchdog: Watchdog
    ) -> None:
        """Compare the stages with the whole model, if that is still to be done.

        Later the last stage looks at the targets: in batch 1, 2, 4, 8, ... at some of them, and in
        each batch at rows that hold something new.
        """
        if self._verification is None:
            return
        if self._verdict is None:
            with _outside(watchdog):
                self._verdict = self._verification.run(batch, targets, num_rows)
                if self._verdict.is_due:
                    self._compare_ranks(self._verdict, batch, targets, num_rows)
            is_due = True
        else:
            is_due = number & (number - 1) == 0
            self._look_at_targets(self._verdict.loss_rows, targets, num_rows, is_due=is_due)
        if is_due and self._verdict.loss_rows is not None:
            self._runner.on_output = self._look_at_output

    @property
    def _runner(self) -> StageRunner:
        """That of this rank's last stage."""
        assert self._verification is not None
        assert self._verification.replica is not None
        return self._verification.replica.parts[-1].runner

    def _look_at_targets(
        self, loss_rows: LossOfRows | None, targets: Any, num_rows: int, *, is_due: bool
    ) -> None:
        if loss_rows is not None:
            _refuse(loss_rows.find_problem(targets, num_rows, is_due=is_due))

    def _look_at_output(self, output: Any, targets: Any) -> None:
        """Ask whether the loss of a microbatch is a mean over its rows."""
        if self._verdict is not None and self._verdict.loss_rows is not None:
            _refuse(self._verdict.loss_rows.find_in_microbatch(output, targets))

    def has_new_rows(self, batch: Any, num_rows: int) -> bool:
        """Whether a model that computes its loss itself was given something new, such as padding.

        Only the rank that looks at that loss knows.
        """
        if self._verdict is None or self._verdict.input_records is None:
            return False
        self._new_rows = self._verdict.input_records.look(batch, num_rows)
        return bool(self._new_rows)

    def recheck(
        self,
        batch: Any,
        targets: Any,
        num_rows: int,
        number: int,
        watchdog: Watchdog,
        *,
        is_doubted: bool,
    ) -> None:
        """Compare what ranks and stages compute, behind batch 1, 2, 4, 8, ... and in doubt."""
        is_due = number & (number - 1) == 0 and number not in self._looked_at
        if self._verdict is not None and (is_due or is_doubted):
            self._looked_at.add(number)
            with _outside(watchdog):
                self._compare_ranks(self._verdict, batch, targets, num_rows, is_later=True)

    def _compare_ranks(
        self,
        verdict: Verdict,
        batch: Any,
        targets: Any,
        num_rows: int,
        *,
        is_later: bool = False,
    ) -> None:
        """Before the first step a few rows are enough, later it is a microbatch, too."""
        verification = self._verification
        assert verification is not None  # it has given the verdict
        if verdict.doubt is None:
            given = (batch, targets, num_rows)
            microbatch = verification.share_microbatch(*given) if is_later else None
            wanted = self._new_rows if is_later else None
            verdict.recheck.run(verification.share(*given, wanted=wanted), microbatch)

    def require_no_doubt(self, watchdog: Watchdog) -> None:
        """Refuse a step in which no stage raises, although the whole model does."""
        if self._verdict is not None and self._verdict.doubt is not None:
            error = RuntimeMismatchError(self._verdict.doubt)
            watchdog.report(error, is_mismatch=True)
            raise error


def _refuse(problem: str | None) -> None:
    if problem is not None:
        raise RuntimeMismatchError(problem)


@contextlib.contextmanager
def _outside(watchdog: Watchdog) -> Iterator[None]:
    """Inside, this rank may take longer than for a block; what it refuses, all ranks refuse."""
    watchdog.enter(State.OUTSIDE)
    try:
        yield
    except RuntimeMismatchError as error:
        watchdog.report(error, is_mismatch=True)
        raise
    watchdog.enter(State.WAITING, "for the start of the step")
