"""A measurement for people: in the terminal, as a page and as a trace."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.text import Text

from pipeplan.pipeline import Block, Kind, Plan
from pipeplan.replaying import replay_plan
from pipeplan.report.analysis.items import Items
from pipeplan.report.analysis.plan_analysis import PlanAnalysis
from pipeplan.report.html import write_report
from pipeplan.report.names import short_text
from pipeplan.report.page_beside import MeasuredPlan, SideBySide
from pipeplan.report.tables import Column, fitted_table
from pipeplan.report.units import humanise_ms, signed_percent
from pipeplan.runtime.tracing import ALL_REDUCE, Event, RankTrace, write_trace
from pipeplan.testbed.measurement import Measurement
from pipeplan.testbed.orders import IterationTimes, Way

__all__ = ["render_measurement", "write_measured_page", "write_measured_trace"]

WAYS = {
    Way.NAMESPACES: "network namespaces",
    Way.PACING: "paced sockets over loopback",
}
CATEGORIES = {"F": "forward", "B": "backward"}


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
        kind = Kind.BACKWARD if item.kind else Kind.FORWARD
        if number < items.first_transfer:
            span = blocks[Block(kind, item.place, item.microbatch)]
            last_of[item.place] = max(last_of.get(item.place, 0.0), span.end_ms)
            yield span.start_ms, span.end_ms
        elif number < items.first_all_reduce:
            is_forward = kind is Kind.FORWARD
            sender = Block(kind, item.place if is_forward else item.place + 1, item.microbatch)
            receiver = Block(kind, item.place + 1 if is_forward else item.place, item.microbatch)
            start_ms = blocks[sender].end_ms
            yield start_ms, max(start_ms, measured.arrivals_ms.get(receiver, start_ms))
        else:
            start_ms = last_of[item.place]
            has_reduce = measured.plan.stages[item.place].num_replicas > 1
            yield start_ms, measured.reduce_ends_ms[item.place] if has_reduce else start_ms


def write_measured_trace(measured: Measurement, path: str | Path) -> None:
    """Write what each device did in the median iteration, beside what was predicted."""
    traces = [
        RankTrace(
            rank=number,
            stage=rank.stage,
            replica=rank.replica,
            zero_s=0.0,
            start_s=0.0,
            events=tuple(_events(measured, rank.stage, times)),
        )
        for number, (rank, times) in enumerate(measured.shown)
    ]
    write_trace(measured.plan, traces, path)


def _events(measured: Measurement, stage: int, times: IterationTimes) -> Iterator[Event]:
    """A rank's events, in seconds of the plan."""

    def moment_s(of_machine_s: float) -> float:
        return measured.moment_ms(of_machine_s) / 1e3

    for block in times.blocks:
        category = CATEGORIES[block.name[0]]
        yield Event(block.name, category, moment_s(block.start_s), moment_s(block.end_s))
    if measured.plan.stages[stage].num_replicas > 1:
        last_s = times.blocks[-1].end_s
        yield Event(ALL_REDUCE, ALL_REDUCE, moment_s(last_s), moment_s(times.reduce_end_s))
