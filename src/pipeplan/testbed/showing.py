"""A measurement for people: in the terminal, as a page and as a trace."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.text import Text

from pipeplan.pipeline import Block, Kind, Plan
from pipeplan.replaying import replay_plan
from pipeplan.report.analysis.items import LETTERS, Item, Items
from pipeplan.report.analysis.plan_analysis import PlanAnalysis
from pipeplan.report.html import write_report
from pipeplan.report.names import short_text
from pipeplan.report.page_beside import MeasuredPlan, SideBySide
from pipeplan.report.tables import Column, fitted_table
from pipeplan.report.units import humanise_ms, signed_percent
from pipeplan.runtime.tracing import (
    ALL_REDUCE,
    CATEGORIES,
    Event,
    RankTrace,
    block_name,
    write_trace,
)
from pipeplan.testbed.measurement import Measurement, parse_block
from pipeplan.testbed.orders import IterationTimes, RankTimes, Way

__all__ = ["render_measurement", "write_measured_page", "write_measured_trace"]

T = TypeVar("T")
WAYS = {
    Way.NAMESPACES: "network namespaces",
    Way.PACING: "paced sockets over loopback",
}


def verdict(measured: Measurement) -> str:
    """The result in one sentence."""
    return (
        f"Measured {humanise_ms(measured.measured_ms)} an iteration (median of"
        f" {len(measured.iterations_ms)}), predicted {humanise_ms(measured.predicted_ms)}:"
        f" {signed_percent(measured.error)}."
    )


def scale_words(measured: Measurement) -> str:
    """How the emulated plan differs from the given one, in one sentence."""
    scale = measured.scale
    words = (
        f"{len(measured.ranks)} devices by {WAYS[measured.way]}; everything lasted"
        f" {scale.time_factor:g} times as long, with {scale.byte_factor:g} times the bytes."
    )
    if scale.rows != measured.plan.model.microbatch_size:
        words += f" A microbatch had {scale.rows} rows, which shares divide evenly."
    return words


def render_measurement(measured: Measurement, console: Console) -> RenderableType:
    """The figures, and where prediction and run part."""
    plan = measured.plan
    title = Text()
    title.append(f"{short_text(plan.model.name)} on {short_text(plan.cluster.name)}", style="bold")
    title.append(f", planner {short_text(plan.planner)}")
    each = "  ".join(humanise_ms(ms) for ms in measured.iterations_ms)
    columns = [
        Column(heading="where they part most"),
        *(Column(heading=heading, is_number=True) for heading in ("predicted", "measured")),
    ]
    rows = [
        [slip.what, f"{slip.predicted_ms:.2f} ms", f"{slip.measured_ms:.2f} ms"]
        for slip in measured.slips
    ]
    return Group(
        title,
        Text(scale_words(measured)),
        "",
        Text(verdict(measured), style="bold"),
        Text(f"iterations  {each}"),
        "",
        fitted_table(columns, rows, console.width),
    )


def write_measured_page(measured: Measurement, path: str | Path) -> None:
    """Write the plan's page with the predicted and the measured timeline one above the other."""
    replayed = replay_plan(measured.plan)
    plans: dict[str, Plan | MeasuredPlan] = {
        "Predicted": measured.plan,
        "Measured": MeasuredPlan(
            analysis=_analysis(measured, PlanAnalysis(replayed)), facts=scale_words(measured)
        ),
    }
    words = f"{verdict(measured)} The measured timeline is that of the median iteration."
    heading = "Predicted and measured"
    beside = SideBySide(heading=heading, words=words, plans=plans)
    write_report(measured.plan, path, beside=beside)


def _analysis(measured: Measurement, predicted: PlanAnalysis) -> PlanAnalysis:
    """The plan's analysis with the measured times of all its items."""
    spans = list(_spans(measured, predicted.items))
    return predicted.with_times(
        np.array([start for start, _ in spans]),
        np.array([end for _, end in spans]),
        measured.iterations_ms[measured.median_iteration],
    )


def _spans(measured: Measurement, items: Items) -> Iterator[tuple[float, float]]:
    """Start and end of each item, in the order of their numbers."""
    blocks = measured.blocks
    last_of: dict[int, float] = {}
    for number in range(len(items)):
        item = items[number]
        if number < items.first_transfer:
            span = blocks[Block(Kind(LETTERS[item.kind]), item.place, item.microbatch)]
            last_of[item.place] = max(last_of.get(item.place, 0.0), span.end_ms)
            yield span.start_ms, span.end_ms
        elif number < items.first_all_reduce:
            ends = item.place, item.place + 1
            sender, receiver = ends[:: -1 if item.kind else 1]
            start_ms = _gradient_or_output(blocks, sender, item).end_ms
            arrivals = measured.arrivals_ms
            end_ms = _gradient_or_output(arrivals, receiver, item, start_ms)
            yield start_ms, max(start_ms, end_ms)
        else:
            start_ms = last_of[item.place]
            has_reduce = measured.plan.stages[item.place].num_replicas > 1
            yield start_ms, measured.reduce_ends_ms[item.place] if has_reduce else start_ms


def _gradient_or_output(
    found: Mapping[Block, T], stage: int, item: Item, default: T | None = None
) -> T:
    """What was found for the block of a stage that sends or gets a transfer: F, B or I."""
    kinds = (Kind.BACKWARD, Kind.INPUT_GRADIENT) if item.kind else (Kind.FORWARD,)
    for kind in kinds:
        value = found.get(Block(kind, stage, item.microbatch))
        if value is not None:
            return value
    assert default is not None  # blocks that send have run
    return default


def write_measured_trace(measured: Measurement, path: str | Path) -> None:
    """Write what each device did in the median iteration, beside what was predicted."""
    traces = [
        RankTrace(
            rank=number,
            stages=tuple(rank.stages),
            replica=rank.replica,
            zero_s=0.0,
            start_s=0.0,
            events=tuple(_events(measured, rank, times)),
        )
        for number, (rank, times) in enumerate(measured.shown)
    ]
    write_trace(measured.plan, traces, path)


def _events(measured: Measurement, rank: RankTimes, times: IterationTimes) -> Iterator[Event]:
    """A rank's events, in seconds of the plan."""

    def moment_s(of_machine_s: float) -> float:
        return measured.moment_ms(of_machine_s) / 1e3

    for block in times.blocks:
        found = parse_block(block.name)
        name = block_name(found, tells_stage=len(rank.stages) > 1)
        category = CATEGORIES[found.kind]
        yield Event(name, category, moment_s(block.start_s), moment_s(block.end_s))
    if measured.plan.stages[rank.stages[0]].num_replicas > 1:
        last_s = times.blocks[-1].end_s
        yield Event(ALL_REDUCE, ALL_REDUCE, moment_s(last_s), moment_s(times.reduce_end_s))
