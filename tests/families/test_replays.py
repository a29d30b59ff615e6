"""Plans with groups: drawings by hand, and simulator against checker on random plans."""

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest

import pipeplan as pp
from families.samples import bucket_example, format_example, schedule_of
from family_plans import random_family_plan
from instances import random_plan
from pipeplan.checker import structural_errors
from pipeplan.cost import CostModel
from pipeplan.documents.files import plan_document
from pipeplan.documents.json_text import to_json
from pipeplan.documents.plans import parse_plan
from pipeplan.errors import ScheduleError
from pipeplan.group_costs import group_costs
from pipeplan.group_simulator import group_time_ms, run_group_plan
from pipeplan.interop.exported import CannotExport, ExportSettings
from pipeplan.interop.exporting import FORMATS, export_plan
from pipeplan.pipeline import GroupTimeline, Transfer
from pipeplan.plain_group_flows import replay_group_flows
from pipeplan.plain_group_memory import group_memory_gb
from pipeplan.plain_groups import replay_groups
from pipeplan.planning.whatif.carrying import carry_over
from pipeplan.planning.whatif.changed_cluster import apply_changes
from pipeplan.planning.whatif.changes import Changes
from pipeplan.replaying import replay_plan, simulate
from shared_plans import random_plan as random_shared_plan

FEW, MANY = 120, 6000


def is_close(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=1e-9, abs_tol=1e-9)


# ------------------------------------------------------------------------ by hand


def test_the_example_of_the_format_takes_23_ms():
    """The gradient of 3B0 is ready at 10 and waits behind F2 on the channel from X to Y."""
    timeline = simulate(format_example())
    assert isinstance(timeline, GroupTimeline)
    assert timeline.iteration_ms == 23
    assert [each for each in timeline.transfers if each.channel == 2 and each.kind == "B"] == [
        Transfer("B", 2, 0, 13.0, 14.0),
        Transfer("B", 2, 1, 14.0, 15.0),
        Transfer("B", 2, 2, 18.0, 19.0),
    ]
    there = [each for each in timeline.transfers if each.channel == 0 and each.kind == "F"]
    assert [(each.start_ms, each.end_ms) for each in there] == [(1, 5), (5, 9), (9, 13)]
    assert not [each for each in timeline.transfers if each.channel == 1]  # inside group Y
    replayed = replay_plan(format_example()).plan
    assert pp.check(replayed).ok


def test_parts_of_all_reduces_begin_while_the_last_block_runs():
    """Two devices are one group.

    compute  0F0 1F0 1I0  0F1  1F1  1B1  1W0 0B0 0I1 0W1
    until    0.5 1.0 1.25 1.75 2.25 2.75 3.0 3.5 3.875 4.0
    ring     1W0 is the last block of stage 1: part 1 is ready half way, at 2.875, and takes
             2 ms of latency and 2 MB at 1 GB/s; part 2 and stage 0 follow at 6.875 and 10.875
    """
    timeline = simulate(bucket_example())
    ends = [timed.end_ms for timed in timeline.blocks[0]]
    assert ends == [0.5, 1.0, 1.25, 1.75, 2.25, 2.75, 3.0, 3.5, 3.875, 4.0]
    parts = {(each.stage, each.part): (each.start_ms, each.end_ms) for each in timeline.all_reduces}
    assert parts == {(1, 1): (2.875, 6.875), (1, 2): (6.875, 10.875), (0, 1): (10.875, 14.875)}
    assert timeline.iteration_ms == 14.875
    # 6 MB of parameters, as much gradient, half of twice as much optimizer, and at most both
    # activations of stage 0, those of microbatch 1 and the kept ones of microbatch 0 of stage 1.
    need_gb = 6e-3 * (1 + 1 + 1) + (2 * 5e-3 + 2 * 3e-3) / 2
    predicted = replay_plan(bucket_example()).plan.predicted
    assert predicted.peak_memory_gb == pytest.approx({"d0": need_gb, "d1": need_gb})


def test_recomputation_is_over_before_gradients_come():
    """B of stage 1 takes 0.5 ms to compute again, then 0.5: its first part is ready at 3/4."""
    plan = bucket_example()
    stages = (plan.stages[0], replace(plan.stages[1], recompute=True))
    schedule = schedule_of("0F0 1F0 0F1 1F1 1B0 1B1 0B0 0B1")
    timeline = simulate(replace(plan, stages=stages, schedule=schedule))
    last = next(timed for timed in timeline.blocks[0] if str(timed.block) == "1B1")
    assert (last.start_ms, last.end_ms) == (3.0, 4.0)
    first = next(each for each in timeline.all_reduces if each.stage == 1)
    assert first.start_ms == 3.75


def test_a_deadlock_names_the_circle():
    plan = format_example()
    orders = (
        "3F0 0F0 0F1 0F2 3B0 3F1 3B1 3F2 3B2 0B0 0B1 0B2",
        "1F0 2F0 1F1 2F1 1F2 2F2 2B0 1B0 2B1 1B1 2B2 1B2",
    )
    wrong = replace(plan, schedule=schedule_of(*orders))
    expected = "schedule: deadlocks: group 0 waits at 3F0 for 2F0, group 1 waits at 1F0 for 0F0"
    with pytest.raises(ScheduleError, match=expected):
        simulate(wrong)
    verdict = pp.check(wrong)
    assert verdict.errors == ("schedule: deadlocks: group 0 at 3F0, group 1 at 1F0 wait for ever",)


def test_too_much_memory_names_the_group():
    plan = bucket_example()
    devices = tuple(replace(device, memory_gb=0.01) for device in plan.cluster.devices)
    small = replace(plan, cluster=replace(plan.cluster, devices=devices))
    assert pp.check(small).ok
    (warning,) = pp.check(small).warnings
    assert warning.startswith("group 0 needs 0.026 GB on 'd0' (0.01 GB) (and 1 device more)")
    assert not pp.check(small, strict_memory=True).ok


def test_bounds_and_guarantees_of_families():
    plan = replay_plan(format_example()).plan
    for scope, lower_bound_ms, message in (
        ("any", 5.0, "'any' speaks of plans with one stage a device"),
        ("even-shares", 5.0, "'even-shares' speaks of plans with one stage a device"),
        ("families", 24.0, "predicted.lower_bound_ms: 24 is above"),
    ):
        bound = pp.Bound(lower_bound_ms=lower_bound_ms, scope=scope)
        wrong = replace(plan, predicted=replace(plan.predicted, bound=bound))
        assert message in pp.check(wrong).errors[0]
    bound = pp.Bound(lower_bound_ms=5.0, scope="families")
    assert pp.check(replace(plan, predicted=replace(plan.predicted, bound=bound))).ok
    promised = replace(plan, predicted=replace(plan.predicted, schedule_guarantee_ms=99.0))
    assert "predicted.schedule_guarantee_ms: 99 has to be null" in pp.check(promised).errors[0]


# ------------------------------------------------------------------------ random plans


def compare_replays(plan: pp.Plan) -> None:
    """Simulator and checker agree on every block's end, the iteration and memory."""
    assert structural_errors(plan) == []
    read = parse_plan(json.loads(to_json(plan_document(plan))))
    assert (read.stages, read.schedule) == (plan.stages, plan.schedule)
    cost = CostModel(plan.model, plan.cluster)
    costs = group_costs(cost, plan.stages)
    timeline = run_group_plan(plan, costs)
    replayed = (replay_group_flows if plan.cluster.links else replay_groups)(plan, costs)
    assert is_close(timeline.iteration_ms, replayed.iteration_ms)
    ends_ms = [end_ms for group in replayed.ends_ms for end_ms in group]
    assert np.allclose(timeline.block_end_ms_N, ends_ms, rtol=1e-9, atol=1e-9)
    orders = [plan.schedule.group_codes(group) for group in range(len(plan.schedule))]
    assert is_close(group_time_ms(costs, orders, plan.microbatches), timeline.iteration_ms)
    figures = replay_plan(plan).plan.predicted
    needs_gb = {
        plan.cluster.devices[device].name: need_gb
        for needs in (group_memory_gb(plan) if plan.uses_families else [])
        for device, need_gb in needs.items()
    }
    for name, need_gb in needs_gb.items():
        assert math.isclose(figures.peak_memory_gb[name], need_gb, rel_tol=1e-9, abs_tol=1e-12)
    assert pp.check(replace(plan, predicted=figures)).ok


@pytest.mark.parametrize("part", range(4))
def test_simulator_and_checker_agree(part):
    for seed in range(part * FEW // 4, (part + 1) * FEW // 4):
        compare_replays(random_family_plan(random.Random(seed)))


@pytest.mark.full
@pytest.mark.parametrize("part", range(10))
def test_simulator_and_checker_agree_on_many(part):
    for seed in range(10_000 + part * MANY // 10, 10_000 + (part + 1) * MANY // 10):
        rng = random.Random(seed)
        compare_replays(random_family_plan(rng, max_stages=rng.choice([4, 8, 14])))


def test_no_deadlock_is_overlooked():
    """Simulator, checker and the quick pass find the same orders to wait for ever."""
    num_stuck = 0
    for seed in range(FEW):
        plan = random_family_plan(random.Random(seed), deadlocks=True)
        assert structural_errors(plan) == []
        costs = group_costs(CostModel(plan.model, plan.cluster), plan.stages)
        orders = [plan.schedule.group_codes(group) for group in range(len(plan.schedule))]
        time_ms = group_time_ms(costs, orders, plan.microbatches)
        verdict = pp.check(plan)
        if time_ms is None:
            num_stuck += 1
            assert verdict.errors[0].startswith("schedule: deadlocks")
            with pytest.raises(
                ScheduleError, match=r"schedule: deadlocks: (group|stage) \d+ waits at"
            ):
                simulate(plan)
        else:
            assert verdict.ok
            assert is_close(simulate(plan).iteration_ms, time_ms)
    assert FEW / 10 < num_stuck < FEW * 9 / 10


def test_plans_of_the_first_version_have_the_same_figures_as_groups():
    """The rules of groups, on plans that use nothing of them, give what the old rules give."""
    for seed in range(60):
        plan = random_plan(random.Random(seed)) if seed % 3 else random_shared_plan(seed)
        document = json.loads(to_json(plan_document(plan)))
        read = parse_plan({**document, "format": "pipeplan.plan/2"})
        assert not read.uses_families
        predicted = replay_plan(plan).plan.predicted
        assert replay_plan(read).plan.predicted == predicted
        costs = group_costs(CostModel(read.model, read.cluster), read.stages)
        timeline = run_group_plan(read, costs)
        assert is_close(timeline.iteration_ms, predicted.iteration_ms)
        replayed = (replay_group_flows if plan.cluster.links else replay_groups)(read, costs)
        assert is_close(replayed.iteration_ms, predicted.iteration_ms)
        for needs in group_memory_gb(read):
            for device, need_gb in needs.items():
                name = plan.cluster.devices[device].name
                assert math.isclose(predicted.peak_memory_gb[name], need_gb, abs_tol=1e-12)


def test_tiny_times_are_one_instant():
    """Bytes over the fastest links take less than an instant: rounds, not time, order them."""
    for seed in range(60):
        plan = random_family_plan(random.Random(seed), shared=False)
        rows = [[1e9] * plan.cluster.num_devices for _ in plan.cluster.devices]
        fast = replace(plan.cluster, bandwidth_gb_per_s=tuple(map(tuple, rows)), latency_us=0.0)
        made = replace(plan, cluster=fast)
        costs = group_costs(CostModel(made.model, made.cluster), made.stages)
        timeline = run_group_plan(made, costs)
        replayed = replay_groups(made, costs)
        assert timeline.iteration_ms == pytest.approx(replayed.iteration_ms, rel=1e-12, abs=1e-12)


# ------------------------------------------------------------------------ who refuses it


def test_a_lost_replica_leaves_a_valid_plan_behind():
    """All stages of a group give the lost device's samples to the same others."""
    for seed in range(40):
        plan = replay_plan(random_family_plan(random.Random(seed), max_stages=5)).plan
        group = max(plan.groups, key=lambda each: each.num_replicas)
        if group.num_replicas < 2:
            continue
        name = plan.cluster.devices[group.devices[0]].name
        carried = carry_over(plan, apply_changes(plan.cluster, Changes(lose=(name,))))
        assert carried.plan is not None, carried.problem
        assert pp.check(carried.plan).ok


def test_exporters_refuse_what_they_cannot_express():
    plan = format_example()
    for target, chosen in FORMATS.items():
        if chosen.takes_groups:
            continue
        with pytest.raises(CannotExport, match=f"{target}: the plan has several stages a device"):
            export_plan(plan, target, ExportSettings())
    table = export_plan(bucket_example(), "csv", ExportSettings()).data.decode()
    assert "weight gradient,1,,0,d1 d0,2.75,3.0" in table


def test_torch_accepts_exported_chains():
    """Torch's own validator, lowering and simulation of communication, on any chain of groups."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    num_exported = 0
    for seed in range(120):
        plan = random_family_plan(random.Random(seed), shared=False)
        try:
            text = export_plan(plan, "torch-csv", ExportSettings()).data.decode()
        except CannotExport:
            continue
        num_exported += 1
        actions = {
            rank: [schedules._Action.from_str(cell) for cell in row.split(",") if cell]
            for rank, row in enumerate(text.splitlines())
        }
        size, stages = len(plan.groups), plan.num_stages
        mapping = schedules._validate_schedule(actions, size, stages, plan.microbatches)
        groups = {stage: g for g, group in enumerate(plan.groups) for stage in group.stages}
        assert mapping == groups
        if size > 1:
            lowered = schedules._add_send_recv(actions, groups.get, stages)
            schedules._simulate_comms_compute(lowered, groups.get, stages)
    assert num_exported > 30
