"""Checkpoints that each stage writes its part of, and that any other plan can go on from.

A checkpoint is a folder `step-00000012`: torch's distributed checkpoint with every tensor under
its name in the whole model, and `pipeplan.json` with the rest. All ranks need to see the same
folder. It is written under another name and renamed when all ranks are done::

    .step-00000012.partial     being written; no reader looks at it
    step-00000012              complete
    .step-00000012.replaced    an older one of the same step, until the new one has its name
"""

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from pipeplan.documents.syntax import write_atomically
from pipeplan.errors import RuntimeMismatchError

if TYPE_CHECKING:
    from pipeplan.runtime.training import Pipeline

__all__ = ["load_checkpoint", "newest_checkpoint", "put_in_place", "save_checkpoint"]

FORMAT = "pipeplan.checkpoint/1"
NAME = re.compile(r"step-(\d{8,})")
PARTIAL, REPLACED = ".partial", ".replaced"


def save_checkpoint(pipeline: "Pipeline", directory: Path, keep: int) -> Path:
    """Write the pipeline's state; older checkpoints beyond the newest `keep` are removed."""
    final = directory / f"step-{pipeline.num_steps:08d}"
    partial = _beside(final, PARTIAL)
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        for unfinished in directory.glob(f".step-*{PARTIAL}"):
            shutil.rmtree(unfinished, ignore_errors=True)
    dist.barrier()
    tensors, settings = _collect(pipeline)
    with warnings.catch_warnings():
        _expect_private_storage_warning()
        save(tensors, storage_writer=FileSystemWriter(partial))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(settings, everyone if dist.get_rank() == 0 else None)
    if dist.get_rank() == 0:
        merged = {name: values for part in everyone for name, values in part.items()}
        document = {
            "format": FORMAT,
            "steps": pipeline.num_steps,
            "loss_scale": pipeline.loss_scale,
            "settings": merged,
        }
        write_atomically(partial / "pipeplan.json", json.dumps(document).encode())
        put_in_place(partial, final)
        for old in _complete(directory)[:-keep] if keep > 0 else []:
            shutil.rmtree(old, ignore_errors=True)
    dist.barrier()
    return final


def put_in_place(partial: Path, final: Path) -> None:
    """Give a finished checkpoint its name; at every moment it or the one before is there."""
    replaced = _beside(final, REPLACED)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    partial.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)


def newest_checkpoint(directory: Path) -> Path | None:
    """The complete checkpoint with the most steps; None if there is none."""
    complete = _complete(directory)
    return complete[-1] if complete else None


def load_checkpoint(pipeline: "Pipeline", directory: Path) -> bool:
    """Take over the newest checkpoint's state; False if there is none."""
    # Rank 0 decides, so that all ranks read the same one.
    chosen: list[Any] = [str(newest_checkpoint(directory) or "")]
    dist.broadcast_object_list(chosen, src=0)
    if not chosen[0]:
        return False
    path = Path(chosen[0])
    document = json.loads((path / "pipeplan.json").read_text())
    if document.get("format") != FORMAT:
        raise RuntimeMismatchError(
            f"{path}: has format {document.get('format')!r}; this reader takes {FORMAT!r}"
        )
    reader = FileSystemReader(path)
    known = reader.read_metadata().state_dict_metadata
    wanted: dict[str, torch.Tensor] = {}
    for key, tensor in _model_tensors(pipeline).items():
        if key not in known:
            raise RuntimeMismatchError(
                f"{path}: has no {key.removeprefix('model.')!r}; it is of another model"
            )
        wanted[key] = tensor
    slots = _empty_slots(pipeline, known)
    for (name, slot), tensor in slots.items():
        wanted[f"optimizer.{name}.{slot}"] = tensor
    load(wanted, storage_reader=reader)
    _apply(pipeline, slots, document["settings"])
    pipeline.num_steps = document["steps"]
    pipeline.loss_scale = document["loss_scale"]
    return True


def _complete(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    found = {path.name: path for path in directory.iterdir() if NAME.fullmatch(path.name)}
    for path in directory.glob(f".step-*{REPLACED}"):
        found.setdefault(path.name[1:].removesuffix(REPLACED), path)
    return [found[name] for name in sorted(found, key=lambda name: int(name.partition("-")[2]))]


def _beside(final: Path, ending: str) -> Path:
    return final.with_name(f".{final.name}{ending}")


def _collect(pipeline: "Pipeline") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """This rank's tensors by key, and by parameter the settings of its optimizer group."""
    tensors = _model_tensors(pipeline)
    settings: dict[str, Any] = {}
    if pipeline.optimizer is None:
        return tensors, settings
    for name, parameter in _parameters(pipeline).items():
        for slot, value in pipeline.optimizer.state.get(parameter, {}).items():
            if value is not None:
                tensors[f"optimizer.{name}.{slot}"] = torch.as_tensor(value)
    for group in pipeline.optimizer.param_groups:
        members = {id(parameter) for parameter in group["params"]}
        plain = {key: value for key, value in group.items() if _is_plain(value)}
        for name, parameter in _parameters(pipeline).items():
            if id(parameter) in members:
                settings[name] = plain
    return tensors, settings


def _is_plain(value: Any) -> bool:
    numbers = bool | int | float | str | None
    if isinstance(value, tuple | list):
        return all(isinstance(entry, numbers) for entry in value)
    return isinstance(value, numbers)


def _model_tensors(pipeline: "Pipeline") -> dict[str, torch.Tensor]:
    if pipeline.model is None:
        return {}
    return {f"model.{name}": tensor for name, tensor in pipeline.model.state_dict().items()}


def _parameters(pipeline: "Pipeline") -> dict[str, torch.nn.Parameter]:
    """By the first name that the whole model has for it, which all stages agree on."""
    if pipeline.model is None:
        return {}
    return {
        pipeline.first_name_of[name]: parameter
        for name, parameter in pipeline.model.named_parameters()
    }


def _empty_slots(
    pipeline: "Pipeline", known: dict[str, Any]
) -> dict[tuple[str, str], torch.Tensor]:
    """Room for the optimizer's tensors that the checkpoint holds for this rank's parameters."""
    slots = {}
    for name, parameter in _parameters(pipeline).items():
        prefix = f"optimizer.{name}."
        for key, kind in known.items():
            slot = key.removeprefix(prefix)
            if key.startswith(prefix) and "." not in slot:
                on_device = parameter.device if kind.size else torch.device("cpu")
                slots[name, slot] = torch.empty(
                    kind.size, dtype=kind.properties.dtype, device=on_device
                )
    return slots


def _apply(
    pipeline: "Pipeline", slots: dict[tuple[str, str], torch.Tensor], settings: dict[str, Any]
) -> None:
    if pipeline.optimizer is None:
        return
    parameters = _parameters(pipeline)
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    for (name, slot), tensor in slots.items():
        pipeline.optimizer.state[parameters[name]][slot] = tensor
    for group in pipeline.optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in settings.get(name_of[id(parameter)], {}).items():
                if key in group:
                    group[key] = tuple(value) if isinstance(group[key], tuple) else value


def _expect_private_storage_warning() -> None:
    """Torch's own writer warns of its use of TypedStorage and of full loads."""
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated", category=UserWarning)
