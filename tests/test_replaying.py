"""What is shown of a plan is what its replay says, or the plan is refused."""

from dataclasses import replace

import pytest

from instances import even_model, flat_cluster, forced
from pipeplan import simulate as public_simulate
from pipeplan import zoo
from pipeplan.checker import check
from pipeplan.cost import CostModel
from pipeplan.errors import PlanFileError, ScheduleError
from pipeplan.figures import predicted_figures
from pipeplan.pipeline import Bound, BoundScope, Plan, Schedule, Stage
from pipeplan.planning.door import plan
from pipeplan.replaying import replay_plan, simulate
from pipeplan.schedules import SCHEDULES, schedule_guarantee_ms


@pytest.fixture(scope="module")
def good() -> Plan:
    return plan(zoo.model("bert-large"), zoo.cluster("4x2-10g"), 6, "spp")


def by_hand(**changes) -> Plan:
    """Two stages on three devices, F takes 1, B takes 2, nothing to send."""
    fields = {
        "model": even_model(2, 1.0, 2.0),
        "cluster": flat_cluster(3),
        "microbatches": 2,
        "stages": (
            Stage(layers=range(1), devices=(0, 1)),
            Stage(layers=range(1, 2), devices=(2,)),
        ),
        "schedule": Schedule.from_codes([[0, 1, -1, -2]] * 2),
        "planner": "hand",
    }
    return Plan(**{**fields, **changes})


def test_the_public_simulate_is_the_checked_one():
    assert public_simulate is simulate


def test_a_fresh_plan_is_shown_as_it_is(good):
    replayed = replay_plan(good)
    assert replayed.plan is good
    assert replayed.warnings == ()
    assert replayed.run.iteration_ms == pytest.approx(good.iteration_ms)
    assert replayed.timeline == simulate(good)
    assert replayed.timeline.iteration_ms == replayed.run.iteration_ms
    assert replayed.cost.cluster is good.cluster
    assert replayed.costs.num_stages == len(good.stages)


def test_missing_figures_are_filled_in():
    # stage 0   F0 F1 .  .  .  B0 .  B1      on two devices: F takes 0.5, B takes 1
    # stage 1   .  F0 F1 B0 B0 B1 B1
    made = by_hand()
    replayed = replay_plan(made)
    assert replayed.warnings == ("predicted: is missing; the replayed figures take its place",)
    predicted = replayed.plan.predicted
    assert predicted.iteration_ms == 7.5
    assert predicted.bubble_fraction == pytest.approx(1 - (3 + 3 + 6) / (3 * 7.5))
    assert predicted.peak_memory_gb == {"d0": 0.0, "d1": 0.0, "d2": 0.0}
    assert predicted.schedule_guarantee_ms is None
    assert predicted.bound is None
    assert replace(replayed.plan, predicted=None) == made
    assert check(replayed.plan).ok


def test_stale_figures_are_replaced_and_one_line_says_so(good):
    stale = replace(good, predicted=replace(good.predicted, iteration_ms=1.0, bubble_fraction=0.5))
    replayed = replay_plan(stale)
    (warning,) = replayed.warnings
    assert warning.startswith("predicted.iteration_ms: says 1, the replay ")
    assert warning.endswith(" (and 1 more); the replayed figures take their place")
    assert "\n" not in warning
    fresh = good.predicted
    assert replayed.plan.iteration_ms == pytest.approx(fresh.iteration_ms)
    assert replayed.plan.predicted.bubble_fraction == pytest.approx(fresh.bubble_fraction)
    assert replayed.plan.predicted.peak_memory_gb == pytest.approx(fresh.peak_memory_gb)
    assert replayed.plan.predicted.schedule_guarantee_ms == pytest.approx(
        fresh.schedule_guarantee_ms
    )
    assert replayed.plan.bound == good.bound
    assert check(replayed.plan).ok
    assert check(stale).stale[0] == warning.split(" (and")[0]
    assert simulate(stale) == simulate(good)


def test_a_single_stale_figure_has_no_others_beside_it(good):
    replayed = replay_plan(replace(good, predicted=replace(good.predicted, bubble_fraction=0.5)))
    assert "more)" not in replayed.warnings[0]
    assert replayed.warnings[0].endswith("; the replayed figures take their place")


def test_figures_within_the_checker_s_tolerance_stay(good):
    near = replace(
        good, predicted=replace(good.predicted, iteration_ms=good.iteration_ms * (1 + 5e-7))
    )
    assert replay_plan(near).plan is near


def test_a_guarantee_that_was_wrong_is_replaced(good):
    assert good.predicted.schedule_guarantee_ms is not None
    wrong = replace(good, predicted=replace(good.predicted, schedule_guarantee_ms=1.0))
    costs = CostModel(good.model, good.cluster).pipeline_costs(good.stages)
    expected_ms = schedule_guarantee_ms(costs, good.microbatches)
    assert replay_plan(wrong).plan.predicted.schedule_guarantee_ms == expected_ms
    none = replace(
        good, predicted=replace(good.predicted, schedule_guarantee_ms=None, iteration_ms=1.0)
    )
    assert replay_plan(none).plan.predicted.schedule_guarantee_ms is None


def test_a_guarantee_that_the_schedule_breaks_is_dropped():
    # One microbatch after the other: 16 * 15 ms are more than (16 + 4 * 4) rounds of 3 ms.
    order = [code for m in range(16) for code in (m, -1 - m)]
    made = by_hand(
        model=even_model(5, 1.0, 2.0),
        cluster=flat_cluster(5),
        microbatches=16,
        stages=tuple(Stage(layers=range(n, n + 1), devices=(n,)) for n in range(5)),
        schedule=Schedule.from_codes([order] * 5),
    )
    bound = Bound(lower_bound_ms=48.0, scope=BoundScope.ANY)
    figures = replace(replay_plan(made).plan.predicted, schedule_guarantee_ms=96.0, bound=bound)
    replayed = replay_plan(replace(made, predicted=figures))
    assert len(replayed.warnings) == 1
    assert replayed.plan.predicted.schedule_guarantee_ms is None
    assert replayed.plan.bound == bound
    assert check(replayed.plan).ok


def test_a_bound_above_the_replayed_time_is_dropped(good):
    above = Bound(lower_bound_ms=good.iteration_ms * 2, scope=BoundScope.ANY)
    replayed = replay_plan(replace(good, predicted=replace(good.predicted, bound=above)))
    assert "lower_bound_ms" in replayed.warnings[0]
    assert replayed.plan.bound is None
    assert replayed.plan.predicted.schedule_guarantee_ms == pytest.approx(
        good.predicted.schedule_guarantee_ms
    )
    below = Bound(lower_bound_ms=good.iteration_ms / 2, scope=BoundScope.ANY)
    stale = replace(good, predicted=replace(good.predicted, bound=below, iteration_ms=1e9))
    assert replay_plan(stale).plan.bound == below


def test_a_bound_that_does_not_speak_of_the_plan_is_dropped():
    made = by_hand()
    uneven = replace(made, stages=(replace(made.stages[0], shares=(0.25, 0.75)), made.stages[1]))
    bound = Bound(lower_bound_ms=1.0, scope=BoundScope.EVEN_SHARES)
    figures = replace(replay_plan(uneven).plan.predicted, bound=bound)
    assert replay_plan(replace(uneven, predicted=figures)).plan.bound is None


REFUSED = {
    "stages: cover 1 of 2 layers": lambda made: replace(
        made, stages=made.stages[:1], schedule=Schedule(made.schedule.orders[:1])
    ),
    "stages[1].devices: 'd0' already serves stage 0": lambda made: replace(
        made, stages=(made.stages[0], replace(made.stages[1], devices=(0,)))
    ),
    "stages[0].shares: sum to 0.6": lambda made: replace(
        made, stages=(forced(made.stages[0], shares=(0.3, 0.3)), made.stages[1])
    ),
    "stages[0].devices: needs a path from 'd0' to 'd1'": lambda made: replace(
        made, cluster=flat_cluster(3, 0.0)
    ),
    "cluster.devices[0].speed: 9.99989e-321": lambda made: forced(
        made,
        cluster=forced(
            made.cluster,
            devices=(forced(made.cluster.devices[0], speed=1e-320), *made.cluster.devices[1:]),
        ),
    ),
}
BAD_SCHEDULES = {
    "schedule: has 1 orders for 2 stages": [[0, 1, -1, -2]],
    "schedule[1]: does not hold every block: 1B1 missing": [[0, 1, -1, -2], [0, 1, -1]],
    "schedule[0][4]: 0B1 stands at 3 already": [[0, 1, -1, -2, -2], [0, 1, -1, -2]],
    "schedule: deadlocks: stage 0 waits at 0B0 for 1B0, stage 1 waits at 1F1 for 0F1": [
        [0, -1, 1, -2],
        [1, 0, -1, -2],
    ],
}


@pytest.mark.parametrize("show", [simulate, replay_plan])
@pytest.mark.parametrize("message", REFUSED)
def test_what_the_checker_refuses_is_not_shown(show, message):
    wrong = REFUSED[message](by_hand())
    assert check(wrong).errors[0].startswith(message)
    with pytest.raises(PlanFileError) as caught:
        show(wrong)
    assert str(caught.value) == check(wrong).errors[0]
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("show", [simulate, replay_plan])
@pytest.mark.parametrize("message", BAD_SCHEDULES)
def test_schedules_that_cannot_run_are_not_shown(show, message):
    wrong = by_hand(schedule=Schedule.from_codes(BAD_SCHEDULES[message]))
    assert not check(wrong).ok
    with pytest.raises(ScheduleError) as caught:
        show(wrong)
    assert str(caught.value) == message


@pytest.mark.parametrize("rule", SCHEDULES)
def test_figures_follow_the_order_that_ran(rule):
    """Memory from the most in flight, the bubble from all devices' own compute time."""
    model = replace(
        even_model(2, 1.0, 2.0),
        layers=tuple(
            replace(layer, activation_bytes=1e9, parameter_bytes=1e9)
            for layer in even_model(2, 1.0, 2.0).layers
        ),
    )
    made = by_hand(model=model, microbatches=5)
    cost = CostModel(model, made.cluster)
    run = SCHEDULES[rule](cost.pipeline_costs(made.stages), 5)
    figures = predicted_figures(cost, made.stages, list(run.order_SM2), 30.0)
    held = [0, 0]
    for stage, order in enumerate(run.order_SM2.tolist()):
        in_flight = 0
        for code in order:
            in_flight += 1 if code >= 0 else -1
            held[stage] = max(held[stage], in_flight)
    assert figures.peak_memory_gb == pytest.approx(
        {"d0": 4 + held[0] / 2, "d1": 4 + held[0] / 2, "d2": 4 + held[1]}
    )
    assert figures.bubble_fraction == pytest.approx(1 - 5 * (1.5 + 1.5 + 3) / (3 * 30.0))
    assert (figures.iteration_ms, figures.schedule_guarantee_ms, figures.bound) == (30, None, None)


def test_a_plan_of_no_length_has_no_bubble():
    made = by_hand(model=even_model(2, 0.0, 0.0))
    assert replay_plan(made).plan.predicted.bubble_fraction == 0.0
    assert check(replay_plan(made).plan).ok


def test_a_plan_prints_as_one_short_line(good):
    assert repr(by_hand()) == (
        "<Plan of 'even' on 'flat' by 'hand': 2 stages on 3 devices, 2 microbatches, not simulated>"
    )
    assert repr(replay_plan(by_hand()).plan).endswith("2 microbatches, 7.5 ms>")
    nasty = replace(good, planner="\x1b[31m\n" + "x" * 10_000)
    assert len(repr(nasty)) < 300
    assert repr(nasty).isprintable()
