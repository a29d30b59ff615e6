"""Saves and loads what a pipeline is made of, and whatever else is tracked with it."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeplan.errors import CheckpointError, RuntimeMismatchError
from pipeplan.runtime.checkpoints.agreement import together
from pipeplan.runtime.checkpoints.descriptions import Progress
from pipeplan.runtime.checkpoints.loading import load_checkpoint
from pipeplan.runtime.checkpoints.saving import (
    NOT_SETTINGS,
    Extras,
    TrainingState,
    save_checkpoint,
)
from pipeplan.runtime.checkpoints.weights import load_weights

__all__ = ["StateKeeper"]


class StateKeeper:
    """One rank's part in saving and loading."""

    def __init__(self, training: TrainingState) -> None:
        self._training = training
        self._tracked: dict[str, Any] = {}
        self._waiting: dict[str, Any] = {}
        """Loaded state of objects that are not tracked yet."""
        self._settings: list[dict[str, Any]] = []
        """Loaded settings of the optimizer's groups."""
        self._since: int | None = None
        """The step that was saved or loaded last."""
        self.user_state: dict[str, Any] = {}
        """The `state` of the loaded checkpoint."""

    def track(self, objects: Mapping[str, Any]) -> None:
        """Save and load these objects, too; state that has been loaded already is given to them."""
        for name, tracked in objects.items():
            if not callable(getattr(tracked, "state_dict", None)) or not callable(
                getattr(tracked, "load_state_dict", None)
            ):
                raise RuntimeMismatchError(
                    f"{name}: a {type(tracked).__name__} cannot be tracked; it needs state_dict()"
                    " and load_state_dict()"
                )
            if name in self._tracked:
                raise RuntimeMismatchError(f"{name}: something is tracked by this name already")
            if name in self._waiting:
                tracked.load_state_dict(self._waiting.pop(name))
                self._restore_settings()
            self._tracked[name] = tracked

    def save(
        self, directory: Path, progress: Progress, state: Mapping[str, Any] | None, keep: int
    ) -> Path:
        """Write a checkpoint; all ranks have to call it."""
        self._require_equal_groups()
        extras = Extras(state=state or {}, tracked=self._tracked)
        path = save_checkpoint(self._training, progress, directory, keep, extras, self._since)
        self._since = progress.num_steps
        return path

    def load(self, path: Path, *, trust: bool) -> Progress | None:
        """Load a checkpoint, and return how far it had come; None if there is none."""
        loaded = load_checkpoint(self._training, path, trust=trust, needed=list(self._tracked))
        if loaded is None:
            return None
        self.user_state, self._waiting = loaded.state, dict(loaded.tracked)
        for name, tracked in self._tracked.items():
            if name in self._waiting:  # checkpoints of the first format have none
                tracked.load_state_dict(self._waiting.pop(name))
        self._settings = [
            {key: value for key, value in group.items() if key not in NOT_SETTINGS}
            for group in self._groups()
        ]
        if loaded.random is not None:
            torch.set_rng_state(loaded.random)
        self._since = loaded.progress.num_steps
        return loaded.progress

    def load_weights(self, paths: Sequence[Path], *, cast: bool) -> None:
        """Fill the model from safetensors files; all ranks have to call it."""
        load_weights(self._training, paths, cast=cast)

    def warn_of_waiting(self) -> None:
        """Say that loaded state has found no owner; once, before training goes on."""
        if self._waiting and dist.get_rank() == 0:
            names = ", ".join(map(repr, self._waiting))
            warnings.warn(
                f"the checkpoint holds the state of {names}, which nothing tracks;"
                " call pipeline.track(NAME=...) before the first step",
                stacklevel=4,
            )
        self._waiting, self._settings = {}, []

    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self._training.optimizer
        return optimizer.param_groups if optimizer is not None else []

    def _restore_settings(self) -> None:
        """Undo what a scheduler changes when it is made: it sets its first learning rates."""
        for group, settings in zip(self._groups(), self._settings, strict=True):
            group.update(settings)

    def _require_equal_groups(self) -> None:
        """A tracked scheduler has a number for each group; all ranks load that of rank 0."""
        counts = together(lambda: len(self._groups()))
        if self._tracked and len(set(counts)) > 1:
            raise CheckpointError(
                f"optimizer: has {counts[0]} groups on rank 0, but other ranks have"
                f" {', '.join(map(str, sorted(set(counts) - {counts[0]})))}; make groups with"
                " param_groups_fn, which gives all ranks the same"
            )
