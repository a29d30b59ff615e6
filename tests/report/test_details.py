"""Details of pictures, links and the terminal that are easily lost."""

import base64
import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from instances import even_plan
from one_stage import plan
from pages import Page
from pipeplan import zoo
from pipeplan.cluster import Cluster, Device
from pipeplan.pipeline import Plan
from pipeplan.report import html
from pipeplan.report.analysis.plan_analysis import analyse
from pipeplan.report.analysis.summary import summarise
from pipeplan.report.cluster_picture import cluster_svg
from pipeplan.report.elements import element
from pipeplan.report.html import render_report
from pipeplan.report.terminal import render_plan
from pipeplan.report.text_timeline import ASCII, draw_text_lane
from pipeplan.report.timeline_picture import timeline_svg


def shown(plan: Plan, width: int = 80) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, markup=False, emoji=False)
    console.print(render_plan(analyse(plan), console))
    return out.getvalue()


def test_elements_escape_texts_and_attributes():
    made = element("text", "<b>", element("i", "&"), class_='"x" <', stroke_width=1.25)
    assert made == (
        '<text class="&#34;x&#34; &lt;" stroke-width="1.2">&lt;b&gt;<i>&amp;</i></text>'
    )


def test_links_between_hosts_sum_those_of_their_devices(drawn_plan):
    # Devices 0 and 1 are one host, 2 and 3 another. Stage 0 is on 0 and 2, stage 1 on 1.
    hosts = ("left", "left", "right", "right")
    cluster = Cluster(
        name="two hosts",
        devices=tuple(Device(name=f"d{n}", host=host) for n, host in enumerate(hosts)),
        bandwidth_gb_per_s=drawn_plan.cluster.bandwidth_gb_per_s,
    )
    used = analyse(replace(drawn_plan, cluster=cluster)).links(between_hosts=True)
    # From left: gradients of 1 MB twice, and 3 MB of the all-reduce; from right the same.
    assert [(link.source, link.target, link.num_bytes) for link in used.links] == [
        (0, 1, 5e6),
        (1, 0, 5e6),
    ]
    assert used.num_used == 2


def test_the_cluster_says_how_many_links_it_leaves_out(monkeypatch):
    analysis = analyse(even_plan(4, 2))
    assert "busiest" not in cluster_svg(analysis)
    monkeypatch.setattr("pipeplan.report.cluster_picture.MAX_LINKS", 2)
    assert "The busiest 2 of 6 links." in cluster_svg(analysis)


def test_a_lane_that_is_hardly_busy_does_not_look_idle(analysis, monkeypatch):
    monkeypatch.setattr("pipeplan.report.analysis.summary.WHOLE", 1)
    monkeypatch.setattr("pipeplan.report.analysis.summary.MOST_BINS", 1)
    summary = summarise(analysis.items, analysis.memory, analysis.iteration_ms)
    assert summary.busy_RK.tolist() == [[1], [1], [1], [1]]


def test_idle_time_between_narrow_blocks_stays_visible():
    # A transfer takes ten times as long as a block, and a block is narrower than a pixel.
    plan = even_plan(2, 40)
    layers = tuple(replace(layer, output_bytes=10e6) for layer in plan.model.layers)
    slow = replace(plan, model=replace(plan.model, layers=layers))
    drawn = timeline_svg(analyse(slow), 300)
    mixed = drawn.partition('class="pp-mixed"')[2].partition("/>")[0]
    assert mixed.count("M") > 30


def test_a_faster_device_is_idle_while_the_slower_one_computes(drawn_plan):
    first, second = drawn_plan.stages
    uneven = replace(drawn_plan, stages=(replace(first, shares=(0.8, 0.2)), second))
    drawn = timeline_svg(analyse(uneven))
    paths = [part.partition('"')[0] for part in drawn.split('class="pp-forward"')[1:]]
    boxes = [part.partition(' d="M')[2] for part in drawn.split('class="pp-forward"')[1:3]]
    widths = [float(box.partition("h")[2].partition("v")[0]) + 0.8 for box in boxes]
    assert len(paths) == 4  # two replicas, one device, the legend
    assert widths[1] == pytest.approx(widths[0] / 4, abs=0.3)


def test_compressed_plans_hold_no_time_stamp(drawn_plan, monkeypatch):
    monkeypatch.setattr(html, "MAX_PLAIN_PLAN_BYTES", 100)
    packed = base64.b64decode(Page(render_report(drawn_plan)).scripts["plan-data"])
    assert packed[4:8] == b"\0\0\0\0"


def test_the_peak_is_that_of_the_device_that_needs_most(drawn_plan):
    assert "5 GBon d1, no limit" in Page(render_report(drawn_plan)).text


def test_text_lanes_by_hand(analysis):
    assert draw_text_lane(analysis, 0, 42, ASCII) == "F0-F1-............B0====...B1====#########"
    assert draw_text_lane(analysis, 1, 42, ASCII) == "......F0-B0====F1-B1====.................."
    # Two characters have no room for a fill, so the letter stands alone.
    assert draw_text_lane(analysis, 0, 28, ASCII) == "F-F-........B0==..B1==######"


def test_the_terminal_shows_the_first_and_the_last_of_many_stages():
    text = shown(even_plan(100, 2))
    for stage, count in ((0, 2), (31, 2), (32, 0), (67, 0), (68, 2), (99, 2)):
        assert len(re.findall(rf"^(?:stage {stage} | +{stage} {stage}-)", text, re.M)) == count, (
            stage
        )
    assert "\n..." not in shown(even_plan(64, 1))


def test_the_terminal_shows_memory_speeds_shares_and_recomputation():
    made = plan(zoo.model("bert-large"), zoo.cluster("mixed-hosts"), 4, planner="gpipe")
    text = shown(made)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    header = next(line for line in lines if line.startswith("stage layers"))
    columns = "stage layers devices speed forward backward send return GB"
    assert " ".join(header.split()) == columns
    assert " 2.5 " in text
    peak_gb = max(made.predicted.peak_memory_gb.values())
    assert f" {peak_gb:.3g} " in text
    assert "reduce" not in header  # no stage has replicas
    changed = tuple(replace(stage, recompute=n != 2) for n, stage in enumerate(made.stages))
    again = shown(replace(made, stages=changed, predicted=None))
    assert "stages 0 to 1, 3 to 11 recompute activations in the backward" in again


def test_samples_of_uneven_replicas_are_shown():
    made = plan(zoo.model("bert-large"), zoo.cluster("1x8-pcie"), 4, planner="data-parallel")
    (stage,) = made.stages
    stage = replace(stage, devices=stage.devices[:3], shares=(0.5, 0.25, 0.25))
    text = shown(replace(made, stages=(stage,), predicted=None))
    assert "samples of each device: stage 0 2+1+1" in text


def test_too_little_memory_is_one_line():
    made = plan(zoo.model("bert-large"), zoo.cluster("4x2-10g"), 16, planner="gpipe")
    text = shown(made)
    assert "! 2 devices need more memory than there is" in text
    assert text.count("!") == 3  # two stages and the line
    assert "peak 19.3 of 16 GB" in text


def test_a_shared_beginning_of_layer_names_is_written_once():
    made = plan(zoo.model("bert-large"), zoo.cluster("4x2-10g"), 4, planner="gpipe")
    text = shown(made)
    assert re.search(r" \d+-\d+ encoder\.\d+\.\.\d+ ", text)
    assert "..head" in text
