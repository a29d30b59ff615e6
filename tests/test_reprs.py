"""What Python shows of an object fits a line, whatever names and numbers it holds."""

import pytest

import pipeplan as pp
from hostile_names import hostile_plan

LONGEST = 170


@pytest.fixture(scope="module")
def answers():
    model, cluster = pp.zoo.model("gpt2-xl"), pp.zoo.cluster("8x8-100g")
    plan = pp.plan(model, cluster, 8, planner="spp")
    small = pp.plan(pp.zoo.model("vgg19"), pp.zoo.cluster("4x2-10g"), 4, planner="spp")
    comparison = pp.compare(model, cluster, 8, ["spp", "1f1b"])
    hostile = hostile_plan("x" * 10_000)
    return [
        *(model, *model.layers, cluster, *cluster.devices),
        *(plan, *plan.stages, plan.schedule, plan.predicted, pp.check(plan), pp.simulate(plan)),
        *(comparison, *comparison.rows),
        pp.whatif(small, lose=["h0d1"], effort=0.1),
        *(hostile, hostile.model, hostile.cluster, *hostile.model.layers),
        pp.Bound(lower_bound_ms=1.0, scope="even-shares"),
    ]


def test_a_line_holds_each(answers):
    shown = [repr(answer) for answer in answers]
    assert [text for text in shown if len(text) > LONGEST or "\n" in text] == []


def test_the_line_says_what_it_is(answers):
    shown = {type(answer).__name__: repr(answer) for answer in reversed(answers)}
    assert shown["ModelProfile"] == (
        "<Model 'gpt2-xl': 50 layers, 3.115 GB of parameters, microbatches of 1>"
    )
    assert shown["Cluster"] == "<Cluster '8x8-100g': devices 64, hosts 8, shared links 8>"


def test_a_stage_shows_what_is_special():
    stage = pp.Stage(layers=range(3), devices=(4, 5), shares=(0.25, 0.75), recompute=True)
    assert repr(stage) == (
        "Stage(layers=range(0, 3), devices=(4, 5), shares=(0.25, 0.75), recompute=True)"
    )
