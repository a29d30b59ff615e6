"""A plan as a notebook shows it: the figures, the timeline, the stages; no script."""

from dataclasses import dataclass

from pipeplan.errors import PipeplanError
from pipeplan.pipeline import Plan
from pipeplan.report.analysis.plan_analysis import PlanAnalysis, analyse
from pipeplan.report.colours import stage_colour
from pipeplan.report.names import short_text
from pipeplan.report.templating import render
from pipeplan.report.timeline_picture import timeline_svg
from pipeplan.report.units import humanise_gb, humanise_ms, percent

__all__ = ["notebook_html"]

MAX_ROWS = 32
MAX_NAMES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A stage as its row shows it."""

    index: int
    colour: str
    layers: str
    devices: str
    work: str
    utilisation: str


def notebook_html(plan: Plan) -> str:
    """The HTML for a notebook cell; a plan that cannot run shows why."""
    try:
        analysis = analyse(plan)
    except PipeplanError as error:  # showing an object never fails, whatever it holds
        return render("notebook.html", problem=short_text(str(error), 300))
    rows = [_row(analysis, index) for index in range(min(analysis.num_stages, MAX_ROWS))]
    return render(
        "notebook.html",
        problem="",
        model=short_text(plan.model.name),
        cluster=short_text(plan.cluster.name),
        iteration=humanise_ms(analysis.iteration_ms),
        facts=", ".join(_facts(analysis)),
        planner=short_text(plan.planner),
        timeline=timeline_svg(analysis, 980, title=False),
        rows=rows,
        num_left=analysis.num_stages - len(rows),
    )


def _facts(analysis: PlanAnalysis) -> list[str]:
    facts = [f"{percent(1 - analysis.shares.compute)} bubble"]
    if analysis.verdict:
        facts.append(analysis.verdict)
    peak_gb = max(max(memory.peak_gb) for memory in analysis.memory)
    return [*facts, f"{humanise_gb(peak_gb)} at most"]


def _row(analysis: PlanAnalysis, index: int) -> _Row:
    plan, stage = analysis.plan, analysis.plan.stages[index]
    layers, costs = plan.model.layers, analysis.costs
    first, last = layers[stage.layers[0]].name, layers[stage.layers[-1]].name
    devices = [plan.cluster.devices[device].name for device in stage.devices[:MAX_NAMES]]
    num_left = stage.num_replicas - len(devices)
    return _Row(
        index=index,
        colour=stage_colour(index),
        layers=f"{stage.layers.start} to {stage.layers.stop - 1}:"
        f" {short_text(first)} to {short_text(last)}",
        devices=", ".join(short_text(name, 16) for name in devices)
        + (f" and {num_left} more" if num_left else ""),
        work=f"{float(costs.forward_ms_S[index] + costs.backward_ms_S[index]):.3g}",
        utilisation=percent(analysis.stage_shares[analysis.group_of(index)].compute),
    )
