"""Makes one safetensors file of a checkpoint's model; copies bytes, and needs no torch."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pipeplan.documents.writing import write_stream_atomically
from pipeplan.errors import CheckpointError
from pipeplan.runtime.checkpoints.descriptions import (
    DESCRIPTION,
    MODEL,
    open_files,
    read_description,
)
from pipeplan.runtime.checkpoints.folders import choose_checkpoint, explain_damage
from pipeplan.runtime.checkpoints.reading import quoted, shown
from pipeplan.runtime.checkpoints.tensor_files import TensorFile, TensorSource, write_tensor_file

__all__ = ["Exported", "export_checkpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written."""

    checkpoint: Path
    num_steps: int
    num_tensors: int
    num_bytes: int


def export_checkpoint(path: Path, output: str | Path) -> Exported:
    """Write the model of the checkpoint at `path`, or of the newest one there, to one file.

    Raises:
        CheckpointError: there is none, or it is damaged; no file is written then.
    """
    checkpoint = choose_checkpoint(path)
    if checkpoint is None and not path.exists():
        raise CheckpointError(f"{shown(path)}: does not exist; give the folder of checkpoints")
    if checkpoint is None:
        raise CheckpointError(f"{shown(path)}: holds no checkpoint")
    if Path(output).resolve().parent == checkpoint.resolve():
        raise CheckpointError(f"{shown(output)}: lies in the checkpoint; choose another output")
    try:
        with ExitStack() as stack:
            description = read_description(checkpoint)
            files = open_files(checkpoint, description)
            for file in files.values():
                stack.enter_context(file)
            sources = [
                _source(files[record.file], key, record.sha256)
                for key, record in description.tensors.items()
                if key.startswith(MODEL)
            ]
            # Hugging Face's transformers wants to know which framework has written a file.
            write_stream_atomically(
                output, lambda target: write_tensor_file(target, sources, {"format": "pt"})
            )
            num_bytes = sum(
                files[record.file].entries[key].num_bytes
                for key, record in description.tensors.items()
                if key.startswith(MODEL)
            )
    except CheckpointError as problem:
        if f"{DESCRIPTION}: has format" in str(problem):
            raise CheckpointError(f"{problem}; load and save it again first") from None
        raise CheckpointError(
            explain_damage(checkpoint, str(problem), "export the one before,")
        ) from None
    return Exported(
        checkpoint=checkpoint,
        num_steps=description.progress.num_steps,
        num_tensors=len(sources),
        num_bytes=num_bytes,
    )


def _source(file: TensorFile, key: str, sha256: str) -> TensorSource:
    entry = file.entries[key]
    return TensorSource(
        name=key.removeprefix(MODEL),
        dtype=entry.dtype,
        shape=entry.shape,
        make_pieces=_checked(file, key, sha256),
    )


def _checked(file: TensorFile, key: str, sha256: str) -> Callable[[], Iterator[bytes]]:
    def make_pieces() -> Iterator[bytes]:
        digest = hashlib.sha256()
        for piece in file.pieces(key):
            digest.update(piece)
            yield piece
        if digest.hexdigest() != sha256:
            raise CheckpointError(
                f"{shown(file.path)}: {quoted(key)}: its checksum differs; the file is damaged"
            )

    return make_pieces
