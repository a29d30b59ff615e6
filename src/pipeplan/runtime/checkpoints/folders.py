"""The folders of checkpoints: which are complete, and how a new one gets its name.

A checkpoint is written under another name, and renamed when all ranks are done::

    .step-00000012.partial     being written, or being removed; no reader looks at it
    step-00000012              complete
    .step-00000012.replaced    an older one of the same step, until the new one has its name
    set-aside.step-00000020    was newer when training went back to an earlier step

A process may be killed at any moment: the newest checkpoint is then the old or the new one, and it
is complete. The next save removes what the killed process has left.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeplan.documents.writing import sync_folder
from pipeplan.errors import CheckpointError
from pipeplan.runtime.checkpoints.descriptions import DESCRIPTION, open_files, read_description
from pipeplan.runtime.checkpoints.reading import shown

if sys.platform != "win32":
    import fcntl

__all__ = [
    "begin_partial",
    "choose_checkpoint",
    "complete_checkpoints",
    "explain_damage",
    "locked",
    "newest_checkpoint",
    "put_in_place",
    "remove_partial",
    "remove_surplus",
]

NAME = re.compile(r"step-([0-9]{8,})")
PARTIAL, REPLACED, SET_ASIDE = ".partial", ".replaced", "set-aside."


def newest_checkpoint(directory: Path) -> Path | None:
    """The complete checkpoint with the most steps; None if there is none."""
    complete = complete_checkpoints(directory)
    return complete[-1] if complete else None


def choose_checkpoint(path: Path) -> Path | None:
    """The checkpoint at this path: the folder itself, or the newest one in it."""
    if os.path.lexists(path / DESCRIPTION):
        return path
    if NAME.fullmatch(path.name):
        problem = f"{shown(path)}: has no {DESCRIPTION}; it is no checkpoint"
        raise CheckpointError(explain_damage(path, problem))
    if path.exists() and not path.is_dir():
        raise CheckpointError(
            f"{shown(path)}: is a file; give the folder of checkpoints (load_weights reads"
            " safetensors files)"
        )
    return newest_checkpoint(path)


def complete_checkpoints(directory: Path) -> list[Path]:
    """All complete checkpoints, by number of steps."""
    if not directory.is_dir():
        return []
    found = {
        path.name: path
        for path in directory.iterdir()
        if NAME.fullmatch(path.name) and path.is_dir()
    }
    for path in directory.glob(f".step-*{REPLACED}"):
        if NAME.fullmatch(_final_of(path).name):
            found.setdefault(_final_of(path).name, path)
    return [found[name] for name in sorted(found, key=_steps)]


def explain_damage(
    checkpoint: Path,
    problem: str,
    remedy: str = "continue from the one before with --resume-from",
) -> str:
    """What is wrong with a checkpoint, and which one before it can be used instead."""
    for earlier in reversed(complete_checkpoints(checkpoint.parent)):
        final = _final_of(earlier) if earlier.name.startswith(".") else earlier
        if NAME.fullmatch(checkpoint.name) and _steps(final.name) < _steps(checkpoint.name):
            try:
                for file in open_files(earlier, read_description(earlier)).values():
                    file.close()
            except CheckpointError:
                continue
            return f"{problem}; {remedy} {shown(earlier)}"
    return f"{problem}; there is no checkpoint before it"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Nobody else saves into this folder meanwhile; it is made if it does not exist."""
    directory.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"{shown(directory)}: another run is saving here; give each its own folder"
            ) from None
        except OSError:  # a file system without locks
            yield
            return
        yield
    finally:
        os.close(descriptor)


def begin_partial(directory: Path, num_steps: int) -> Path:
    """An empty folder to write a checkpoint into; leftovers of killed processes are removed."""
    for unfinished in directory.glob(f".step-*{PARTIAL}"):
        _delete(unfinished)
    for replaced in directory.glob(f".step-*{REPLACED}"):
        if _final_of(replaced).exists():
            _delete(replaced)
        else:  # the process was killed between two renames
            replaced.rename(_final_of(replaced))
    partial = _beside(directory / f"step-{num_steps:08d}", PARTIAL)
    partial.mkdir()
    return partial


def remove_partial(partial: Path) -> None:
    """Remove a checkpoint that could not be written."""
    _delete(partial)


def put_in_place(partial: Path, final: Path) -> None:
    """Give a finished checkpoint its name; at every moment it or the one before is there."""
    replaced = _beside(final, REPLACED)
    sync_folder(partial)
    if final.exists():
        _delete(replaced)
        final.rename(replaced)
    partial.rename(final)
    sync_folder(final.parent)
    _delete(replaced)


def remove_surplus(final: Path, keep: int, since: int | None = None) -> None:
    """Remove all but the newest `keep` checkpoints, up to this one.

    Training may have gone back to an earlier step: the run has saved or loaded nothing between the
    step `since` and this one. What is there, or has more steps, was given up. It is set aside: the
    newest checkpoint has to be the one that was saved last.
    """
    steps = _steps(final.name)
    first = steps if since is None else min(since, steps)
    older = []
    for path in complete_checkpoints(final.parent):
        if _steps(path.name) <= first or path.name == final.name:
            older.append(path)
        else:
            _set_aside(path)
    for old in older[:-keep] if keep > 0 else []:
        hidden = _beside(old, PARTIAL)  # under another name, so that no half of it looks complete
        old.rename(hidden)
        _delete(hidden)


def _set_aside(checkpoint: Path) -> None:
    target = checkpoint.with_name(SET_ASIDE + checkpoint.name)
    number = 1
    while os.path.lexists(target):
        number += 1
        target = checkpoint.with_name(f"{SET_ASIDE}{checkpoint.name}.{number}")
    checkpoint.rename(target)


def _delete(folder: Path) -> None:
    """Remove a folder, or a link or a file of its name, if it is there."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _steps(name: str) -> int:
    return int(name.partition("-")[2])


def _beside(final: Path, ending: str) -> Path:
    return final.with_name(f".{final.name}{ending}")


def _final_of(replaced: Path) -> Path:
    return replaced.with_name(replaced.name[1:].removesuffix(REPLACED))
