"""Who is to blame, from signs of life alone."""

import dataclasses

import pytest

pytest.importorskip("torch")

from pipeplan.runtime.supervision.judging import Waiting, judge
from pipeplan.runtime.supervision.options import WatchdogOptions
from pipeplan.runtime.supervision.status_board import Beat, Failure, State

OPTIONS = WatchdogOptions()
STEP = Beat(count=1, state=State.WAITING, doing="0F0", age_s=1.0, calls=7, call="step")
WAITS = dataclasses.replace(STEP, age_s=16.0, is_idle=True)
OUTSIDE = Beat(
    count=1, state=State.OUTSIDE, doing="", age_s=16.0, calls=6, call="step", where="train.py:9"
)
IN_BARRIER = dataclasses.replace(OUTSIDE, collective="barrier at train.py:9", held_s=15.5)


def test_all_is_well():
    computing = dataclasses.replace(STEP, state=State.COMPUTING, age_s=500.0)
    outside = [dataclasses.replace(OUTSIDE, calls=7, age_s=5000.0)] * 3
    assert judge(outside, OPTIONS) is None
    assert judge([STEP, dataclasses.replace(STEP, calls=6)], OPTIONS) is None
    assert isinstance(judge([STEP, computing], OPTIONS), Waiting)


def test_a_silent_rank_is_busy_and_waits_for_nobody():
    silent = dataclasses.replace(WAITS, state=State.SILENT, age_s=100.0, where="train.py:9")
    waits = dataclasses.replace(WAITS, age_s=100.0)
    verdict = judge([waits, silent, waits], OPTIONS)
    assert isinstance(verdict, Waiting)
    assert verdict.rank == 1
    assert verdict.what == "runs, but gives no sign of life (last seen at train.py:9) for 100 s"
    late = [dataclasses.replace(beat, age_s=601.0) for beat in (waits, silent)]
    assert judge(late, OPTIONS).rank == 1


def test_a_barrier_that_nobody_else_comes_to():
    verdict = judge([WAITS, IN_BARRIER, WAITS], OPTIONS)
    assert verdict == Failure(
        rank=1,
        reason="sits in barrier at train.py:9, outside of the pipeline, while rank 0 waits in step"
        " (call 7); all ranks have to take the same steps",
    )


def test_somebody_may_still_come_to_the_barrier():
    """Rank 2 loads data, and then joins a barrier of ranks 1 and 2 only."""
    verdict = judge([WAITS, IN_BARRIER, OUTSIDE], OPTIONS)
    assert isinstance(verdict, Waiting)
    assert verdict.rank == 2
    assert verdict.what == "is outside of step (train.py:9) for 16 s"
    short = dataclasses.replace(IN_BARRIER, held_s=14.0)
    assert isinstance(judge([WAITS, short, WAITS], OPTIONS), Waiting)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("other", ["save", "evaluate"])
def test_another_call_is_named(num_ranks, other):
    for stray in range(num_ranks):
        beats = [STEP] * num_ranks
        beats[stray] = dataclasses.replace(STEP, call=other, state=State.TOGETHER)
        verdict = judge(beats, OPTIONS)
        assert isinstance(verdict, Failure)
        assert verdict.rank == stray
        assert verdict.reason.startswith(f"calls {other} where rank")


def test_the_minority_is_named_only_when_all_have_come():
    evaluate = dataclasses.replace(STEP, call="evaluate")
    late = dataclasses.replace(OUTSIDE, age_s=0.5)
    assert isinstance(judge([evaluate, late, STEP], OPTIONS), Waiting)
    verdict = judge([evaluate, evaluate, STEP], OPTIONS)
    assert isinstance(verdict, Failure)
    assert verdict.rank == 2


def test_who_has_closed_its_pipeline_is_named_if_others_go_on():
    done = dataclasses.replace(OUTSIDE, state=State.DONE)
    verdict = judge([STEP, done], OPTIONS)
    assert isinstance(verdict, Failure)
    assert verdict.reason.startswith("closed its pipeline after call 6, but rank 0 is in step")
    ended = dataclasses.replace(done, calls=7)
    assert judge([STEP, ended], OPTIONS) is None  # it has left the same step before
    assert judge([OUTSIDE, done], OPTIONS) is None


def test_a_busy_rank_has_ten_minutes():
    long, wait = dataclasses.replace(OUTSIDE, age_s=599.0), dataclasses.replace(WAITS, age_s=599.0)
    assert isinstance(judge([wait, long], OPTIONS), Waiting)
    long, wait = dataclasses.replace(long, age_s=601.0), dataclasses.replace(wait, age_s=601.0)
    verdict = judge([wait, long], OPTIONS)
    assert isinstance(verdict, Failure)
    assert "raise outside_timeout_s (600 s)" in verdict.reason


def test_saving_is_no_hang_while_one_rank_writes():
    holds = dataclasses.replace(
        STEP, call="save", state=State.TOGETHER, age_s=50.0, collective="barrier", held_s=50.0
    )
    writes = dataclasses.replace(holds, collective="", held_s=0.0)
    verdict = judge([writes, holds, holds], OPTIONS)
    assert isinstance(verdict, Waiting)
    assert verdict.rank == 0
    assert verdict.what.startswith("has been busy in save")


def test_a_deadlock_takes_twice_the_limit_of_a_block():
    wait = dataclasses.replace(WAITS, age_s=39.0)
    assert judge([wait, wait], OPTIONS) is None
    wait = dataclasses.replace(WAITS, age_s=41.0)
    assert isinstance(judge([wait, wait], OPTIONS), Failure)
    busy = dataclasses.replace(wait, is_idle=False)
    assert judge([wait, busy], OPTIONS) is None


def test_a_broken_connection_is_left_to_those_who_know_more():
    seeking = dataclasses.replace(WAITS, state=State.SEEKING)
    assert judge([seeking, IN_BARRIER], OPTIONS) is None
