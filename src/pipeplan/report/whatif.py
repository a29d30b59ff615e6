"""What a change costs, in the terminal: the plans side by side, and the outlook as a table."""

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from pipeplan.checker import memory_excesses
from pipeplan.documents.text import printable
from pipeplan.pipeline import Plan
from pipeplan.planning.whatif.outlook import Outlook, Prospect
from pipeplan.planning.whatif.question import WhatIf
from pipeplan.report.analysis.plan_analysis import PlanAnalysis, analyse
from pipeplan.report.names import short_text
from pipeplan.report.page_beside import SideBySide
from pipeplan.report.tables import Column, fitted_table
from pipeplan.report.terminal import timeline_lanes
from pipeplan.report.units import humanise_gb, humanise_ms, signed_percent

__all__ = ["beside", "render_outlook", "render_whatif", "verdict"]

LONGEST_NAME = 24
BAR_WIDTH = 12
PROSPECT_HEADINGS = ("this plan", "change", "a new plan", "change")
LEAST_CHANGE = 5e-4
"""A smaller change would be shown as 0.0 %."""
MAX_LANES = 16
"""With more stages the timelines are not drawn; the report has them."""


def verdict(answer: WhatIf) -> str:
    """The answer in one or two sentences."""
    if answer.replanned is None:
        reason = answer.replanned_problem or "no plan exists"
        return f"No plan was found for the changed cluster: {printable(reason)}"
    left = _compared(answer.cost_replanned)
    if answer.kept is None or answer.kept_problem:
        does = "run any more" if answer.kept is None else "fit any more"
        if answer.kept is not None and memory_excesses(answer.before):
            does = "fit, and did not before"
        return f"The old plan does not {does}. With a new plan an iteration is {left}."
    if answer.is_kept_best:
        return f"An iteration is {left}. The old plan is still the best one known."
    won = 100 * (answer.won_back or 0.0)
    return (
        f"With the old plan an iteration is {_compared(answer.cost)}. A new plan makes that"
        f" {won:.1f} % shorter: {left}."
    )


def _compared(change: float | None) -> str:
    """`7.7 % longer than today`."""
    if change is None or abs(change) < LEAST_CHANGE:
        return "as long as today"
    return f"{100 * abs(change):.1f} % {'longer' if change > 0 else 'shorter'} than today"


def beside(answer: WhatIf) -> SideBySide:
    """The plans of the question for the page."""
    plans = {"Today": answer.before}
    if answer.kept is not None:
        plans["The old plan after the change"] = answer.kept
    if answer.replanned is not None and not answer.is_kept_best:
        plans["A new plan"] = answer.replanned
    problem = f" Old plan: {answer.kept_problem}." if answer.kept_problem else ""
    return SideBySide(
        heading=f"What if {answer.changes.title}", words=verdict(answer) + problem, plans=plans
    )


def render_whatif(answer: WhatIf, console: Console) -> RenderableType:
    """Today's plan, the same plan after the change, and a new plan: figures and timelines."""
    before = answer.before
    title = Text()
    title.append(f"{_short(before.model.name)} on {_short(before.cluster.name)}", style="bold")
    title.append(f": what if {printable(answer.changes.title)}")
    parts: list[RenderableType] = [title, "", _plans_table(answer, console), ""]
    parts.append(Text(verdict(answer), style="bold"))
    if answer.kept_problem:
        parts.append(Text(f"Old plan: {printable(answer.kept_problem)}", style="red"))
    return Group(*parts, *_timelines(answer, console))


def _plans_table(answer: WhatIf, console: Console) -> RenderableType:
    rows: list[tuple[str, Plan | None, float | None]] = [
        ("today", answer.before, None),
        ("old plan, changed", answer.kept, answer.cost),
    ]
    if not answer.is_kept_best:
        rows.append(("new plan", answer.replanned, answer.cost_replanned))
    longest_ms = max(plan.iteration_ms for _, plan, _ in rows if plan is not None)
    bar = "█" if console.encoding.startswith("utf") else "#"
    figures = ("change", "bubble", "memory", "stages", "devices")
    columns = [
        Column(heading=""),
        Column(heading="iteration", is_number=True),
        Column(heading="", is_extra=True),
        *(Column(heading=heading, is_number=True) for heading in figures),
    ]
    lines: list[list[str | Text]] = []
    for name, plan, change in rows:
        if plan is None:
            lines.append([name, "stops", *([""] * (len(columns) - 2))])
            continue
        predicted = plan.require_predicted()
        length = round(BAR_WIDTH * plan.iteration_ms / longest_ms) if longest_ms else 0
        memory = humanise_gb(max(predicted.peak_memory_gb.values()))
        is_over = bool(memory_excesses(plan))
        lines.append(
            [
                name,
                humanise_ms(plan.iteration_ms),
                Text(bar * max(1, length), style="blue"),
                "" if change is None else signed_percent(change),
                f"{predicted.bubble_fraction:.1%}",
                Text(f"{memory}!", style="red") if is_over else memory,
                str(plan.num_stages),
                str(plan.num_used_devices),
            ]
        )
    return fitted_table(columns, lines, console.width)


def _timelines(answer: WhatIf, console: Console) -> list[Text]:
    """The old and the new plan on the changed cluster, both on one scale of time."""
    shown: Sequence[tuple[str, Plan | None]] = [("old plan, changed", answer.kept)]
    if not answer.is_kept_best:
        shown = [*shown, ("new plan", answer.replanned)]
    drawn = [(name, analyse(plan)) for name, plan in shown if plan is not None]
    drawn = [(name, analysis) for name, analysis in drawn if analysis.num_stages <= MAX_LANES]
    longest_ms = max((analysis.iteration_ms for _, analysis in drawn), default=0.0)
    lines: list[Text] = []
    for name, analysis in drawn:
        lines += [Text(""), Text(name, style="bold"), *_lanes(analysis, console, longest_ms)]
    return lines


def _lanes(analysis: PlanAnalysis, console: Console, longest_ms: float) -> list[Text]:
    part = analysis.iteration_ms / longest_ms if longest_ms else 1.0
    return timeline_lanes(analysis, console, part=part)


def render_outlook(found: Outlook, console: Console) -> RenderableType:
    """What could happen, and what more hardware would buy."""
    before = found.before
    title = Text()
    title.append(f"{_short(before.model.name)} on {_short(before.cluster.name)}", style="bold")
    title.append(f": {humanise_ms(before.iteration_ms)} an iteration today")
    harm = [each for each in found.prospects if each.kind.is_harm]
    gain = [each for each in found.prospects if not each.kind.is_harm]
    parts: list[RenderableType] = [title]
    for heading, prospects in (("what if", harm), ("with", gain)):
        if prospects:
            parts += ["", _prospects_table(heading, prospects, before.iteration_ms, console)]
    if any(each.kept_problem for each in harm):
        parts += ["", Text("stops: the plan needs a device, a link or memory that is not there")]
    options = next((each.options for each in harm if each.options), None)
    if options:
        parts += ["", Text(f"look closer: pipeplan whatif PLAN {printable(options)}", style="dim")]
    return Group(*parts)


def _prospects_table(
    heading: str, prospects: Sequence[Prospect], before_ms: float, console: Console
) -> RenderableType:
    columns = [
        Column(heading=heading, least=36),
        *(Column(heading=name, is_number=True) for name in PROSPECT_HEADINGS),
    ]
    lines = []
    for each in prospects:
        stops = each.kept_ms is None or (each.kind.is_harm and each.kept_problem)
        kept = ["stops", ""] if stops else _time_cells(each.kept_ms, before_ms)
        new = (
            ["none", ""] if each.replanned_ms is None else _time_cells(each.replanned_ms, before_ms)
        )
        lines.append([printable(each.what), *kept, *new])
    return fitted_table(columns, lines, console.width)


def _time_cells(time_ms: float | None, before_ms: float) -> list[str]:
    change = (time_ms or 0.0) / before_ms - 1 if before_ms else 0.0
    return [humanise_ms(time_ms or 0.0), signed_percent(change)]


def _short(name: str) -> str:
    return short_text(name, LONGEST_NAME, "...")
