"""A plan as one HTML file: no network, no framework, everything inside.

What can be read as text is written here; the timeline and the memory are drawn by `assets/page.js`
from arrays of numbers, base64 in one JSON element. The plan itself is embedded once, for download.

Names from the inputs are untrusted. They become escaped text in HTML, `<`-free JSON in script
elements, and `textContent` or canvas text in the script; a content security policy allows
the page's own script by its hash and nothing else.
"""

import base64
import gzip
import hashlib
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeplan.documents.files import plan_document
from pipeplan.documents.syntax import write_atomically
from pipeplan.pipeline import BoundScope, Kind, Plan, Stage
from pipeplan.replaying import simulate
from pipeplan.report.drawing import Drawing, Shares, StageFigures
from pipeplan.report.svg import cluster_svg, safe_text, stage_colour
from pipeplan.report.units import humanise_gb, humanise_ms

__all__ = ["render_report", "write_report"]

MAX_PLAIN_PLAN_BYTES = 1_000_000
"""A larger plan is embedded compressed; matrices of thousands of devices shrink to nothing."""
MAX_NAMES = 6
"""Devices of a stage that its row names."""
PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
SHARE_NAMES = {
    "compute": "computing",
    "communication": "waiting for links",
    "all_reduce": "all-reduce",
    "bubble": "idle otherwise",
}
SCOPES = {
    BoundScope.ANY: "no plan is faster",
    BoundScope.EVEN_SHARES: "no plan with even shares is faster",
}
REASON_KEYS = ("infeasible_reason", "reason", "error")
"""Where a comparison row says why there is no plan."""


def write_report(
    plan: Plan, path: str | Path, comparison: Sequence[Mapping[str, Any]] | None = None
) -> None:
    """Write the report of a plan as one HTML file.

    Args:
        plan: what to show.
        path: where to write it.
        comparison: rows of a table beside the plan, such as other planners' results: plain values
            by column name. A row with an `infeasible_reason` is marked, and shows it.
    """
    write_atomically(path, render_report(plan, comparison).encode())


def render_report(plan: Plan, comparison: Sequence[Mapping[str, Any]] | None = None) -> str:
    """The report as text."""
    drawing = Drawing(plan, simulate(plan))
    assets = files("pipeplan.report") / "assets"
    page, css, js = (
        (assets / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")
    )
    digest = base64.b64encode(hashlib.sha256(js.encode()).digest()).decode()
    plan_type, plan_text = _embedded_plan(plan)
    model, cluster = safe_text(plan.model.name, 60), safe_text(plan.cluster.name, 60)
    values = {
        "script_hash": f"sha256-{digest}",
        "title": f"{model} on {cluster}",
        "css": css,
        "js": js,
        "model": model,
        "cluster": cluster,
        "subtitle": _subtitle(drawing),
        "figures": "".join(_figures(drawing)),
        "last_microbatch": str(plan.microbatches - 1),
        "shares": _shares(drawing),
        "stages": _stage_table(drawing),
        "memory_label": f"Memory over time, at most {_peak(drawing)[1]}",
        "cluster_graph": cluster_svg(drawing),
        "comparison": _comparison(comparison) if comparison else "",
        "footer": _footer(plan),
        "data": _script_json(_timeline_data(drawing)),
        "plan_type": plan_type,
        "plan": plan_text,
    }
    # In one pass, so that a name that looks like a placeholder stays a name.
    return PLACEHOLDER.sub(lambda match: values[match[1]], page)


# --------------------------------------------------------------------- for the script


def _script_json(document: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _embedded_plan(plan: Plan) -> tuple[str, str]:
    """The type and the content of the element that holds the plan."""
    text = _script_json(plan_document(plan))
    if len(text) <= MAX_PLAIN_PLAN_BYTES:
        return "application/json", text
    packed = gzip.compress(text.encode(), mtime=0)  # the same plan gives the same file
    return "application/gzip", base64.b64encode(packed).decode()


def _timeline_data(drawing: Drawing) -> dict[str, Any]:
    """Everything that the script draws; the ends of items follow from their starts."""
    plan, timeline = drawing.plan, drawing.timeline
    items = drawing.items
    starts_ms = np.array([item.start_ms for item in items], dtype="<f8")
    blocks, transfers = drawing.first_transfer, drawing.first_all_reduce
    order = [
        item.microbatch if item.kind is Kind.FORWARD else -1 - item.microbatch
        for item in items[:blocks]
    ]
    file_name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{plan.model.name}-{plan.cluster.name}")
    return {
        "iteration_ms": drawing.iteration_ms,
        "microbatches": plan.microbatches,
        "file_name": file_name.strip("-.")[:80] or "plan",
        "phases": [
            {"name": phase.name, "start_ms": phase.start_ms, "end_ms": phase.end_ms}
            for phase in drawing.phases
        ],
        "last": drawing.last_item,
        "stages": [
            {
                "colour": stage_colour(index),
                "forward_ms": figures.forward_ms,
                "backward_ms": figures.backward_ms,
                "send_ms": figures.send_ms,
                "return_ms": figures.return_ms,
                "all_reduce": [reduce.start_ms, reduce.end_ms],
                "devices": _device_data(drawing, index),
            }
            for index, (figures, reduce) in enumerate(
                zip(drawing.stages, timeline.all_reduces, strict=True)
            )
        ],
        "order": _base64(np.array(order, dtype="<i4")),
        "block_start_ms": _base64(starts_ms[:blocks]),
        "sent": _base64(np.array([i.microbatch for i in items[blocks:transfers]], dtype="<i4")),
        "transfer_start_ms": _base64(starts_ms[blocks:transfers]),
        "waits": _base64(np.array(drawing.waited_for, dtype="<i4")),
    }


def _device_data(drawing: Drawing, index: int) -> list[dict[str, Any]]:
    memory = drawing.memory[index]
    return [
        {
            "name": drawing.plan.cluster.devices[device].name,
            "index": device,
            "pace": drawing.device_paces[index][position],
            "base_gb": memory.base_gb[position],
            "per_microbatch_gb": memory.per_microbatch_gb[position],
            "peak_gb": memory.peak_gb[position],
            "limit_gb": memory.limit_gb[position],
        }
        for position, device in enumerate(drawing.plan.stages[index].devices)
    ]


def _base64(numbers: NDArray[Any]) -> str:
    return base64.b64encode(numbers.tobytes()).decode()


# -------------------------------------------------------------------------- for people


def _subtitle(drawing: Drawing) -> str:
    plan = drawing.plan
    unused = plan.cluster.num_devices - drawing.num_used_devices
    spare = f", {unused} unused" if unused else ""
    return (
        f"{_count(plan.microbatches, 'microbatch', 'microbatches')} of"
        f" {_count(plan.model.microbatch_size, 'sample', 'samples')},"
        f" {_count(drawing.num_stages, 'stage', 'stages')} on"
        f" {_count(drawing.num_used_devices, 'device', 'devices')}{spare}"
    )


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _figures(drawing: Drawing) -> list[str]:
    plan, iteration_ms = drawing.plan, drawing.iteration_ms
    samples = plan.microbatches * plan.model.microbatch_size
    rate = 1e3 * samples / iteration_ms if iteration_ms else math.inf
    bound = plan.predicted.bound if plan.predicted else None
    guarantee_ms = plan.predicted.schedule_guarantee_ms if plan.predicted else None
    claimed_ms = plan.predicted.iteration_ms if plan.predicted else iteration_ms
    agrees = math.isclose(claimed_ms, iteration_ms, rel_tol=1e-6, abs_tol=1e-6)
    peak, peak_text, over = _peak(drawing)
    figures = [
        _figure(
            "iteration",
            humanise_ms(iteration_ms),
            "simulated" if agrees else f"the plan says {humanise_ms(claimed_ms)}",
            "lead" if agrees else "lead bad",
        ),
        _figure("samples a second", _rate(rate), f"{samples} an iteration"),
        _figure("bubble", _percent(1 - drawing.shares.compute), "of devices' time not computing"),
    ]
    if bound:
        figures.append(
            _figure(
                "lower bound",
                humanise_ms(bound.lower_bound_ms),
                f"{bound.verdict(iteration_ms)}; {SCOPES[bound.scope]}",
            )
        )
    else:
        figures.append(_figure("lower bound", "none", "not computed by this planner"))
    if guarantee_ms is None:
        figures.append(_figure("guarantee", "none", "only for the PE schedule"))
    else:
        figures.append(
            _figure("guarantee", humanise_ms(guarantee_ms), "the schedule's theorem: no longer")
        )
    figures.append(_figure("peak memory", peak, peak_text, "bad" if over else ""))
    return figures


def _figure(what: str, value: str, more: str, kind: str = "") -> str:
    """`value` and `more` are safe already."""
    return (
        f'<div class="figure {kind}"><div class="what">{what}</div>'
        f'<div class="value">{value}</div><div class="more">{more}</div></div>'
    )


def _peak(drawing: Drawing) -> tuple[str, str, bool]:
    """The most that a device needs, in words, and whether any has less than it needs."""
    needs = [
        (need_gb, limit_gb, device)
        for stage, memory in zip(drawing.plan.stages, drawing.memory, strict=True)
        for need_gb, limit_gb, device in zip(
            memory.peak_gb, memory.limit_gb, stage.devices, strict=True
        )
    ]
    excesses = [n for n in needs if n[1] is not None and n[0] > n[1] * (1 + 1e-9)]
    need_gb, limit_gb, device = max(excesses or needs, key=lambda need: need[0])
    name = safe_text(drawing.plan.cluster.devices[device].name)
    room = "no limit" if limit_gb is None else f"it has {humanise_gb(limit_gb)}"
    more = f"; {len(excesses)} do not fit" if excesses else ""
    return humanise_gb(need_gb), f"on {name}, {room}{more}", bool(excesses)


def _rate(rate: float) -> str:
    if math.isinf(rate):
        return "unlimited"
    return f"{rate:.4g}" if rate < 1e4 else f"{rate:.0f}"


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _shares(drawing: Drawing) -> str:
    """The four parts as one bar, in words, and as a bar for each stage."""
    shares = drawing.shares
    legend = "".join(
        f'<li class="{name}"><b>{_percent(getattr(shares, name))}</b> {words}</li>'
        for name, words in SHARE_NAMES.items()
    )
    path = drawing.critical_shares
    rows = "".join(
        f'<div class="bar-row"><span class="who">stage {index}</span>{_bar(figures.shares)}</div>'
        for index, figures in enumerate(drawing.stages)
    )
    if drawing.num_stages > 24:
        rows = f"<details><summary>By stage</summary>{rows}</details>"
    return (
        f'{_bar(shares, "big")}<ul class="parts">{legend}</ul>{rows}'
        f'<p class="note">The critical path, {humanise_ms(drawing.iteration_ms)} without a gap:'
        f" {_percent(path.compute)} computing, {_percent(path.communication)} on links,"
        f" {_percent(path.all_reduce)} all-reduce.</p>"
    )


def _bar(shares: Shares, kind: str = "") -> str:
    parts = []
    for name, words in SHARE_NAMES.items():
        share = getattr(shares, name)
        label = _percent(share) if kind and share > 0.07 and name != "bubble" else ""
        parts.append(
            f'<span class="{name}" style="width:{100 * share:.3f}%"'
            f' title="{words} {_percent(share)}">{label}</span>'
        )
    return f'<div class="bar {kind}">{"".join(parts)}</div>'


def _stage_table(drawing: Drawing) -> str:
    headings = (
        ("stage", ""),
        ("layers", ""),
        ("devices", ""),
        ("forward", "number"),
        ("backward", "number"),
        ("send / return", "number"),
        ("all-reduce", "number"),
        ("utilisation", "number"),
        ("memory", "number"),
        ("why cut behind it", ""),
    )
    head = "".join(f'<th class="{kind}" scope="col">{name}</th>' for name, kind in headings)
    rows = "".join(
        _stage_row(drawing, index, stage, figures)
        for index, (stage, figures) in enumerate(
            zip(drawing.plan.stages, drawing.stages, strict=True)
        )
    )
    return (
        f'<div class="table"><table class="stages-table"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
        '<p class="note">Times in ms for one microbatch; the all-reduce once an iteration.</p>'
    )


def _stage_row(drawing: Drawing, index: int, stage: Stage, figures: StageFigures) -> str:
    layers = drawing.plan.model.layers
    first, last = safe_text(layers[stage.layers[0]].name), safe_text(layers[stage.layers[-1]].name)
    span = f"{stage.layers.start} to {stage.layers.stop - 1}"
    names = f"{first} to {last}"
    if len(stage.layers) == 1:
        span, names = str(stage.layers.start), first
    memory = drawing.memory[index]
    over = any(
        limit is not None and peak > limit * (1 + 1e-9)
        for peak, limit in zip(memory.peak_gb, memory.limit_gb, strict=True)
    )
    peak = f'<span class="{"over" if over else ""}">{humanise_gb(max(memory.peak_gb))}</span>'
    sends = ""
    if figures.send_ms is not None and figures.return_ms is not None:
        sends = f"{_ms(figures.send_ms)} / {_ms(figures.return_ms)}"
    cut = figures.cut
    why = f'{cut.reason}<span class="small">{cut.evidence}</span>' if cut else ""
    chip = f'<span class="chip" style="background:{stage_colour(index)}">{index}</span>'
    use = (
        f'{_percent(figures.utilisation)}<span class="meter">'
        f'<i style="width:{100 * figures.utilisation:.1f}%"></i></span>'
    )
    reduce = _ms(figures.all_reduce_ms) if stage.num_replicas > 1 else ""
    held = f'<span class="small">{max(memory.in_flight)} in flight</span>'
    cells = (
        ("stage", "", chip),
        ("layers", "layers", f'{span}<span class="small">{names}</span>'),
        ("devices", "devices", _devices(drawing, stage)),
        ("forward", "number", _ms(figures.forward_ms)),
        ("backward", "number", _ms(figures.backward_ms)),
        ("send / return", "number", sends),
        ("all-reduce", "number", reduce),
        ("utilisation", "number", use),
        ("memory", "number", f"{peak}{held}"),
        ("why cut behind it", "cut", why),
    )
    tds = "".join(
        f'<td class="{kind}" data-title="{title}">{cell}</td>' for title, kind, cell in cells
    )
    return f"<tr>{tds}</tr>"


def _devices(drawing: Drawing, stage: Stage) -> str:
    devices = drawing.plan.cluster.devices
    names = [safe_text(devices[device].name, 16) for device in stage.devices]
    if stage.shares is not None:
        names = [
            f"{name} ({_percent(share)})" for name, share in zip(names, stage.shares, strict=True)
        ]
    shown = " ".join(names[:MAX_NAMES])
    if len(names) > MAX_NAMES:
        shown = f"{names[0]} to {names[-1]}"
    notes = []
    if len(names) > 1:
        notes.append(f"{len(names)} replicas")
    if stage.recompute:
        notes.append("recomputes")
    small = f'<span class="small">{", ".join(notes)}</span>' if notes else ""
    return f"{shown}{small}"


def _ms(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 1000 else f"{ms:.1f}" if ms >= 10 else f"{ms:.3g}"


def _comparison(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of plain values as a table; what has no plan says why."""
    columns = [
        column
        for column in dict.fromkeys(name for row in rows for name in row)
        if column not in (*REASON_KEYS, "feasible")
        and any(row.get(column) is not None for row in rows)
    ]
    numeric = {c for c in columns if all(_is_number(row.get(c)) for row in rows if c in row)}
    times = [row.get("iteration_ms") for row in rows if not _reason(row)]
    best = min((time for time in times if _is_number(time) and time is not None), default=None)
    head = "".join(
        f'<th scope="col" class="{"number" if c in numeric else ""}">{_heading(c)}</th>'
        for c in columns
    )
    body = []
    for row in rows:
        reason = _reason(row)
        cells = [
            f'<td class="{"number" if c in numeric else ""}">{_cell(c, row.get(c))}</td>'
            for c in columns
        ]
        if reason:
            given = [k for k, c in enumerate(columns) if row.get(c) is not None]
            keep = given[0] + 1 if given else 0
            mark = f'<span class="mark">infeasible</span> {html.escape(reason)}'
            cells = [*cells[:keep], f'<td colspan="{max(len(columns) - keep, 1)}">{mark}</td>']
        is_best = best is not None and not reason and row.get("iteration_ms") == best
        kind = "infeasible" if reason else "best" if is_best else ""
        body.append(f'<tr class="{kind}">{"".join(cells)}</tr>')
    return (
        '<section aria-labelledby="comparison-title"><h2 id="comparison-title">Comparison</h2>'
        f'<div class="table"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div></section>"
    )


def _reason(row: Mapping[str, Any]) -> str:
    """Why there is no plan; empty where there is one."""
    given = next((str(row[key]) for key in REASON_KEYS if row.get(key)), "")
    return given or ("no plan exists" if row.get("feasible") is False else "")


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _heading(column: str) -> str:
    name, unit = column.removeprefix("num_"), ""
    for suffix, words in (("_ms", "ms"), ("_gb", "GB"), ("_s", "s"), ("_fraction", "%")):
        if column.endswith(suffix):
            name, unit = name.removesuffix(suffix), f" ({words})"
            break
    return safe_text(name.replace("_", " "), 40) + unit


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if column == "gap":
            return _percent(value)
        return f"{100 * value:.1f}" if column.endswith("_fraction") else f"{value:.4g}"
    return safe_text(str(value), 80)


def _footer(plan: Plan) -> str:
    model, cluster = plan.model, plan.cluster
    version = f"pipeplan {safe_text(plan.version)}" if plan.version else "pipeplan"
    return (
        f"Planner {safe_text(plan.planner)}, seed {plan.seed}, {version}. Model"
        f" {safe_text(model.name, 60)}: {_count(model.num_layers, 'layer', 'layers')}. Cluster"
        f" {safe_text(cluster.name, 60)}: {_count(cluster.num_devices, 'device', 'devices')},"
        f" {cluster.duplex} duplex."
    )
