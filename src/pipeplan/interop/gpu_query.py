"""The table of `nvidia-smi --query-gpu=index,name,memory.total --format=csv`: names and memory.

::

    index, name, memory.total [MiB]
    0, NVIDIA A100-SXM4-40GB, 40960 MiB
"""

from dataclasses import dataclass

from pipeplan.documents.text import excerpt
from pipeplan.errors import InputError
from pipeplan.interop.source_text import csv_rows, number_in, whole_number_in

__all__ = ["QueriedGpu", "is_gpu_query", "read_gpu_query"]

MEMORY = "memory.total"
UNITS = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
MOST_MEMORY_BYTES = 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class QueriedGpu:
    """One GPU."""

    name: str
    memory_bytes: float


def is_gpu_query(text: str) -> bool:
    """Whether the first line has the column of the memory."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    return any(_column(cell) == MEMORY for cell in first.split(","))


def read_gpu_query(text: str) -> dict[int, QueriedGpu]:
    """The GPUs by their numbers; without a column `index`, lines count."""
    (_, header), *rows = csv_rows(text)
    columns = [_column(cell) for cell in header]
    if MEMORY not in columns:
        raise InputError(f"line 1: there is no column {MEMORY}")
    default_unit = header[columns.index(MEMORY)].partition("[")[2].rstrip("] ") or "MiB"
    gpus: dict[int, QueriedGpu] = {}
    for position, (line, cells) in enumerate(rows):
        if len(cells) != len(columns):
            raise InputError(f"line {line}: has {len(cells)} cells for {len(columns)} columns")
        given = dict(zip(columns, cells, strict=True))
        index = position
        if "index" in given:
            index = whole_number_in(given["index"], f"line {line}: index")
        if index in gpus:
            raise InputError(f"line {line}: GPU {index} stands twice; give one host's text")
        gpus[index] = QueriedGpu(
            name=given.get("name", ""),
            memory_bytes=_memory(given[MEMORY], default_unit, f"line {line}: {MEMORY}"),
        )
    if not gpus:
        raise InputError("there is no GPU in it")
    return gpus


def _column(cell: str) -> str:
    """The name of a column without its unit."""
    return cell.partition("[")[0].strip()


def _memory(cell: str, default_unit: str, where: str) -> float:
    value, _, unit = cell.partition(" ")
    unit = unit.strip() or default_unit
    if unit not in UNITS:
        raise InputError(f"{where}: {excerpt(unit)} is no unit; known are {', '.join(UNITS)}")
    number = number_in(value, where) * UNITS[unit]
    if not 0 < number <= MOST_MEMORY_BYTES:
        raise InputError(f"{where}: {excerpt(cell)} is no memory of a GPU")
    return number
