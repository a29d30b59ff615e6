"""What is made of measured times."""

import pytest

from instances import even_plan
from pipeplan.replaying import simulate
from pipeplan.testbed.measurement import Measurement
from pipeplan.testbed.orders import BlockTimes, IterationTimes, RankTimes, Way
from pipeplan.testbed.scaling import Scale

FACTOR = 4.0


def ran_as_predicted(plan, *, late=None, ends_s=(0.0, 0.0, 0.0)):
    """A measurement in which everything ran as predicted, but for what `late` adds (ms).

    Iterations take as much longer as `ends_s` says.
    """
    timeline, late = simulate(plan), late or {}
    ranks = []
    for stage, order in enumerate(timeline.blocks):
        iterations = []
        for extra_s in ends_s:
            blocks = [
                BlockTimes(
                    str(timed.block),
                    10.0 + (timed.start_ms + late.get(str(timed.block), 0.0)) * FACTOR / 1e3,
                    10.0 + (timed.end_ms + late.get(str(timed.block), 0.0)) * FACTOR / 1e3,
                    0.0,
                    0.0,
                )
                for timed in order
            ]
            end_s = 10.0 + timeline.iteration_ms * FACTOR / 1e3 + extra_s
            iterations.append(
                IterationTimes(
                    start_s=10.0 + 0.001 * stage,
                    end_s=end_s - 0.001 * stage,
                    before_end_s=10.0 - 0.001 * stage,
                    reduce_end_s=blocks[-1].end_s,
                    blocks=blocks,
                    loss=1.0,
                )
            )
        ranks.append(RankTimes(stages=[stage], replica=0, iterations=iterations))
    return Measurement(
        plan=plan,
        timeline=timeline,
        scale=Scale(time_factor=FACTOR, byte_factor=1.0, rows=4),
        way=Way.NAMESPACES,
        note="",
        ranks=tuple(ranks),
    )


def test_times_are_those_of_the_plan():
    measured = ran_as_predicted(even_plan(3, 4), ends_s=(0.0, 0.4, 0.004))
    predicted_ms = measured.predicted_ms
    wanted = [predicted_ms, predicted_ms + 100, predicted_ms + 1]
    assert measured.iterations_ms == pytest.approx(wanted)
    assert measured.measured_ms == pytest.approx(predicted_ms + 1)
    assert measured.median_iteration == 2
    for order in measured.timeline.blocks:
        for timed in order:
            span = measured.blocks[timed.block]
            assert (span.start_ms, span.end_ms) == pytest.approx((timed.start_ms, timed.end_ms))
    assert all(slip.slip_ms == pytest.approx(0.0, abs=1e-6) for slip in measured.slips)


def test_a_delay_is_found_where_it_comes_from():
    plan = even_plan(3, 4)
    last = [str(timed.block) for timed in simulate(plan).blocks[0]][-1]
    measured = ran_as_predicted(plan, late={last: 7.0})
    assert measured.slips[0].what.startswith(f"{last} after ")
    assert measured.slips[0].slip_ms == pytest.approx(7.0)
    assert all(slip.slip_ms == pytest.approx(0.0, abs=1e-6) for slip in measured.slips[1:])


def test_the_document_has_what_is_promised():
    document = ran_as_predicted(even_plan(2, 2)).document()
    assert document["predicted_ms"] == pytest.approx(document["measured_ms"])
    assert len(document["iterations_ms"]) == 3
    assert len(document["blocks"]) == 8
