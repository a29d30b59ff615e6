"""A timeline as rows of characters that can be read without colour.

A lane is a stage, a column is a slice of time::

    stage 0  F0─F1─F2─·······B0═══B1═══B2═══░░
    stage 1  ···F0─B0═══F1─B1═══F2─B2═══

A block too narrow for its label shows its letter alone; one narrower than a column may vanish.
Where a lane is a group with several stages, a block begins with its stage, `2F0`, and one that is
too narrow for all shows stage and letter. The halves of a backward are I and W.
"""

from dataclasses import dataclass

import numpy as np

from pipeplan.report.analysis.items import BACKWARD, FORWARD, INPUT, LETTERS, WEIGHT
from pipeplan.report.analysis.plan_analysis import PlanAnalysis

__all__ = ["ASCII", "UNICODE", "Glyphs", "draw_text_lane"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """What fills a lane."""

    forward: str
    backward: str
    input_gradient: str
    weight_gradient: str
    idle: str
    all_reduce: str

    def filling(self, kind: int) -> str:
        """What fills a block of this kind."""
        return {
            FORWARD: self.forward,
            BACKWARD: self.backward,
            INPUT: self.input_gradient,
            WEIGHT: self.weight_gradient,
        }[kind]


UNICODE = Glyphs(
    forward="─",
    backward="═",
    input_gradient="═",
    weight_gradient="~",
    idle="·",
    all_reduce="░",
)
ASCII = Glyphs(
    forward="-",
    backward="=",
    input_gradient="=",
    weight_gradient="~",
    idle=".",
    all_reduce="#",
)


def draw_text_lane(analysis: PlanAnalysis, group: int, width: int, glyphs: Glyphs = UNICODE) -> str:
    """The lane of one group, which mostly is a stage, in `width` characters."""
    items, mine = analysis.items, analysis.items.blocks_of(group)
    names_stages = len(items.stages_of(group)) > 1
    columns_per_ms = width / analysis.iteration_ms if analysis.iteration_ms else 0.0
    firsts = np.rint(items.start_ms_N[mine] * columns_per_ms).astype(np.int64)
    ends = np.rint(items.end_ms_N[mine] * columns_per_ms).astype(np.int64)
    lane = [glyphs.idle] * width
    for position in np.flatnonzero(ends > firsts).tolist():
        first, end = int(firsts[position]), int(ends[position])
        number = mine.start + position
        kind = int(items.kind_N[number])
        stage = str(items.place_N[number]) if names_stages else ""
        label = f"{stage}{LETTERS[kind]}{items.microbatch_N[number]}"
        room = end - first
        if len(label) >= room:  # no room to tell it from its neighbour
            label = f"{stage}{LETTERS[kind]}" if len(stage) < room else LETTERS[kind]
        lane[first:end] = label.ljust(end - first, glyphs.filling(kind))[: end - first]
    for number in items.reduces_of(group).tolist():
        first = round(items.start_ms_N[number] * columns_per_ms)
        end = round(items.end_ms_N[number] * columns_per_ms)
        for column in range(first, min(end, width)):
            if lane[column] == glyphs.idle:  # it may run beside computing
                lane[column] = glyphs.all_reduce
    return "".join(lane)
