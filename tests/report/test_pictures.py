from xml.etree import ElementTree

import pytest

from instances import even_plan
from pipeplan.errors import InputError
from pipeplan.pipeline import Plan
from pipeplan.report import picture
from pipeplan.report.analysis.plan_analysis import analyse
from pipeplan.report.cluster_picture import cluster_svg
from pipeplan.report.notebook import notebook_html
from pipeplan.report.timeline_picture import tick_step_ms, timeline_svg

SVG = "{http://www.w3.org/2000/svg}"


def parse(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)  # noqa: S314 - our own text, of a few kilobytes


def test_every_picture_is_well_formed(random_analyses):
    for analysis in random_analyses:
        root = parse(timeline_svg(analysis))
        assert root.tag == f"{SVG}svg"
        parse(f"<div>{cluster_svg(analysis)}</div>")


def test_blocks_stand_where_the_timeline_says(analysis):
    root = parse(timeline_svg(analysis, 1000))
    rects = [e for e in root.iter(f"{SVG}rect") if e.get("class") == "pp-lane"]
    lanes = [e for e in rects if e.get("rx") is None]  # the legend's has round corners
    assert len(lanes) == 5  # two replicas, both directions, one device
    forward = next(e for e in root.iter(f"{SVG}path") if e.get("class") == "pp-forward")
    # F0 and F1 from 96 on, 888 pixels for 14 ms, less the gap between blocks.
    assert forward.get("d").startswith("M96.0 62h62.6v20h-62.6zM159.4 62h62.6")


def test_a_picture_does_not_grow_with_the_microbatches():
    small, large = (len(timeline_svg(analyse(even_plan(8, m)))) for m in (64, 2000))
    assert large < 3 * small + 100_000


def test_hostile_names_are_text(hostile_plan):
    analysis = analyse(hostile_plan)
    for drawn in (timeline_svg(analysis), f"<div>{cluster_svg(analysis)}</div>"):
        root = parse(drawn)
        tags = {element.tag.removeprefix(SVG) for element in root.iter()}
        assert not tags & {"script", "img", "b"}
        assert not [a for e in root.iter() for a in e.attrib if a.startswith("on")]
    assert "&lt;/script&gt;" in timeline_svg(analysis)


def test_a_large_cluster_shows_hosts_alone():
    drawn = cluster_svg(analyse(even_plan(2, 2, num_devices=100)))
    assert drawn.count('class="node"') == 100  # here every device is a host
    assert drawn.count('class="host"') == 0
    assert "<text" not in drawn


@pytest.mark.parametrize(
    ("span_ms", "most", "step_ms"), [(10, 10, 1), (14, 10, 2), (965, 10, 100), (0.3, 5, 0.1)]
)
def test_ticks(span_ms, most, step_ms):
    assert tick_step_ms(span_ms, most) == pytest.approx(step_ms)


def test_without_a_renderer_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    monkeypatch.setattr(picture.shutil, "which", lambda name: None)
    with pytest.raises(InputError, match=r"no renderer for \.png here; pip install cairosvg"):
        picture.svg_to_png("<svg/>")


def test_a_notebook_shows_the_plan(drawn_plan, hostile_plan):
    shown = notebook_html(drawn_plan)
    assert "14.0 ms" in shown
    assert "<script" not in shown
    parse(shown)
    hostile = notebook_html(hostile_plan)
    parse(hostile)
    assert "<script" not in hostile
    assert "<img" not in hostile


def test_a_notebook_shows_why_a_plan_cannot_run(drawn_plan):
    broken = Plan(
        model=drawn_plan.model,
        cluster=drawn_plan.cluster,
        microbatches=3,
        stages=drawn_plan.stages,
        schedule=drawn_plan.schedule,
        planner="hand",
    )
    assert "cannot run: schedule[0]: does not hold" in notebook_html(broken)
