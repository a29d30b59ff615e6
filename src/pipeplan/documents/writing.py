"""Writing files so that an interruption leaves the old file or the new one, never a part.

The bytes go to a `.part` file beside the target, which then takes the target's place. The writer
holds a lock on the `.part` file. So the next write in the same folder knows the parts of dead
processes, and removes them. Locks do not tell about other machines that share the folder. So the
part's name says which running system wrote it, and parts of other systems stay for a day. A writer
whose part disappears all the same writes it again.
"""

import hashlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

from pipeplan.errors import InputError

if sys.platform != "win32":
    import fcntl

__all__ = [
    "SEPARATORS",
    "STANDARD_STREAM",
    "sync_folder",
    "write_atomically",
    "write_stream_atomically",
]

STANDARD_STREAM = "-"
"""The path that means standard input, or standard output."""

SEPARATORS = tuple(filter(None, (os.sep, os.altsep)))
"""A path that ends with one of these names a folder."""

PREFIX, SUFFIX = ".pipeplan-", ".part"
FOREIGN_PART_S = 24 * 3600.0
"""For how long the part of another machine, or of this one before it was restarted, stays."""
MAX_TRIES = 5


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write a file so that an interruption leaves the old one or the new one, never a part.

    The path `-` is the standard output.
    """
    if str(path) == STANDARD_STREAM:
        _write_to_stdout(data)
        return
    write_stream_atomically(path, lambda file: file.write(data))


def write_stream_atomically(path: str | Path, fill: Callable[[BinaryIO], object]) -> None:
    """The same for a file that `fill` writes piece by piece; it may be called several times."""
    if str(path) == STANDARD_STREAM:
        sys.stdout.flush()
        fill(sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    if str(path).endswith(SEPARATORS):
        raise InputError(f"{path}: cannot be written: Is a directory")
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe or a device
            with open(path, "wb") as file:
                fill(file)
        else:
            _replace(Path(path).resolve(), fill)  # through a link, so that the link stays one
    except OSError as problem:
        reason = problem.strerror or type(problem).__name__
        raise InputError(f"{path}: cannot be written: {reason}") from None
    except ValueError:  # a null character in the path
        raise InputError(f"{str(path)!r}: cannot be written: no file has such a name") from None


def _write_to_stdout(data: bytes) -> None:
    """Bytes as they are, whatever the terminal speaks; text where stdout takes nothing else."""
    stream: BinaryIO | None = getattr(sys.stdout, "buffer", None)
    sys.stdout.flush()
    if stream is None:
        sys.stdout.write(data.decode(errors="replace"))
    else:
        stream.write(data)
        stream.flush()


def _replace(target: Path, fill: Callable[[BinaryIO], object]) -> None:
    _remove_dead_parts(target.parent)
    for tries_left in reversed(range(MAX_TRIES)):
        with _locked_part(target.parent) as (part, file):
            fill(file)
            file.flush()
            os.fsync(file.fileno())
            try:
                if target.exists():
                    os.chmod(part, target.stat().st_mode & 0o777)
                os.replace(part, target)
            except FileNotFoundError:
                if tries_left == 0 or part.exists():
                    raise
                continue  # somebody took our part for a dead one
        break
    sync_folder(target.parent)


@contextmanager
def _locked_part(folder: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file beside the target, locked while it is written and gone if that fails."""
    part = folder / f"{PREFIX}{_kernel()}-{secrets.token_hex(8)}{SUFFIX}"
    try:
        with open(part, "xb") as file:
            _try_lock(file.fileno())
            yield part, file
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def _remove_dead_parts(folder: Path) -> None:
    """Remove the parts of processes that died while writing here; living ones hold a lock."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and entry.name.endswith(SUFFIX):
                with suppress(OSError):
                    _remove_if_dead(Path(entry.path))


def _remove_if_dead(part: Path) -> None:
    is_ours = part.name.startswith(f"{PREFIX}{_kernel()}-")
    if not is_ours and time.time() - part.lstat().st_mtime < FOREIGN_PART_S:
        return
    # A name is used once, so what is removed is the file that was locked, or nothing. Some network
    # file systems lock only files that are open for writing.
    descriptor = os.open(part, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    try:
        if _try_lock(descriptor):
            part.unlink()
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Whether the file is ours alone now; never where the system has no such locks."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@cache
def _kernel() -> str:
    """What tells this running system from others that may share a folder with it."""
    try:
        identity = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        identity = os.uname().nodename.encode() if sys.platform != "win32" else b"windows"
    return hashlib.sha256(identity).hexdigest()[:12]


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk, so that they survive a crash of the system.

    Some file systems cannot do this; there nothing happens.
    """
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
