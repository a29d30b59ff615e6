"""Reads a checkpoint: everything is read and checked first, on all ranks, and then put in place."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeplan.documents.text import excerpt
from pipeplan.errors import CheckpointError
from pipeplan.runtime.checkpoints.agreement import together
from pipeplan.runtime.checkpoints.descriptions import (
    MODEL,
    Description,
    Progress,
    open_files,
    read_description,
)
from pipeplan.runtime.checkpoints.folders import choose_checkpoint, explain_damage
from pipeplan.runtime.checkpoints.legacy import is_legacy, load_legacy
from pipeplan.runtime.checkpoints.plain_data import decode
from pipeplan.runtime.checkpoints.reading import quoted, shown
from pipeplan.runtime.checkpoints.saving import NOT_SETTINGS, TrainingState, named_parameters
from pipeplan.runtime.checkpoints.tensor_bytes import read_tensor, require_like
from pipeplan.runtime.checkpoints.tensor_files import TensorFile

__all__ = ["Loaded", "load_checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a checkpoint holds besides the tensors of model and optimizer."""

    progress: Progress
    state: dict[str, Any]
    """The user's own."""
    tracked: dict[str, Any]
    random: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    """What has been read and checked, for this rank."""

    model: dict[str, torch.Tensor]
    states: dict[str, dict[str, Any]]
    settings: list[dict[str, Any]]
    """The settings of each group of this rank's optimizer."""
    loaded: Loaded


def load_checkpoint(
    state: TrainingState, path: Path, *, trust: bool = False, needed: Sequence[str] = ()
) -> Loaded | None:
    """Load the checkpoint at `path`, or the newest one there; None if there is none.

    All ranks have to call it. If it raises, nothing has changed. `needed` are the names of tracked
    objects whose state has to be there.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model.
    """
    # Rank 0 decides, so that all ranks read the same one.
    chosen = together(lambda: choose_checkpoint(path) if dist.get_rank() == 0 else None)[0]
    if chosen is None:
        return None
    if together(lambda: _is_legacy(chosen))[0]:
        progress = load_legacy(state, chosen, trust=trust)
        return Loaded(progress=progress, state={}, tracked={}, random=None)
    names = together(lambda: _model_names(state))
    staged: list[_Staged] = []
    everywhere = {name for of_rank in names for name in of_rank}
    together(lambda: staged.append(_stage(state, chosen, everywhere, needed)))
    _apply(state, staged[0])
    return staged[0].loaded


def _is_legacy(path: Path) -> bool:
    try:
        return is_legacy(path)
    except CheckpointError as problem:
        raise CheckpointError(explain_damage(path, str(problem))) from None


def _model_names(state: TrainingState) -> list[str]:
    return list(state.model.state_dict()) if state.model is not None else []


# ------------------------------------------------------------------------------- reading


def _stage(
    state: TrainingState, path: Path, everywhere: set[str], needed: Sequence[str]
) -> _Staged:
    """Read and check what this rank needs; nothing of the model changes."""
    try:
        with ExitStack() as stack:
            description = read_description(path)
            files = open_files(path, description)
            for file in files.values():
                stack.enter_context(file)
            _require_same_names(description, path, everywhere)
            for name in needed:
                if name not in description.tracked:
                    raise _OtherModelError(
                        f"{shown(path)}: has no state of {quoted(name)}; to begin anew with it,"
                        " track it after load"
                    )
            return _read(state, path, description, files)
    except _OtherModelError:
        raise
    except CheckpointError as problem:
        raise CheckpointError(explain_damage(path, str(problem))) from None
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        reason = f"{shown(path)}: its description is not of a checkpoint"
        raise CheckpointError(explain_damage(path, reason)) from None


class _OtherModelError(CheckpointError):
    """The checkpoint is sound, but does not fit; an earlier one would not fit either."""


def _require_same_names(description: Description, path: Path, everywhere: set[str]) -> None:
    saved = {key.removeprefix(MODEL) for key in description.tensors if key.startswith(MODEL)}
    missing, extra = sorted(everywhere - saved), sorted(saved - everywhere)
    if missing:
        raise _OtherModelError(
            f"{shown(path)}: has no {quoted(missing[0])}; it is of another model"
        )
    if extra:
        raise _OtherModelError(
            f"{shown(path)}: holds {quoted(extra[0])}, which the model does not have;"
            " it is of another model"
        )


def _read(
    state: TrainingState, path: Path, description: Description, files: Mapping[str, TensorFile]
) -> _Staged:
    def tensor_of(key: str, like: torch.Tensor | None = None) -> torch.Tensor:
        record = description.tensors[key]
        if like is not None:
            try:
                require_like(files[record.file], key, like)
            except CheckpointError as problem:
                raise _OtherModelError(str(problem)) from None
        return read_tensor(files[record.file], key, record.sha256)

    model = {}
    if state.model is not None:
        model = {
            name: tensor_of(MODEL + name, tensor)
            for name, tensor in state.model.state_dict().items()
        }
    return _Staged(
        model=model,
        states=_read_states(state, description, tensor_of),
        settings=_read_settings(state, path, description, tensor_of),
        loaded=_read_extras(description, tensor_of),
    )


def _read_extras(description: Description, tensor_of: Callable[[str], torch.Tensor]) -> Loaded:
    state, random = decode(description.state, tensor_of), decode(description.random, tensor_of)
    if not isinstance(state, dict):
        raise TypeError("state")
    try:
        torch.Generator().set_state(random)
    except RuntimeError:
        raise ValueError("random") from None
    return Loaded(
        progress=description.progress,
        state=state,
        tracked={name: decode(tree, tensor_of) for name, tree in description.tracked.items()},
        random=random,
    )


def _read_states(
    state: TrainingState, description: Description, tensor_of: Callable[[str], torch.Tensor]
) -> dict[str, dict[str, Any]]:
    """The optimizer's state of each parameter that this rank trains."""
    if state.optimizer is None:
        return {}
    trained = {id(p): group for group in state.optimizer.param_groups for p in group["params"]}
    saved, states = dict(description.optimizer["states"]), {}
    for name, parameter in named_parameters(state).items():
        if id(parameter) in trained and name in saved:
            states[name] = {
                slot: value.to(_device_of(slot, parameter, trained[id(parameter)]))
                if isinstance(value, torch.Tensor)
                else value
                for slot, value in decode(saved[name], tensor_of).items()
            }
    return states


def _device_of(slot: str, parameter: nn.Parameter, group: Mapping[str, Any]) -> torch.device:
    """Torch's optimizers count steps on the CPU, unless they are capturable or fused."""
    if slot == "step" and not group.get("capturable") and not group.get("fused"):
        return torch.device("cpu")
    return parameter.device


def _read_settings(
    state: TrainingState,
    path: Path,
    description: Description,
    tensor_of: Callable[[str], torch.Tensor],
) -> list[dict[str, Any]]:
    """The saved settings of each group of this rank's optimizer."""
    if state.optimizer is None:
        return []
    saved = description.optimizer
    kind = type(state.optimizer).__name__
    if saved["kind"] != kind:
        raise _OtherModelError(
            f"{shown(path)}: its optimizer is {excerpt(saved['kind'])}, now it is {kind!r};"
            " use the same, or load the model alone (pipeplan export-checkpoint, load_weights)"
        )
    name_of = {id(parameter): name for name, parameter in named_parameters(state).items()}
    groups = state.optimizer.param_groups
    by_place = saved["groups"] if saved["groups"] and len(saved["groups"]) == len(groups) else None
    result: list[dict[str, Any]] = []
    for place, group in enumerate(groups):
        names = [name_of[id(p)] for p in group["params"] if id(p) in name_of]
        found = {saved["setting_of"][name]: name for name in names if name in saved["setting_of"]}
        if len(found) > 1:
            first, second = list(found.values())[:2]
            raise _OtherModelError(
                f"{shown(path)}: {quoted(first)} and {quoted(second)} had different settings, but"
                f" are both in the optimizer's group {place} now; use the groups of before"
            )
        index = next(iter(found), by_place[place] if by_place and not names else None)
        tree = None if index is None else saved["settings"][index]
        settings = {} if tree is None else decode(tree, tensor_of)
        if not isinstance(settings, dict) or settings.keys() & NOT_SETTINGS:
            raise TypeError("settings")
        result.append(settings)
    return result


# ------------------------------------------------------------------------------- applying


def _apply(state: TrainingState, staged: _Staged) -> None:
    """Put everything in place."""
    if state.model is not None:
        with torch.no_grad():
            for name, tensor in state.model.state_dict().items():
                tensor.copy_(staged.model[name])
    if state.optimizer is None:
        return
    parameters = named_parameters(state)
    state.optimizer.state.clear()
    for name, found in staged.states.items():
        state.optimizer.state[parameters[name]] = found
    for group, settings in zip(state.optimizer.param_groups, staged.settings, strict=True):
        group.update(settings)
