"""Plans with groups in the terminal, as a picture, a trace and a page."""

import json
import random
import re
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from rich.console import Console

from families.samples import bucket_example, format_example
from family_plans import random_family_plan
from pipeplan.report.analysis.items import NOTHING, WEIGHT
from pipeplan.report.analysis.plan_analysis import analyse
from pipeplan.report.html import render_report
from pipeplan.report.notebook import notebook_html
from pipeplan.report.terminal import render_plan
from pipeplan.report.timeline_picture import timeline_svg
from pipeplan.report.trace import count_events, trace_document


def in_terminal(plan, width=80):
    console = Console(width=width, force_terminal=False, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_plan(analyse(plan), console))
    console.file.close()
    return console.export_text()


def test_a_lane_in_the_terminal_is_a_group():
    shown = in_terminal(format_example())
    assert "4 stages in 2 groups on 2 of 2" in shown
    assert re.search(r"^stage group layers", shown, re.MULTILINE)
    lanes = [line for line in shown.splitlines() if line.startswith("group ")]
    assert len(lanes) == 2
    assert lanes[1].split(maxsplit=2)[2].startswith("·" * 16 + "1F─2F─")
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_halves_of_backwards_and_buckets_are_told():
    shown = in_terminal(bucket_example())
    assert "I0═ W0~ input, weight gradient" in shown
    assert "stage 1: gradients in 2 buckets" in shown
    assert "optimizer state sharded over the devices of a group" in shown
    assert "░" * 40 in shown


def test_the_picture_tells_stages_and_weight_gradients():
    picture = str(timeline_svg(analyse(bucket_example())))
    texts = set(re.findall(r"<text[^>]*>([^<]*)</text>", picture))
    assert {"1F0", "1B1", "weight gradient", "stages"} <= texts
    assert 'class="pp-weight"' in picture


@pytest.mark.parametrize("seed", range(12))
def test_every_view_of_a_random_plan(seed):
    plan = random_family_plan(random.Random(seed))
    analysis = analyse(plan)
    shares = analysis.shares
    whole = shares.compute + shares.communication + shares.all_reduce + shares.bubble
    assert whole == pytest.approx(1, abs=1e-6)
    if analysis.iteration_ms:
        expected = analysis.plan.predicted.bubble_fraction
        assert 1 - shares.compute == pytest.approx(expected, abs=1e-9)
    path = analysis.critical_path
    assert analysis.items.end_ms_N[path[-1]] == pytest.approx(analysis.iteration_ms)
    assert analysis.waited_for[path[0]] == NOTHING
    events = trace_document(analysis)["traceEvents"]
    assert len(events) <= count_events(plan)
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        spans.sort()
        for before, after in pairwise(spans):
            assert before[1] <= after[0] + 1e-6
    timeline_svg(analysis)
    notebook_html(plan)
    in_terminal(plan)


def test_the_page_has_every_item_and_the_memory_of_groups():
    plan = bucket_example()
    page = render_report(plan)
    data = json.loads(
        re.search(r'id="timeline-data">(.*?)</script>', page, re.DOTALL)[1].replace("\\u003c", "<")
    )
    analysis = analyse(plan)
    assert data["items"]["count"] == len(analysis.items)
    assert [group["stages"] for group in data["groups"]] == [[0, 1]]
    assert data["items"]["first_sent"] == [NOTHING, NOTHING]  # all inside one group
    assert int((analysis.items.kind_N == WEIGHT).sum()) == 2
    (memory,) = analysis.memory
    held_gb = np.array(memory.base_gb[0]) + memory.in_flight.max() * memory.per_microbatch_gb[0]
    assert held_gb == pytest.approx(memory.peak_gb[0]) == pytest.approx(0.026)
    assert "weight gradient" in page
    assert "2 stages in 1 group on 2 devices" in page
