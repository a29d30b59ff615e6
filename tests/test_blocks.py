"""Schedules and timelines hold arrays, and give blocks when somebody asks."""

import copy
import pickle
import sys
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from pipeplan.errors import InputError
from pipeplan.pipeline import (
    AllReduce,
    Block,
    Kind,
    Schedule,
    TimedBlock,
    Timeline,
    Transfer,
    most_in_flight,
)

F, B = Kind.FORWARD, Kind.BACKWARD
ORDERS = (
    (Block(F, 0, 0), Block(F, 0, 1), Block(B, 0, 0), Block(B, 0, 1)),
    (Block(F, 1, 0), Block(B, 1, 0)),
    (),
)
CODES = [[0, 1, -1, -2], [0, -1], []]


def test_blocks_print_as_they_are_written():
    assert str(Block(F, 2, 0)) == "2F0"


def test_blocks_and_codes_are_two_forms_of_one_schedule():
    schedule = Schedule(ORDERS)
    assert schedule == Schedule.from_codes(CODES)
    assert schedule.to_codes() == CODES
    assert schedule.orders == tuple(schedule) == ORDERS
    assert (schedule[0], schedule[-1], schedule[-2]) == (ORDERS[0], ORDERS[2], ORDERS[1])
    assert schedule.block(1, 1) == Block(B, 1, 0)
    assert (len(schedule), schedule.num_stages, schedule.num_blocks) == (3, 3, 6)
    assert schedule.codes(0).dtype == np.int32
    with pytest.raises(IndexError):
        schedule[3]


def test_lists_and_kinds_as_text_are_as_good():
    assert Schedule([list(order) for order in ORDERS]) == Schedule(ORDERS)
    assert Schedule([[Block("F", 0, 0), Block("B", 0, 0)]]).to_codes() == [[0, -1]]


def test_nobody_can_change_a_schedule():
    given = np.array([[0, -1]], dtype=np.int32)
    schedule = Schedule.from_codes(given)
    given[0, 0] = 5
    assert schedule.to_codes() == [[0, -1]]
    copies = (schedule, Schedule(ORDERS), pickle.loads(pickle.dumps(schedule)))  # noqa: S301
    for one in (*copies, copy.deepcopy(schedule)):
        with pytest.raises(ValueError, match="read-only"):
            one.codes(0)[0] = 1
    with pytest.raises(FrozenInstanceError):
        schedule._rows = ()


def test_schedules_compare_hash_and_travel():
    schedule = Schedule(ORDERS)
    assert schedule != Schedule(ORDERS[:2])
    assert schedule != Schedule((ORDERS[0], ORDERS[1][::-1], ()))
    assert (schedule == CODES) is False
    assert hash(schedule) == hash(Schedule.from_codes(CODES))
    assert pickle.loads(pickle.dumps(schedule)) == schedule  # noqa: S301
    assert repr(schedule) == "<Schedule of 3 stages, 6 blocks>"


@pytest.mark.parametrize("block", [Block(F, -1, 0), Block(B, 0, -1), Block(F, 0, 2**40)])
def test_blocks_that_fit_nowhere_are_kept_for_the_checker(block):
    """A negative microbatch must not become a backward, nor another stage's block this one's."""
    schedule = Schedule([[Block(F, 0, 0), block]])
    assert schedule[0] == (Block(F, 0, 0), block)
    assert schedule.block(0, 1) == block
    assert schedule.to_codes() == [[0, 2**31 - 1]]
    assert pickle.loads(pickle.dumps(schedule)) == schedule  # noqa: S301
    assert schedule != Schedule([[Block(F, 0, 0), Block(F, 0, -7)]])
    assert schedule != Schedule.from_codes(schedule.to_codes())


def test_the_largest_code_is_a_block_like_others():
    assert Schedule.from_codes([[2**31 - 1]])[0] == (Block(F, 0, 2**31 - 1),)


@pytest.mark.parametrize("codes", [[0.5], [2**40], [True], [10**30], [[0], [1]]])
def test_codes_that_are_none_are_refused(codes):
    with pytest.raises(InputError, match=r"schedule\[1\]"):
        Schedule.from_codes([[0, -1], codes])


def test_a_microbatch_that_is_no_whole_number_is_refused():
    with pytest.raises(InputError, match=r"schedule\[0\]"):
        Schedule([[Block(F, 0, 0.5)]])


def test_most_in_flight():
    assert most_in_flight(np.array([0, 1, -1, 2, 3, -2], dtype=np.int32)) == 3
    assert most_in_flight(np.array([], dtype=np.int32)) == 0
    assert most_in_flight(np.array([-1, 0], dtype=np.int32)) == 0
    assert [Schedule(ORDERS).most_in_flight(stage) for stage in range(3)] == [2, 1, 0]


def test_large_schedules_take_four_bytes_a_block():
    schedule = Schedule.from_codes(np.zeros((26, 60_000), dtype=np.int32))
    rows = [schedule.codes(stage) for stage in range(26)]
    assert sum(row.nbytes for row in rows) == 4 * schedule.num_blocks
    assert sys.getsizeof(schedule) < 200


def timeline(**changes) -> Timeline:
    """Two stages, one microbatch; every number another."""
    arrays = {
        "order_SM2": np.array([[0, -1], [0, -1]], dtype=np.int32),
        "block_start_ms_SM2": np.array([[0.0, 7.0], [2.0, 4.0]]),
        "block_end_ms_SM2": np.array([[1.0, 9.0], [3.0, 6.0]]),
        "sent_C2M": np.array([[[0], [-1]]], dtype=np.int32),
        "transfer_start_ms_C2M": np.array([[[1.5], [6.25]]]),
        "transfer_end_ms_C2M": np.array([[[1.75], [6.5]]]),
        "all_reduce_start_ms_S": np.array([9.0, 6.0]),
        "all_reduce_end_ms_S": np.array([9.5, 11.0]),
    }
    return Timeline(**{**arrays, **changes})


def test_timelines_give_what_their_arrays_hold():
    made = timeline()
    assert made.blocks == (
        (TimedBlock(Block(F, 0, 0), 0.0, 1.0), TimedBlock(Block(B, 0, 0), 7.0, 9.0)),
        (TimedBlock(Block(F, 1, 0), 2.0, 3.0), TimedBlock(Block(B, 1, 0), 4.0, 6.0)),
    )
    assert made.transfers == (Transfer(F, 0, 0, 1.5, 1.75), Transfer(B, 0, 0, 6.25, 6.5))
    assert made.all_reduces == (AllReduce(0, 9.0, 9.5), AllReduce(1, 6.0, 11.0))
    assert made.iteration_ms == 11.0
    assert made.blocks is made.blocks  # made once
    assert repr(made) == "<Timeline of 2 stages, 11 ms>"


def test_timelines_compare_by_all_they_hold():
    made = timeline()
    assert made == timeline()
    assert hash(made) == hash(timeline())
    assert (made == "a timeline") is False
    assert pickle.loads(pickle.dumps(made)) == made  # noqa: S301
    for name in made.__dataclass_fields__:
        assert made != timeline(**{name: getattr(made, name) + 1}), name
