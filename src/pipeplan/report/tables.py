"""Tables that fit the terminal: where there is no room, they go on below, and nothing is cut off.

A wide terminal shows one table. A narrow one shows several below each other, each with the first
column, which says what a row is about:

    planner  iteration speed-up          planner  bubble  memory
    best      971.2 ms    2.74x          best      20.0% 14.1 GB
    spp       985.3 ms    2.70x          spp       21.1% 15.7 GB
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["Column", "fitted_table"]

LEAST_KEY, LONGEST_KEY = 0.3, 0.65
"""The part of the width that the first column of a table in parts may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column's heading, and what may happen to it where room is short."""

    heading: str
    is_number: bool = False
    least: int | None = None
    """The width that it may shrink to in one table; None: as wide as its cells."""
    wraps: bool = False
    """Whether cells that are too long go on in the next line, or are cut off with `…`."""
    grows: bool = False
    """Whether it takes the room that is left."""
    is_extra: bool = False
    """Whether it is left out before the table is cut in parts."""


def fitted_table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str | Text]],
    width: int,
    *,
    gap: int = 1,
) -> RenderableType:
    """The rows as one table of at most this width, or as several below each other."""
    widths = [
        max([cell_len(column.heading), *(cell_len(str(row[number])) for row in rows if row)])
        for number, column in enumerate(columns)
    ]
    everything = list(range(len(columns)))
    needed = [column for column in everything if not columns[column].is_extra]
    for shown in (everything, needed):
        least = [min(widths[n], columns[n].least or widths[n]) + gap for n in shown]
        if sum(least) <= width:
            return _table(columns, rows, shown, gap)
    gap = 1
    widest = max((widths[n] for n in needed[1:] if columns[n].is_number), default=0)
    key_width = max(min(int(width * LONGEST_KEY), width - widest - 2 * gap), int(width * LEAST_KEY))
    widths[0] = min(widths[0], key_width)
    room = width - widths[0] - gap
    tables: list[RenderableType] = []
    for part in _parts(needed, widths, room, gap):
        fixed = [widths[0], *(min(widths[n], room - gap) for n in part[1:])]
        tables += ["", _table(columns, rows, part, gap, fixed)]
    return Group(*tables[1:])


def _parts(shown: list[int], widths: list[int], room: int, gap: int) -> list[list[int]]:
    """The columns of each table: the first one, and as many of the next as there is room for."""
    key, *others = shown
    parts: list[list[int]] = []
    left = -1
    for column in others:
        needs = min(widths[column] + gap, room)
        if needs > left:
            parts.append([key])
            left = room
        parts[-1].append(column)
        left -= needs
    return parts


def _table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str | Text]],
    shown: Sequence[int],
    gap: int,
    fixed: Sequence[int] | None = None,
) -> Table:
    """One table of these columns; with `fixed` widths, cells go on in the next line."""
    grows = fixed is None and any(columns[n].grows for n in shown)
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="bold", expand=grows)
    for position, n in enumerate(shown):
        column = columns[n]
        width = None if fixed is None else fixed[position]
        table.add_column(
            column.heading,
            justify="right" if column.is_number else "left",
            no_wrap=fixed is None and not column.wraps,
            overflow="ellipsis" if fixed is None else "fold",
            ratio=1 if grows and column.grows else None,
            min_width=None if column.least or fixed is not None else cell_len(column.heading),
            width=width,
        )
    for row in rows:
        table.add_row(*([row[n] for n in shown] if row else ["..."]))
    return table
