"""The rows of a sweep as lines of a chart: which points, in which series, and what is left out.

Nothing is averaged or left out without a word: several rows at one place are refused with the
columns in which they differ, unless their mean is asked for.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeplan.documents.text import nearest
from pipeplan.errors import InputError
from pipeplan.planning.sweep.cases import SweepRow

__all__ = [
    "Chart",
    "ChartOptions",
    "Point",
    "Series",
    "chart_of",
    "is_table",
    "parse_where",
    "read_rows",
]

Row = Mapping[str, Any]
SUFFIXES = (".csv", ".parquet")
ALIASES = {
    "devices": "cluster_devices",
    "stages": "num_stages",
    "iteration": "iteration_ms",
    "throughput": "samples_per_second",
    "bubble": "bubble_fraction",
    "memory": "peak_memory_gb",
}
CASE = ("model", "cluster", "microbatches", "seed")
"""What a speed-up has in common with what it is measured against."""
DEFAULT_REFERENCE = "data-parallel"
LIMITS = ("fits_memory", "has_whole_samples")
MAX_SERIES = 12
MAX_BYTES = 200_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartOptions:
    """What to draw of the rows."""

    x: str
    y: str
    by: tuple[str, ...] = ("planner",)
    """Each combination of values in these columns is a line."""
    where: Mapping[str, str] | None = None
    """Only rows with these values."""
    over: str | None = None
    """The planner that `speedup` is measured against."""
    mean: bool = False
    """Whether rows at one place become their geometric mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A place of the chart, and the rows there."""

    x: float
    """The value, or the index of the category."""
    y: float
    low: float
    high: float
    breaks_limits: bool
    """Whether a plan there needs more memory than there is, or splits samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of the chart."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What a picture shows."""

    x: str
    y: str
    categories: tuple[str, ...]
    """The values of x where they are texts; then points lie at 0, 1, ..."""
    series: tuple[Series, ...]
    over: str | None
    is_mean: bool
    notes: tuple[str, ...]
    """What was left out."""


def is_table(path: str | Path) -> bool:
    """Whether a file of this name holds the rows of a sweep."""
    return Path(path).suffix.lower() in SUFFIXES


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a `.csv` or `.parquet` file; numbers are numbers, empty cells are None."""
    try:
        data = Path(path).read_bytes()
    except OSError as problem:
        raise InputError(f"{path}: cannot be read: {problem.strerror}") from None
    if len(data) > MAX_BYTES:
        raise InputError(f"{path}: is larger than {MAX_BYTES / 1e6:g} MB; divide the sweep")
    if Path(path).suffix.lower() == ".parquet":
        return _parquet_rows(path, data)
    try:
        reader = csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
        read = list(reader)
    except (UnicodeDecodeError, csv.Error) as problem:
        raise InputError(f"{path}: is not CSV in UTF-8 ({problem})") from None
    if not read or any(None in row for row in read):
        raise InputError(f"{path}: has no rows, or rows that are longer than its first line")
    return [{name: _value(cell) for name, cell in row.items()} for row in read]


def _parquet_rows(path: str | Path, data: bytes) -> list[dict[str, Any]]:
    if find_spec("pyarrow") is None:
        raise InputError(f"{path}: .parquet needs pyarrow; pip install pyarrow, or use .csv")
    pyarrow = import_module("pyarrow")
    try:
        table = import_module("pyarrow.parquet").read_table(pyarrow.BufferReader(data))
    except pyarrow.ArrowException:
        raise InputError(f"{path}: is no parquet file") from None
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _value(cell: str | None) -> Any:
    """What a cell says: a number, true or false, text, or nothing."""
    if cell is None or cell == "":
        return None
    if cell in ("True", "False"):
        return cell == "True"
    try:
        number = float(cell)
    except ValueError:
        return cell
    return number if math.isfinite(number) else cell


def chart_of(rows: Sequence[Row | SweepRow], options: ChartOptions) -> Chart:
    """The chart of these rows; what cannot be drawn is refused with the remedy."""
    table = [asdict(row) if isinstance(row, SweepRow) else row for row in rows]
    if not table:
        raise InputError("rows: there are none; sweep first")
    columns = tuple(dict.fromkeys(name for row in table for name in row))
    for name in options.where or {}:
        _require_column(name, "where", columns)
    chosen = [row for row in table if _matches(row, options.where or {})]
    if not chosen:
        wanted = ", ".join(f"{name}={value}" for name, value in (options.where or {}).items())
        raise InputError(f"where: no row has {wanted}")
    by = tuple(_require_column(name, "by", columns) for name in options.by)
    x = _require_column(options.x, "x", columns)
    over = None
    if options.y in ("speedup", "speed-up"):
        chosen, over = _with_speedups(chosen, options.over)
        y = "speedup"
    elif options.over is not None:
        raise InputError(f"over: {options.over!r} is for y = speedup, and y is {options.y!r}")
    elif options.y == "gap":
        chosen, y = [{**row, "gap": _gap(row)} for row in chosen], "gap"
    else:
        y = _require_column(options.y, "y", columns)
    kept = [row for row in chosen if row.get(y) is not None and row.get(x) is not None]
    notes = _left_out(len(chosen) - len(kept), y)
    if not kept:
        raise InputError(f"y: no row has a value of {y!r} at an {x!r}; choose other columns")
    for row in kept:
        if isinstance(row[y], bool) or not isinstance(row[y], int | float):
            raise InputError(f"y: {str(row[y])[:40]!r} in column {y!r} is not a number")
    return _drawn(kept, x, y, by, options.mean, over, notes)


def _matches(row: Row, where: Mapping[str, str]) -> bool:
    return all(_text(row.get(ALIASES.get(name, name))) == value for name, value in where.items())


def _require_column(name: str, option: str, columns: tuple[str, ...]) -> str:
    column = name if name in columns else ALIASES.get(name, name)
    if column not in columns:
        known = (*columns, *(a for a, full in ALIASES.items() if full in columns))
        raise InputError(f"{option}: {name!r} is no column{nearest(name, known)}")
    return column


def _left_out(count: int, y: str) -> tuple[str, ...]:
    if not count:
        return ()
    return (f"{count} row{'s' if count > 1 else ''} without {y} left out",)


def _gap(row: Row) -> float | None:
    bound_ms, time_ms = row.get("lower_bound_ms"), row.get("iteration_ms")
    return time_ms / bound_ms - 1 if bound_ms and time_ms is not None else None


def _with_speedups(rows: Sequence[Row], asked: str | None) -> tuple[list[Row], str]:
    """The rows with their speed-up over one planner's plan of the same case."""
    planners = list(dict.fromkeys(str(row.get("planner")) for row in rows))
    over = asked or DEFAULT_REFERENCE
    if over not in planners:
        raise InputError(
            f"over: no row is of planner {over!r}; choose one of {', '.join(planners[:12])}"
        )
    times = {
        tuple(row.get(name) for name in CASE): row.get("iteration_ms")
        for row in rows
        if row.get("planner") == over
    }
    found: list[Row] = []
    for row in rows:
        base_ms, time_ms = times.get(tuple(row.get(name) for name in CASE)), row.get("iteration_ms")
        found.append({**row, "speedup": base_ms / time_ms if base_ms and time_ms else None})
    return found, over


def _drawn(
    rows: Sequence[Row],
    x: str,
    y: str,
    by: tuple[str, ...],
    is_mean: bool,
    over: str | None,
    notes: tuple[str, ...],
) -> Chart:
    is_number = all(
        isinstance(row[x], int | float) and not isinstance(row[x], bool) for row in rows
    )
    categories = () if is_number else tuple(dict.fromkeys(_text(row[x]) for row in rows))
    at: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        name = ", ".join(_text(row.get(column)) for column in by)
        place = float(row[x]) if is_number else float(categories.index(_text(row[x])))
        at.setdefault((name, place), []).append(row)
    names = list(dict.fromkeys(name for name, _ in at))
    if len(names) > MAX_SERIES:
        raise InputError(
            f"by: {' and '.join(by)} give {len(names)} lines, more than {MAX_SERIES};"
            " choose some with where"
        )
    for (name, _), here in at.items():
        if len(here) > 1 and not is_mean:
            _refuse_several(name, x, here, by)
    series = tuple(
        Series(
            name=name,
            points=tuple(
                _point(place, at[one, place], y) for one, place in sorted(at) if one == name
            ),
        )
        for name in names
    )
    averages = is_mean and any(len(here) > 1 for here in at.values())
    return Chart(
        x=x, y=y, categories=categories, series=series, over=over, is_mean=averages, notes=notes
    )


def _refuse_several(name: str, x: str, rows: Sequence[Row], by: tuple[str, ...]) -> None:
    candidates = (*CASE, "planner")
    differ = [c for c in candidates if len({_text(row.get(c)) for row in rows}) > 1 and c != x]
    separate = ",".join((*by, *differ[:1]))
    raise InputError(
        f"rows: {len(rows)} of {name!r} lie at {x} {_text(rows[0][x])}, and differ in"
        f" {', '.join(differ) or 'nothing'}; choose with where, separate with by {separate},"
        " or ask for the mean"
    )


def _point(place: float, rows: Sequence[Row], y: str) -> Point:
    unit = 100.0 if y == "gap" or y.endswith("_fraction") else 1.0  # shown in per cent
    values = [unit * float(row[y]) for row in rows]
    return Point(
        x=place,
        y=_mean(values, y),
        low=min(values),
        high=max(values),
        breaks_limits=any(row.get(name) is False for row in rows for name in LIMITS)
        or any(row.get("broken_constraint") for row in rows),
    )


def _mean(values: Sequence[float], y: str) -> float:
    """The geometric mean."""
    if len(values) == 1:
        return values[0]
    if min(values) <= 0:
        raise InputError(f"mean: {y!r} has the value {min(values):g}; a geometric mean has none")
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else str(value)


def parse_where(texts: Iterable[str]) -> dict[str, str]:
    """`model=bert-large` and the like as a mapping."""
    found = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise InputError(f"where: {text!r} is not COLUMN=VALUE")
        found[name] = value
    return found
