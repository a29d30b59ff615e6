"""A plan in the terminal: stages, figures, and a timeline that fits the window."""

from itertools import takewhile

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.text import Text

from pipeplan.pipeline import Plan, Stage
from pipeplan.report.analysis.items import INPUT, WEIGHT
from pipeplan.report.analysis.plan_analysis import PlanAnalysis
from pipeplan.report.names import short_text
from pipeplan.report.tables import Column, fitted_table
from pipeplan.report.text_timeline import ASCII, UNICODE, Glyphs, draw_text_lane
from pipeplan.report.units import humanise_gb, humanise_ms

__all__ = ["render_plan", "timeline_lanes"]

MAX_DEVICE_NAMES = 2
MAX_STAGES = 64
"""Of more stages the first and the last ones are shown."""
LONGEST_NAME = 24
LEAST_LAYERS = 9
"""How far the names of layers are cut off before the table goes on below."""
MAX_LISTED = 8
"""Of more stages or replicas a note names the first ones."""
MAX_SPLITS = 4
LETTER_STYLES = {
    **dict.fromkeys("F─-", "blue"),
    **dict.fromkeys("BI═=", "green"),
    **dict.fromkeys("W~", "magenta"),
}


def render_plan(analysis: PlanAnalysis, console: Console) -> RenderableType:
    """What the terminal shows of a plan."""
    notes = _notes(analysis)
    table = _stage_table(analysis, console)
    lanes = _timeline(analysis, console)
    return Group(_summary(analysis), "", table, *notes, "", *lanes)


def _few_of(count: int) -> list[int | None]:
    """The stages or groups to show; None stands for those that are left out."""
    if count <= MAX_STAGES:
        return list(range(count))
    half = MAX_STAGES // 2
    return [*range(half), None, *range(count - half, count)]


def _summary(analysis: PlanAnalysis) -> Text:
    """The figures that people ask for first."""
    plan, iteration_ms = analysis.plan, analysis.iteration_ms
    model, cluster = plan.model, plan.cluster
    samples = plan.microbatches * model.microbatch_size
    text = Text()
    text.append(f"{_short(model.name)} on {_short(cluster.name)}", style="bold")
    text.append(
        f": {plan.microbatches} microbatches of {model.microbatch_size},"
        f" {len(plan.stages)} stages{_group_words(analysis)} on {analysis.num_used_devices} of"
        f" {cluster.num_devices} devices\n"
    )
    text.append(f"iteration {humanise_ms(iteration_ms)}", style="bold")
    if iteration_ms:
        text.append(f", {samples / iteration_ms * 1e3:.4g} samples/s")
    text.append(f", {1 - analysis.shares.compute:.1%} bubble, {_peak(analysis)}\n")
    facts = [f"planner {_short(plan.planner)}"]
    if plan.predicted is not None:
        if analysis.verdict is not None:
            text.append(analysis.verdict, style="bold")
            text.append(" ")
        if plan.predicted.schedule_guarantee_ms is not None:
            guarantee = humanise_ms(plan.predicted.schedule_guarantee_ms)
            facts.append(f"guaranteed <= {guarantee}")
    text.append(f"({'; '.join([*facts, 'times in ms, memory in GB'])})")
    return text


def _group_words(analysis: PlanAnalysis) -> str:
    """How many groups have these stages, where that is another number."""
    count = len(analysis.groups)
    return f" in {count} group{'s' if count > 1 else ''}" if count < analysis.num_stages else ""


def _peak(analysis: PlanAnalysis) -> str:
    """The largest need of a device; one that does not fit goes before all others."""
    needs = [need for memory in analysis.memory for need in memory.needs]
    largest = max([need for need in needs if not need.fits] or needs, key=lambda need: need.peak_gb)
    if largest.limit_gb is None:
        return f"{humanise_gb(largest.peak_gb)} peak"
    return f"peak {largest.peak_gb:.3g} of {largest.limit_gb:g} GB"


def _stage_table(analysis: PlanAnalysis, console: Console) -> RenderableType:
    plan, costs = analysis.plan, analysis.shown_costs
    has_speeds = analysis.has_speeds
    has_groups = len(analysis.groups) < analysis.num_stages
    has_replicas = any(stage.num_replicas > 1 for stage in plan.stages)
    figures = [
        *(["speed"] if has_speeds else []),
        *("forward", "backward", "send", "return"),
        *(["reduce"] if has_replicas else []),
        "GB",
    ]
    columns = [
        Column(heading="stage", is_number=True),
        *([Column(heading="group", is_number=True)] if has_groups else []),
        Column(heading="layers", grows=True, least=LEAST_LAYERS),
        Column(heading="devices"),
        *(Column(heading=heading, is_number=True) for heading in figures),
    ]
    rows: list[list[str | Text]] = []
    for index in _few_of(analysis.num_stages):
        if index is None:
            rows.append([])
            continue
        stage = plan.stages[index]
        sends = index < len(plan.stages) - 1 and _sends(analysis, index)
        rows.append(
            [
                str(index),
                *([str(analysis.group_of(index))] if has_groups else []),
                _layer_names(plan, stage),
                _device_names(plan, stage),
                *([_speeds(plan, stage)] if has_speeds else []),
                _ms(costs.forward_ms_S[index]),
                _ms(costs.backward_ms_S[index]),
                _ms(costs.send_forward_ms_C[index]) if sends else "",
                _ms(costs.send_backward_ms_C[index]) if sends else "",
                *([_reduce(analysis, index)] if has_replicas else []),
                _memory(analysis, index),
            ]
        )
    return fitted_table(columns, rows, console.width)


def _sends(analysis: PlanAnalysis, index: int) -> bool:
    """Whether anything goes over a link behind a stage."""
    return analysis.group_of(index) != analysis.group_of(index + 1)


def _reduce(analysis: PlanAnalysis, index: int) -> str:
    is_replicated = analysis.plan.stages[index].num_replicas > 1
    return _ms(analysis.shown_costs.all_reduce_ms_S[index]) if is_replicated else ""


def _speeds(plan: Plan, stage: Stage) -> str:
    speeds = [plan.cluster.devices[device].speed for device in stage.devices]
    low, high = min(speeds), max(speeds)
    return f"{low:g}" if low == high else f"{low:g}..{high:g}"


def _memory(analysis: PlanAnalysis, index: int) -> Text:
    """What a device of the stage needs; with its group's first stage for all of them."""
    group = analysis.group_of(index)
    if analysis.groups[group].stages[0] != index:
        return Text("")
    memory = analysis.memory[group]
    peak = f"{max(memory.peak_gb):.3g}"
    if all(need.fits for need in memory.needs):
        return Text(peak)
    return Text(f"{peak}!", style="red")


def _notes(analysis: PlanAnalysis) -> list[Text]:
    """What the table has no column for: recomputation, uneven shares, memory that is short."""
    stages, options = analysis.plan.stages, analysis.plan.options
    notes = []
    if isinstance(options.get("global_batch"), int):
        notes.append(Text(_batch_note(analysis.plan)))
    recomputing = [index for index, stage in enumerate(stages) if stage.recompute]
    if recomputing:
        which = f"{_stage_list(recomputing)} recompute{'s' if len(recomputing) == 1 else ''}"
        notes.append(Text(f"{which} activations in the backward"))
    uneven = [index for index, stage in enumerate(stages) if stage.shares is not None]
    if uneven:
        split = [f"{index} {_split(analysis.plan, stages[index])}" for index in uneven[:MAX_SPLITS]]
        more = ", ..." if len(uneven) > MAX_SPLITS else ""
        notes.append(Text(f"samples of each device: stage {', '.join(split)}{more}"))
    if analysis.has_groups:
        notes += _group_notes(analysis)
    needs = [need for memory in analysis.memory for need in memory.needs]
    num_over = sum(not need.fits for need in needs)
    if num_over:
        devices = "device needs" if num_over == 1 else "devices need"
        notes.append(Text(f"! {num_over} {devices} more memory than there is", style="red"))
    return notes


def _group_notes(analysis: PlanAnalysis) -> list[Text]:
    """Buckets and the optimizer, which have no column."""
    notes = []
    cut = [n for n, stage in enumerate(analysis.plan.stages) if stage.gradient_buckets > 1]
    if cut:
        counts = [analysis.plan.stages[n].gradient_buckets for n in cut]
        low, high = min(counts), max(counts)
        how_many = f"{low}" if low == high else f"{low} to {high}"
        notes.append(Text(f"{_stage_list(cut)}: gradients in {how_many} buckets"))
    if analysis.plan.shard_optimizer:
        notes.append(Text("optimizer state sharded over the devices of a group"))
    return notes


def _batch_note(plan: Plan) -> str:
    """How the microbatches of a global batch came about."""
    size, profiled = plan.model.microbatch_size, plan.options.get("profiled_microbatch_size")
    batch = f"global batch {plan.microbatches * size}: {plan.microbatches} microbatches of {size}"
    if profiled == size or not isinstance(profiled, int):
        return f"{batch}, as profiled"
    if any(layer.at for layer in plan.model.layers):
        return f"{batch}; times as measured at several sizes, bytes scaled linearly from {profiled}"
    return f"{batch}; times and bytes scaled linearly from the profile's {profiled}"


def _stage_list(indices: list[int]) -> str:
    """`stages 0 to 13, 15`: runs of stages in short."""
    if len(indices) == 1:
        return f"stage {indices[0]}"
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    shown = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    more = f" and {len(shown) - MAX_LISTED} more" if len(shown) > MAX_LISTED else ""
    return f"stages {', '.join(shown[:MAX_LISTED])}{more}"


def _split(plan: Plan, stage: Stage) -> str:
    """`3+1`: how many samples each replica takes."""
    samples = [share * plan.model.microbatch_size for share in stage.device_shares]
    shown = "+".join(f"{count:.3g}" for count in samples[:MAX_LISTED])
    return f"{shown}+..." if len(samples) > MAX_LISTED else shown


def _ms(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 1000 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _layer_names(plan: Plan, stage: Stage) -> Text:
    first = _short(plan.model.layers[stage.layers[0]].name)
    last = _short(plan.model.layers[stage.layers[-1]].name)
    if len(stage.layers) == 1:
        return Text(f"{stage.layers.start}-{stage.layers.start} {first}")
    return Text(f"{stage.layers.start}-{stage.layers.stop - 1} {first}..{_own_end(first, last)}")


def _own_end(first: str, last: str) -> str:
    """The last name without the beginning that it shares: `encoder.7`, `encoder.13` gives `13`."""
    same = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    )
    return last[max(last.rfind(mark, 0, same) for mark in "./_:-") + 1 :]


def _device_names(plan: Plan, stage: Stage) -> Text:
    names = [_short(plan.cluster.devices[device].name) for device in stage.devices]
    if len(names) <= MAX_DEVICE_NAMES:
        return Text(" ".join(names))
    return Text(f"{names[0]}..{names[-1]} x{len(names)}")


def _short(name: str) -> str:
    """A name from the inputs, which may hold anything, as one short printable word."""
    return short_text(name, LONGEST_NAME, "...")


def _timeline(analysis: PlanAnalysis, console: Console) -> list[Text]:
    """The lanes, the scale of time below them, and the legend."""
    lanes = timeline_lanes(analysis, console)
    glyphs, label_width, _ = _lane_shape(analysis, console)
    is_split = bool(np.isin(analysis.items.kind_N, (INPUT, WEIGHT)).any())
    backward = (
        f"I0{glyphs.input_gradient} W0{glyphs.weight_gradient} input, weight gradient"
        if is_split
        else f"B0{glyphs.backward} backward"
    )
    legend = [
        f"F0{glyphs.forward} forward",
        backward,
        f"{glyphs.idle} idle",
        f"{glyphs.all_reduce} all-reduce",
    ]
    lines = _filled(legend, console.width - label_width)
    return [*lanes, *(Text(" " * label_width + line, style="dim") for line in lines)]


def _filled(parts: list[str], width: int) -> list[str]:
    """The parts in lines of at most this width; each part stays whole."""
    lines = [parts[0]]
    for part in parts[1:]:
        longer = f"{lines[-1]}   {part}"
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


def timeline_lanes(analysis: PlanAnalysis, console: Console, *, part: float = 1.0) -> list[Text]:
    """A line for each group and one for the time, in this part of the width."""
    glyphs, label_width, whole_width = _lane_shape(analysis, console)
    width = max(round(part * whole_width), 12)
    lines = []
    for index in _few_of(len(analysis.groups)):
        if index is None:
            lines.append(Text("...", style="dim"))
            continue
        line = Text(f"{_lane_noun(analysis)} {index}".ljust(label_width), no_wrap=True)
        style = ""
        for letter in draw_text_lane(analysis, index, width, glyphs):
            # A microbatch's number has the colour of the letter before it.
            style = style if letter.isdigit() else LETTER_STYLES.get(letter, "dim")
            line.append(letter, style=style)
        lines.append(line)
    end = humanise_ms(analysis.iteration_ms)
    scale = "0 ms".ljust(max(width - len(end), 5)) + end
    return [*lines, Text(" " * label_width + scale, style="dim")]


def _lane_noun(analysis: PlanAnalysis) -> str:
    return "group" if len(analysis.groups) < analysis.num_stages else "stage"


def _lane_shape(analysis: PlanAnalysis, console: Console) -> tuple[Glyphs, int, int]:
    """The characters, the width of the labels and that of the lanes."""
    unicode = "utf" in (console.encoding or "").lower()
    label_width = len(f"{_lane_noun(analysis)} {len(analysis.groups) - 1}") + 1
    return (UNICODE if unicode else ASCII), label_width, max(console.width - label_width, 20)
