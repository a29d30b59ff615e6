import random

import numpy as np
import pytest

from instances import even_model, flat_cluster, random_costs, random_schedule
from pipeplan import checker
from pipeplan.cluster import Duplex
from pipeplan.cost import CostModel, PipelineCosts
from pipeplan.errors import ScheduleError
from pipeplan.pipeline import Block, Kind, Plan, Schedule, Stage
from pipeplan.replaying import simulate
from pipeplan.schedules import SCHEDULES, fixed_codes
from pipeplan.simulator import run_schedule

F, B = Kind.FORWARD, Kind.BACKWARD


def costs_of(forward, backward, there, back, half=False, reduce=None) -> PipelineCosts:
    return PipelineCosts(
        forward_ms_S=np.array(forward, dtype=float),
        backward_ms_S=np.array(backward, dtype=float),
        send_forward_ms_C=np.array(there, dtype=float),
        send_backward_ms_C=np.array(back, dtype=float),
        all_reduce_ms_S=np.array(reduce or [0.0] * len(forward), dtype=float),
        half_duplex=half,
    )


def codes_of(text: str) -> np.ndarray:
    """A schedule as it is drawn: a line a stage."""
    rows = [
        [int(word[1:]) if word[0] == "F" else -1 - int(word[1:]) for word in line.split()]
        for line in text.strip().splitlines()
    ]
    return np.array(rows, dtype=np.int32)


def gpipe_codes(num_stages: int, num_microbatches: int) -> np.ndarray:
    return fixed_codes([num_microbatches] * num_stages, num_microbatches)


def one_f_one_b_codes(num_stages: int, num_microbatches: int) -> np.ndarray:
    return fixed_codes([num_stages - n for n in range(num_stages)], num_microbatches)


def test_hand_drawn_timeline():
    # F takes 1, B takes 2, a transfer takes 1; the all-reduce of stage 0 takes 3.
    #
    #   time     0  1  2  3  4  5  6  7  8  9  10 11 12 13
    #   stage 0  F0 F1 .  .  .  B0 B0 .  B1 B1 R  R  R
    #   there    .  f0 f1
    #   back     .  .  .  .  .  b0 .  .  b1      (from the end of B on stage 1)
    #   stage 1  .  .  F0 B0 B0 F1 B1 B1
    costs = costs_of([1, 1], [2, 2], [1], [1], reduce=[3, 0])
    run = run_schedule(costs, codes_of("F0 F1 B0 B1\nF0 B0 F1 B1"))
    assert run.block_start_ms_SM2.tolist() == [[0, 1, 6, 9], [2, 3, 5, 6]]
    assert run.transfer_start_ms_C2M.tolist() == [[[1, 2], [5, 8]]]
    assert run.end_ms_S.tolist() == [14, 8]
    assert run.iteration_ms == 14


def test_a_channel_carries_one_transfer_at_a_time():
    # F takes 1, a transfer 3: the second waits for the first. B takes nothing to send.
    costs = costs_of([1, 1], [1, 1], [3], [0])
    run = run_schedule(costs, codes_of("F0 F1 B0 B1\nF0 F1 B0 B1"))
    assert run.transfer_start_ms_C2M[0, 0].tolist() == [1, 4]
    assert run.block_start_ms_SM2[1].tolist() == [4, 7, 8, 9]


@pytest.mark.parametrize(("half", "second_forward_ms"), [(False, 6), (True, 10)])
def test_half_duplex_shares_the_channel(half, second_forward_ms):
    # Stage 1 sends B0 back at 6, when F1 of stage 0 has just ended. With two stages the rule
    # i + 4(S-1) - 2n - 1 <= j + 2n + 1 reads 0 + 3 <= 1 + 1: forward first. So F1 goes at 6
    # in both cases, and with half duplex B0 waits for it.
    costs = costs_of([2, 1], [1, 1], [2], [2], half=half)
    run = run_schedule(costs, codes_of("F0 F1 B0 B1\nF0 B0 F1 B1"))
    assert run.transfer_start_ms_C2M[0, 0].tolist() == [2, 4]
    assert run.transfer_start_ms_C2M[0, 1].tolist() == [6, 8]


def test_half_duplex_prefers_as_the_rule_says():
    # Both wait at 4, when the first forward transfer ends: F1 (ended at 2) and nothing else yet;
    # at 7 F2 and B0 both wait: i = 0, j = 2 on channel 0 of 2 stages: 0 + 3 <= 2 + 1, backward.
    costs = costs_of([1, 1], [1, 1], [3], [3], half=True)
    run = run_schedule(costs, codes_of("F0 F1 F2 B0 B1 B2\nF0 B0 F1 B1 F2 B2"))
    assert run.transfer_start_ms_C2M[0, 0].tolist() == [1, 4, 10]
    assert run.transfer_start_ms_C2M[0, 1].tolist()[0] == 7


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 16])
def test_gpipe_and_1f1b_equal_their_closed_form(num_stages, num_microbatches):
    for rule in ("gpipe", "1f1b"):
        zeros = [0.0] * (num_stages - 1)
        costs = costs_of([1.0] * num_stages, [2.0] * num_stages, zeros, zeros)
        run = SCHEDULES[rule](costs, num_microbatches)
        assert run.iteration_ms == (num_microbatches + num_stages - 1) * 3


def test_zero_length_work_happens_in_rounds():
    zeros = [0.0, 0.0]
    costs = costs_of([0, 0, 0], [0, 0, 0], zeros, zeros, half=True)
    run = run_schedule(costs, gpipe_codes(3, 4))
    assert run.iteration_ms == 0


def test_equals_the_checkers_replay_on_random_plans():
    for seed in range(5000):
        rng = random.Random(seed)
        costs = random_costs(rng, shares=True)
        schedule = random_schedule(rng, costs.num_stages, rng.randint(1, 6))
        codes = np.array(schedule.to_codes(), dtype=np.int32)
        run = run_schedule(costs, codes)
        ends_ms = checker.replay(costs, schedule.to_codes())
        length_ms = {F: costs.forward_ms_S, B: costs.backward_ms_S}
        for stage, order in enumerate(schedule):
            for position, block in enumerate(order):
                end_ms = run.block_start_ms_SM2[stage, position] + length_ms[block.kind][stage]
                assert abs(end_ms - ends_ms[stage][position]) <= 1e-9, seed


def test_deadlock_says_which_block_waits_for_which():
    costs = costs_of([1, 1], [1, 1], [0], [0])
    with pytest.raises(ScheduleError) as caught:
        run_schedule(costs, codes_of("F0 B0 F1 B1\nF1 F0 B0 B1"))
    assert "stage 0 waits at 0B0 for 1B0" in str(caught.value)
    assert "stage 1 waits at 1F1 for 0F1" in str(caught.value)


def plan_of(schedule: Schedule, microbatches: int) -> Plan:
    stages = (Stage(layers=range(1), devices=(0,)), Stage(layers=range(1, 2), devices=(1,)))
    return Plan(
        model=even_model(2, 1, 2),
        cluster=flat_cluster(2),
        microbatches=microbatches,
        stages=stages,
        schedule=schedule,
        planner="by hand",
    )


def test_simulate_gives_every_block_transfer_and_all_reduce():
    schedule = Schedule.from_codes(one_f_one_b_codes(2, 3).tolist())
    timeline = simulate(plan_of(schedule, 3))
    assert timeline.iteration_ms == 12
    assert [str(timed.block) for timed in timeline.blocks[1]] == [
        "1F0", "1B0", "1F1", "1B1", "1F2", "1B2",
    ]  # fmt: skip
    assert len(timeline.transfers) == 6
    assert [reduce.stage for reduce in timeline.all_reduces] == [0, 1]


@pytest.mark.parametrize(
    "orders",
    [
        [[0, 1, -1], [0, 1, -1, -2]],  # a block is missing
        [[0, 0, -1, -2], [0, 1, -1, -2]],  # a block stands twice
        [[0, 1, -1, -2]],  # a stage is missing
    ],
)
def test_incomplete_schedules_are_refused(orders):
    with pytest.raises(ScheduleError, match="schedule"):
        simulate(plan_of(Schedule.from_codes(orders), 2))


def test_costs_follow_the_cost_model():
    """One stage of two devices, then one of one device; every number worked out by hand."""
    model = even_model(3, 4.0, 8.0)
    cluster = flat_cluster(3, 2.0, latency_us=500.0, duplex=Duplex.HALF)
    stages = (
        Stage(layers=range(2), devices=(0, 1), shares=(0.25, 0.75)),
        Stage(layers=range(2, 3), devices=(2,), recompute=True),
    )
    costs = CostModel(model, cluster).pipeline_costs(stages)
    assert costs.forward_ms_S.tolist() == [6.0, 4.0]  # 8 * 0.75
    assert costs.backward_ms_S.tolist() == [12.0, 12.0]  # 16 * 0.75; 8 + 4
    assert costs.send_forward_ms_C.tolist() == [0.5]  # nothing to send, but a latency to pay
    assert costs.all_reduce_ms_S.tolist() == [1.0, 0.0]  # 2 (k-1) latencies
    assert costs.channel_ms_C.tolist() == [1.0]


def test_blocks_print_as_they_are_written():
    assert str(Block(F, 2, 0)) == "2F0"
