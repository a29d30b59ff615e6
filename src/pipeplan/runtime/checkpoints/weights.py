"""Loads the values of a model from safetensors files, such as exported ones."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from pipeplan.errors import CheckpointError
from pipeplan.runtime.byte_views import as_bytes
from pipeplan.runtime.checkpoints.agreement import together
from pipeplan.runtime.checkpoints.reading import quoted, shown
from pipeplan.runtime.checkpoints.saving import TrainingState
from pipeplan.runtime.checkpoints.tensor_bytes import DTYPES, read_tensor, require_like
from pipeplan.runtime.checkpoints.tensor_files import TensorFile

__all__ = ["load_weights"]


def load_weights(state: TrainingState, paths: Sequence[Path], *, cast: bool = False) -> None:
    """Fill the model from files that hold each of its tensors once; all ranks have to call it.

    A tensor with several names may stand under any of them. If it stands under several, their
    values have to be equal. With `cast`, values of other types are converted.

    Raises:
        CheckpointError: a file is damaged, or of another model. Nothing has changed then.
    """
    names = together(lambda: list(state.model.state_dict()) if state.model is not None else [])
    everywhere = {name for of_rank in names for name in of_rank}
    found: dict[str, torch.Tensor] = {}
    together(lambda: found.update(_read(state, paths, everywhere, cast=cast)))
    if state.model is not None:
        with torch.no_grad():
            for name, tensor in state.model.state_dict().items():
                tensor.copy_(found[name])


def _read(
    state: TrainingState, paths: Sequence[Path], everywhere: set[str], *, cast: bool
) -> dict[str, torch.Tensor]:
    """The values of this rank's tensors."""
    with ExitStack() as stack:
        file_of: dict[str, TensorFile] = {}
        for path in paths:
            file = stack.enter_context(TensorFile(path, follow_links=True))
            for name in file.entries:
                if name in file_of:
                    raise CheckpointError(
                        f"{shown(path)}: holds {quoted(name)}, as {shown(file_of[name].path)} does"
                    )
                file_of[name] = file
        known = everywhere | state.first_name_of.keys()
        extra = sorted(file_of.keys() - known)
        if extra:
            raise CheckpointError(
                f"{shown(file_of[extra[0]].path)}: holds {quoted(extra[0])}, which the model does"
                " not have; it is of another model"
            )
        if state.model is None:
            return {}
        return {
            name: _read_one(state, name, tensor, file_of, cast=cast)
            for name, tensor in state.model.state_dict().items()
        }


def _read_one(
    state: TrainingState,
    name: str,
    like: torch.Tensor,
    file_of: dict[str, TensorFile],
    *,
    cast: bool,
) -> torch.Tensor:
    first = state.first_name_of.get(name)
    aliases = [n for n, first_name in state.first_name_of.items() if first_name == first]
    places = [alias for alias in (aliases if first is not None else [name]) if alias in file_of]
    if not places:
        files = ", ".join(sorted({shown(file.path) for file in file_of.values()})) or "the files"
        raise CheckpointError(f"{files}: has no {quoted(name)}; it is of another model")
    values = [_read_at(file_of[place], place, like, cast=cast) for place in places]
    for place, value in zip(places[1:], values[1:], strict=True):
        if not torch.equal(_bits(value), _bits(values[0])):
            raise CheckpointError(
                f"{shown(file_of[place].path)}: {quoted(places[0])} and {quoted(place)} differ, but"
                " are one tensor in the model; leave out one of them"
            )
    return values[0]


def _read_at(file: TensorFile, name: str, like: torch.Tensor, *, cast: bool) -> torch.Tensor:
    found = file.entries[name]
    is_cast = cast and like.is_floating_point() and DTYPES[found.dtype].is_floating_point
    try:
        require_like(
            file, name, like.new_empty(like.shape, dtype=DTYPES[found.dtype]) if is_cast else like
        )
    except CheckpointError as problem:
        hint = "" if cast or found.shape != tuple(like.shape) else ", or give cast=True"
        raise CheckpointError(f"{problem}{hint}") from None
    return read_tensor(file, name, None)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, so that NaN equals itself."""
    return as_bytes(tensor) if tensor.numel() else tensor
