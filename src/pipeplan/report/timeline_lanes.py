"""The lanes of the picture of a timeline: devices or groups, and what is sent between them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeplan.cost import Floats
from pipeplan.report.analysis.items import BACKWARD, FORWARD, INPUT, LETTERS, WEIGHT
from pipeplan.report.analysis.plan_analysis import PlanAnalysis
from pipeplan.report.colours import stage_colour
from pipeplan.report.names import short_text
from pipeplan.simulator import Codes

__all__ = ["BLOCK_COLOURS", "MAX_STAGES_WITH_TRANSFERS", "Lane", "Spans", "lanes_of"]

MAX_DEVICE_LANES = 16
"""With more devices a lane stands for a stage."""
MAX_STAGES_WITH_TRANSFERS = 128
"""With more stages only stages have lanes, and these share `LANES_HEIGHT`."""
LANES_HEIGHT = 2560.0
BLOCK_COLOURS = {FORWARD: "forward", BACKWARD: "backward", INPUT: "backward", WEIGHT: "weight"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Times of one lane that have one colour; arrays of one length."""

    colour: str
    start_ms: Floats
    end_ms: Floats
    microbatch: Codes | None = None
    """What the labels say; None: no labels."""
    prefix: str = ""
    """What stands before it: stage and letter, where a lane has several stages."""
    stripe: str = ""
    """The colour of a stripe that tells the stage, where a lane has several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A row of the picture."""

    label: str
    height: float
    gap: float
    """The distance to the next lane."""
    spans: list[Spans]


def lanes_of(analysis: PlanAnalysis) -> Iterator[Lane]:
    """A lane a device, or a group, and thin ones for what is sent behind its stages."""
    by_device = analysis.num_used_devices <= MAX_DEVICE_LANES
    with_transfers = analysis.num_stages <= MAX_STAGES_WITH_TRANSFERS
    height, gap = (20.0 if by_device else 16.0), 4.0
    if not with_transfers:
        share = LANES_HEIGHT / len(analysis.groups)
        height, gap = (min(16.0, share - 4), 4.0) if share >= 12 else (share * 0.8, share * 0.2)
    for index, group in enumerate(analysis.groups):
        if by_device:
            paces = analysis.device_paces[group.stages[0]]
            for device, pace in zip(group.devices, paces, strict=True):
                name = short_text(analysis.plan.cluster.devices[device].name, 13)
                spans = _group_spans(analysis, index, pace)
                yield Lane(label=name, height=height, gap=gap, spans=spans)
        else:
            spans = _group_spans(analysis, index, 1.0)
            label = _group_label(analysis, index)
            yield Lane(label=label, height=height, gap=gap, spans=spans)
        for channel in group.stages if with_transfers else ():
            yield from _transfer_lanes(analysis, channel)


def _transfer_lanes(analysis: PlanAnalysis, channel: int) -> Iterator[Lane]:
    """Two thin lanes for what goes over the cut behind a stage; none inside a group."""
    if channel + 1 == analysis.num_stages:
        return
    for kind, colour in ((FORWARD, "there"), (BACKWARD, "back")):
        sent = analysis.items.transfers_of(channel, kind)
        if sent.stop > sent.start:
            start_ms, end_ms = analysis.items.start_ms_N[sent], analysis.items.end_ms_N[sent]
            spans = [Spans(colour=colour, start_ms=start_ms, end_ms=end_ms)]
            yield Lane(label="", height=5, gap=2, spans=spans)


def _group_spans(analysis: PlanAnalysis, index: int, pace: float) -> list[Spans]:
    """A group's blocks, each as long as a device of that pace computes, and its all-reduces.

    What is all-reduced beside computing is not drawn.
    """
    items, mine = analysis.items, analysis.items.blocks_of(index)
    kind, start_ms, stage = items.kind_N[mine], items.start_ms_N[mine], items.place_N[mine]
    end_ms = items.end_ms_N[mine]
    last_ms = end_ms[-1]
    if pace != 1.0:
        end_ms = start_ms + (end_ms - start_ms) * pace
    stages = analysis.groups[index].stages
    spans = []
    for each in stages:
        for which, colour in BLOCK_COLOURS.items():
            these = (kind == which) & (stage == each) if len(stages) > 1 else kind == which
            if not these.any():
                continue
            spans.append(
                Spans(
                    colour=colour,
                    start_ms=start_ms[these],
                    end_ms=end_ms[these],
                    microbatch=items.microbatch_N[mine][these],
                    prefix=f"{each}{LETTERS[which]}" if len(stages) > 1 else "",
                    stripe=stage_colour(each) if len(stages) > 1 else "",
                )
            )
    reduces = items.reduces_of(index)
    reduces = reduces[items.end_ms_N[reduces] > last_ms]
    start_ms = np.maximum(items.start_ms_N[reduces], last_ms)
    spans.append(Spans(colour="reduce", start_ms=start_ms, end_ms=items.end_ms_N[reduces]))
    return spans


def _group_label(analysis: PlanAnalysis, index: int) -> str:
    group = analysis.groups[index]
    noun = "group" if len(analysis.groups) < analysis.num_stages else "stage"
    return f"{noun} {index}" + (f" x{group.num_replicas}" if group.num_replicas > 1 else "")
