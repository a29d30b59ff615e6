"""Large plans are shown in seconds and in less than a gigabyte, or refused before the work."""

import json
import subprocess
import sys

import numpy as np
import pytest

from instances import even_plan
from pages import Page
from pipeplan.errors import InputError
from pipeplan.report.analysis import links
from pipeplan.report.analysis.plan_analysis import analyse
from pipeplan.report.analysis.summary import WHOLE, summarise
from pipeplan.report.html import render_report
from pipeplan.report.timeline_picture import timeline_svg
from pipeplan.report.trace import count_events, trace_document, write_trace

MAX_MB = 1000
MAX_SECONDS = 60
"""Far above what it takes, because other tests run at the same time."""


SHOW = """
import resource, sys
from dataclasses import replace
from instances import even_plan
from pipeplan import HostGroup, expand_hosts
from pipeplan.errors import InputError
from pipeplan.report.html import write_report
from pipeplan.report.picture import plot
from pipeplan.report.trace import write_trace
stages, microbatches, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
# A file may hold 4,096 devices only as hosts.
cluster = expand_hosts("flat", [HostGroup(devices=stages, bandwidth_gb_per_s=1.0)])
plan = replace(even_plan(stages, microbatches), cluster=cluster)
del cluster
write_report(plan, f"{folder}/plan.html")
plot(plan, f"{folder}/plan.svg")
try:
    write_trace(plan, f"{folder}/plan.json")
except InputError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
"""


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches"),
    [
        (26, 6_500),
        pytest.param(26, 30_000, marks=pytest.mark.full),
        pytest.param(4_096, 8, marks=pytest.mark.full),
    ],
)
def test_a_large_plan_is_shown_within_a_gigabyte(num_stages, num_microbatches, tmp_path):
    folders = ("tests",)
    script = f"import sys; sys.path[:0] = {folders!r}\n{SHOW}"
    arguments = [str(num_stages), str(num_microbatches), str(tmp_path)]
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=MAX_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    *refusals, peak_mb = result.stdout.splitlines()
    assert float(peak_mb) < MAX_MB
    assert (tmp_path / "plan.html").stat().st_size < 20e6
    assert (tmp_path / "plan.svg").stat().st_size < 3e6
    if num_microbatches > 1000:
        assert "million events are more than the 1 million" in refusals[0]
        assert not (tmp_path / "plan.json").exists()


def test_a_page_says_that_it_is_a_summary(drawn_plan, monkeypatch):
    assert "A summary" not in Page(render_report(drawn_plan)).text
    monkeypatch.setattr("pipeplan.report.page_data.MAX_ITEMS", 10)
    page = Page(render_report(drawn_plan))
    assert "A summary: this plan has" in page.text
    assert "14.0 ms" in page.text
    data = json.loads(page.scripts["timeline-data"])
    assert data["summary"]["bins"] == 4000
    assert "waits" not in data


def test_a_summary_by_hand(analysis, monkeypatch):
    # 14 ms in 14 bins; the timeline of `drawn_plan`.
    monkeypatch.setattr("pipeplan.report.analysis.summary.MOST_BINS", 14)
    summary = summarise(analysis.items, analysis.memory, analysis.iteration_ms)
    busy = (summary.busy_RK / WHOLE).tolist()
    assert busy[0] == [1, 1, 0, 0, 0, 0, 1, 1, 0, 1, 1, 0, 0, 0]
    assert busy[1] == [0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert busy[2] == [0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0]
    assert busy[3] == [0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    backward = (summary.backward_RK / WHOLE).tolist()
    assert backward[0] == [0, 0, 0, 0, 0, 0, 1, 1, 0, 1, 1, 0, 0, 0]
    # A microbatch is held until its backward ends, at 8 and at 11.
    assert summary.in_flight_SK[0].tolist() == [2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 0, 0, 0]


def test_random_summaries_keep_all_time_and_the_peak(random_analyses, monkeypatch):
    monkeypatch.setattr("pipeplan.report.analysis.summary.MOST_BINS", 7)
    for analysis in random_analyses:
        if not analysis.iteration_ms:
            continue
        items = analysis.items
        summary = summarise(items, analysis.memory, analysis.iteration_ms)
        bin_ms = analysis.iteration_ms / 7
        for stage in range(analysis.num_stages):
            mine = items.blocks_of(stage)
            whole_ms = float(np.sum(items.end_ms_N[mine] - items.start_ms_N[mine]))
            summed_ms = float(summary.busy_RK[3 * stage].sum()) / WHOLE * bin_ms
            assert summed_ms == pytest.approx(whole_ms, abs=7 * bin_ms / WHOLE)
            peak = int(summary.in_flight_SK[stage].max())
            assert peak == analysis.memory[stage].most_in_flight


def test_the_count_of_events_is_a_close_bound(random_analyses):
    for analysis in random_analyses:
        num_events = len(trace_document(analysis)["traceEvents"])
        assert num_events <= count_events(analysis.plan)
        assert num_events >= 0.4 * count_events(analysis.plan) - 40


def test_too_many_events_are_refused_before_the_work(drawn_plan, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeplan.report.trace.MAX_EVENTS", 10)
    monkeypatch.setattr("pipeplan.report.trace.analyse", None)
    with pytest.raises(InputError, match="events are more than the"):
        write_trace(drawn_plan, tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []


def test_a_picture_of_many_stages_stays_small():
    drawn = timeline_svg(analyse(even_plan(600, 4)))
    height = float(drawn.partition(' height="')[2].partition('"')[0])
    assert height < 2_800
    assert len(drawn) < 600_000
    assert "activations sent" not in drawn
    assert drawn.count(">stage ") < 200


def test_only_the_busiest_links_are_kept(random_analyses):
    for analysis in random_analyses:
        everything = analysis.links()
        assert everything.num_used == len(everything.links)
        kept = analysis.links(most=3)
        assert kept.num_used == everything.num_used
        busiest = sorted(everything.links, key=lambda link: -link.busy)[:3]
        assert sorted(kept.links, key=lambda link: -link.busy) == busiest


def test_links_are_cut_down_on_the_way(random_analyses, monkeypatch):
    monkeypatch.setattr(links, "SLACK", 0)
    for analysis in random_analyses:
        busiest = sorted(analysis.links().links, key=lambda link: -link.busy)[:1]
        assert list(analysis.links(most=1).links) == busiest
