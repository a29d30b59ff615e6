"""The finished cases of a sweep, on disk before they count.

One JSON document a line: first `{"format": ..., "sweep": digest}`, then
`{"case": index, "row": {...}, "planning_s": ...}` in the order in which cases end. Each line is
synced to disk. After a crash the last line may be incomplete; it is cut off then.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from pipeplan.documents.writing import sync_folder
from pipeplan.errors import InputError
from pipeplan.planning.sweep.cases import Outcome, SweepRow

__all__ = ["Journal", "journal_path", "open_journal", "require_folder"]

JOURNAL_FORMAT = "pipeplan.sweep-journal/1"


def journal_path(output: str | Path) -> Path:
    """The path of a result's journal: beside the result."""
    output = Path(output)
    return output.with_name(f"{output.name}.journal")


def require_folder(output: str | Path) -> None:
    """Refuse an output whose folder does not exist."""
    folder = Path(output).parent
    if not folder.is_dir():
        raise InputError(f"{folder}: is not a folder; make it first")


class Journal:
    """An open journal: the rows that it holds already, and a way to add more."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path = path
        self.rows: dict[int, SweepRow] = {}
        self._file = file

    def append(self, outcome: Outcome) -> None:
        """Add a line, and return once the disk has it."""
        self.write(
            {
                "case": outcome.index,
                "row": asdict(outcome.row),
                "planning_s": round(outcome.planning_s, 6),
            }
        )
        self.rows[outcome.index] = outcome.row

    def write(self, document: Mapping[str, Any]) -> None:
        """Add one line in one piece."""
        line = json.dumps(document, allow_nan=False).encode() + b"\n"
        try:
            while line:  # a disk that is nearly full takes a part and refuses the rest
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError as problem:
            raise InputError(f"{self.path}: cannot be written: {problem.strerror}") from None


@contextmanager
def open_journal(path: Path, digest: str) -> Iterator[Journal]:
    """The journal of this very sweep, locked against other processes while it is open."""
    require_folder(path)
    try:
        file = path.open("a+b", buffering=0)
    except OSError as problem:
        raise InputError(f"{path}: cannot be written: {problem.strerror}") from None
    with file:
        _lock(path, file)
        file.seek(0)
        data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        if len(complete) < len(data):  # the last line was cut short by a crash
            file.truncate(len(complete))
        journal = Journal(path, file)
        if complete:
            journal.rows.update(_parse_rows(path, complete, digest))
        else:
            journal.write({"format": JOURNAL_FORMAT, "sweep": digest})
            sync_folder(path.parent)
        yield journal


def _lock(path: Path, file: IO[bytes]) -> None:
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise InputError(
            f"{path}: another sweep is writing it; wait for that or choose another output"
        ) from None


def _parse_rows(path: Path, data: bytes, digest: str) -> dict[int, SweepRow]:
    header, *lines = data.splitlines()
    try:
        head = json.loads(header)
        if head.get("format") != JOURNAL_FORMAT:
            raise InputError(f"{path}: is not the journal of a sweep; choose another output")
        if head.get("sweep") != digest:
            raise InputError(
                f"{path}: belongs to another sweep or to other inputs;"
                " finish that one, delete this file or choose another output"
            )
        entries = [json.loads(line) for line in lines]
        return {entry["case"]: SweepRow(**entry["row"]) for entry in entries}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        if isinstance(problem, InputError):
            raise
        raise InputError(f"{path}: is damaged ({problem}); delete it to start anew") from None
