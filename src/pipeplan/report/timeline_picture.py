"""The timeline of an iteration as SVG, for papers and READMEs.

Blocks narrower than a pixel are drawn together, and with very many stages lanes become thin. So the
size of a picture depends on its width and not on the number of microbatches.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.report.analysis.items import WEIGHT
from pipeplan.report.analysis.plan_analysis import PlanAnalysis
from pipeplan.report.colours import DARK, LIGHT, stage_colour
from pipeplan.report.elements import Markup, element, join
from pipeplan.report.fonts import SANS
from pipeplan.report.names import short_text
from pipeplan.report.timeline_lanes import (
    BLOCK_COLOURS,
    MAX_STAGES_WITH_TRANSFERS,
    Lane,
    lanes_of,
)
from pipeplan.report.units import humanise_ms

__all__ = ["tick_step_ms", "timeline_svg"]

THIN = 10.0
"""A lane up to this high has no labels inside its blocks."""
LABEL_HEIGHT = 14.0
STRIPE = 3.0
MAX_LISTED_STAGES = 24
"""With more stages the legend does not list their colours."""
LEFT, RIGHT = 96.0, 16.0
LEGEND = (
    ("forward", "forward"),
    ("backward", "backward"),
    ("weight", "weight gradient"),
    ("reduce", "all-reduce"),
    ("there", "activations sent"),
    ("back", "gradients sent"),
    ("lane", "idle"),
)


@dataclass(frozen=True, slots=True)
class _Scale:
    """From milliseconds to pixels."""

    width: int
    per_ms: float
    span_ms: float

    @property
    def lane_width(self) -> float:
        return self.width - LEFT - RIGHT

    def x_of(self, ms: float) -> float:
        return LEFT + ms * self.per_ms


def tick_step_ms(span_ms: float, most: int) -> float:
    """The smallest of 1, 2, 5, 10, ... that divides a span into at most so many parts."""
    if not span_ms > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span_ms / most))
    return next(
        power * factor for factor in (1, 2, 5, 10, 20) if power * factor * most >= span_ms * 0.999
    )


def timeline_svg(
    analysis: PlanAnalysis,
    width: int = 1000,
    *,
    title: bool = True,
    legend: bool = True,
    span_ms: float = 0.0,
    font: str = SANS,
) -> Markup:
    """The timeline as an SVG document: a lane a device or stage, thin lanes for transfers.

    With `span_ms` the lanes are that long, so that several pictures have one scale of time.
    """
    top = 62.0 if title else 30.0
    span_ms = max(span_ms, analysis.iteration_ms)
    scale = _Scale(width, (width - LEFT - RIGHT) / span_ms if span_ms else 0.0, span_ms)
    lanes: list[Markup] = []
    y, last_label_y = top, -math.inf
    for lane in lanes_of(analysis):
        lanes.append(
            element(
                "rect",
                class_="pp-lane",
                x=LEFT,
                y=y,
                width=analysis.iteration_ms * scale.per_ms or scale.lane_width,
                height=lane.height,
                fill=LIGHT["lane"],
            )
        )
        if lane.label and y - last_label_y >= LABEL_HEIGHT:
            last_label_y = y
            lanes.append(_label(LEFT - 8, y + lane.height / 2 + 3.5, lane.label, "end", 10.5))
        lanes += _lane_shapes(lane, y, scale)
        y += lane.height + lane.gap
    parts = [
        *(_title(analysis, width) if title else []),
        *_phases(analysis, top, y, scale),
        *lanes,
        *_axis(y, scale),
        *(_legend(y + 36, analysis) if legend else []),
        *(_stage_legend(y + 54, analysis) if legend else []),
    ]
    below = (68 if _lists_stages(analysis) else 50) if legend else 22
    return join([_document(width, y + below, parts, font), "\n"])


def _document(width: int, height: float, parts: list[Markup], font: str) -> Markup:
    return element(
        "svg",
        element("title", "Timeline of one iteration"),
        _dark_style(),
        element("rect", class_="pp-page", width=width, height=height, rx=8, fill=LIGHT["page"]),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height:g}",
        width=width,
        height=height,
        role="img",
        font_family=font,
        class_="pp-timeline",
    )


def _title(analysis: PlanAnalysis, width: int) -> Iterator[Markup]:
    plan, iteration_ms = analysis.plan, analysis.iteration_ms
    name = f"{short_text(plan.model.name)} on {short_text(plan.cluster.name)}"
    samples = plan.microbatches * plan.model.microbatch_size
    rate = 1e3 * samples / iteration_ms if iteration_ms else 0.0
    yield _label(LEFT, 22, name, "start", 14, bold=True)
    figures = (
        f"{humanise_ms(iteration_ms)} an iteration, {rate:.4g} samples/s,"
        f" {analysis.num_stages} stages, {plan.microbatches} microbatches"
    )
    yield _label(width - RIGHT, 22, figures, "end", 11)


# ------------------------------------------------------------------------------- lanes


def _lane_shapes(lane: Lane, y: float, scale: _Scale) -> Iterator[Markup]:
    """One path for each colour, and the labels that have room."""
    labels: dict[str, list[Markup]] = {}
    narrow: dict[str, list[NDArray[np.float64]]] = {}
    for spans in lane.spans:
        first, end = LEFT + spans.start_ms * scale.per_ms, LEFT + spans.end_ms * scale.per_ms
        wide = end - first >= 1
        boxes, stripes = [], []
        for index in np.flatnonzero(wide).tolist():
            left, right = float(first[index]), float(end[index])
            gap = 0.8 if right - left > 4 else 0.0  # tells a block from the next of its colour
            boxes.append(_box(left, right - gap, y, lane.height))
            stripes.append(_box(left, right - gap, y + lane.height - STRIPE, STRIPE))
            number = "" if spans.microbatch is None else str(spans.microbatch[index])
            text = f"{spans.prefix}{number}"
            if text and right - left >= 6 * len(text) + 1.5 and lane.height > THIN:
                middle = f"{(left + right) / 2:.1f}"
                text_y = y + lane.height / 2 + 3.3
                labels.setdefault(spans.colour, []).append(
                    element("text", text, x=middle, y=text_y)
                )
        if boxes:
            yield _path(spans.colour, boxes)
        if boxes and spans.stripe and lane.height > THIN:
            yield element("path", fill=spans.stripe, d="".join(stripes))
        colour = "mixed" if spans.colour in BLOCK_COLOURS.values() else spans.colour
        is_narrow = ~wide & (end > first)
        narrow.setdefault(colour, []).append(np.stack([first[is_narrow], end[is_narrow]]))
    for colour, parts in narrow.items():
        boxes = [_box(left, right, y, lane.height) for left, right in _runs(parts, lane.height)]
        if boxes:
            yield _path(colour, boxes)
    for colour, texts in labels.items():
        kind = f"on-{colour}"
        yield element(
            "g", *texts, class_=f"pp-{kind}", font_size=9.5, fill=LIGHT[kind], text_anchor="middle"
        )


def _runs(parts: list[NDArray[np.float64]], height: float) -> Iterator[tuple[float, float]]:
    """Narrow spans joined where they lie close together, in thin lanes a little less close."""
    first, end = np.concatenate(parts, axis=1)
    if not len(first):
        return
    order = np.argsort(first, kind="stable")
    first, end = first[order], end[order]
    closest = 0.5 if height >= 5 else 2.0
    breaks = np.flatnonzero(first[1:] - end[:-1] >= closest)
    starts = first[np.concatenate([[0], breaks + 1])]
    ends = end[np.concatenate([breaks, [len(end) - 1]])]
    yield from zip(starts.tolist(), ends.tolist(), strict=True)


def _box(left: float, right: float, y: float, height: float) -> str:
    wide = max(right - left, 0.4)
    return f"M{left:.1f} {y:g}h{wide:.1f}v{height:g}h{-wide:.1f}z"


def _path(colour: str, boxes: list[str]) -> Markup:
    return element("path", class_=f"pp-{colour}", fill=LIGHT[colour], d="".join(boxes))


# ------------------------------------------------------------------------ around them


def _phases(analysis: PlanAnalysis, top: float, bottom: float, scale: _Scale) -> Iterator[Markup]:
    for phase in analysis.phases:
        first, end = scale.x_of(phase.start_ms), scale.x_of(phase.end_ms)
        if end - first >= 7 * len(phase.name):
            yield _label((first + end) / 2, top - 12, phase.name, "middle", 10.5)
        if first > LEFT:
            yield element(
                "path",
                class_="pp-line",
                d=f"M{first:.1f} {top - 22:g}V{bottom:g}",
                fill="none",
                stroke=LIGHT["line"],
                stroke_dasharray="2 3",
            )


def _axis(y: float, scale: _Scale) -> Iterator[Markup]:
    line = f"M{LEFT:g} {y + 2:g}h{scale.lane_width:g}"
    yield element("path", class_="pp-line", d=line, stroke=LIGHT["line"])
    step_ms = tick_step_ms(scale.span_ms, 10)
    count = math.floor(scale.span_ms / step_ms) if scale.span_ms else 0
    for tick in range(count + 1):
        unit = " ms" if tick == 0 else ""
        x = scale.x_of(tick * step_ms)
        yield _label(x, y + 16, f"{tick * step_ms:g}{unit}", "middle", 10)


def _legend(y: float, analysis: PlanAnalysis) -> Iterator[Markup]:
    x = LEFT
    with_transfers = analysis.num_stages <= MAX_STAGES_WITH_TRANSFERS
    is_split = bool((analysis.items.kind_N == WEIGHT).any())
    for colour, name in LEGEND:
        if colour in ("there", "back") and not with_transfers:
            continue
        if colour == "weight" and not is_split:
            continue
        yield element(
            "rect",
            class_=f"pp-{colour}",
            x=x,
            y=y - 9,
            width=12,
            height=10,
            rx=2,
            fill=LIGHT[colour],
        )
        yield _label(x + 17, y, name, "start", 10.5)
        x += 34 + 5.6 * len(name)


def _lists_stages(analysis: PlanAnalysis) -> bool:
    """Whether the legend tells the colours of stages: where lanes have several."""
    return len(analysis.groups) < analysis.num_stages <= MAX_LISTED_STAGES


def _stage_legend(y: float, analysis: PlanAnalysis) -> Iterator[Markup]:
    if not _lists_stages(analysis):
        return
    yield _label(LEFT, y, "stages", "start", 10.5)
    for stage in range(analysis.num_stages):
        x = LEFT + 44 + 34 * stage
        yield element("rect", x=x, y=y - 9, width=12, height=10, rx=2, fill=stage_colour(stage))
        yield _label(x + 16, y, str(stage), "start", 10.5)


def _label(
    x: float, y: float, text: str, anchor: str, size: float, *, bold: bool = False
) -> Markup:
    kind = "text" if bold else "quiet"
    weight: dict[str, str | float] = {"font_weight": "600"} if bold else {}
    return element(
        "text",
        text,
        class_=f"pp-{kind}",
        x=x,
        y=y,
        font_size=size,
        **weight,
        text_anchor=anchor,
        fill=LIGHT[kind],
    )


def _dark_style() -> Markup:
    rules = "".join(
        f".pp-timeline .pp-{name}{{{'stroke' if name == 'line' else 'fill'}:{colour}}}"
        for name, colour in DARK.items()
    )
    return element("style", f"@media screen and (prefers-color-scheme:dark){{{rules}}}")
