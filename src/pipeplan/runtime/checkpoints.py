"""Checkpoints: each stage writes its part, and any other plan can continue from them.

A checkpoint is a folder `step-00000012`. It holds torch's distributed checkpoint, with every tensor
under its name in the whole model, and `pipeplan.json` with the rest. All ranks have to see the same
folder. The checkpoint is written under another name, and renamed when all ranks are done::

    .step-00000012.partial     being written, or being removed; no reader looks at it
    step-00000012              complete
    .step-00000012.replaced    an older one of the same step, until the new one has its name

A process may be killed at any moment: the newest checkpoint is then the old or the new one, and it
is complete. The next save removes what the killed process has left.
"""

import json
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from pipeplan.documents.syntax import write_atomically
from pipeplan.documents.text import printable
from pipeplan.documents.writing import sync_folder
from pipeplan.errors import RuntimeMismatchError

__all__ = [
    "Progress",
    "TrainingState",
    "load_checkpoint",
    "newest_checkpoint",
    "put_in_place",
    "save_checkpoint",
]

FORMAT = "pipeplan.checkpoint/1"
NAME = re.compile(r"step-(\d{8,})")
PARTIAL, REPLACED = ".partial", ".replaced"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The tensors that one rank saves and loads."""

    model: nn.Module | None
    """This rank's part of the model; None for a rank that the plan leaves unused."""
    optimizer: torch.optim.Optimizer | None
    first_name_of: Mapping[str, str]
    """The first name that the whole model has for each parameter; tied ones have several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far training has come."""

    num_steps: int
    loss_scale: float


def save_checkpoint(state: TrainingState, progress: Progress, directory: Path, keep: int) -> Path:
    """Write a checkpoint, and remove all but the newest `keep`; all ranks have to call it."""
    final = directory / f"step-{progress.num_steps:08d}"
    partial = _beside(final, PARTIAL)
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        _clean_up(directory)
    dist.barrier()
    tensors, settings = _collect(state)
    with warnings.catch_warnings():
        _expect_private_storage_warning()
        save(tensors, storage_writer=FileSystemWriter(partial))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(settings, everyone if dist.get_rank() == 0 else None)
    if dist.get_rank() == 0:
        document = {
            "format": FORMAT,
            "steps": progress.num_steps,
            "loss_scale": progress.loss_scale,
            "settings": {name: values for part in everyone for name, values in part.items()},
        }
        write_atomically(partial / "pipeplan.json", json.dumps(document).encode())
        sync_folder(partial)
        put_in_place(partial, final)
        for old in _complete(directory)[:-keep] if keep > 0 else []:
            _remove(old)
    dist.barrier()
    return final


def put_in_place(partial: Path, final: Path) -> None:
    """Give a finished checkpoint its name; at every moment it or the one before is there."""
    replaced = _beside(final, REPLACED)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    partial.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def newest_checkpoint(directory: Path) -> Path | None:
    """The complete checkpoint with the most steps; None if there is none."""
    complete = _complete(directory)
    return complete[-1] if complete else None


def load_checkpoint(state: TrainingState, directory: Path) -> Progress | None:
    """Load the newest checkpoint; None if there is none. All ranks have to call it."""
    # Rank 0 decides, so that all ranks read the same one.
    chosen: list[Any] = [str(newest_checkpoint(directory) or "")]
    dist.broadcast_object_list(chosen, src=0)
    if not chosen[0]:
        return None
    path = Path(chosen[0])
    document = json.loads((path / "pipeplan.json").read_text())
    if document.get("format") != FORMAT:
        raise RuntimeMismatchError(
            f"{printable(str(path))}: has format {document.get('format')!r};"
            f" this reader takes {FORMAT!r}"
        )
    reader = FileSystemReader(path)
    known = reader.read_metadata().state_dict_metadata
    wanted: dict[str, torch.Tensor] = {}
    for key, tensor in _model_tensors(state).items():
        if key not in known:
            raise RuntimeMismatchError(
                f"{printable(str(path))}: has no {key.removeprefix('model.')!r};"
                " it is of another model"
            )
        wanted[key] = tensor
    slots = _empty_slots(state, known)
    for (name, slot), tensor in slots.items():
        wanted[f"optimizer.{name}.{slot}"] = tensor
    load(wanted, storage_reader=reader)
    _restore_optimizer(state, slots, document["settings"])
    return Progress(num_steps=document["steps"], loss_scale=document["loss_scale"])


# ------------------------------------------------------------------------------- folders


def _complete(directory: Path) -> list[Path]:
    """All complete checkpoints, by number of steps."""
    if not directory.is_dir():
        return []
    found = {path.name: path for path in directory.iterdir() if NAME.fullmatch(path.name)}
    for path in directory.glob(f".step-*{REPLACED}"):
        found.setdefault(_final_of(path).name, path)
    return [found[name] for name in sorted(found, key=lambda name: int(name.partition("-")[2]))]


def _clean_up(directory: Path) -> None:
    """Remove what killed processes have left."""
    for unfinished in directory.glob(f".step-*{PARTIAL}"):
        shutil.rmtree(unfinished, ignore_errors=True)
    for replaced in directory.glob(f".step-*{REPLACED}"):
        if _final_of(replaced).exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:  # the process was killed between two renames
            replaced.rename(_final_of(replaced))


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint; under another name, so that no half of it looks complete."""
    final = checkpoint if NAME.fullmatch(checkpoint.name) else _final_of(checkpoint)
    hidden = _beside(final, PARTIAL)
    checkpoint.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _beside(final: Path, ending: str) -> Path:
    return final.with_name(f".{final.name}{ending}")


def _final_of(replaced: Path) -> Path:
    return replaced.with_name(replaced.name[1:].removesuffix(REPLACED))


# ------------------------------------------------------------------------------- tensors


def _collect(state: TrainingState) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """This rank's tensors by key, and the optimizer's settings by parameter."""
    tensors = _model_tensors(state)
    settings: dict[str, Any] = {}
    if state.optimizer is None:
        return tensors, settings
    for name, parameter in _parameters(state).items():
        for slot, value in state.optimizer.state.get(parameter, {}).items():
            if value is not None:
                tensors[f"optimizer.{name}.{slot}"] = torch.as_tensor(value)
    for group in state.optimizer.param_groups:
        members = {id(parameter) for parameter in group["params"]}
        plain = {key: value for key, value in group.items() if _is_plain(value)}
        for name, parameter in _parameters(state).items():
            if id(parameter) in members:
                settings[name] = plain
    return tensors, settings


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold a setting."""
    plain = bool | int | float | str | None
    if isinstance(value, tuple | list):
        return all(isinstance(entry, plain) for entry in value)
    return isinstance(value, plain)


def _model_tensors(state: TrainingState) -> dict[str, torch.Tensor]:
    if state.model is None:
        return {}
    return {f"model.{name}": tensor for name, tensor in state.model.state_dict().items()}


def _parameters(state: TrainingState) -> dict[str, nn.Parameter]:
    """This rank's parameters by their first name in the whole model, which all stages share."""
    if state.model is None:
        return {}
    return {
        state.first_name_of[name]: parameter for name, parameter in state.model.named_parameters()
    }


def _empty_slots(
    state: TrainingState, known: dict[str, Any]
) -> dict[tuple[str, str], torch.Tensor]:
    """Empty tensors for the optimizer's state that the checkpoint holds for this rank."""
    slots = {}
    for name, parameter in _parameters(state).items():
        prefix = f"optimizer.{name}."
        for key, kind in known.items():
            slot = key.removeprefix(prefix)
            if key.startswith(prefix) and "." not in slot:
                on_device = parameter.device if kind.size else torch.device("cpu")
                slots[name, slot] = torch.empty(
                    kind.size, dtype=kind.properties.dtype, device=on_device
                )
    return slots


def _restore_optimizer(
    state: TrainingState, slots: dict[tuple[str, str], torch.Tensor], settings: dict[str, Any]
) -> None:
    if state.optimizer is None:
        return
    parameters = _parameters(state)
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    for (name, slot), tensor in slots.items():
        state.optimizer.state[parameters[name]][slot] = tensor
    for group in state.optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in settings.get(name_of[id(parameter)], {}).items():
                if key in group:
                    group[key] = tuple(value) if isinstance(group[key], tuple) else value


def _expect_private_storage_warning() -> None:
    """Ignore a warning that torch's own writer causes."""
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated", category=UserWarning)
