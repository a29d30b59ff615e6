"""A comparison of planners in the terminal: a line and a bar for each, within 80 columns."""

from itertools import islice

from rich.console import Console, Group, RenderableType
from rich.text import Text

from pipeplan.documents.text import printable
from pipeplan.planning.comparison import Comparison, ComparisonRow
from pipeplan.report.names import short_text
from pipeplan.report.page_beside import SideBySide
from pipeplan.report.tables import Column, fitted_table
from pipeplan.report.units import humanise_gb, humanise_ms

__all__ = ["fastest_two", "render_comparison"]

LONGEST_NAME = 24
BAR_WIDTH = 12
MARK = "~"
"""Behind the time of a plan that breaks a limit other than memory."""
UNICODE_BAR, ASCII_BAR = "█", "#"


def render_comparison(comparison: Comparison, console: Console) -> RenderableType:
    """The rows, fastest first; bars show iteration times, shorter is better."""
    longest_ms = max((row.iteration_ms or 0.0 for row in comparison.rows), default=0.0)
    bar = UNICODE_BAR if console.encoding.startswith("utf") else ASCII_BAR
    has_gap = any(row.gap is not None for row in comparison.rows)
    figures = ("speed-up", "bubble", "memory", *(["gap"] if has_gap else []), "planned")
    columns = [
        Column(heading="planner"),
        Column(heading="iteration", is_number=True),
        Column(heading="", is_extra=True),
        *(Column(heading=heading, is_number=True) for heading in figures),
    ]
    rows = [
        _cells(row, row.iteration_ms, longest_ms, bar, has_gap)
        for row in comparison.rows
        if row.iteration_ms is not None
    ]
    table = fitted_table(columns, rows, console.width)
    return Group(_heading(comparison), "", table, *_notes(comparison))


def fastest_two(comparison: Comparison) -> SideBySide | None:
    """The first two rows that have plans, for the page; None where there is only one."""
    plans = dict(islice(comparison.plans.items(), 2))
    if len(plans) < 2:
        return None
    return SideBySide(heading="The first two planners", words="", plans=plans)


def _cells(
    row: ComparisonRow, iteration_ms: float, longest_ms: float, bar: str, has_gap: bool
) -> list[str | Text]:
    length = round(BAR_WIDTH * iteration_ms / longest_ms) if longest_ms else 0
    memory = humanise_gb(row.peak_memory_gb or 0.0)
    time = humanise_ms(iteration_ms)
    if row.has_whole_samples is False or row.broken_constraint:
        time += MARK
    cells: list[str | Text] = [
        _short(row.planner),
        time,
        Text(bar * max(1, length), style="blue"),
        "" if row.speedup is None else f"{row.speedup:.2f}x",
        f"{row.bubble_fraction:.1%}",
        memory if row.fits_memory else Text(f"{memory}!", style="red"),
    ]
    if has_gap:
        cells.append("" if row.gap is None else f"{row.gap:.1%}")
    return [*cells, _seconds(row.planning_s)]


def _heading(comparison: Comparison) -> Text:
    text = Text()
    text.append(f"{_short(comparison.model)} on {_short(comparison.cluster)}", style="bold")
    text.append(f": {comparison.microbatches} microbatches, seed {comparison.seed}")
    if comparison.reference is not None:
        text.append(f"; speed-up over {_short(comparison.reference)}")
    return text


def _notes(comparison: Comparison) -> list[Text]:
    notes = []
    if any(row.fits_memory is False for row in comparison.rows):
        notes.append(Text("! needs more memory than a device has", style="red"))
    split = [_short(row.planner) for row in comparison.rows if row.has_whole_samples is False]
    if split:
        text = f"{MARK} splits samples, which cannot be run: {', '.join(split)}"
        notes.append(Text(text, style="red"))
    by_constraint: dict[str, list[str]] = {}
    for row in comparison.rows:
        if row.broken_constraint is not None:
            by_constraint.setdefault(row.broken_constraint, []).append(_short(row.planner))
    notes += [
        Text(f"{MARK} breaks a constraint, {printable(broken)}: {', '.join(names)}", style="red")
        for broken, names in by_constraint.items()
    ]
    notes += [
        Text(f"{_short(row.planner)}: no plan: {printable(row.infeasible_reason or '')}")
        for row in comparison.rows
        if row.iteration_ms is None
    ]
    return [Text(""), *notes] if notes else []


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def _short(text: str) -> str:
    return short_text(text, LONGEST_NAME, "...")
