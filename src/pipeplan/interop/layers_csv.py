"""A plain table of layers: one line each, the columns named as the fields of a model file.

::

    name,forward_ms,backward_ms,output_bytes,parameter_bytes
    embed,0.4,0.8,4194304,131072000
"""

from typing import Any

from pipeplan.documents.text import excerpt, nearest
from pipeplan.errors import InputError, ProfileError
from pipeplan.interop.imported import Imported, ImportSettings
from pipeplan.interop.source_text import csv_rows, number_in
from pipeplan.profile import LayerProfile, ModelProfile

__all__ = ["is_layers_csv", "read_layers_csv"]

REQUIRED = ("name", "forward_ms", "backward_ms", "output_bytes", "parameter_bytes")
OPTIONAL = ("gradient_bytes", "activation_bytes", "weight_grad_ms")
TIME_COLUMN = "forward_ms"


def is_layers_csv(text: str) -> bool:
    """Whether the first line names a column of forward times."""
    return TIME_COLUMN in next(line for line in text.splitlines() if line.strip())


def read_layers_csv(text: str, settings: ImportSettings) -> Imported:
    """The model whose layers a table lists, from first to last; empty cells take defaults."""
    (_, header), *rows = csv_rows(text)
    for column in header:
        if column not in (*REQUIRED, *OPTIONAL):
            near = nearest(column, (*REQUIRED, *OPTIONAL))
            raise InputError(f"line 1: {excerpt(column)} is no known column{near}")
        if header.count(column) > 1:
            raise InputError(f"line 1: the column {column} stands twice")
    for column in REQUIRED:
        if column not in header:
            raise InputError(f"line 1: the column {column} is missing")
    notes: tuple[str, ...] = ()
    if settings.microbatch_size is None:
        notes = ("the file has no microbatch size, 1 is assumed; give --microbatch-size",)
    model = ModelProfile(
        name=settings.name,
        microbatch_size=settings.microbatch_size or 1,
        layers=tuple(_layer(header, cells, f"line {number}") for number, cells in rows),
    )
    return Imported(result=model, notes=notes)


def _layer(header: list[str], cells: list[str], where: str) -> LayerProfile:
    if len(cells) != len(header):
        raise InputError(f"{where}: has {len(cells)} cells for {len(header)} columns")
    given = dict(zip(header, cells, strict=True))
    numbers: dict[str, Any] = {}
    for column in header:
        if column == "name" or (column in OPTIONAL and not given[column]):
            continue
        numbers[column] = number_in(given[column], f"{where}: {column}")
    if not given["name"]:
        raise InputError(f"{where}: name: is empty; each layer has a name")
    try:
        return LayerProfile(name=given["name"], **numbers)
    except ProfileError as problem:
        raise ProfileError(f"{where}: {problem}") from None
