"""A measured model in the terminal: a table of layers, and their sum beside the whole model."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeplan.measure.results import ModelMeasurement
from pipeplan.report.names import short_text
from pipeplan.report.units import (
    humanise_bytes,
    humanise_count,
    humanise_ms,
    percent,
    short_ms,
    signed_percent,
)

__all__ = ["render_model", "verdict"]

CLOSE = 0.10
"""Sums of layers within this part of the whole model are trusted."""
STEADY = 0.15
"""Wider spreads of a layer that matters deserve a word."""
MATTERS = 0.05
"""A layer matters from this part of all work on."""


def render_model(measured: ModelMeasurement) -> RenderableType:
    """The table of layers, and whether to trust it."""
    model = measured.profile
    title = Text()
    title.append(short_text(model.name), style="bold")
    how = (
        f"estimated for {measured.device}"
        if measured.is_estimate
        else f"median of {measured.num_runs} runs on {measured.device}"
    )
    title.append(f", microbatches of {model.microbatch_size}: {how} (times in ms)")
    tied = [Text(f"{' and '.join(map(short_text, group))} share weights") for group in model.tied]
    return Group(title, "", _table(measured), "", Text(verdict(measured), style="bold"), *tied)


def _table(measured: ModelMeasurement) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("layer", no_wrap=True)
    shown = ["forward", "backward", "weights", "FLOPs" if measured.is_estimate else "spread"]
    for heading in (*shown, "cut", "parameters", "kept"):
        table.add_column(heading, justify="right", no_wrap=True)
    figures = zip(
        measured.profile.layers,
        measured.spreads,
        measured.forward_flops,
        measured.backward_flops,
        strict=True,
    )
    for layer, spread, forward, backward in figures:
        table.add_row(
            short_text(layer.name),
            short_ms(layer.forward_ms),
            short_ms(layer.backward_ms),
            "" if layer.weight_grad_ms is None else short_ms(layer.weight_grad_ms),
            humanise_count(forward + backward) if measured.is_estimate else percent(spread),
            humanise_bytes(layer.output_bytes),
            humanise_bytes(layer.parameter_bytes),
            humanise_bytes(layer.activation_bytes),
        )
    return table


def verdict(measured: ModelMeasurement) -> str:
    """The sum of layers beside the whole model, and what it means, in one line."""
    line = (
        f"The layers together take {humanise_ms(measured.layers_ms)}, the whole model"
        f" {humanise_ms(measured.whole_ms)} ({signed_percent(measured.difference)})"
    )
    if abs(measured.difference) > CLOSE:
        return f"{line}: they differ; close other programs, or use larger microbatches."
    unsteady = [
        layer.name
        for layer, spread in zip(measured.profile.layers, measured.spreads, strict=True)
        if spread > STEADY and layer.forward_ms + layer.backward_ms > MATTERS * measured.layers_ms
    ]
    if unsteady:
        return f"{line}; {short_text(unsteady[0])} is unsteady: close other programs."
    return f"{line}."
