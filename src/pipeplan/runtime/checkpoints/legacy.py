"""Reads checkpoints of pipeplan's first format, which torch reads with pickle.

Such a file can run any code when it is read. So the caller has to trust it explicitly.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeplan.errors import CheckpointError
from pipeplan.runtime.checkpoints.agreement import together
from pipeplan.runtime.checkpoints.descriptions import DESCRIPTION, FIRST_FORMAT, MODEL, Progress
from pipeplan.runtime.checkpoints.reading import open_regular, parse_strictly, quoted, shown
from pipeplan.runtime.checkpoints.saving import TrainingState, named_parameters

__all__ = ["is_legacy", "load_legacy"]

HEAD = f'{{"format": "{FIRST_FORMAT}"'.encode()


def is_legacy(checkpoint: Path) -> bool:
    """Whether this checkpoint has the first format."""
    with open_regular(checkpoint / DESCRIPTION, follow_links=False) as file:
        return file.read(len(HEAD)) == HEAD


def load_legacy(state: TrainingState, checkpoint: Path, *, trust: bool) -> Progress:
    """Load a checkpoint of the first format; all ranks have to call it.

    Raises:
        CheckpointError: it is not trusted, or of another model.
    """
    if not trust:
        raise CheckpointError(
            f"{shown(checkpoint)}: has pipeplan's first format, which can run any code when it is"
            " read; if you made it yourself, load it with trust=True (--trust) and save it again"
        )
    if dist.get_rank() == 0:
        warnings.warn(
            f"{shown(checkpoint)}: is read with pickle, which runs any code in it;"
            " the next save writes the new format",
            stacklevel=5,
        )
    return _load(state, checkpoint)


def _load(state: TrainingState, checkpoint: Path) -> Progress:
    # Imported late: few need it, and it takes half a second.
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    document, reader = _read_document(checkpoint), FileSystemReader(checkpoint)
    known = reader.read_metadata().state_dict_metadata
    wanted: dict[str, torch.Tensor] = {}

    def want_model() -> None:
        for name, tensor in (state.model.state_dict() if state.model is not None else {}).items():
            if MODEL + name not in known:
                raise CheckpointError(
                    f"{shown(checkpoint)}: has no {quoted(name)}; it is of another model"
                )
            wanted[MODEL + name] = tensor

    together(want_model)
    slots = _empty_slots(state, known)
    for (name, slot), tensor in slots.items():
        wanted[f"optimizer.{name}.{slot}"] = tensor
    load(wanted, storage_reader=reader)
    _restore_optimizer(state, slots, document["settings"])
    steps: int = document["steps"]
    return Progress(num_steps=steps, loss_scale=document["loss_scale"], num_batches=steps)


def _read_document(checkpoint: Path) -> Any:
    with open_regular(checkpoint / DESCRIPTION, follow_links=False) as file:
        return parse_strictly(file.read(), checkpoint / DESCRIPTION)


def _empty_slots(
    state: TrainingState, known: dict[str, Any]
) -> dict[tuple[str, str], torch.Tensor]:
    """Empty tensors for the optimizer's state that the checkpoint holds for this rank."""
    slots = {}
    for name, parameter in named_parameters(state).items():
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
    parameters = named_parameters(state)
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    for (name, slot), tensor in slots.items():
        state.optimizer.state[parameters[name]][slot] = tensor
    for group in state.optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in settings.get(name_of.get(id(parameter), ""), {}).items():
                if key in group:
                    group[key] = tuple(value) if isinstance(group[key], tuple) else value
