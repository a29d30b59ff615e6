"""A timeline as rows of characters that can be read without colour.

A lane is a stage, a column is a slice of time::

    stage 0  F0─F1─F2─·······B0═══B1═══B2═══░░
    stage 1  ···F0─B0═══F1─B1═══F2─B2═══

A block too narrow for its label shows its letter alone; one narrower than a column may vanish.
"""

from dataclasses import dataclass

import numpy as np

from pipeplan.report.analysis.items import FORWARD, LETTERS
from pipeplan.report.analysis.plan_analysis import PlanAnalysis

__all__ = ["ASCII", "UNICODE", "Glyphs", "draw_text_lane"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """What fills a lane."""

    forward: str
    backward: str
    idle: str
    all_reduce: str


UNICODE = Glyphs(forward="─", backward="═", idle="·", all_reduce="░")
ASCII = Glyphs(forward="-", backward="=", idle=".", all_reduce="#")


def draw_text_lane(analysis: PlanAnalysis, stage: int, width: int, glyphs: Glyphs = UNICODE) -> str:
    """The lane of one stage in `width` characters."""
    items, mine = analysis.items, analysis.items.blocks_of(stage)
    columns_per_ms = width / analysis.iteration_ms if analysis.iteration_ms else 0.0
    firsts = np.rint(items.start_ms_N[mine] * columns_per_ms).astype(np.int64)
    ends = np.rint(items.end_ms_N[mine] * columns_per_ms).astype(np.int64)
    lane = [glyphs.idle] * width
    for position in np.flatnonzero(ends > firsts).tolist():
        first, end = int(firsts[position]), int(ends[position])
        kind = int(items.kind_N[mine.start + position])
        fill = glyphs.forward if kind == FORWARD else glyphs.backward
        label = f"{LETTERS[kind]}{items.microbatch_N[mine.start + position]}"
        if len(label) >= end - first:  # no room to tell it from its neighbour
            label = LETTERS[kind]
        lane[first:end] = label.ljust(end - first, fill)[: end - first]
    reduce = items[items.first_all_reduce + stage]
    first, end = round(reduce.start_ms * columns_per_ms), round(reduce.end_ms * columns_per_ms)
    lane[first:end] = glyphs.all_reduce * (end - first)
    return "".join(lane)
