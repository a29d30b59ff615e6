"""The rows of a sweep as a .csv or .parquet file."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from pipeplan.documents.syntax import write_atomically
from pipeplan.errors import InputError
from pipeplan.planning.sweep.cases import COLUMNS, SweepRow

__all__ = ["choose_writer"]

Writer = Callable[[Path, Sequence[SweepRow]], None]

FORMULA_STARTS = "=+-@\uff1d\uff0b\uff0d\uff20"
"""A cell that begins with one of these is a formula to spreadsheets; the last four are wide."""


def choose_writer(output: Path) -> Writer:
    """The function that writes files with this suffix; other suffixes are refused."""
    suffix = output.suffix.lower()
    if suffix == ".csv":
        return _write_csv
    if suffix != ".parquet":
        raise InputError(f"output: {output} ends in {suffix!r}; use .csv or .parquet")
    from importlib.util import find_spec

    if find_spec("pyarrow") is None:
        raise InputError("output: .parquet needs pyarrow; pip install pyarrow, or use .csv")
    return _write_parquet


def _write_csv(output: Path, rows: Sequence[SweepRow]) -> None:
    lines = [_csv_line(COLUMNS)]
    lines += [_csv_line([_cell(getattr(row, column)) for column in COLUMNS]) for row in rows]
    write_atomically(output, "".join(lines).encode(errors="backslashreplace"))


def _csv_line(cells: Sequence[Any]) -> str:
    """One line of the file; a cell with a line break in it is quoted, whichever kind it is."""
    line = io.StringIO(newline="")
    csv.writer(line, lineterminator="\r\n").writerow(cells)  # with "\n", "\r" would not be quoted
    return line.getvalue().removesuffix("\r\n") + "\n"


def _cell(value: Any) -> Any:
    """The value of a CSV cell; texts that a spreadsheet would run get an apostrophe in front."""
    if not isinstance(value, str):
        return value
    first = next((c for c in value if c.isprintable() and not c.isspace()), "")
    hidden_start = value[:1] in ("\t", "\r")
    return f"'{value}" if hidden_start or (first and first in FORMULA_STARTS) else value


def _write_parquet(output: Path, rows: Sequence[SweepRow]) -> None:
    pyarrow = import_module("pyarrow")
    kinds = {
        "str": pyarrow.string(),
        "int": pyarrow.int64(),
        "float": pyarrow.float64(),
        "bool": pyarrow.bool_(),
    }
    kind_of = {
        field.name: kinds[str(getattr(field.type, "__name__", field.type)).split(" ")[0]]
        for field in fields(SweepRow)
    }
    kind_of["seed"] = pyarrow.uint64()  # a seed may have all 64 bits
    table = pyarrow.Table.from_pylist(
        [asdict(row) for row in rows], schema=pyarrow.schema(list(kind_of.items()))
    )
    buffer = pyarrow.BufferOutputStream()
    import_module("pyarrow.parquet").write_table(table, buffer)
    write_atomically(output, buffer.getvalue().to_pybytes())
