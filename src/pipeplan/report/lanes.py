"""A timeline as rows of characters that can be read without colour.

A lane a stage, a column a slice of time::

    stage 0  F0─F1─F2─·······B0═══B1═══B2═══░░
    stage 1  ···F0─B0═══F1─B1═══F2─B2═══

A block too narrow for its label shows its letter alone; one narrower than a column may vanish.
"""

from dataclasses import dataclass

from pipeplan.pipeline import Kind
from pipeplan.report.drawing import Drawing

__all__ = ["ASCII", "UNICODE", "Glyphs", "draw_lanes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """What fills a lane."""

    forward: str
    backward: str
    idle: str
    all_reduce: str


UNICODE = Glyphs(forward="─", backward="═", idle="·", all_reduce="░")
ASCII = Glyphs(forward="-", backward="=", idle=".", all_reduce="#")


def draw_lanes(drawing: Drawing, width: int, glyphs: Glyphs = UNICODE) -> list[str]:
    """One line of `width` characters for each stage."""
    timeline = drawing.timeline
    columns_per_ms = width / timeline.iteration_ms if timeline.iteration_ms else 0.0

    def column(ms: float) -> int:
        return round(ms * columns_per_ms)

    lines = []
    for blocks, all_reduce in zip(timeline.blocks, timeline.all_reduces, strict=True):
        lane = [glyphs.idle] * width
        for timed in blocks:
            first, end = column(timed.start_ms), column(timed.end_ms)
            fill = glyphs.forward if timed.block.kind is Kind.FORWARD else glyphs.backward
            label = f"{timed.block.kind}{timed.block.microbatch}"
            if len(label) >= end - first:  # no room to tell it from its neighbour
                label = str(timed.block.kind)
            lane[first:end] = label.ljust(end - first, fill)[: end - first]
        first, end = column(all_reduce.start_ms), column(all_reduce.end_ms)
        lane[first:end] = glyphs.all_reduce * (end - first)
        lines.append("".join(lane))
    return lines
