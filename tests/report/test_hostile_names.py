"""Names are text in the page, the pictures, the trace, the notebook and the terminal."""

import io
import json
from xml.etree import ElementTree

import pytest
from rich.console import Console

from hostile_names import NAMES, hostile_plan
from pages import Page
from pipeplan.documents.files import plan_document
from pipeplan.planning.comparison import Comparison, ComparisonRow
from pipeplan.report.analysis.plan_analysis import analyse
from pipeplan.report.cluster_picture import cluster_svg
from pipeplan.report.comparison import render_comparison
from pipeplan.report.html import render_report
from pipeplan.report.names import short_text
from pipeplan.report.notebook import notebook_html
from pipeplan.report.terminal import render_plan
from pipeplan.report.timeline_picture import timeline_svg
from pipeplan.report.trace import write_trace

SVG = "{http://www.w3.org/2000/svg}"
HARMLESS_NAME = "name"
OBEYED = {chr(n) for n in (*range(32), *range(127, 160), *range(0x2028, 0x202F))} - {"\n"}
"""What a terminal obeys, but for the line ends that tables have."""

every_name = pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())


def rows_named(name: str) -> list[dict[str, object]]:
    return [
        {"planner": name, "iteration_ms": 9.0, name: name},
        {"planner": name, "infeasible_reason": name},
    ]


def structure(page: Page) -> list[tuple[str, set[str]]]:
    """The elements with the names of their attributes, whatever the texts are."""
    return [(tag, set(attributes)) for tag, attributes in page.elements]


def parse(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)  # noqa: S314 - our own text, of a few kilobytes


def shapes(text: str) -> list[tuple[str, tuple[str, ...]]]:
    return [(e.tag.removeprefix(SVG), tuple(e.attrib)) for e in parse(text).iter()]


def test_there_are_thirty_names():
    assert len(set(NAMES.values())) == 30


@every_name
def test_the_page_has_the_same_elements_as_with_a_harmless_name(name):
    page = Page(render_report(hostile_plan(name), rows_named(name)))
    harmless = Page(render_report(hostile_plan(HARMLESS_NAME), rows_named(HARMLESS_NAME)))
    assert structure(page) == structure(harmless)
    assert len(page.scripts) == 3
    assert page.scripts[""] == harmless.scripts[""]
    assert len(page.text) < len(harmless.text) + 4_000


@every_name
def test_the_page_says_the_name_and_embeds_it_unchanged(name):
    plan = hostile_plan(name)
    page = Page(render_report(plan))
    assert " ".join(short_text(name, 60).split()) in " ".join(page.text.split())
    for script in ("timeline-data", "plan-data"):
        assert not set(page.scripts[script]) & set("<>&")
    data = json.loads(page.scripts["timeline-data"])
    names = [device["name"] for stage in data["stages"] for device in stage["devices"]]
    assert names == [device.name for device in plan.cluster.devices]
    embedded = json.loads(page.scripts["plan-data"])
    assert embedded == json.loads(json.dumps(plan_document(plan)))


@every_name
def test_pictures_have_the_same_shapes_as_with_a_harmless_name(name):
    analysis, harmless = analyse(hostile_plan(name)), analyse(hostile_plan(HARMLESS_NAME))
    drawn = str(timeline_svg(analysis))
    assert shapes(drawn) == shapes(str(timeline_svg(harmless)))
    assert short_text(f"{name}0", 13) in [e.text for e in parse(drawn).iter(f"{SVG}text")]
    cluster, plain = (f"<div>{cluster_svg(a)}</div>" for a in (analysis, harmless))
    assert shapes(cluster) == shapes(plain)
    assert len(drawn) < len(timeline_svg(harmless)) + 2_000


@every_name
def test_the_trace_holds_the_name_as_it_is(name, tmp_path):
    write_trace(hostile_plan(name), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [f"{name}0 (stage 0)", f"{name}1 (stage 0)", f"{name}2 (stage 1)"]


@every_name
def test_a_notebook_shows_it_as_text(name):
    shown, harmless = (notebook_html(hostile_plan(n)) for n in (name, HARMLESS_NAME))
    assert shapes(shown) == shapes(harmless)
    assert len(shown) < len(harmless) + 4_000


@every_name
def test_a_terminal_gets_nothing_to_obey(name):
    comparison = Comparison(
        model=name,
        cluster=name,
        microbatches=1,
        seed=0,
        reference=name,
        rows=(row_named(name, 1.0), row_named(name, None)),
    )
    for render in (
        lambda console: render_plan(analyse(hostile_plan(name)), console),
        lambda console: render_comparison(comparison, console),
    ):
        out = io.StringIO()
        console = Console(file=out, width=100, highlight=False, markup=False, emoji=False)
        console.print(render(console))
        assert not set(out.getvalue()) & OBEYED
        assert len(out.getvalue()) < 20_000


def row_named(name: str, iteration_ms: float | None) -> ComparisonRow:
    found = iteration_ms is not None
    return ComparisonRow(
        planner=name,
        iteration_ms=iteration_ms,
        speedup=1.0 if found else None,
        bubble_fraction=0.5 if found else None,
        peak_memory_gb=1.0 if found else None,
        fits_memory=True if found else None,
        gap=None,
        planning_s=0.1,
        infeasible_reason=None if found else name,
    )
