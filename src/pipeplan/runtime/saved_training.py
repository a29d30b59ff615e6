"""The part of `Pipeline` that can be saved: how far training has come, and what it has made."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.checkpoints.descriptions import Progress
from pipeplan.runtime.checkpoints.saving import TrainingState
from pipeplan.runtime.exchange.transports import Transport
from pipeplan.runtime.parameters import gather_state
from pipeplan.runtime.state_keeping import StateKeeper
from pipeplan.runtime.supervision.error_policy import in_collective
from pipeplan.runtime.supervision.watchdog import Watchdog
from pipeplan.runtime.updating import Updater

__all__ = ["SavedTraining", "SchedulerFn"]

SchedulerFn = Callable[[torch.optim.Optimizer], LRScheduler]
"""From an optimizer to its learning-rate scheduler."""


class SavedTraining:
    """Counts, saves and loads; `Pipeline` trains."""

    stage: int
    replica: int
    model: nn.Module | None
    _optimizer: torch.optim.Optimizer
    _is_sharded: bool
    first_name_of: dict[str, str]
    _transport: Transport
    _updater: Updater
    _watchdog: Watchdog
    _other_values: str | None = None
    """Why the model must not be trained, unless its values are loaded."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """This rank's optimizer; it cannot be replaced. With `shard_optimizer`, of its share.

        A rank without parameters has one, too, so that learning-rate schedulers are alike
        everywhere.
        """
        return self._optimizer

    def _set_up_keeping(self, seed: int, scheduler_fn: SchedulerFn | None) -> None:
        self.num_steps = 0
        """Steps taken, those of a loaded checkpoint included. Accumulated batches are one step."""
        self.num_batches = 0
        """The same for batches."""
        self.num_rows = 0
        """The rows of these batches: the position in the data."""
        self._seed = seed
        self._keeper = StateKeeper(
            TrainingState(
                model=self.model,
                optimizer=self.optimizer,
                first_name_of=self.first_name_of,
                stage=self.stage,
                replica=self.replica,
                is_sharded=self._is_sharded,
            )
        )

        self.scheduler: LRScheduler | None = None
        """The learning-rate scheduler of `scheduler_fn`; it steps after each update."""
        if scheduler_fn is not None:
            self.scheduler = scheduler_fn(self.optimizer)
            self.track(scheduler=self.scheduler)

    def _step_scheduler(self, loss: float, *, is_update: bool) -> None:
        if isinstance(self.scheduler, ReduceLROnPlateau):
            if is_update:
                self.scheduler.step(loss)  # the same on every rank
        elif self.scheduler is not None and is_update:
            self.scheduler.step()

    def _count(self, num_rows: int, *, is_step: bool) -> None:
        self.num_steps += is_step
        self.num_batches += 1
        self.num_rows += num_rows

    def full_state_dict(self) -> dict[str, Any] | None:
        """The whole model's parameters and buffers on rank 0, on the CPU; None elsewhere.

        What modules add by `get_extra_state` is in it, too.
        """
        state = self.model.state_dict() if self.model is not None and not self.replica else {}
        with in_collective(self._watchdog, "full_state_dict"):
            return gather_state(state, self._transport.device)

    def track(self, **objects: Any) -> None:
        """Save and load these, too: schedulers, data loaders, all that have a `state_dict`.

        Rank 0's state is saved, and all ranks load it.
        """
        self._keeper.track(objects)

    def save(
        self, directory: str | Path, *, keep: int = 2, state: Mapping[str, Any] | None = None
    ) -> Path:
        """Write a checkpoint, each stage its part; it appears whole or not at all.

        `state` is your own: plain data and tensors, of rank 0. See `loaded_state`.
        """
        self._updater.accumulation.require_none("save")
        scaler = self._updater.scaler
        progress = Progress(
            num_steps=self.num_steps,
            loss_scale=scaler.scale,
            num_calm_steps=scaler.num_calm_steps,
            num_batches=self.num_batches,
            num_rows=self.num_rows,
            seed=self._seed,
        )
        with in_collective(self._watchdog, "save"):
            return self._keeper.save(Path(directory), progress, state, keep)

    def load(self, path: str | Path, *, trust: bool = False) -> bool:
        """Continue from a checkpoint, or the newest one in a folder; False if there is none.

        It may be of any plan. `trust` permits pipeplan's first format, which can run any code.
        """
        with in_collective(self._watchdog, "load"):
            progress = self._keeper.load(Path(path), trust=trust)
        if progress is None:
            return False
        self._other_values = None
        self._updater.reset()
        if progress.seed not in (None, self._seed) and dist.get_rank() == 0:
            warnings.warn(
                f"{path}: was trained with seed={progress.seed}, now it is {self._seed}; dropout"
                " draws other numbers than an uninterrupted run",
                stacklevel=2,
            )
        self.num_steps, self.num_batches = progress.num_steps, progress.num_batches
        self.num_rows, self.loss_scale = progress.num_rows, progress.loss_scale
        self._updater.scaler.num_calm_steps = progress.num_calm_steps
        return True

    def load_weights(self, *paths: str | Path, cast: bool = False) -> None:
        """Take the model's values from safetensors files; `cast` permits other float types."""
        with in_collective(self._watchdog, "load_weights"):
            self._keeper.load_weights([Path(path) for path in paths], cast=cast)
        self._other_values = None

    def _require_same_values(self) -> None:
        """Refuse to train a model that ranks have built with other values."""
        if self._other_values is not None:
            error = RuntimeMismatchError(self._other_values)
            self._watchdog.report(error, is_mismatch=True)  # all ranks raise it
            raise error

    @property
    def loaded_state(self) -> dict[str, Any]:
        """The `state` that was saved with the loaded checkpoint; empty if none was loaded."""
        return self._keeper.user_state

    @property
    def loss_scale(self) -> float:
        """The factor on a float16 loss; 1 for other types."""
        return self._updater.scaler.scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        scaler = self._updater.scaler
        scaler.scale = scale if scaler.enabled else 1.0

    @property
    def is_skipped(self) -> bool:
        """Whether the last step left the model as it was: an overflow, or a NaN to be skipped."""
        return self._updater.is_skipped

    @property
    def gradient_norm(self) -> float | None:
        """The norm of all gradients of the last step, before clipping; None without `clip_norm`."""
        return self._updater.gradient_norm
