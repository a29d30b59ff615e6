"""Writes a checkpoint: each stage's first replica its tensors, rank 0 the rest.

If replicas share an optimizer out, each of them writes its share of the optimizer's state.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from pipeplan.errors import CheckpointError
from pipeplan.runtime.checkpoints.agreement import together
from pipeplan.runtime.checkpoints.descriptions import (
    MODEL,
    Description,
    FileRecord,
    Progress,
    TensorRecord,
    write_description,
)
from pipeplan.runtime.checkpoints.folders import (
    begin_partial,
    locked,
    put_in_place,
    remove_partial,
    remove_surplus,
)
from pipeplan.runtime.checkpoints.plain_data import encode
from pipeplan.runtime.checkpoints.tensor_bytes import source_of
from pipeplan.runtime.checkpoints.tensor_files import TensorSource, WrittenFile, write_tensor_file
from pipeplan.runtime.checkpoints.writing import write_synced

__all__ = ["NOT_SETTINGS", "Extras", "TrainingState", "named_parameters", "save_checkpoint"]

STATE_FILE = "state.safetensors"
T = TypeVar("T")
NOT_SETTINGS = {"params", "param_names"}
"""What an optimizer's group holds besides settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The tensors that one rank saves and loads."""

    model: nn.Module | None
    """This rank's part of the model; None for a rank that the plan leaves unused."""
    optimizer: torch.optim.Optimizer | None
    first_name_of: Mapping[str, str]
    """The first name that the whole model has for each parameter; tied ones have several."""
    stage: int = 0
    replica: int = 0
    is_sharded: bool = False
    """Whether each replica has an optimizer of its own parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What rank 0 saves for all ranks."""

    state: Mapping[str, Any] = field(default_factory=dict)
    """The user's own."""
    tracked: Mapping[str, Any] = field(default_factory=dict)
    """Objects with `state_dict` and `load_state_dict`, such as schedulers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one rank has collected; the tensors stay on the rank."""

    stage: int
    """-1 for a rank that saves nothing of a stage."""
    replica: int
    keys: list[str]
    """The names of the stage's tensors."""
    groups: list[tuple[Any, list[str]]]
    """The optimizer's settings of each group, and the parameters in it."""
    optimizer_kind: str
    states: dict[str, Any]
    """The optimizer's state of each parameter."""
    extras: dict[str, Any]


class _Tensors:
    """The tensors of one file, by name."""

    def __init__(self) -> None:
        self.source_of: dict[str, TensorSource] = {}

    def keep(self, name: str, tensor: torch.Tensor) -> str:
        """Keep a tensor, and return its name."""
        if name in self.source_of:
            raise CheckpointError(f"{name}: two tensors have this name")
        self.source_of[name] = source_of(name, tensor)
        return name


def save_checkpoint(
    state: TrainingState,
    progress: Progress,
    directory: Path,
    keep: int,
    extras: Extras | None = None,
    since: int | None = None,
) -> Path:
    """Write a checkpoint, and remove all but the newest `keep`; all ranks have to call it.

    `since` is the step that was saved or loaded last, if there is one.
    """
    own, shared = _Tensors(), _Tensors()
    parts = together(lambda: _collect(state, extras or Extras(), own, shared))
    final = directory / f"step-{progress.num_steps:08d}"
    with ExitStack() as lock:

        def begin() -> Path:
            lock.enter_context(locked(directory))
            return begin_partial(directory, progress.num_steps)

        partial = _on_first(begin)
        try:
            written = together(lambda: _write_tensors(partial, parts, own, shared))
            _on_first(lambda: write_description(_describe(progress, parts, written), partial))
        except CheckpointError:
            if dist.get_rank() == 0:
                remove_partial(partial)
            raise

        def finish() -> None:
            put_in_place(partial, final)
            remove_surplus(final, keep, since)

        _on_first(finish)
    return final


def _on_first(work: Callable[[], T]) -> T:
    """What `work` returns on rank 0, on every rank; only rank 0 does it."""
    results: list[Any] = together(lambda: work() if dist.get_rank() == 0 else None)
    first: T = results[0]
    return first


# ------------------------------------------------------------------------------- collecting


def named_parameters(state: TrainingState) -> dict[str, nn.Parameter]:
    """This rank's parameters by their first name in the whole model, which all stages share."""
    if state.model is None:
        return {}
    return {
        state.first_name_of[name]: parameter for name, parameter in state.model.named_parameters()
    }


def _collect(state: TrainingState, extras: Extras, own: _Tensors, shared: _Tensors) -> _Part:
    """What this rank has. The stage's tensors go to `own`, all others of rank 0 to `shared`."""
    is_saved = state.model is not None and (state.replica == 0 or state.is_sharded)
    if is_saved and state.replica == 0:
        _collect_model(state, own)
    return _Part(
        stage=state.stage if is_saved else -1,
        replica=state.replica,
        states=_collect_states(state, own) if is_saved else {},
        groups=_collect_groups(state, own) if is_saved else [],
        keys=list(own.source_of),
        optimizer_kind=type(state.optimizer).__name__,
        extras=_collect_extras(extras, shared) if dist.get_rank() == 0 else {},
    )


def _collect_model(state: TrainingState, own: _Tensors) -> None:
    assert state.model is not None
    for name, value in state.model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{name}: is a {type(value).__name__}; only tensors of a model are saved"
            )
        own.keep(MODEL + name, value)


def _collect_states(state: TrainingState, own: _Tensors) -> dict[str, Any]:
    if state.optimizer is None:
        return {}
    # A look at `optimizer.state[parameter]` makes an empty state; it may be another replica's.
    updated = {id(p) for group in state.optimizer.param_groups for p in group["params"]}
    return {
        name: encode(dict(state.optimizer.state[parameter]), f"optimizer.{name}", own.keep)
        for name, parameter in named_parameters(state).items()
        if parameter in state.optimizer.state and id(parameter) in updated
    }


def _collect_groups(state: TrainingState, own: _Tensors) -> list[tuple[Any, list[str]]]:
    if state.optimizer is None:
        return []
    name_of = {id(parameter): name for name, parameter in named_parameters(state).items()}
    groups = []
    for index, group in enumerate(state.optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key not in NOT_SETTINGS}
        where = f"settings of the optimizer's group {index} on stage {state.stage}"
        members = [name_of[id(p)] for p in group["params"] if id(p) in name_of]
        groups.append((encode(settings, where, own.keep), members))
    return groups


def _collect_extras(extras: Extras, shared: _Tensors) -> dict[str, Any]:
    return {
        "state": encode(dict(extras.state), "state", shared.keep),
        "tracked": {
            name: encode(tracked.state_dict(), f"tracked.{name}", shared.keep)
            for name, tracked in extras.tracked.items()
        },
        "random": encode(torch.get_rng_state(), "random", shared.keep),
    }


# ------------------------------------------------------------------------------- writing


def _write_tensors(
    partial: Path, parts: Sequence[_Part], own: _Tensors, shared: _Tensors
) -> dict[str, WrittenFile]:
    """Write the tensors that are this rank's to write; by the name of the file."""
    mine = parts[dist.get_rank()]
    # A tensor that several stages hold is written by the first of them.
    others = [part for part in parts if part.stage >= 0 and _place(part) < _place(mine)]
    before = {key for part in others for key in part.keys}
    files = {
        f"{_file_name(mine)}.safetensors": [
            source for key, source in own.source_of.items() if key not in before
        ],
        STATE_FILE: list(shared.source_of.values()),
    }
    return {
        name: write_synced(partial / name, functools.partial(write_tensor_file, sources=sources))
        for name, sources in files.items()
        if sources
    }


def _place(part: _Part) -> tuple[int, int]:
    return part.stage, part.replica


def _file_name(part: _Part) -> str:
    """What the file of a rank's part is called; mostly it has all of a stage."""
    return f"stage-{part.stage:03d}" + (f"-{part.replica:03d}" if part.replica else "")


def _describe(
    progress: Progress, parts: Sequence[_Part], written: Sequence[dict[str, WrittenFile]]
) -> Description:
    files, tensors = {}, {}
    for of_rank in written:
        for name, file in of_rank.items():
            files[name] = FileRecord(num_bytes=file.num_bytes, header_sha256=file.header_sha256)
            for key, sha256 in file.sha256_of.items():
                if key in tensors:
                    raise CheckpointError(f"{key}: two tensors have this name")
                tensors[key] = TensorRecord(file=name, sha256=sha256)
    return Description(
        progress=progress,
        files=files,
        tensors=tensors,
        optimizer=_describe_optimizer(sorted(parts, key=_place)),
        tracked=parts[0].extras["tracked"],
        state=parts[0].extras["state"],
        random=parts[0].extras["random"],
    )


def _describe_optimizer(parts: Sequence[_Part]) -> dict[str, Any]:
    """The optimizers of all stages as one: settings and state by parameter.

    `groups` has the settings of each group by position, for ranks that hold no parameter of it. It
    is None if the ranks have different numbers of groups.
    """
    parts = [part for part in parts if part.stage >= 0]
    settings: list[Any] = []
    setting_of: dict[str, int] = {}
    states: dict[str, Any] = {}
    for part in parts:
        for tree, members in part.groups:
            if tree not in settings:
                settings.append(tree)
            for name in members:
                setting_of.setdefault(name, settings.index(tree))
        for name, tree in part.states.items():
            states.setdefault(name, tree)
    groups: list[int] | None = None
    if len({len(part.groups) for part in parts}) == 1:
        groups = []
        for at_place in zip(*(part.groups for part in parts), strict=True):
            tree = next((tree for tree, members in at_place if members), at_place[0][0])
            groups.append(settings.index(tree))
    return {
        "kind": parts[0].optimizer_kind,
        "settings": settings,
        "setting_of": setting_of,
        "groups": groups,
        "states": states,
    }
