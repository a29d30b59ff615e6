"""Shared links in analysis, page and trace: how busy they are, and who slows whom."""

import json
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from one_stage import plan as plain_plan
from pages import Page
from pipeplan import zoo
from pipeplan.cluster import Cluster, HostGroup, expand_hosts
from pipeplan.cost import CostModel
from pipeplan.group_costs import group_costs
from pipeplan.group_simulator import run_group_plan
from pipeplan.pipeline import Plan, Schedule, Stage
from pipeplan.planning import door
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.report.analysis.items import make_group_items
from pipeplan.report.analysis.plan_analysis import analyse
from pipeplan.report.analysis.shared_links import shared_use_of_groups
from pipeplan.report.html import render_report
from pipeplan.report.trace import trace_document
from pipeplan.shared_links import SharedLink
from pipeplan.simulator import run_schedule


def two_rings(name: str = "card") -> Plan:
    """Both stages all-reduce over both hosts: 1 MB at 4 ms, 3 MB at 3 ms, over one card of 1 GB/s.

    For 1 ms the larger ring is alone, then each has half until the smaller one ends after 2 ms. The
    larger one then has 1 MB left: 4 ms instead of 3, and the smaller one 2 ms instead of 1.
    """
    cluster = expand_hosts(
        "two hosts",
        [HostGroup(count=2, devices=2, bandwidth_gb_per_s=100.0)],
        between_hosts_gb_per_s=1.0,
        shared=[SharedLink(name=name, members=("h0",), gb_per_s=1.0)],
    )
    layers = tuple(
        LayerProfile(name=str(n), forward_ms=2, backward_ms=2, output_bytes=0, parameter_bytes=size)
        for n, size in enumerate((1e6, 3e6))
    )
    model = ModelProfile(name="two", microbatch_size=4, layers=layers)
    return Plan(
        planner="test",
        model=model,
        cluster=cluster,
        microbatches=1,
        stages=(
            Stage(layers=range(1), devices=(0, 2)),
            Stage(layers=range(1, 2), devices=(1, 3)),
        ),
        schedule=Schedule.from_codes([[0, -1], [0, -1]]),
    )


def test_use_over_time_by_hand():
    use = analyse(two_rings()).shared_use
    assert [(link.name, link.direction) for link in use.links] == [("card", "out"), ("card", "in")]
    for link in use.links:
        assert link.times_ms.tolist() == [0.0, 3.0, 7.0]
        assert link.used.tolist() == [0.0, 1.0, 0.0]
        assert link.busy == pytest.approx(4 / 7)
        assert link.full == pytest.approx(4 / 7)


def test_who_slows_whom_by_hand():
    analysis = analyse(two_rings())
    items, slowed = analysis.items, analysis.shared_use.slowed
    small, large = items.first_all_reduce, items.first_all_reduce + 1
    assert {number: (found.by, found.more_ms) for number, found in slowed.items()} == {
        small: (large, pytest.approx(1.0)),
        large: (small, pytest.approx(1.0)),
    }
    assert analysis.stages[1].all_reduce_ms == pytest.approx(4.0)


def test_links_carry_what_the_plan_sends():
    """The area below the use is the bytes that cross the link, for every direction."""
    plan = crowded()
    analysis = analyse(plan)
    sent = defaultdict(float)
    for stage, behind in ((0, 1), (1, 0)):
        for link in plan.cluster.links:
            mine, theirs = (share_in(plan.stages[n], link.devices) for n in (stage, behind))
            sent[link.name, "out"] += 4e6 * mine * (1 - theirs)
            sent[link.name, "in"] += 4e6 * theirs * (1 - mine)
    for link in analysis.shared_use.links:
        lengths_ms = np.diff(link.times_ms, append=analysis.iteration_ms)
        carried = float((link.used * lengths_ms).sum()) * link.gb_per_s * 1e6
        expected = plan.microbatches * sent[link.name, link.direction]
        assert carried == pytest.approx(expected, rel=1e-6)
    assert analysis.shared_use.slowed


def share_in(stage: Stage, devices: frozenset[int]) -> float:
    return sum(device in devices for device in stage.devices) / len(stage.devices)


def crowded() -> Plan:
    """Two stages across two hosts; both directions are under way at once."""
    cluster = expand_hosts(
        "two hosts",
        [HostGroup(count=2, devices=2, bandwidth_gb_per_s=100.0)],
        between_hosts_gb_per_s=1.0,
        uplink_gb_per_s=1.0,
    )
    layer = LayerProfile(name="a", forward_ms=1, backward_ms=1, output_bytes=4e6, parameter_bytes=0)
    model = ModelProfile(name="two", microbatch_size=4, layers=(layer, replace(layer, name="b")))
    stages = (Stage(layers=range(1), devices=(0, 2)), Stage(layers=range(1, 2), devices=(1, 3)))
    costs = CostModel(model, cluster).pipeline_costs(stages)
    codes = np.array([[0, 1, 2, -1, -2, -3], [0, -1, 1, -2, 2, -3]], dtype=np.int32)
    run_schedule(costs, codes)  # does not deadlock
    return Plan(
        planner="test",
        model=model,
        cluster=cluster,
        microbatches=3,
        stages=stages,
        schedule=Schedule.from_codes(codes.tolist()),
    )


def test_the_trace_has_a_counter_for_each_direction():
    plan = crowded()
    events = trace_document(analyse(plan))["traceEvents"]
    counters = {e["name"] for e in events if e["ph"] == "C" and "GB/s" in e["args"]}
    assert counters == {f"uplink of {h} ({d})" for h in ("h0", "h1") for d in ("out", "in")}
    assert all(0 <= e["args"]["GB/s"] <= 1.0 for e in events if "GB/s" in e.get("args", {}))
    slowed = [e for e in events if "slowed_by" in e.get("args", {})]
    assert slowed
    assert all(e["args"]["slowed_ms"] > 0 for e in slowed)
    alone = replace(plan, cluster=without_links(plan.cluster))
    assert "GB/s" not in json.dumps(trace_document(analyse(alone)))


def without_links(cluster: Cluster) -> Cluster:
    return replace(cluster, uplink_gb_per_s=None, shared=())


def test_the_page_shows_them_and_escapes_their_names():
    name = "<img src=x onerror=alert(1)>"
    html = render_report(two_rings(name))
    page = Page(html)
    assert "img" not in {element[0] for element in page.elements}
    assert "Shared links over time" in html
    assert "2 transfers and all-reduces take longer than alone" in html
    alone = replace(two_rings(), cluster=without_links(two_rings().cluster))
    assert "Shared links over time" not in render_report(alone)


def test_groups_use_links_as_stages_do():
    """A plan with one stage a device, read as one with groups, has the same links and slowings."""
    plan = plain_plan(zoo.model("vgg19"), zoo.cluster("4x2-10g"), 8, "pipedream")
    stages = analyse(plan)
    costs = group_costs(stages.cost, plan.stages)
    timeline = run_group_plan(plan, costs)
    items = make_group_items(timeline, costs.group_of_S, plan.microbatches)
    expected, found = stages.shared_use, shared_use_of_groups(plan, costs, timeline, items)
    assert expected.links
    assert expected.slowed
    for mine, other in zip(found.links, expected.links, strict=True):
        assert (mine.name, mine.is_out) == (other.name, other.is_out)
        assert mine.busy == pytest.approx(other.busy)
        assert mine.full == pytest.approx(other.full)
    assert found.slowed.keys() == expected.slowed.keys()
    for number, slowing in found.slowed.items():
        assert slowing.more_ms == pytest.approx(expected.slowed[number].more_ms)


def test_pages_and_traces_of_groups_show_shared_links():
    plan = door.plan(zoo.model("bert-large"), zoo.cluster("4x2-10g"), 4, effort=0.2)
    assert plan.uses_families
    analysis = analyse(plan)
    use = analysis.shared_use
    assert use.slowed
    for link in use.links:
        assert link.used.max() <= 1 + 1e-9
    lengths_ms = analysis.items.end_ms_N - analysis.items.start_ms_N
    for number, slowing in use.slowed.items():
        assert 0 < slowing.more_ms < lengths_ms[number]
    page = Page(render_report(plan))
    assert "Shared links over time" in page.text
    assert f"{len(use.slowed)} transfers and all-reduces take longer than alone" in page.text
    counters = {e["name"] for e in trace_document(analysis)["traceEvents"] if e["ph"] == "C"}
    assert any("h0" in name for name in counters)
