import base64
import gzip
import hashlib
import json
import re

import pytest
from click.testing import CliRunner

from instances import flat_cluster
from pages import Page
from pipeplan.commands.plot import plot_command
from pipeplan.commands.report import report_command, trace_command
from pipeplan.documents.files import plan_document, read_plan, write_plan
from pipeplan.errors import InputError
from pipeplan.pipeline import Bound, BoundScope, Plan, Prediction
from pipeplan.report import html
from pipeplan.report.html import render_report, write_report


def with_prediction(plan: Plan, **fields) -> Plan:
    predicted = Prediction(
        iteration_ms=14.0,
        bubble_fraction=1 - 18 / 42,
        peak_memory_gb={"d0": 2.012, "d2": 2.012, "d1": 5.0},
        **fields,
    )
    return Plan(
        model=plan.model,
        cluster=plan.cluster,
        microbatches=plan.microbatches,
        stages=plan.stages,
        schedule=plan.schedule,
        planner=plan.planner,
        predicted=predicted,
        version=plan.version,
    )


def test_the_key_figures_are_there(drawn_plan):
    plan = with_prediction(
        drawn_plan,
        bound=Bound(lower_bound_ms=12.5, scope=BoundScope.ANY),
        schedule_guarantee_ms=21.0,
    )
    text = Page(render_report(plan)).text
    for figure in (
        "two layers",
        "flat",
        "14.0 ms",
        "571.4",  # 8 samples in 14 ms
        "57.1 %",  # 1 - 18/42
        "12.5 ms",
        "at most 12 % from the optimum",
        "21.0 ms",
        "5 GB",
        "pipeplan 1.2.3",
    ):
        assert figure in text


def test_a_plan_without_figures_shows_what_is_known(drawn_plan):
    text = Page(render_report(drawn_plan)).text
    assert "14.0 ms" in text
    assert "not computed by this planner" in text


def test_a_plan_that_claims_another_time_is_found_out(drawn_plan):
    plan = with_prediction(drawn_plan)
    object.__setattr__(plan.predicted, "iteration_ms", 13.0)
    assert "the plan says 13.0 ms" in Page(render_report(plan)).text


def test_nothing_comes_from_elsewhere(drawn_plan):
    report = render_report(drawn_plan)
    assert "://" not in report
    assert "@import" not in report
    assert "url(" not in report
    page = Page(report)
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "img", "object", "embed")
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")


def test_the_policy_allows_the_own_script_alone(drawn_plan):
    report = render_report(drawn_plan)
    script = Page(report).scripts[""]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in report
    assert "default-src 'none'" in report


def test_the_plan_is_embedded_once_and_whole(drawn_plan):
    report = render_report(drawn_plan)
    embedded = json.loads(Page(report).scripts["plan-data"])
    assert embedded == json.loads(json.dumps(plan_document(drawn_plan)))
    assert report.count("pipeplan.plan/1") == 1


def test_a_large_plan_is_embedded_compressed(drawn_plan, monkeypatch):
    monkeypatch.setattr(html, "MAX_PLAIN_PLAN_BYTES", 100)
    page = Page(render_report(drawn_plan))
    packed = base64.b64decode(page.scripts["plan-data"])
    assert json.loads(gzip.decompress(packed)) == json.loads(json.dumps(plan_document(drawn_plan)))


def test_hostile_names_are_text(hostile_plan):
    rows = [{"planner": "</script><img src=x>", "iteration_ms": 1.0}, {"<b>": "x", "reason": "<i>"}]
    report = render_report(hostile_plan, rows)
    page = Page(report)
    assert len(page.scripts) == 3
    assert not {tag for tag, _ in page.elements} & {"img", "iframe", "object"}
    handlers = [name for _, attributes in page.elements for name in attributes if name[:2] == "on"]
    assert handlers == []
    for script in ("timeline-data", "plan-data"):
        assert "<" not in page.scripts[script]
    data = json.loads(page.scripts["timeline-data"])
    names = [stage["devices"][0]["name"] for stage in data["stages"]]
    assert names == [device.name for device in hostile_plan.cluster.devices]
    assert re.fullmatch(r"[A-Za-z0-9._-]+", data["file_name"])


def test_the_same_plan_gives_the_same_file(drawn_plan):
    assert render_report(drawn_plan) == render_report(drawn_plan)


def test_random_plans_are_well_formed(random_analyses):
    for analysis in random_analyses[:40]:
        Page(render_report(analysis.plan))


def test_a_comparison_marks_the_best_and_the_infeasible(drawn_plan):
    rows = [
        {"planner": "spp", "iteration_ms": 14.0, "gap": 0.12},
        {"planner": "other", "iteration_ms": 20.0, "gap": None},
        {"planner": "gpipe", "iteration_ms": None, "infeasible_reason": "needs 18.3 GB"},
        {"planner": "dp", "feasible": False},
    ]
    report = render_report(drawn_plan, rows)
    assert (
        '<tr class="best"><td class="" data-value="spp">spp</td>'
        '<td class="number" data-value="14.0">14</td>'
    ) in report
    assert report.count('<tr class="infeasible">') == 2
    text = Page(report).text
    assert "infeasible needs 18.3 GB" in text
    assert "iteration (ms)" in text
    assert "12.0 %" in text
    assert "Comparison" not in Page(render_report(drawn_plan)).text


def test_a_device_without_room_is_marked(drawn_plan):
    small = flat_cluster(4)
    devices = tuple(
        type(device)(name=device.name, memory_gb=limit_gb)
        for device, limit_gb in zip(small.devices, (16.0, 3.0, 16.0, None), strict=True)
    )
    plan = Plan(
        model=drawn_plan.model,
        cluster=type(small)(
            name="small", devices=devices, bandwidth_gb_per_s=small.bandwidth_gb_per_s
        ),
        microbatches=2,
        stages=drawn_plan.stages,
        schedule=drawn_plan.schedule,
        planner="hand",
    )
    text = Page(render_report(plan)).text
    assert "on d1, it has 3 GB; 1 do not fit" in text


# ----------------------------------------------------------------------------- commands


@pytest.fixture
def plan_path(drawn_plan, tmp_path):
    write_plan(drawn_plan, tmp_path / "a.plan.json")
    return tmp_path / "a.plan.json"


def test_commands_write_their_files(plan_path, tmp_path):
    for command, name in (
        (report_command, "plan.html"),
        (trace_command, "trace.json"),
        (plot_command, "plan.svg"),
    ):
        output = tmp_path / name
        result = CliRunner().invoke(command, [str(plan_path), "-o", str(output)])
        assert result.exit_code == 0, result.output
        assert output.stat().st_size > 500
    write_report(read_plan(plan_path), tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "plan.html").read_bytes()


def test_plot_refuses_what_it_cannot_draw(plan_path):
    with pytest.raises(InputError, match="ends in none of"):
        CliRunner().invoke(plot_command, [str(plan_path), "-o", "x.eps"], catch_exceptions=False)
