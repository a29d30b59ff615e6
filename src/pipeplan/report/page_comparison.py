"""The page's table of other planners' results; a planner without a plan says why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeplan.pipeline import Plan
from pipeplan.report.names import short_text
from pipeplan.report.page_beside import Beside, SideBySide, side_by_side
from pipeplan.report.units import percent

__all__ = ["ComparisonTable", "comparison_table", "heading_of"]

REASON_KEYS = ("infeasible_reason", "reason", "error")
"""Where a row says why there is no plan."""
UNITS = (("_ms", "ms"), ("_gb", "GB"), ("_s", "s"), ("_fraction", "%"))
LONGEST_REASON = 500
LARGE_IS_GOOD = ("speedup", "lower_bound_ms", "fits_memory", "has_whole_samples", "keeps_limits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column's heading, and `number` if it holds numbers."""

    heading: str
    kind: str
    first: str
    """The order of the first click: what is best comes to the top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell."""

    text: str
    kind: str
    value: str
    """What rows are sorted by; empty where there is nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One planner's result."""

    cells: list[Cell]
    kind: str
    """`best`, `infeasible` or nothing."""
    reason: str = ""
    """Why there is no plan; it takes the place of the last `span` cells."""
    span: int = 0
    timeline: Beside | None = None
    """The planner's plan, where the page has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonTable:
    """The table as the page shows it."""

    columns: list[Column]
    rows: list[Row]


def comparison_table(
    rows: Sequence[Mapping[str, Any]], plans: Mapping[str, Plan]
) -> ComparisonTable:
    """Rows of plain values as a table, the fastest marked, with the timelines of these plans."""
    names = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if name not in (*REASON_KEYS, "feasible") and any(row.get(name) is not None for row in rows)
    ]
    kinds = {
        name: "number" if all(_is_number(row[name]) for row in rows if name in row) else ""
        for name in names
    }
    times = [row.get("iteration_ms") for row in rows if not _reason(row)]
    best = min((time for time in times if _is_number(time) and time is not None), default=None)
    return ComparisonTable(
        columns=[
            Column(
                heading=heading_of(name),
                kind=kinds[name],
                first="descending" if name in LARGE_IS_GOOD else "ascending",
            )
            for name in names
        ],
        rows=[_row(row, kinds, best, plans) for row in rows],
    )


def _timeline(name: str, plan: Plan) -> Beside:
    """A planner's plan on a scale of its own."""
    (shown,) = side_by_side(SideBySide(heading="", words="", plans={name: plan}))
    return shown


def _row(
    row: Mapping[str, Any], kinds: dict[str, str], best: float | None, plans: Mapping[str, Plan]
) -> Row:
    cells = [
        Cell(text=_cell_text(name, row.get(name)), kind=kind, value=_sort_value(row.get(name)))
        for name, kind in kinds.items()
    ]
    reason = _reason(row)
    if not reason:
        is_best = best is not None and row.get("iteration_ms") == best
        name = str(next(iter(row.values()), ""))
        return Row(
            cells=cells,
            kind="best" if is_best else "",
            timeline=_timeline(name, plans[name]) if name in plans else None,
        )
    given = [position for position, name in enumerate(kinds) if row.get(name) is not None]
    num_kept = given[0] + 1 if given else 0
    return Row(
        cells=cells[:num_kept],
        kind="infeasible",
        reason=reason,
        span=max(len(cells) - num_kept, 1),
    )


def _reason(row: Mapping[str, Any]) -> str:
    """Why there is no plan; empty where there is one."""
    given = next((str(row[key]) for key in REASON_KEYS if row.get(key)), "")
    given = short_text(given, LONGEST_REASON)
    return given or ("no plan exists" if row.get("feasible") is False else "")


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def heading_of(column: str) -> str:
    """A column's name for people: `peak_memory_gb` is `peak memory (GB)`."""
    name, unit = column.removeprefix("num_"), ""
    for suffix, words in UNITS:
        if column.endswith(suffix):
            name, unit = name.removesuffix(suffix), f" ({words})"
            break
    return short_text(name.replace("_", " "), 40) + unit


def _sort_value(value: Any) -> str:
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)[:80]


def _cell_text(column: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if column == "gap":
            return percent(value)
        return f"{100 * value:.1f}" if column.endswith("_fraction") else f"{value:.4g}"
    return short_text(str(value), 80)
