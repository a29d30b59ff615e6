import random

import numpy as np
import pytest

from instances import even_model, flat_cluster, random_plan, random_schedule
from pipeplan import checker
from pipeplan.cluster import Duplex
from pipeplan.cost import CostModel, PipelineCosts
from pipeplan.errors import ScheduleError
from pipeplan.pipeline import AllReduce, Block, Kind, Plan, Schedule, Stage, Transfer
from pipeplan.replaying import replay_plan, simulate
from pipeplan.schedules import SCHEDULES, fixed_codes, schedule_guarantee_ms
from pipeplan.simulator import run_plan, run_schedule, timeline_of

F, B = Kind.FORWARD, Kind.BACKWARD
THREE_EACH = "F0 F1 F2 B0 B1 B2\nF0 B0 F1 B1 F2 B2"


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


def test_half_duplex_makes_a_transfer_wait_for_the_other_direction():
    # Transfers take 4. The channel carries F0 from 2 to 6 and F1, which waits since 4, from 6 to
    # 10. Stage 1 ends B0 at 8: with full duplex it goes at once, with half duplex at 10.
    #
    #   time     0  2  4  6  8  10 12 14
    #   stage 0  F0 F1
    #   stage 1  .  .  .  FB
    #   full     .  f0 f0 f1 f1           and b0 from 8 to 12
    #   half     .  f0 f0 f1 f1 b0 b0
    codes = codes_of("F0 F1 B0 B1\nF0 B0 F1 B1")
    for half, first_back_ms in ((False, 8), (True, 10)):
        run = run_schedule(costs_of([2, 1], [1, 1], [4], [4], half=half), codes)
        assert run.transfer_start_ms_C2M[0, 0].tolist() == [2, 6]
        assert run.transfer_start_ms_C2M[0, 1].tolist()[0] == first_back_ms


def test_half_duplex_prefers_the_forward_where_the_rule_says_so():
    # F1 of stage 0 and B0 of stage 1 both end at 8, and the channel is free. Two stages, channel
    # 0, one forward and no backward begun: 0 + 4 - 0 - 1 <= 1 + 0 + 1 does not hold. So F1 goes
    # first, from 8 to 9, and B0 follows; with full duplex both go at 8.
    #
    #   time     0  .  .  .  4  5  .  .  8  9  10
    #   stage 0  F0 F0 F0 F0 F1 F1 F1 F1 .  .  B0
    #   stage 1  .  .  .  .  .  F0 F0 B0 .  F1 ...     (F0 ends at 6.5)
    #   half     .  .  .  .  f0 .  .  .  f1 b0
    codes = codes_of("F0 F1 B0 B1\nF0 B0 F1 B1")
    for half, backs_ms, block_ms in (
        (False, [8, 12], [0, 4, 9, 13]),
        (True, [9, 12], [0, 4, 10, 13]),
    ):
        run = run_schedule(costs_of([4, 1.5], [1, 1.5], [1], [1], half=half), codes)
        assert run.transfer_start_ms_C2M[0, 0].tolist() == [4, 8]
        assert run.transfer_start_ms_C2M[0, 1].tolist() == backs_ms
        assert run.block_start_ms_SM2[0].tolist() == block_ms
        assert run.iteration_ms == 14


def test_half_duplex_prefers_as_the_rule_says():
    # Both wait at 4, when the first forward transfer ends: F1 (ended at 2) and nothing else yet;
    # at 7 F2 and B0 both wait: i = 0, j = 2 on channel 0 of 2 stages: 0 + 3 <= 2 + 1, backward.
    costs = costs_of([1, 1], [1, 1], [3], [3], half=True)
    run = run_schedule(costs, codes_of(THREE_EACH))
    assert run.transfer_start_ms_C2M[0, 0].tolist() == [1, 4, 10]
    assert run.transfer_start_ms_C2M[0, 1].tolist()[0] == 7
    full = run_schedule(costs_of([1, 1], [1, 1], [3], [3]), codes_of(THREE_EACH))
    assert full.transfer_start_ms_C2M[0, 0].tolist() == [1, 4, 7]
    assert full.transfer_start_ms_C2M[0, 1].tolist()[0] == 6


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 16])
def test_gpipe_and_1f1b_equal_their_closed_form(num_stages, num_microbatches):
    for rule in ("gpipe", "1f1b"):
        zeros = [0.0] * (num_stages - 1)
        costs = costs_of([1.0] * num_stages, [2.0] * num_stages, zeros, zeros)
        run = SCHEDULES[rule](costs, num_microbatches)
        assert run.iteration_ms == (num_microbatches + num_stages - 1) * 3


ORDERS_BY_RULE = {
    "pe": "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4",
    "1f1b": "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
    "eager-1f1b": "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
    "gpipe": "F0 F1 F2 F3 F4 B0 B1 B2 B3 B4",
    "backward-first": "F0 F1 F2 B0 B1 F3 B2 F4 B3 B4",
    "capped-4": "F0 F1 F2 F3 F4 B0 B1 B2 B3 B4",
    "capped-2": "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
}


@pytest.mark.parametrize("rule", SCHEDULES)
def test_rules_give_the_orders_worked_out_by_hand(rule):
    # F of stage 0 takes 3, all else 1. At 9 stage 0 has run F0 F1 F2, and B0 waits since 7.
    # PE: 0 + 4 <= 3 does not hold, so F3; at 12 it does, so B0; at 13 1 + 4 <= 4 does not, so F4.
    # Backward first: B0, and B1, which arrives at 10; at 15 B3 is not there yet, so F4.
    # Caps of 2 and 4 for each stage behind, and one more: 3 and 5 microbatches.
    run = SCHEDULES[rule](costs_of([3, 1], [1, 1], [1], [1]), 5)
    last = "F0 F1 F2 F3 F4 B0 B1 B2 B3 B4" if rule == "gpipe" else "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"
    assert run.order_SM2.tolist() == codes_of(f"{ORDERS_BY_RULE[rule]}\n{last}").tolist()


def test_warm_ups_follow_the_number_of_stages():
    costs = costs_of([1, 1, 1], [1, 1, 1], [0, 0], [0, 0])
    for rule, warm_ups in (("1f1b", [3, 2, 1]), ("eager-1f1b", [5, 3, 1]), ("gpipe", [8, 8, 8])):
        orders = SCHEDULES[rule](costs, 8).order_SM2.tolist()
        assert [order.index(-1) for order in orders] == warm_ups
    for rule, most in (("capped-2", [5, 3, 1]), ("capped-4", [9, 5, 1])):
        held = SCHEDULES[rule](costs_of([1, 9, 9], [1, 1, 1], [0, 0], [0, 0]), 20).order_SM2
        assert (2 * (held >= 0) - 1).cumsum(axis=1).max(axis=1).tolist() == most


def test_the_guarantee_is_the_theorem_s_formula():
    # (6 + 4 * 2) rounds of the busiest, and the longest all-reduce.
    stages = {"forward": [1, 2, 3], "backward": [2, 2, 2], "reduce": [1, 7, 2]}
    sends = {"there": [1, 4], "back": [3, 3]}
    assert schedule_guarantee_ms(costs_of(**stages, **sends), 6) == 14 * 5 + 7
    assert schedule_guarantee_ms(costs_of(**stages, **sends, half=True), 6) == 14 * 7 + 7


def test_zero_length_work_happens_in_rounds():
    zeros = [0.0, 0.0]
    costs = costs_of([0, 0, 0], [0, 0, 0], zeros, zeros, half=True)
    run = run_schedule(costs, gpipe_codes(3, 4))
    assert run.iteration_ms == 0


@pytest.mark.parametrize("count", [500, pytest.param(20_000, marks=pytest.mark.full)])
def test_equals_the_checkers_replay_on_random_plans(count):
    """Plans of all kinds: every schedule, shares, recomputation, both duplex modes, ties."""
    for seed in range(count):
        made = random_plan(random.Random(seed))
        costs, run = run_plan(made)
        timeline = timeline_of(costs, run)
        ends_ms = checker.replay(costs, made.schedule.to_codes())
        assert run.order_SM2.tolist() == made.schedule.to_codes()
        assert np.abs(timeline.block_end_ms_SM2 - ends_ms).max() <= 1e-9, seed
        lasts_ms = [order[-1] for order in ends_ms] + costs.all_reduce_ms_S
        assert np.abs(run.end_ms_S - lasts_ms).max() <= 1e-9, seed
        assert timeline.iteration_ms == run.iteration_ms == run.end_ms_S.max()
        sent_ms_C2M = timeline.transfer_end_ms_C2M - timeline.transfer_start_ms_C2M
        lengths_ms_C2 = np.stack([costs.send_forward_ms_C, costs.send_backward_ms_C], axis=1)
        assert np.abs(sent_ms_C2M - lengths_ms_C2[:, :, None]).max(initial=0) <= 1e-9, seed
        assert checker.check(replay_plan(made).plan).errors == (), seed


@pytest.mark.parametrize("count", [300, pytest.param(5_000, marks=pytest.mark.full)])
def test_equals_the_checkers_replay_where_channels_are_crowded(count):
    """Half duplex, transfers longer than blocks, whole numbers: both directions often wait."""
    for seed in range(count):
        rng = random.Random(seed)
        S, M = rng.randint(2, 6), rng.randint(4, 14)

        def times(count: int, most: int, rng: random.Random = rng) -> list[int]:
            return [rng.randint(0, most) for _ in range(count)]

        costs = costs_of(times(S, 2), times(S, 2), times(S - 1, 4), times(S - 1, 4), half=True)
        orders = SCHEDULES[rng.choice(list(SCHEDULES))](costs, M).order_SM2
        if seed % 3 == 0:
            orders = np.array(random_schedule(rng, S, M).to_codes(), dtype=np.int32)
        timeline = timeline_of(costs, run_schedule(costs, orders))
        ends_ms = checker.replay(costs, orders.tolist())
        assert np.abs(timeline.block_end_ms_SM2 - ends_ms).max() <= 1e-9, seed


def test_random_plans_are_of_all_kinds():
    """The test above means what it says: among its plans there is some of everything."""
    plans = [random_plan(random.Random(seed)) for seed in range(500)]
    costs = [CostModel(made.model, made.cluster).pipeline_costs(made.stages) for made in plans]
    stages = [stage for made in plans for stage in made.stages]
    assert {made.cluster.duplex for made in plans} == set(Duplex)
    assert {len(made.stages) for made in plans} >= {1, 2, 3, 4, 5}
    for count in (
        sum(stage.shares is not None for stage in stages),
        sum(stage.recompute for stage in stages),
        sum(isinstance(made.cluster.latency_us, tuple) for made in plans),
        sum((cost.forward_ms_S == 0).any() for cost in costs),
        sum((cost.backward_ms_S == 0).any() for cost in costs),
        sum((cost.send_forward_ms_C == 0).any() for cost in costs),
        sum((cost.all_reduce_ms_S > 0).any() for cost in costs),
    ):
        assert count > 25


def test_deadlock_says_which_block_waits_for_which():
    costs = costs_of([1, 1], [1, 1], [0], [0])
    with pytest.raises(ScheduleError) as caught:
        run_schedule(costs, codes_of("F0 B0 F1 B1\nF1 F0 B0 B1"))
    assert "stage 0 waits at 0B0 for 1B0" in str(caught.value)
    assert "stage 1 waits at 1F1 for 0F1" in str(caught.value)


def test_the_two_stages_that_wait_for_each_other_are_found_behind_others():
    # Every stage waits for B0 of the next one, but only the last two wait for each other.
    rows = ["F0 B0 F1 B1"] * 5 + ["F1 F0 B0 B1"]
    costs = costs_of([1] * 6, [1] * 6, [0] * 5, [0] * 5)
    with pytest.raises(ScheduleError) as caught:
        run_schedule(costs, codes_of("\n".join(rows)))
    assert str(caught.value) == (
        "schedule: deadlocks: stage 4 waits at 4B0 for 5B0, stage 5 waits at 5F1 for 4F1"
    )


def test_a_last_stage_can_wait_for_itself():
    costs = costs_of([1, 1, 1], [1, 1, 1], [0, 0], [0, 0])
    with pytest.raises(ScheduleError) as caught:
        run_schedule(costs, codes_of("F0 B0\nF0 B0\nB0 F0"))
    assert str(caught.value) == "schedule: deadlocks: stage 2 waits at 2B0 for 2F0"


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
    # stage 0  F0 F1 .  B0 B0 F2 B1 B1 .  .  B2 B2      F takes 1, B takes 2, transfers nothing
    # stage 1  .  F0 B0 B0 F1 B1 B1 F2 B2 B2
    assert timeline.iteration_ms == 12
    assert [str(timed.block) for timed in timeline.blocks[1]] == [
        "1F0", "1B0", "1F1", "1B1", "1F2", "1B2",
    ]  # fmt: skip
    assert [(timed.start_ms, timed.end_ms) for timed in timeline.blocks[0]] == [
        (0, 1), (1, 2), (4, 6), (6, 7), (7, 9), (10, 12),
    ]  # fmt: skip
    assert timeline.transfers == (
        Transfer(F, 0, 0, 1, 1),
        Transfer(F, 0, 1, 2, 2),
        Transfer(F, 0, 2, 7, 7),
        Transfer(B, 0, 0, 4, 4),
        Transfer(B, 0, 1, 7, 7),
        Transfer(B, 0, 2, 10, 10),
    )
    assert timeline.all_reduces == (AllReduce(0, 12, 12), AllReduce(1, 10, 10))


@pytest.mark.parametrize(
    "orders",
    [
        [[0, 1, -1], [0, 1, -1, -2]],  # a block is missing
        [[0, 0, -1, -2], [0, 1, -1, -2]],  # a block stands twice
        [[0, 1, -1, -2, -2], [0, 1, -1, -2]],  # nothing is missing, but a block stands twice
        [[0, 1, -1, -2], [0, 1, -1, -2, 1, -2]],
        [[0, 1, 2, -1, -2, -3], [0, 1, 2, -1, -2, -3]],  # a microbatch too many
        [[0, 1, -1, -2]],  # a stage is missing
        [[0, 1, -1, -2]] * 3,  # a stage too many
    ],
)
def test_incomplete_schedules_are_refused(orders):
    with pytest.raises(ScheduleError, match="schedule"):
        simulate(plan_of(Schedule.from_codes(orders), 2))
    # Without the checker before it too.
    with pytest.raises(ScheduleError, match=r"every microbatch of 0\.\.1 exactly|orders for 2 st"):
        run_plan(plan_of(Schedule.from_codes(orders), 2))


def test_blocks_of_another_stage_are_refused():
    order = (Block(F, 0, 0), Block(B, 0, 0))
    with pytest.raises(ScheduleError, match="blocks of groups"):
        run_plan(plan_of(Schedule((order, order)), 1))
