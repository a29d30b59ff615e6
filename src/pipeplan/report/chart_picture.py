"""A chart of a sweep as SVG: lines where x is a number, bars where it is a name.

Series differ in colour and in marker, so that print without colour tells them apart. A hollow
marker or a pale bar is a plan that breaks a limit. Axes of plain numbers begin at zero.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pipeplan.report.colours import LIGHT, stage_colour
from pipeplan.report.elements import Markup, element, join
from pipeplan.report.fonts import font_family
from pipeplan.report.names import short_text
from pipeplan.report.page_comparison import heading_of
from pipeplan.report.sweep_rows import Chart, Point, Series
from pipeplan.report.timeline_picture import tick_step_ms

__all__ = ["ChartStyle", "chart_svg"]

CHARACTER = 0.58
"""The width of a character in parts of the font's size, on the safe side."""
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "hourglass")
BARS = 0.8
"""The part of a category's width that its bars take."""
LONGEST_NAME = 32
LABELS = {"cluster_devices": "devices", "speedup": "speed-up", "gap": "gap (%)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartStyle:
    """Size, fonts and axes of a chart."""

    width: int = 640
    height: int = 400
    font: str = "sans"
    font_size: float = 12.0
    title: str = ""
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class _Axis:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool

    def at(self, value: float) -> float:
        low, high, value = (
            (math.log(v) for v in (self.low, self.high, value))
            if self.is_log
            else (self.low, self.high, value)
        )
        part = (value - low) / (high - low) if high > low else 0.5
        return self.start + part * (self.end - self.start)


def chart_svg(chart: Chart, style: ChartStyle) -> Markup:
    """The chart as an SVG document."""
    size = style.font_size
    legend = _legend_rows(chart, style)
    y_values = [value for s in chart.series for p in s.points for value in (p.low, p.high)]
    y_ticks = _ticks(y_values, style.log_y, style.height / (4 * size))
    labels = [f"{tick:g}" for tick in y_ticks]
    left = 2.2 * size + CHARACTER * size * max(map(len, labels)) + 10
    top = (2.2 * size if style.title else 0.8 * size) + 1.7 * size * len(legend)
    bottom = style.height - 3.6 * size - (1.3 * size if _footnote(chart) else 0)
    y_axis = _Axis(min(y_ticks), max(y_ticks), bottom, top + 0.6 * size, style.log_y)
    x_axis, x_ticks = _x_axis(chart, style, left, style.width - 1.5 * size)
    parts = [
        *_frame(x_axis, x_ticks, y_axis, list(zip(y_ticks, labels, strict=True)), style),
        *_axis_names(chart, x_axis, y_axis, style),
        *_shapes(chart, x_axis, y_axis, style),
        *_legend(chart, legend, left, style),
    ]
    return join([_document(parts, chart, style), "\n"])


def _document(parts: list[Markup], chart: Chart, style: ChartStyle) -> Markup:
    return element(
        "svg",
        element("title", style.title or f"{_label_of(chart.y)} by {_label_of(chart.x)}"),
        element("rect", width=style.width, height=style.height, fill=LIGHT["page"]),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {style.width} {style.height}",
        width=style.width,
        height=style.height,
        role="img",
        font_family=font_family(style.font),
        font_size=style.font_size,
        fill=LIGHT["text"],
    )


def _label_of(column: str) -> str:
    return LABELS.get(column) or heading_of(column)


# -------------------------------------------------------------------------------- axes


def _ticks(values: list[float], is_log: bool, most: float) -> list[float]:
    """Round numbers around the values; from zero on where the axis is linear."""
    low, high = min(values), max(values)
    if is_log:
        return _log_ticks(low, high)
    low, high = min(low, 0.0), max(high, 0.0)
    step = tick_step_ms((high - low) or 1.0, max(int(most), 2))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, max(last, first + 1) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of two over a small range, else powers of ten."""
    base = 2.0 if high / low <= 2**10 else 10.0
    first = math.floor(math.log(low, base) + 1e-9)
    last = math.ceil(math.log(high, base) - 1e-9)
    return [base**power for power in range(first, max(last, first + 1) + 1)]


def _x_axis(
    chart: Chart, style: ChartStyle, left: float, right: float
) -> tuple[_Axis, list[tuple[float, str]]]:
    if chart.categories:
        count = len(chart.categories)
        room = (right - left) / count / (CHARACTER * style.font_size)
        names = [short_text(name, max(int(room), 4)) for name in chart.categories]
        return _Axis(-0.5, count - 0.5, left, right, False), list(enumerate(names))
    values = sorted({point.x for series in chart.series for point in series.points})
    ticks = _ticks(values, style.log_x, (right - left) / (5 * style.font_size))
    is_exact = style.log_x and len(values) <= 12
    labels = [(value, f"{value:g}") for value in (values if is_exact else ticks)]
    inset = style.font_size
    axis = _Axis(min(ticks), max(ticks), left + inset, right - inset, style.log_x)
    return axis, labels


def _frame(
    x_axis: _Axis,
    x_ticks: list[tuple[float, str]],
    y_axis: _Axis,
    y_ticks: list[tuple[float, str]],
    style: ChartStyle,
) -> Iterator[Markup]:
    size = style.font_size
    inset = size if x_axis.low != -0.5 else 0.0
    left, right = x_axis.start - inset, x_axis.end + inset
    for value, label in y_ticks:
        y = y_axis.at(value)
        yield element(
            "path",
            d=f"M{left:.1f} {y:.1f}H{right:.1f}",
            stroke=LIGHT["text"] if value == y_axis.low else LIGHT["line"],
            stroke_width=1,
            fill="none",
        )
        yield _text(left - 6, y + 0.35 * size, label, "end", size)
    for value, label in x_ticks:
        yield _text(x_axis.at(value), y_axis.start + 1.4 * size, label, "middle", size)


def _axis_names(chart: Chart, x_axis: _Axis, y_axis: _Axis, style: ChartStyle) -> Iterator[Markup]:
    size = style.font_size
    middle = (x_axis.start + x_axis.end) / 2
    yield _text(middle, y_axis.start + 2.9 * size, _label_of(chart.x), "middle", size)
    name = _label_of(chart.y)
    if chart.over is not None:
        name = f"speed-up over {short_text(chart.over, LONGEST_NAME)}"
    x, y = 1.3 * size, (y_axis.start + y_axis.end) / 2
    yield element(
        "text",
        name,
        x=x,
        y=y,
        text_anchor="middle",
        font_size=size,
        transform=f"rotate(-90 {x:.1f} {y:.1f})",
    )
    if _footnote(chart):
        yield element(
            "text",
            _footnote(chart),
            x=style.width - 1.5 * size,
            y=style.height - 0.6 * size,
            text_anchor="end",
            font_size=0.85 * size,
            fill=LIGHT["quiet"],
        )


def _footnote(chart: Chart) -> str:
    """What the shapes mean where it is not plain."""
    parts = []
    if chart.is_mean:
        parts.append("geometric means; bars from lowest to highest")
    if any(point.breaks_limits for series in chart.series for point in series.points):
        parts.append("pale: breaks a limit" if chart.categories else "hollow: breaks a limit")
    return "; ".join([*parts, *chart.notes])


# ------------------------------------------------------------------------------ shapes


def _shapes(chart: Chart, x_axis: _Axis, y_axis: _Axis, style: ChartStyle) -> Iterator[Markup]:
    for index, series in enumerate(chart.series):
        if chart.categories:
            yield from _bars(series, index, len(chart.series), x_axis, y_axis)
        else:
            yield from _line(series, index, x_axis, y_axis, style)


def _bars(series: Series, index: int, count: int, x_axis: _Axis, y_axis: _Axis) -> Iterator[Markup]:
    unit = x_axis.at(1.0) - x_axis.at(0.0)
    width = unit * BARS / count
    base = y_axis.at(y_axis.low if y_axis.is_log else 0.0)
    for point in series.points:
        left = x_axis.at(point.x) + (index - count / 2) * width
        top = y_axis.at(point.y)
        colour = stage_colour(index)
        yield element(
            "rect",
            x=left + 0.05 * width,
            y=min(top, base),
            width=0.9 * width,
            height=abs(base - top),
            fill=LIGHT["lane"] if point.breaks_limits else colour,
            stroke=colour,
            stroke_width=1,
        )
        yield from _range(point, left + width / 2, y_axis, LIGHT["text"])


def _line(
    series: Series, index: int, x_axis: _Axis, y_axis: _Axis, style: ChartStyle
) -> Iterator[Markup]:
    colour = stage_colour(index)
    places = [(x_axis.at(point.x), y_axis.at(point.y)) for point in series.points]
    if len(places) > 1:
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        yield element("path", d=path, stroke=colour, stroke_width=1.6, fill="none")
    for point, (x, y) in zip(series.points, places, strict=True):
        yield from _range(point, x, y_axis, colour)
        yield _marker(index, x, y, 0.34 * style.font_size, colour, point.breaks_limits)


def _range(point: Point, x: float, y_axis: _Axis, colour: str) -> Iterator[Markup]:
    if point.low == point.high:
        return
    low, high = y_axis.at(point.low), y_axis.at(point.high)
    path = f"M{x:.1f} {low:.1f}V{high:.1f}M{x - 3:.1f} {low:.1f}h6M{x - 3:.1f} {high:.1f}h6"
    yield element("path", d=path, stroke=colour, stroke_width=1, fill="none")


def _marker(index: int, x: float, y: float, r: float, colour: str, is_hollow: bool) -> Markup:
    fill = LIGHT["page"] if is_hollow else colour
    kind = MARKERS[index % len(MARKERS)]
    corners = {
        "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        "triangle": ((0, -1.25), (1.15, 0.9), (-1.15, 0.9)),
        "diamond": ((0, -1.35), (1.35, 0), (0, 1.35), (-1.35, 0)),
        "hourglass": ((-1, -1.1), (1, -1.1), (-1, 1.1), (1, 1.1)),
        "cross": (
            *((-0.4, -1.2), (0.4, -1.2), (0.4, -0.4), (1.2, -0.4), (1.2, 0.4), (0.4, 0.4)),
            *((0.4, 1.2), (-0.4, 1.2), (-0.4, 0.4), (-1.2, 0.4), (-1.2, -0.4), (-0.4, -0.4)),
        ),
    }.get(kind)
    if corners is None:
        return element("circle", cx=x, cy=y, r=r, fill=fill, stroke=colour, stroke_width=1.2)
    path = "M" + "L".join(f"{x + r * dx:.2f} {y + r * dy:.2f}" for dx, dy in corners) + "z"
    return element("path", d=path, fill=fill, stroke=colour, stroke_width=1.2)


# ------------------------------------------------------------------------------ legend


def _legend_rows(chart: Chart, style: ChartStyle) -> list[list[int]]:
    """Which series stand in each row of the legend."""
    rows: list[list[int]] = [[]]
    x = 0.0
    for index, series in enumerate(chart.series):
        width = _entry_width(series, style)
        if rows[-1] and x + width > style.width - 8 * style.font_size:
            rows.append([])
            x = 0.0
        rows[-1].append(index)
        x += width
    return rows


def _entry_width(series: Series, style: ChartStyle) -> float:
    name = short_text(series.name, LONGEST_NAME)
    return style.font_size * (2.4 + CHARACTER * len(name))


def _legend(
    chart: Chart, rows: list[list[int]], left: float, style: ChartStyle
) -> Iterator[Markup]:
    size = style.font_size
    y = 1.6 * size
    if style.title:
        yield element("text", style.title, x=left, y=y, font_size=1.15 * size, font_weight="600")
        y += 1.7 * size
    for row in rows:
        x = left + 0.5 * size
        for index in row:
            series = chart.series[index]
            yield _marker(index, x, y - 0.33 * size, 0.4 * size, stage_colour(index), False)
            yield _text(x + 0.9 * size, y, short_text(series.name, LONGEST_NAME), "start", size)
            x += _entry_width(series, style)
        y += 1.7 * size


def _text(x: float, y: float, text: str, anchor: str, size: float) -> Markup:
    return element("text", text, x=x, y=y, text_anchor=anchor, font_size=size)
