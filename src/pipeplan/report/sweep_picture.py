"""Charts of sweeps in files: `plot_sweep`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pipeplan.documents.syntax import write_atomically
from pipeplan.errors import InputError
from pipeplan.planning.sweep.cases import SweepRow
from pipeplan.report.chart_picture import ChartStyle, chart_svg
from pipeplan.report.picture import (
    LEAST_WIDTH,
    MOST_WIDTH,
    picture_bytes,
    require_font,
    require_format,
)
from pipeplan.report.sweep_rows import Chart, ChartOptions, chart_of, read_rows

__all__ = ["plot_sweep"]

LEAST_HEIGHT, MOST_HEIGHT = 150, 10_000
LEAST_FONT, MOST_FONT = 5.0, 72.0
LONGEST_TITLE = 200


def plot_sweep(
    rows: str | Path | Sequence[SweepRow],
    path: str | Path,
    *,
    x: str,
    y: str,
    by: str | Sequence[str] = ("planner",),
    where: Mapping[str, str] | None = None,
    over: str | None = None,
    mean: bool = False,
    log: str = "",
    title: str = "",
    width: int = 640,
    height: int = 400,
    font: str = "sans",
    font_size: float = 12.0,
    warn: Callable[[str], None] | None = None,
) -> None:
    """Draw the results of a sweep: lines where `x` is a number, bars where it is a name.

    Args:
        rows: a `.csv` or `.parquet` file of a sweep, or its rows.
        path: where to draw: `.svg`, `.pdf` or `.png`; `-` is an SVG on the standard output.
        x: a column, such as `devices`, `microbatches`, `model` or `cluster`.
        y: a column, such as `iteration_ms`, `samples_per_second` or `peak_memory_gb`; or `speedup`
            over another planner, or `gap` to the lower bound.
        by: the columns whose values make the lines.
        where: only rows with these values, by column.
        over: the planner that `speedup` is measured against; by default `data-parallel`.
        mean: whether several rows at one place become their geometric mean; else they are refused.
        log: the axes that are logarithmic: `x`, `y` or `xy`.
        title: above the chart.
        width: in pixels of 1/96 inch; a PNG has two for each.
        height: the same.
        font: `sans`, `serif` or `mono`; in an SVG also any other name.
        font_size: in pixels.
        warn: is told what was left out.

    Examples:
        >>> import pipeplan as pp
        >>> from pipeplan.planning.sweep.specification import SweepSpec
        >>> planners = ("spp", "1f1b", "data-parallel")
        >>> spec = SweepSpec(
        ...     models=("vgg19",), clusters=("4x2-10g",), microbatches=(4, 8), planners=planners
        ... )
        >>> rows = pp.sweep(spec, "results.csv", jobs=1)
        >>> pp.plot_sweep(rows, "speedup.svg", x="microbatches", y="speedup")
    """
    chosen = require_format(path)
    style = _style(chosen, log, title, width, height, font, font_size)
    options = ChartOptions(
        x=x, y=y, by=(by,) if isinstance(by, str) else tuple(by), where=where, over=over, mean=mean
    )
    chart = chart_of(read_rows(rows) if isinstance(rows, str | Path) else rows, options)
    _require_positive(chart, style)
    for line in chart.notes if warn is not None else ():
        assert warn is not None
        warn(line)
    write_atomically(path, picture_bytes(str(chart_svg(chart, style)), chosen, warn))


def _style(
    chosen: str, log: str, title: str, width: int, height: int, font: str, font_size: float
) -> ChartStyle:
    if log not in ("", "x", "y", "xy", "yx"):
        raise InputError(f"log: {log!r} is none of x, y, xy")
    for name, value, least, most in (
        ("width", width, LEAST_WIDTH, MOST_WIDTH),
        ("height", height, LEAST_HEIGHT, MOST_HEIGHT),
        ("font_size", font_size, LEAST_FONT, MOST_FONT),
    ):
        if not least <= value <= most:
            raise InputError(f"{name}: {value:g} is not within {least:g}..{most:g} pixels")
    if len(title) > LONGEST_TITLE or not title.isprintable():
        raise InputError(f"title: is longer than {LONGEST_TITLE} characters, or not printable")
    require_font(font, chosen)
    return ChartStyle(
        width=width,
        height=height,
        font=font,
        font_size=font_size,
        title=title,
        log_x="x" in log,
        log_y="y" in log,
    )


def _require_positive(chart: Chart, style: ChartStyle) -> None:
    if style.log_x and chart.categories:
        raise InputError(f"log: {chart.x!r} has names, which have no logarithm; use --log y")
    points = [point for series in chart.series for point in series.points]
    for name, is_log, least in (
        (chart.x, style.log_x, min(point.x for point in points)),
        (chart.y, style.log_y, min(point.low for point in points)),
    ):
        if is_log and least <= 0:
            raise InputError(f"log: {name!r} has the value {least:g}, which has no logarithm")
