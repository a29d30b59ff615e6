"""The checker refuses what is wrong, one thing at a time."""

from dataclasses import replace

import pytest

from pipeplan import zoo
from pipeplan.checker import check
from pipeplan.cluster import Cluster
from pipeplan.pipeline import Bound, BoundScope, Kind, Plan, Schedule
from pipeplan.planning.door import plan


@pytest.fixture(scope="module")
def good() -> Plan:
    return plan(zoo.model("bert-large"), zoo.cluster("4x2-10g"), 6)


def with_stage(made: Plan, index: int, **changes) -> Plan:
    stages = list(made.stages)
    stages[index] = replace(stages[index], **changes)
    return replace(made, stages=tuple(stages))


def with_order(made: Plan, stage: int, order) -> Plan:
    orders = list(made.schedule)
    orders[stage] = tuple(order)
    return replace(made, schedule=Schedule(tuple(orders)))


def with_predicted(made: Plan, **changes) -> Plan:
    return replace(made, predicted=replace(made.predicted, **changes))


def swapped_forward_and_backward(made: Plan) -> Plan:
    order = list(made.schedule[0])
    backward = next(i for i, block in enumerate(order) if block.kind is Kind.BACKWARD)
    order.insert(0, order.pop(backward))
    return with_order(made, 0, order)


def without_links(made: Plan) -> Plan:
    count = made.cluster.num_devices
    return replace(
        made,
        cluster=Cluster(
            name="cut off",
            devices=made.cluster.devices,
            bandwidth_gb_per_s=((0.0,) * count,) * count,
        ),
    )


def deadlocked(made: Plan) -> Plan:
    """Stage 0 finishes each microbatch before the next, stage 1 starts with the last."""
    orders = [list(order) for order in made.schedule]
    orders[0].sort(key=lambda block: (block.microbatch, block.kind is Kind.BACKWARD))
    orders[1].sort(key=lambda block: (block.kind is Kind.BACKWARD, -block.microbatch))
    return replace(made, schedule=Schedule(tuple(tuple(order) for order in orders)))


WRONG = {
    "sum to": lambda made: with_stage(made, 0, shares=(0.4, 0.5)),
    "starts at": lambda made: with_stage(made, 1, layers=range(9, 14)),
    "of 26 layers": lambda made: replace(made, stages=made.stages[:-1]),
    "already serves": lambda made: with_stage(made, 1, devices=made.stages[0].devices),
    "there is no device": lambda made: with_stage(made, 1, devices=(99,)),
    "needs a path": without_links,
    "missing": lambda made: with_order(made, 2, made.schedule[2][:-1]),
    "already": lambda made: with_order(made, 2, (*made.schedule[2], made.schedule[2][0])),
    "not a block of this stage": lambda made: with_order(made, 2, made.schedule[1]),
    "stands before": swapped_forward_and_backward,
    "orders for": lambda made: replace(made, schedule=Schedule(made.schedule.orders[:-1])),
    "deadlocks": deadlocked,
    "iteration_ms": lambda made: with_predicted(made, iteration_ms=made.iteration_ms * 1.001),
    "bubble_fraction": lambda made: with_predicted(made, bubble_fraction=0.5),
    "exactly the used devices": lambda made: with_predicted(made, peak_memory_gb={}),
    "peak_memory_gb": lambda made: with_predicted(
        made, peak_memory_gb=dict.fromkeys(made.predicted.peak_memory_gb, 1.0)
    ),
    "schedule_guarantee_ms": lambda made: with_predicted(made, schedule_guarantee_ms=1.0),
    "lower_bound_ms": lambda made: with_predicted(
        made, bound=Bound(lower_bound_ms=made.iteration_ms * 2, scope=BoundScope.ANY)
    ),
}


def test_a_good_plan_is_valid(good):
    assert check(good).ok


@pytest.mark.parametrize("message", WRONG)
def test_wrong_plans_are_refused(good, message):
    errors = check(WRONG[message](good)).errors
    assert any(message in error for error in errors), errors


def test_too_much_memory_is_a_warning_unless_strict(good):
    small = replace(
        good.cluster, devices=tuple(replace(d, memory_gb=1.0) for d in good.cluster.devices)
    )
    tight = replace(good, cluster=small)
    verdict = check(tight)
    assert verdict.ok
    assert "needs" in verdict.warnings[0]
    assert not check(tight, strict_memory=True).ok


def test_recomputed_stages_keep_only_what_enters_them(good):
    """A stage that recomputes keeps its inputs in flight and one microbatch's activations."""
    recomputed = with_stage(good, 1, recompute=True)
    stage = recomputed.stages[1]
    layers = good.model.layers
    first = stage.layers.start
    parameters = sum(layers[i].parameter_bytes for i in stage.layers)
    activations = sum(layers[i].activation_bytes for i in stage.layers)
    in_flight = most = 0
    for block in good.schedule[1]:
        in_flight += 1 if block.kind is Kind.FORWARD else -1
        most = max(most, in_flight)
    optimizer = good.model.optimizer_bytes_per_parameter_byte
    expected_gb = (
        parameters * (1 + optimizer)
        + (most * layers[first - 1].output_bytes + activations) / stage.num_replicas
    ) / 1e9
    device = good.cluster.devices[stage.devices[0]].name
    messages = [e for e in check(recomputed).errors if f"peak_memory_gb['{device}']" in e]
    assert f"the replay {expected_gb:.9g}" in messages[0]
