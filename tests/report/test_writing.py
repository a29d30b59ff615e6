"""What the writers refuse, warn of, and need."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.resources import files
from itertools import pairwise

import pytest

from pages import Page
from pipeplan.errors import InputError, PlanFileError
from pipeplan.pipeline import Plan, Prediction
from pipeplan.report.html import SCRIPTS, render_report, write_report
from pipeplan.report.picture import plot
from pipeplan.report.trace import write_trace
from pipeplan.report.trace_events import make_slice

WRITERS = {"report": write_report, "trace": write_trace, "plot": plot}


def with_claim(plan: Plan, iteration_ms: float) -> Plan:
    predicted = Prediction(
        iteration_ms=iteration_ms,
        bubble_fraction=1 - 18 / 42,
        peak_memory_gb={"d0": 2.012, "d2": 2.012, "d1": 5.0},
    )
    return replace(plan, predicted=predicted)


@pytest.mark.parametrize("name", WRITERS)
def test_what_the_checker_refuses_is_not_shown(name, drawn_plan, tmp_path):
    first, second = drawn_plan.stages
    uncovered = replace(drawn_plan, stages=(first, replace(second, devices=(0,))))
    with pytest.raises(PlanFileError):
        WRITERS[name](uncovered, tmp_path / "out.svg")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", WRITERS)
def test_stale_figures_are_warned_of(name, drawn_plan, tmp_path):
    warnings: list[str] = []
    WRITERS[name](with_claim(drawn_plan, 14.0), tmp_path / "right.svg", warn=warnings.append)
    assert warnings == []
    WRITERS[name](with_claim(drawn_plan, 13.0), tmp_path / "stale.svg", warn=warnings.append)
    assert len(warnings) == 1
    assert "predicted.iteration_ms" in warnings[0]
    WRITERS[name](with_claim(drawn_plan, 13.0), tmp_path / "silent.svg")


def test_stale_figures_are_not_passed_on(drawn_plan):
    page = Page(render_report(with_claim(drawn_plan, 13.0)))
    assert "14.0 msthe plan says 13.0 ms" in page.text  # two elements beside each other
    embedded = json.loads(page.scripts["plan-data"])
    assert embedded["predicted"]["iteration_ms"] == 14.0


def test_a_plot_is_what_its_suffix_says(drawn_plan, tmp_path, monkeypatch):
    plot(drawn_plan, tmp_path / "a.SVG", 500)
    assert (tmp_path / "a.SVG").read_text().startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    monkeypatch.setattr("pipeplan.report.picture.svg_to_png", lambda picture: b"pixels")
    plot(drawn_plan, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes() == b"pixels"
    plot(drawn_plan, tmp_path / "a", file_format="png")
    assert (tmp_path / "a").read_bytes() == b"pixels"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a.eps",), r"output: 'a\.eps' ends in none of \.svg, \.pdf, \.png"),
        (("a",), r"output: 'a' ends in none of"),
        (("a.svg", 299), r"width: 299 is not within 300\.\.10000 pixels"),
        (("a.svg", 10_001), r"width: 10001 is not within"),
    ],
)
def test_a_plot_that_cannot_be_is_refused_before_the_work(arguments, message, monkeypatch):
    monkeypatch.setattr("pipeplan.report.picture.analyse", None)
    with pytest.raises(InputError, match=message):
        plot(None, *arguments)
    with pytest.raises(InputError, match="format: 'eps' is none of svg, pdf, png"):
        plot(None, "a.svg", file_format="eps")


def test_rounded_slices_of_one_track_stay_in_order():
    # Thirds of a nanosecond: lengths rounded on their own would overlap.
    times_ms = [n / 3e6 for n in range(200)]
    slices = [make_slice("a", "b", 0, 0, *pair) for pair in pairwise(times_ms)]
    for one, after in pairwise(slices):
        assert round((one.ts + one.dur) * 1e3) == round(after.ts * 1e3)


def test_the_package_holds_every_part_of_the_page():
    folder = files("pipeplan.report") / "assets" / "script"
    names = sorted((entry.name for entry in folder.iterdir()), key=lambda n: int(n.split("-")[0]))
    assert tuple(names) == SCRIPTS
    names = {entry.name for entry in (files("pipeplan.report") / "templates").iterdir()}
    assert names == {"notebook.html", "page.html"}


def test_planning_does_not_load_templates():
    script = (
        "import sys, pipeplan as pp, pipeplan.cli; from pipeplan import zoo;"
        "pp.plan(zoo.model('vgg19'), zoo.cluster('4x2-10g'), 4, 'spp');"
        "print([name for name in ('jinja2', 'markupsafe', 'rich') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")
