"""Opens files of a checkpoint, and parses their JSON, whatever somebody put there."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from pipeplan.documents.json_text import object_without_duplicates
from pipeplan.documents.text import printable
from pipeplan.errors import CheckpointError, InputError

__all__ = ["open_regular", "parse_strictly", "quoted", "require_size", "shown"]

MAX_SHOWN = 200
MAX_JSON_BYTES = 256_000_000
MAX_VALUES = 10_000_000
MAX_CONTAINERS = 2_000_000
"""Objects and lists; AdamW needs eight for each parameter. A file of nothing else takes 1 GB."""


def shown(path: str | Path) -> str:
    """A path or a name as part of one line."""
    text = printable(str(path))
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def quoted(name: str) -> str:
    """The name of a tensor as part of one line."""
    return shown(repr(name))


def open_regular(path: Path, *, follow_links: bool) -> BinaryIO:
    """A file opened for reading; pipes, devices and (on request) links are refused.

    Opening a pipe would wait for its writer for ever.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    if not follow_links:
        flags |= getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(path, flags)
    except OSError as problem:
        if problem.errno == errno.ELOOP:
            raise CheckpointError(f"{shown(path)}: is a link; a checkpoint holds files") from None
        reason = problem.strerror or type(problem).__name__
        raise CheckpointError(f"{shown(path)}: cannot be read: {reason}") from None
    except ValueError:
        raise CheckpointError(f"{shown(path)}: no file has such a name") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{shown(path)}: is not a regular file")
    return open(descriptor, "rb")


def require_size(data: bytes, path: Path) -> None:
    """Refuse JSON that would take too much memory; what is written can be read again."""
    num_containers = data.count(b"[") + data.count(b"{")
    for number, limit, what in (
        (len(data), MAX_JSON_BYTES, "bytes"),
        (num_containers, MAX_CONTAINERS, "objects and lists"),
        (data.count(b","), MAX_VALUES, "values"),
    ):
        if number > limit:
            raise CheckpointError(f"{shown(path)}: has {number:,} {what}; at most {limit:,} can be")


def parse_strictly(data: bytes, path: Path) -> Any:
    """The JSON in these bytes; a key that stands twice, or a number like NaN, is refused."""
    require_size(data, path)
    try:
        return json.loads(
            data.decode(),
            object_pairs_hook=object_without_duplicates,
            parse_constant=_refuse_constant,
        )
    except InputError as problem:
        raise CheckpointError(f"{shown(path)}: {problem}") from None
    except RecursionError:
        raise CheckpointError(f"{shown(path)}: is nested too deeply") from None
    except json.JSONDecodeError as problem:
        raise CheckpointError(
            f"{shown(path)}: is not JSON: {problem.msg} at byte {problem.pos}"
        ) from None
    except UnicodeDecodeError as problem:
        raise CheckpointError(f"{shown(path)}: is not UTF-8 at byte {problem.start}") from None
    except ValueError:
        raise CheckpointError(f"{shown(path)}: holds a number with too many digits") from None


def _refuse_constant(text: str) -> Any:
    raise InputError(f"holds {text}, which is not JSON")
