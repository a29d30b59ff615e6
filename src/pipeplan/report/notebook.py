"""A plan as a notebook shows it: the figures, the timeline, the stages; no script."""

from pipeplan.errors import PipeplanError
from pipeplan.pipeline import Plan
from pipeplan.report.drawing import Drawing
from pipeplan.report.svg import safe_text, stage_colour, timeline_svg
from pipeplan.report.units import humanise_gb, humanise_ms

__all__ = ["notebook_html"]

MAX_ROWS = 32


def notebook_html(plan: Plan) -> str:
    """The HTML for a notebook cell; a plan that cannot run shows why."""
    from pipeplan.replaying import simulate

    try:
        drawing = Drawing(plan, simulate(plan))
    except PipeplanError as error:  # showing an object never fails, whatever it holds
        return f"<p><b>Plan</b> that cannot run: {safe_text(str(error), 300)}</p>"
    shares = drawing.shares
    facts = [
        f"<b>{humanise_ms(drawing.iteration_ms)}</b> an iteration",
        f"{100 * (1 - shares.compute):.1f} % bubble",
    ]
    bound = plan.predicted.bound if plan.predicted else None
    if bound:
        facts.append(bound.verdict(drawing.iteration_ms))
    facts.append(f"{humanise_gb(max(max(m.peak_gb) for m in drawing.memory))} at most")
    return (
        f'<div style="max-width:1000px"><p>{safe_text(plan.model.name)} on'
        f" {safe_text(plan.cluster.name)}: {', '.join(facts)}"
        f" (planner {safe_text(plan.planner)})</p>"
        f'<div style="overflow-x:auto">{timeline_svg(drawing, 980, title=False)}</div>'
        f"{_stages(drawing)}</div>"
    )


def _stages(drawing: Drawing) -> str:
    rows = []
    names = drawing.plan.model.layers
    for index, stage in enumerate(drawing.plan.stages[:MAX_ROWS]):
        figures = drawing.stages[index]
        first, last = names[stage.layers[0]].name, names[stage.layers[-1]].name
        devices = [drawing.plan.cluster.devices[device].name for device in stage.devices]
        shown = ", ".join(safe_text(name, 16) for name in devices[:4])
        more = f" and {len(devices) - 4} more" if len(devices) > 4 else ""
        rows.append(
            f'<tr><td style="color:{stage_colour(index)}"><b>{index}</b></td>'
            f"<td>{stage.layers.start} to {stage.layers.stop - 1}:"
            f" {safe_text(first)} to {safe_text(last)}</td><td>{shown}{more}</td>"
            f"<td>{figures.forward_ms + figures.backward_ms:.3g}</td>"
            f"<td>{100 * figures.utilisation:.1f} %</td></tr>"
        )
    left = drawing.num_stages - len(rows)
    note = f"<p>and {left} more stages</p>" if left else ""
    return (
        "<table><thead><tr><th>stage</th><th>layers</th><th>devices</th>"
        "<th>ms a microbatch</th><th>utilisation</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>{note}"
    )
