"""Which files a command reads and writes, judged before the work begins."""

import os
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

from pipeplan.documents.text import excerpt
from pipeplan.documents.writing import SEPARATORS, STANDARD_STREAM
from pipeplan.errors import InputError
from pipeplan.planning.same_file import are_same_file

__all__ = ["is_stdout", "require_paths"]

LONGEST_PATH = 300
"""Of a longer path, messages show the beginning."""


def is_stdout(*outputs: str | None) -> bool:
    """Whether one of the outputs is standard output, so that nothing else may be printed there."""
    return STANDARD_STREAM in outputs


def require_paths(
    *,
    inputs: Mapping[str, str] | None = None,
    outputs: Mapping[str, str | None] | None = None,
    as_json: bool = False,
) -> None:
    """Refuse files that cannot all be read and written by one command.

    Both mappings go from what the command line calls the file (`PLAN`, `-o`) to its path; None is
    an output that was not asked for.
    """
    read = dict(inputs or {})
    written = {name: path for name, path in (outputs or {}).items() if path is not None}
    _require_one_stdin(read)
    if as_json and is_stdout(*written.values()):
        raise InputError("--json: standard output is taken by an output '-'; leave out one of them")
    for output, path in written.items():
        for other, other_path in read.items():
            if path != STANDARD_STREAM and _are_same(path, other_path):
                raise InputError(
                    f"{output}: {excerpt(path)} is the same file as the input {other}"
                    f" ({excerpt(other_path)}); choose another output"
                )
    for (first, first_path), (second, second_path) in combinations(written.items(), 2):
        if _are_same(first_path, second_path):
            raise InputError(
                f"{second}: {excerpt(second_path)} is the same file as {first}"
                f" ({excerpt(first_path)}); give each its own"
            )
    for path in written.values():
        _require_writable(path)


def _require_one_stdin(inputs: Mapping[str, str]) -> None:
    names = [name for name, path in inputs.items() if path == STANDARD_STREAM]
    if len(names) > 1:
        raise InputError(
            f"{names[1]}: '-' is standard input, which {names[0]} reads already; name a file"
        )


def _are_same(first: str, second: str) -> bool:
    """Whether two paths lead to one file; writing twice to the null device hurts nobody."""
    if first == os.devnull:
        return False
    if STANDARD_STREAM in (first, second):
        return first == second
    return are_same_file(first, second)


def _require_writable(path: str) -> None:
    """Refuse an output that is certain to fail; the rest shows when it is written."""
    if path == STANDARD_STREAM:
        return
    reason: str | None
    try:
        target = Path(path).resolve()
        if path.endswith(SEPARATORS):
            reason = "Is a directory"
        elif target.exists() and not target.is_file():  # a pipe or a device is written directly
            reason = None if os.access(target, os.W_OK) else "Permission denied"
        elif not target.parent.exists():
            reason = "No such file or directory"
        elif not target.parent.is_dir():
            reason = "Not a directory"
        else:
            writable = os.access(target.parent, os.W_OK | os.X_OK)
            reason = None if writable else "Permission denied"
    except (OSError, RuntimeError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem)
    if reason is not None:
        shown = path if len(path) <= LONGEST_PATH else f"{path[: LONGEST_PATH - 3]}..."
        raise InputError(f"{shown}: cannot be written: {reason}")
