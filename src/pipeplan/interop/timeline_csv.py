"""The simulated iteration as a table: a line for each block, transfer and all-reduce."""

import csv
import io
from collections.abc import Iterator

from pipeplan.interop.exported import Exported, ExportSettings
from pipeplan.pipeline import GroupTimeline, Kind, Plan, Timeline
from pipeplan.replaying import Replayed

__all__ = ["export_timeline_csv"]

HEADER = ("what", "stage", "to_stage", "microbatch", "devices", "start_ms", "end_ms")
WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input gradient",
    Kind.WEIGHT_GRADIENT: "weight gradient",
}
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""A cell that begins with one of these is a formula to spreadsheets."""


def export_timeline_csv(replayed: Replayed, settings: ExportSettings) -> Exported:
    """The times of everything that happens, sorted by start."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    rows = list(_rows(replayed.plan, replayed.timeline))
    rows.sort(key=lambda row: (row[5], row[6], row[1]))
    for row in rows:
        writer.writerow(row)
    return Exported(data=text.getvalue().encode(errors="backslashreplace"))


Row = tuple[str, int, int | str, int | str, str, float, float]


def _rows(plan: Plan, timeline: Timeline | GroupTimeline) -> Iterator[Row]:
    place: tuple[int, int | str, int | str, str]
    devices = [_cell(plan, stage) for stage in range(len(plan.stages))]
    for blocks in timeline.blocks:
        for timed in blocks:
            block = timed.block
            place = (block.stage, "", block.microbatch, devices[block.stage])
            yield WORDS[block.kind], *place, timed.start_ms, timed.end_ms
    for sent in timeline.transfers:
        ends = (sent.channel, sent.channel + 1)
        source, target = ends if sent.kind is Kind.FORWARD else ends[::-1]
        what = f"send {WORDS[sent.kind]}"
        place = (source, target, sent.microbatch, devices[source])
        yield what, *place, sent.start_ms, sent.end_ms
    for reduced in timeline.all_reduces:
        if len(plan.stages[reduced.stage].devices) > 1:
            place = (reduced.stage, "", "", devices[reduced.stage])
            yield "all-reduce", *place, reduced.start_ms, reduced.end_ms


def _cell(plan: Plan, stage: int) -> str:
    """The names of a stage's devices, in a cell that no spreadsheet runs as a formula."""
    names = " ".join(plan.cluster.devices[device].name for device in plan.stages[stage].devices)
    plain = "".join(c if c.isprintable() else "?" for c in names)
    return f"'{plain}" if plain.lstrip().startswith(FORMULA_STARTS) else plain
