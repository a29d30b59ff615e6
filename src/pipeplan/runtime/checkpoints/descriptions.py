"""`pipeplan.json`: what a checkpoint holds, with checksums of everything and of itself.

The file begins with a fixed line. It holds the checksum of all bytes behind it, so a changed bit
anywhere is found before the JSON is parsed::

    {"format": "pipeplan.checkpoint/2", "sha256": "<64 digits>",
    "steps": 12, ...}
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeplan.documents.text import excerpt
from pipeplan.errors import CheckpointError
from pipeplan.runtime.checkpoints.reading import (
    MAX_JSON_BYTES,
    open_regular,
    parse_strictly,
    quoted,
    require_size,
    shown,
)
from pipeplan.runtime.checkpoints.tensor_files import TensorFile
from pipeplan.runtime.checkpoints.writing import write_synced

__all__ = [
    "DESCRIPTION",
    "FIRST_FORMAT",
    "MODEL",
    "Description",
    "FileRecord",
    "Progress",
    "TensorRecord",
    "open_files",
    "read_description",
    "require_tensor",
    "write_description",
]

DESCRIPTION = "pipeplan.json"
FORMAT = "pipeplan.checkpoint/2"
FIRST_FORMAT = "pipeplan.checkpoint/1"
"""Of pipeplan before this format; it was read with pickle."""
HEAD = re.compile(
    rb'\{"format": "' + re.escape(FORMAT).encode() + rb'", "sha256": "([0-9a-f]{64})",\n'
)
FILE_NAME = re.compile(r"(?:stage-[0-9]{3,6}(?:-[0-9]{3,6})?|state)\.safetensors")
SHA256 = re.compile(r"[0-9a-f]{64}")
STEP_NAME = re.compile(r"step-([0-9]{8,})")
MAX_COUNT = 2**62
MODEL = "model."
"""What the keys of the model's tensors begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far training has come."""

    num_steps: int
    loss_scale: float
    num_calm_steps: int = 0
    """Steps since the loss scale changed."""
    num_batches: int = 0
    """Batches trained on: more than steps if gradients were accumulated."""
    num_rows: int = 0
    """Rows of all these batches: the position in the data."""
    seed: int | None = None
    """Of dropout and other random numbers inside blocks; None if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What one file of tensors has to be like."""

    num_bytes: int
    header_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """In which file a tensor is, and the checksum of its bytes."""

    file: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """All that a checkpoint holds, besides the bytes of tensors."""

    progress: Progress
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]
    optimizer: Mapping[str, Any]
    tracked: Mapping[str, Any]
    """The state of schedulers and other tracked objects."""
    state: Any
    """The user's own."""
    random: Any
    """The state of torch's random generator on rank 0."""


def write_description(description: Description, folder: Path) -> None:
    """Write `pipeplan.json`, and wait until it is on the disk."""
    document = {
        "progress": asdict(description.progress),
        "files": {name: asdict(record) for name, record in description.files.items()},
        "tensors": {
            name: [record.file, record.sha256] for name, record in description.tensors.items()
        },
        "optimizer": description.optimizer,
        "tracked": description.tracked,
        "state": description.state,
        "random": description.random,
    }
    text = json.dumps(document, allow_nan=False)
    rest = text[1:].encode()
    require_size(rest, folder / DESCRIPTION)
    digest = hashlib.sha256(rest).hexdigest()
    data = f'{{"format": "{FORMAT}", "sha256": "{digest}",\n'.encode() + rest
    write_synced(folder / DESCRIPTION, lambda file: file.write(data))


def read_description(folder: Path) -> Description:
    """What the checkpoint in this folder holds.

    Raises:
        CheckpointError: the file is damaged, or no such file.
    """
    path = folder / DESCRIPTION
    with open_regular(path, follow_links=False) as file:
        data = file.read(MAX_JSON_BYTES + 1)
    require_size(data, path)
    head = HEAD.match(data)
    if head is None:
        raise CheckpointError(f"{shown(path)}: {_other_format(data)}")
    if hashlib.sha256(data[head.end() :]).hexdigest() != head[1].decode():
        raise CheckpointError(f"{shown(path)}: its checksum differs; the file is damaged")
    document = parse_strictly(data, path)
    try:
        description = _description(document)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise CheckpointError(f"{shown(path)}: is not a description of a checkpoint") from None
    _require_plain_names(description, path)
    steps, named = description.progress.num_steps, STEP_NAME.fullmatch(folder.name)
    if named and int(named[1]) != steps:
        raise CheckpointError(
            f"{shown(folder)}: holds step {steps}; give the folder the name step-{steps:08d}"
        )
    return description


def _other_format(data: bytes) -> str:
    found = re.match(rb'\{\s*"format":\s*"([^"]{1,60})"', data)
    if found is None or found[1].decode(errors="replace") == FORMAT:
        return "its first line is damaged"
    return f"has format {excerpt(found[1].decode(errors='replace'))}; this reader takes {FORMAT!r}"


def _description(document: Any) -> Description:
    progress = Progress(**document["progress"])
    counts = (progress.num_steps, progress.num_batches, progress.num_rows, progress.num_calm_steps)
    if any(type(count) is not int or not 0 <= count < MAX_COUNT for count in counts):
        raise ValueError("counts")
    if type(progress.seed) not in (int, type(None)) or not 0 < float(progress.loss_scale) < float(
        "inf"
    ):
        raise ValueError("numbers")
    files = {name: FileRecord(**record) for name, record in document["files"].items()}
    tensors = {}
    for name, (file, sha256) in document["tensors"].items():
        if file not in files or SHA256.fullmatch(sha256) is None:
            raise ValueError(name)
        tensors[name] = TensorRecord(file=file, sha256=sha256)
    return Description(
        progress=progress,
        files=files,
        tensors=tensors,
        optimizer=dict(document["optimizer"]),
        tracked=dict(document["tracked"]),
        state=document["state"],
        random=document["random"],
    )


def _require_plain_names(description: Description, path: Path) -> None:
    """Files lie in the checkpoint's folder: no name leads out of it."""
    for name in description.files:
        if FILE_NAME.fullmatch(name) is None:
            raise CheckpointError(f"{shown(path)}: {quoted(name)} is no file of a checkpoint")


# ------------------------------------------------------------------------------- its files


def open_files(folder: Path, description: Description) -> dict[str, TensorFile]:
    """The checkpoint's files, each as the description says; the caller closes them."""
    files: dict[str, TensorFile] = {}
    try:
        for name, record in description.files.items():
            file = files[name] = TensorFile(folder / name)
            if file.num_bytes != record.num_bytes or file.header_sha256 != record.header_sha256:
                raise CheckpointError(
                    f"{shown(file.path)}: its header's checksum differs; the file is damaged"
                    " or of another checkpoint"
                )
        for key, tensor in description.tensors.items():
            require_tensor(files[tensor.file], key)
        for name, file in files.items():
            for key in file.entries:
                if key not in description.tensors or description.tensors[key].file != name:
                    raise CheckpointError(
                        f"{shown(file.path)}: holds {quoted(key)}, which {DESCRIPTION} lacks"
                    )
    except BaseException:
        for file in files.values():
            file.close()
        raise
    return files


def require_tensor(file: TensorFile, key: str) -> None:
    """Refuse a file without this tensor."""
    if key not in file.entries:
        raise CheckpointError(f"{shown(file.path)}: has no {quoted(key)}")
