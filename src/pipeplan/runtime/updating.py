"""The end of a step: the loss summed over ranks, gradients clipped, the optimizer's step.

All that ranks decide here depends on numbers that have been summed over all ranks, so they decide
alike.
"""

import math
import warnings
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeplan.errors import NonFiniteLossError, RuntimeMismatchError
from pipeplan.runtime.accumulation import Accumulation
from pipeplan.runtime.exchange.rank_tree import NumberSum
from pipeplan.runtime.optimizer_shards import OptimizerShards
from pipeplan.runtime.replica_setup import Replica
from pipeplan.runtime.scaling import LossScaler
from pipeplan.splitting.torch_private import count_changes, watch_steps

__all__ = ["NUM_ADDED", "OnNan", "Updater"]

NUM_ADDED = 2
"""Numbers that are summed with the loss and metrics: the batch's weight, and squares."""

CHUNK = 1 << 20
"""Elements squared at once. A double copy of a whole embedding would be the largest tensor."""


class OnNan(StrEnum):
    """What happens when a loss is NaN or infinite."""

    REPORT = "report"
    SKIP = "skip"
    RAISE = "raise"


class Updater:
    """Steps one rank's optimizer, in agreement with all other ranks."""

    def __init__(self, scaler: LossScaler, clip_norm: float | None, on_nan: str) -> None:
        if on_nan not in list(OnNan):
            raise RuntimeMismatchError(
                f"on_nan: {on_nan!r} is not one of {', '.join(map(repr, map(str, OnNan)))}"
            )
        self._clip_norm, self.scaler, self._on_nan = clip_norm, scaler, OnNan(on_nan)
        self.optimizer: torch.optim.Optimizer | None = None
        self._shards: OptimizerShards | None = None
        self.parameters: Sequence[nn.Parameter] = ()
        self.norm_parameters: Sequence[nn.Parameter] = ()
        """Parameters that this rank adds to the norm. Over all ranks, each counts once."""
        self.gradient_norm: float | None = None
        """The norm in the last step, before clipping; None if nothing needs it."""
        self.is_skipped = False
        """Whether the last step did not change the model: an overflow, or a NaN that is skipped."""
        self.accumulation = Accumulation()
        self._has_nan = False
        """Whether a batch since the last update had a loss that is not finite."""
        self._was_finite = True
        self._problem: str | None = None
        self._kept: list[tuple[int, int]] | None = None
        """The gradients that wait for more batches."""
        self._is_stepping = False

    def take_up(
        self,
        optimizer: torch.optim.Optimizer,
        replica: Replica | None,
        shards: OptimizerShards | None = None,
    ) -> None:
        """Work for this rank; its replica is None if the plan does not use it."""
        self.optimizer, self._shards = optimizer, shards
        watch_steps(optimizer, self._require_own_step)
        if replica is not None:
            self.parameters = replica.parameters
            self.norm_parameters = replica.norm_parameters

    def _require_own_step(self, *_: Any) -> None:
        """Refuse a step by the program: gradients are still there, and would be used twice."""
        if not self._is_stepping:
            raise RuntimeMismatchError(
                "optimizer: its step() was called outside of pipeline.step, which has updated the"
                " model already; leave the call out"
            )

    def gradient_scale(self, weight: float) -> float:
        """What the last stage multiplies the gradient of a batch's mean loss by.

        Raises:
            RuntimeMismatchError: gradients that are kept have changed meanwhile.
        """
        if self._kept is not None and self._kept != self._mark_gradients():
            raise RuntimeMismatchError(
                "gradients: were cleared or changed between batches of one update (by zero_grad?);"
                " leave them alone until a step with update=True"
            )
        return self.scaler.scale * self.accumulation.factor(weight)

    def start_sums(self, stats: torch.Tensor, weight: float, summing: NumberSum) -> None:
        """Start to sum the loss and metrics over all ranks, unless the norm goes with them.

        They travel while the gradients do, so `update` finds them there.
        """
        if not self.needs_norm:
            summing.start(_with_numbers(stats, weight, 0.0))

    def update(
        self,
        stats: torch.Tensor,
        weight: float,
        summing: NumberSum,
        *,
        applies: bool,
        carried: list[float] | None = None,
    ) -> list[float]:
        """Clip, step the optimizer, and return the loss and metrics of all ranks.

        `start_sums` has been called, unless the sums are known already.

        Args:
            stats: the loss and metrics of this rank.
            weight: the batch's weight on one rank, 0 on all others.
            summing: sums numbers over all ranks.
            applies: whether the optimizer steps, or gradients are kept for the next step. All
                ranks have agreed on it (`batch_agreement`).
            carried: the sums of all ranks and of the weight, if they are known already.
        """
        needs_norm = self.needs_norm
        needs_sums = needs_norm or self.accumulation.num_batches > 0
        squares = 0.0
        if carried is None and needs_norm:
            own = self._sum_squares(stats) if applies else 0.0
            summing.start(_with_numbers(stats, weight, own))
        if applies and not needs_sums:
            self._step()  # while the sums are under way
        if carried is None:
            *carried, squares = summing.finish()
        *summed, total_weight = carried
        self._note_loss(summed[0])
        self.accumulation.add(total_weight)
        self.gradient_norm, self.is_skipped = None, False
        if applies:
            if needs_sums:
                self._step_by(math.sqrt(squares) if needs_norm else None)
            self.reset()
        else:
            self._kept = self._mark_gradients()
        return summed

    def reset(self) -> None:
        """Forget the batches since the last update."""
        self.accumulation.reset()
        self._has_nan = False
        self._kept = None

    def _mark_gradients(self) -> list[tuple[int, int]]:
        """Which tensors the gradients are, and how often they were changed."""
        gradients = [parameter.grad for parameter in self.parameters]
        return [(id(grad), count_changes(grad)) for grad in gradients if grad is not None]

    def tell(self, step: int) -> None:
        """Say what was wrong with the step that has just ended.

        Raises:
            NonFiniteLossError: the loss or the gradients are not finite, and `on_nan` is "raise".
        """
        problem, self._problem = self._problem, None
        if problem is None:
            return
        if self._on_nan is OnNan.RAISE:
            self.reset()
            raise NonFiniteLossError(f"step {step}: {problem}; the model is as before this step")
        if dist.get_rank() == 0:
            skips = self._on_nan is OnNan.SKIP
            end = "; the step is skipped" if skips else " (on_nan='skip' or 'raise' reacts to this)"
            warnings.warn(f"step {step}: {problem}{end}", RuntimeWarning, stacklevel=3)

    @property
    def needs_norm(self) -> bool:
        """Whether the norm of all gradients decides about the step."""
        is_asked = self._clip_norm is not None or self._on_nan is not OnNan.REPORT
        return is_asked or self.scaler.enabled

    def _sum_squares(self, stats: torch.Tensor) -> torch.Tensor:
        """The sum of the squared gradients that this rank counts; still scaled."""
        total = stats.new_zeros(())
        for parameter in self.norm_parameters:
            if parameter.grad is not None:
                gradient = parameter.grad.detach()
                if gradient.is_complex():
                    gradient = torch.view_as_real(gradient)
                for piece in torch.split(gradient.flatten(), CHUNK):
                    total += piece.double().square().sum()
        return total

    def _note_loss(self, loss: float) -> None:
        """Notice a loss that is not finite; while it stays so, only its beginning is reported."""
        is_finite = math.isfinite(loss)
        if not is_finite:
            self._has_nan = True
            if self._was_finite or self._on_nan is not OnNan.REPORT:
                self._problem = f"the loss is {loss}"
        self._was_finite = is_finite

    def _step_by(self, scaled_norm: float | None) -> None:
        """Step with gradients that may be scaled, accumulated, too large or not finite."""
        factor = self.accumulation.final_factor() / self.scaler.scale
        may_step = True
        if scaled_norm is not None:
            norm = self.gradient_norm = scaled_norm * factor
            may_step = self.scaler.take(norm) and not self._is_refused(norm)
            factor *= self._clip_factor(norm)
        self.is_skipped = not may_step
        if may_step:
            if factor != 1.0:
                for parameter in self.parameters:
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)
            self._step()

    def _is_refused(self, norm: float) -> bool:
        """Whether a number that is not finite forbids the step."""
        if self._on_nan is OnNan.REPORT:
            return False
        # With a loss scale, gradients overflow now and then. The scaler skips those steps.
        if not (math.isfinite(norm) or self.scaler.enabled or self._has_nan):
            self._problem = f"the norm of gradients is {norm}"
        return self._has_nan or not math.isfinite(norm)

    def _clip_factor(self, norm: float) -> float:
        if self._clip_norm is None:
            return 1.0
        # The same small constant as in torch.nn.utils.clip_grad_norm_.
        factor = self._clip_norm / (norm + 1e-6)
        return factor if factor < 1 else 1.0

    def _step(self) -> None:
        if self.optimizer is not None:
            self._is_stepping = True
            try:
                self.optimizer.step()
            finally:
                self._is_stepping = False
        if self._shards is not None:
            self._shards.give_new_values()


def _with_numbers(stats: torch.Tensor, *numbers: torch.Tensor | float) -> torch.Tensor:
    """These numbers behind the others, where the others are."""
    if stats.device.type == "cpu":
        return torch.tensor([*stats.tolist(), *map(float, numbers)], dtype=stats.dtype)
    own = [torch.as_tensor(number, dtype=stats.dtype, device=stats.device) for number in numbers]
    return torch.cat([stats, torch.stack(own)])
