"""A plan in the terminal: stages, figures, and a timeline that fits the window."""

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeplan.pipeline import Plan, Stage
from pipeplan.report.analysis.plan_analysis import PlanAnalysis
from pipeplan.report.names import short_text
from pipeplan.report.text_timeline import ASCII, UNICODE, draw_text_lane
from pipeplan.report.units import humanise_gb, humanise_ms

__all__ = ["render_plan"]

MAX_DEVICE_NAMES = 2
MAX_STAGES = 64
"""Of more stages the first and the last ones are shown."""
LONGEST_NAME = 24
LETTER_STYLES = {"F": "blue", "─": "blue", "-": "blue", "B": "green", "═": "green", "=": "green"}


def render_plan(analysis: PlanAnalysis, console: Console) -> RenderableType:
    """What the terminal shows of a plan."""
    return Group(_summary(analysis), "", _stage_table(analysis), "", *_timeline(analysis, console))


def _shown_stages(analysis: PlanAnalysis) -> list[int | None]:
    """The stages to show; None stands for those that are left out."""
    count = analysis.num_stages
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
        f" {len(plan.stages)} stages on {analysis.num_used_devices} of"
        f" {cluster.num_devices} devices\n"
    )
    text.append(f"iteration {humanise_ms(iteration_ms)}", style="bold")
    if iteration_ms:
        text.append(f", {samples / iteration_ms * 1e3:.4g} samples/s")
    if plan.predicted is not None:
        text.append(f", {plan.predicted.bubble_fraction:.1%} bubble")
        if plan.predicted.schedule_guarantee_ms is not None:
            text.append(f", guaranteed <= {humanise_ms(plan.predicted.schedule_guarantee_ms)}")
        text.append(f", {humanise_gb(max(plan.predicted.peak_memory_gb.values()))} peak")
        if analysis.verdict is not None:
            text.append(f"\n{analysis.verdict}", style="bold")
    text.append(f" (planner {_short(plan.planner)}; times in ms)")
    return text


def _stage_table(analysis: PlanAnalysis) -> Table:
    plan, costs = analysis.plan, analysis.costs
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", expand=True)
    table.add_column("stage", justify="right", no_wrap=True, min_width=5)
    table.add_column("layers", no_wrap=True, ratio=1)
    table.add_column("devices", no_wrap=True)
    for heading in ("forward", "backward", "send", "return", "reduce"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))
    for index in _shown_stages(analysis):
        if index is None:
            table.add_row("...")
            continue
        stage = plan.stages[index]
        last = index == len(plan.stages) - 1
        table.add_row(
            str(index),
            _layer_names(plan, stage),
            _device_names(plan, stage),
            _ms(costs.forward_ms_S[index]),
            _ms(costs.backward_ms_S[index]),
            "" if last else _ms(costs.send_forward_ms_C[index]),
            "" if last else _ms(costs.send_backward_ms_C[index]),
            _ms(costs.all_reduce_ms_S[index]) if stage.num_replicas > 1 else "",
        )
    return table


def _ms(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 1000 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _layer_names(plan: Plan, stage: Stage) -> Text:
    first = _short(plan.model.layers[stage.layers[0]].name)
    last = _short(plan.model.layers[stage.layers[-1]].name)
    names = first if len(stage.layers) == 1 else f"{first}..{last}"
    return Text(f"{stage.layers.start}-{stage.layers.stop - 1} {names}")


def _device_names(plan: Plan, stage: Stage) -> Text:
    names = [_short(plan.cluster.devices[device].name) for device in stage.devices]
    if len(names) <= MAX_DEVICE_NAMES:
        return Text(" ".join(names))
    return Text(f"{names[0]}..{names[-1]} x{len(names)}")


def _short(name: str) -> str:
    """A name from the inputs, which may hold anything, as one short printable word."""
    return short_text(name, LONGEST_NAME, "...")


def _timeline(analysis: PlanAnalysis, console: Console) -> list[Text]:
    unicode = "utf" in (console.encoding or "").lower()
    glyphs = UNICODE if unicode else ASCII
    label_width = len(f"stage {analysis.num_stages - 1}") + 1
    width = max(console.width - label_width, 20)
    lines = []
    for index in _shown_stages(analysis):
        if index is None:
            lines.append(Text("...", style="dim"))
            continue
        line = Text(f"stage {index}".ljust(label_width), no_wrap=True)
        style = ""
        for letter in draw_text_lane(analysis, index, width, glyphs):
            # A microbatch's number has the colour of the letter before it.
            style = style if letter.isdigit() else LETTER_STYLES.get(letter, "dim")
            line.append(letter, style=style)
        lines.append(line)
    end = humanise_ms(analysis.iteration_ms)
    lines.append(Text(" " * label_width + "0 ms".ljust(width - len(end)) + end, style="dim"))
    legend = (
        f"F0{glyphs.forward} forward   B0{glyphs.backward} backward   "
        f"{glyphs.idle} idle   {glyphs.all_reduce} all-reduce"
    )
    lines.append(Text(" " * label_width + legend, style="dim"))
    return lines
