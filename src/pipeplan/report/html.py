"""A plan as one HTML file: no network, no framework, everything inside.

`page_content` says what can be read as text. The timeline and the memory are drawn by the script in
`assets/script` from the arrays of `page_data`. The plan itself is embedded once, for download.

Names from the inputs are untrusted. The template escapes them, JSON in script elements has no
`<`, and the script uses `textContent` or canvas text. A content security policy allows the page's
own script by its hash and nothing else.
"""

import base64
import gzip
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pipeplan.documents.files import plan_document
from pipeplan.documents.syntax import write_atomically
from pipeplan.pipeline import Plan
from pipeplan.report import page_content, page_memory
from pipeplan.report.analysis.items import WEIGHT
from pipeplan.report.analysis.plan_analysis import analyse
from pipeplan.report.cluster_picture import cluster_svg
from pipeplan.report.elements import Markup, join
from pipeplan.report.names import short_text
from pipeplan.report.page_beside import SideBySide, side_by_side
from pipeplan.report.page_comparison import comparison_table
from pipeplan.report.page_data import summary_note, timeline_data
from pipeplan.report.shared_link_picture import shared_links_rows
from pipeplan.report.templating import as_script, own_file, render

__all__ = ["render_report", "write_report"]

MAX_PLAIN_PLAN_BYTES = 1_000_000
"""A larger plan is embedded compressed; matrices of thousands of devices shrink to little."""
GZIP_LEVEL = 6
SCRIPTS = (
    "1-items.js",
    "2-view.js",
    "3-drawing.js",
    "4-surroundings.js",
    "5-memory.js",
    "6-words.js",
    "7-input.js",
    "8-downloads.js",
    "9-tables.js",
    "10-begin.js",
)


def write_report(
    plan: Plan,
    path: str | Path,
    comparison: Sequence[Mapping[str, Any]] | None = None,
    *,
    beside: SideBySide | None = None,
    others: Mapping[str, Plan] | None = None,
    warn: Callable[[str], None] | None = None,
) -> None:
    """Write the report of a plan as one HTML file.

    Args:
        plan: what to show.
        path: where to write it; `-` is the standard output.
        comparison: rows of a table beside the plan, such as other planners' results: plain values
            by column name. A row with an `infeasible_reason` is marked, and shows it.
        beside: plans whose timelines the page shows on one scale, such as before and after.
        others: plans by the name in the first column of `comparison`; a click shows the timeline.
        warn: is told of stale figures in the plan, which the page replaces.

    Examples:
        >>> import pipeplan as pp
        >>> plan = pp.plan(pp.zoo.model("vgg19"), pp.zoo.cluster("4x2-10g"), planner="spp")
        >>> pp.write_report(plan, "vgg19.html")
    """
    page = render_report(plan, comparison, beside=beside, others=others, warn=warn)
    write_atomically(path, page.encode())


def render_report(
    plan: Plan,
    comparison: Sequence[Mapping[str, Any]] | None = None,
    *,
    beside: SideBySide | None = None,
    others: Mapping[str, Plan] | None = None,
    warn: Callable[[str], None] | None = None,
) -> str:
    """The report as text."""
    analysis = analyse(plan, warn)
    claimed_ms = plan.predicted.iteration_ms if plan.predicted else None
    script = _script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return render(
        "page.html",
        script_hash=f"sha256-{digest}",
        model=short_text(plan.model.name, 60),
        cluster=short_text(plan.cluster.name, 60),
        css=own_file("page.css"),
        js=script,
        subtitle=page_content.subtitle(analysis),
        figures=page_content.key_figures(analysis, claimed_ms),
        summary_note=summary_note(analysis),
        last_microbatch=plan.microbatches - 1,
        whole_bar=page_content.bar_parts(analysis.shares),
        lane_noun="group" if len(analysis.groups) < analysis.num_stages else "stage",
        is_split=bool((analysis.items.kind_N == WEIGHT).any()),
        stage_bars=[page_content.bar_parts(shares) for shares in analysis.stage_shares],
        critical_path=page_content.critical_path_note(analysis),
        has_groups=analysis.has_groups,
        stage_columns=page_content.stage_columns(analysis),
        stage_rows=page_content.stage_rows(analysis),
        num_folded=page_content.num_folded(analysis),
        bottleneck=analysis.bottleneck.words,
        memory_bars=page_memory.memory_bars(analysis),
        memory_parts=page_memory.PART_WORDS,
        memory_caption=page_memory.memory_caption(analysis),
        beside=None if beside is None else side_by_side(beside),
        beside_heading="" if beside is None else short_text(beside.heading, 120),
        beside_words="" if beside is None else short_text(beside.words, 600),
        memory_label=page_content.memory_label(analysis),
        cluster_graph=cluster_svg(analysis),
        shared_links=shared_links_rows(analysis),
        is_sharing=bool(analysis.shared_use.slowed),
        comparison=comparison_table(comparison, others or {}) if comparison else None,
        footer=page_content.footer(plan),
        data=timeline_data(analysis),
        # A plan without figures stays as it was given; stale figures are not passed on.
        embedded_plan=_embed(analysis.plan if plan.predicted else plan),
    )


def _script() -> Markup:
    """The files of the script as one function, so that nothing of it is global by accident."""
    parts = [own_file(f"script/{name}") for name in SCRIPTS]
    return join([Markup('"use strict";\n(() => {\n'), *parts, Markup("})();")])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Embedded:
    """The content of the element that holds the plan, and its type."""

    mime_type: str
    content: Markup | str


def _embed(plan: Plan) -> _Embedded:
    text = as_script(msgspec.json.encode(plan_document(plan)).decode())
    if len(text) <= MAX_PLAIN_PLAN_BYTES:
        return _Embedded(mime_type="application/json", content=text)
    # Without a time stamp, so that the same plan gives the same file.
    packed = gzip.compress(text.encode(), GZIP_LEVEL, mtime=0)
    return _Embedded(mime_type="application/gzip", content=base64.b64encode(packed).decode())
