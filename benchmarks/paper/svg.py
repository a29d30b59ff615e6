"""Two small plots as SVG text: bars, and lines over an axis of named points."""

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

__all__ = ["draw_bars", "draw_lines"]

COLOURS = (
    "#1b6ca8", "#d1495b", "#66a182", "#edae49", "#6a4c93", "#2e4057",
    "#8d6a9f", "#8cb369", "#b56576", "#5f7470", "#00798c",
)  # fmt: skip
FONT = 'font-family="sans-serif" font-size="11"'


def draw_bars(title: str, unit: str, values: Mapping[str, float]) -> str:
    """One horizontal bar for each name."""
    width, left, row = 560, 120, 20
    largest = max(values.values(), default=1.0) or 1.0
    parts = [_text(8, 16, title, bold=True)]
    for index, (name, value) in enumerate(values.items()):
        y = 28 + index * row
        length = (width - left - 80) * value / largest
        parts.append(_text(left - 6, y + 12, name, anchor="end"))
        parts.append(
            f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{row - 5}"'
            f' fill="{COLOURS[0]}"/>'
        )
        parts.append(_text(left + length + 5, y + 12, f"{value:.2f}{unit}"))
    return _document(width, 36 + row * len(values), parts)


def draw_lines(
    title: str, x_label: str, points: Sequence[str], lines: Mapping[str, Sequence[float]]
) -> str:
    """One line for each name, over equally spaced points; the vertical axis starts at 0."""
    width, height, left, right, top, bottom = 560, 300, 44, 120, 28, 40
    top_value = max((value for line in lines.values() for value in line), default=1.0) * 1.05
    step = (width - left - right) / max(1, len(points) - 1)

    def x(index: int) -> float:
        return left + step * index

    def y(value: float) -> float:
        return height - bottom - (height - top - bottom) * value / top_value

    parts = [_text(8, 16, title, bold=True)]
    for quarter in range(5):
        value = top_value * quarter / 4
        parts.append(
            f'<line x1="{left}" x2="{width - right}" y1="{y(value):.1f}" y2="{y(value):.1f}"'
            ' stroke="#ddd"/>'
        )
        parts.append(_text(left - 5, y(value) + 4, f"{value:.2g}", anchor="end"))
    for index, point in enumerate(points):
        parts.append(_text(x(index), height - bottom + 15, point, anchor="middle"))
    parts.append(_text((left + width - right) / 2, height - 8, x_label, anchor="middle"))
    for index, (name, values) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(values))
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
        )
        label_y = top + 14 * index
        parts.append(
            f'<rect x="{width - right + 12}" y="{label_y}" width="10" height="10" fill="{colour}"/>'
        )
        parts.append(_text(width - right + 27, label_y + 9, name))
    return _document(width, height, parts)


def _text(x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" {FONT} text-anchor="{anchor}"{weight}>{escape(text)}</text>'
    )


def _document(width: int, height: int, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )
