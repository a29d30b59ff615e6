"""Exported schedules pass torch's own validator, run on its runtime, and are read again."""

import csv
import io
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from interop.samples import grid_plan
from interop.test_group_exports import group_plan
from pipeplan.errors import ScheduleError
from pipeplan.interop.exported import ExportSettings
from pipeplan.interop.exporting import export_plan
from pipeplan.interop.schedule_check import check_schedule, read_schedule
from pipeplan.pipeline import Kind, Plan
from pipeplan.replaying import simulate

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

FEW, MANY = range(30), range(30, 530)
SEEDS = [*FEW, *(pytest.param(seed, marks=pytest.mark.full) for seed in MANY)]


def csv_of(plan: Plan) -> str:
    return export_plan(plan, "torch-csv", ExportSettings()).data.decode()


def torch_actions(text: str) -> dict[int, list]:
    rows = csv.reader(io.StringIO(text))
    return {n: [schedules._Action.from_str(cell) for cell in row] for n, row in enumerate(rows)}


@pytest.mark.parametrize("seed", SEEDS)
def test_torch_accepts_every_schedule(seed):
    """Its validator, its lowering to sends and receives, and its simulation of these."""
    plan = grid_plan(random.Random(seed))
    num_stages = len(plan.stages)
    actions = torch_actions(csv_of(plan))
    mapping = schedules._validate_schedule(actions, num_stages, num_stages, plan.microbatches)
    assert mapping == {stage: stage for stage in range(num_stages)}
    blocks = {rank: [a for a in row if a is not None] for rank, row in actions.items()}
    lowered = schedules._add_send_recv(blocks, lambda stage: stage, num_stages)
    simulated = schedules._simulate_comms_compute(lowered, lambda stage: stage, num_stages)
    num_done = sum(a is not None and a.is_compute_op for row in simulated.values() for a in row)
    assert num_done == 2 * num_stages * plan.microbatches


@pytest.mark.parametrize("seed", SEEDS)
def test_schedules_are_read_again_with_the_same_times(seed):
    plan = grid_plan(random.Random(seed))
    text = csv_of(plan)
    read = read_schedule(text, len(plan.stages))
    forwards = [block.microbatch for block in read[-1] if block.kind is Kind.FORWARD]
    assert forwards == list(range(plan.microbatches))
    for stage in range(len(plan.stages)):  # only the names of microbatches may differ
        kinds = [block.kind for block in plan.schedule[stage]]
        assert [block.kind for block in read[stage]] == kinds
    verdict = check_schedule(plan, text)
    assert verdict.replayed.plan.iteration_ms == pytest.approx(simulate(plan).iteration_ms)
    assert verdict.our_iteration_ms <= verdict.replayed.plan.iteration_ms * (1 + 1e-9)


@pytest.mark.parametrize("seed", FEW)
def test_blocks_stand_in_later_columns_than_what_they_need(seed):
    plan = grid_plan(random.Random(seed))
    column = {}
    for row in torch_actions(csv_of(plan)).values():
        for step, action in enumerate(row):
            if action is not None:
                column[str(action)] = step
    last = len(plan.stages) - 1
    for stage in range(last + 1):
        for m in range(plan.microbatches):
            if stage:
                assert column[f"{stage}F{m}"] > column[f"{stage - 1}F{m}"]
            assert column[f"{stage}B{m}"] > column[f"{stage}F{m}"]
            if stage < last:
                assert column[f"{stage}B{m}"] > column[f"{stage + 1}B{m}"]


# ------------------------------------------------------------------------------- gloo


def gradients_differ_by(cases: list[dict], world_size: int, folder: Path) -> list[float]:
    """For each case the largest difference on any rank, all cases in the same processes."""
    (folder / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("torch_runs.py")
    arguments = [sys.executable, script, folder / "cases.json", folder / "store"]
    processes = [
        subprocess.Popen(
            [*map(str, arguments), str(rank), str(world_size)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    outcomes = [process.communicate(timeout=280) for process in processes]
    assert [process.returncode for process in processes] == [0] * world_size, outcomes[0][1][-2000:]
    lines = [[float(line) for line in out.splitlines()] for out, _ in outcomes]
    return [max(each) for each in zip(*lines, strict=True)]


def case_of(plan: Plan, runtime: str) -> dict:
    replicas = plan.stages[0].num_replicas
    return {
        "csv": csv_of(plan),
        "cuts": [0, *(stage.layers.stop for stage in plan.stages)],
        "replicas": replicas,
        "samples": plan.model.microbatch_size // replicas,
        "microbatches": plan.microbatches,
        "runtime": runtime,
    }


def pipelines(count: int, world_size: int) -> list[Plan]:
    """Plans of at least two stages for at most so many ranks."""
    rng = random.Random(count)
    found = []
    while len(found) < count:
        plan = grid_plan(rng, max_stages=world_size, max_replicas=2, max_microbatches=6)
        num_ranks = len(plan.stages) * plan.stages[0].num_replicas
        if len(plan.stages) > 1 and num_ranks <= world_size:
            found.append(plan)
    return found


@pytest.mark.parametrize(
    ("count", "world_size"), [(2, 2), pytest.param(24, 4, marks=pytest.mark.full)]
)
def test_gradients_on_gloo_are_those_of_one_process(count, world_size, tmp_path):
    plans = pipelines(count, world_size)
    runtimes = ("runtime", "columns")
    cases = [case_of(plan, runtimes[i % 2]) for i, plan in enumerate(plans)]
    differences = gradients_differ_by(cases, world_size, tmp_path)
    assert len(differences) == count
    assert max(differences) < 1e-12


def group_case(plan: Plan) -> dict:
    group_of = {stage: g for g, group in enumerate(plan.groups) for stage in group.stages}
    chain = [group_of[stage] for stage in range(plan.num_stages)]
    return {**case_of(plan, "runtime"), "chain": chain}


def group_plans(count: int, world_size: int) -> list[Plan]:
    """Plans with loops, Vs and irregular chains, backwards split or not, for so many ranks."""
    rng, found = random.Random(count), []
    while len(found) < count:
        plan = group_plan(rng, shape=("loop", "v", "any")[len(found) % 3])
        if sum(group.num_replicas for group in plan.groups) <= world_size:
            found.append(plan)
    return found


@pytest.mark.parametrize(
    ("count", "world_size"), [(3, 2), pytest.param(24, 4, marks=pytest.mark.full)]
)
def test_gradients_of_groups_on_gloo_are_those_of_one_process(count, world_size, tmp_path):
    cases = [group_case(plan) for plan in group_plans(count, world_size)]
    assert any("I" in case["csv"] for case in cases)
    assert max(gradients_differ_by(cases, world_size, tmp_path)) < 1e-12


# ------------------------------------------------------------------------------ checking


def two_stage_plan(num_microbatches: int = 3) -> Plan:
    rng = random.Random(0)
    while True:
        plan = grid_plan(rng, rule="1f1b", max_stages=2)
        if len(plan.stages) == 2 and plan.microbatches == num_microbatches:
            return plan


GOOD = "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"


def test_orders_and_split_backwards_are_read():
    read = read_schedule(GOOD, 2)
    assert read == read_schedule(GOOD.replace("1B1", "1I1,1W1").replace("0F2", ",0F2,"), 2)
    flipped = "".join(reversed(GOOD.splitlines(keepends=True)))  # stages on other ranks
    assert read == read_schedule(flipped, 2)
    assert [str(block) for block in read[0]] == ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]


WITH_COMMUNICATION = (
    "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\n"
    "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
)


def test_communication_is_read():
    assert read_schedule(WITH_COMMUNICATION, 2) == read_schedule(
        "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", 2
    )


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (GOOD.replace("0B1,", ""), "stage 0: 0B1 is missing"),
        (GOOD.replace("1B1", "1B0"), "stage 1: 1B0 stands twice"),
        (GOOD.replace("1F1,1B1", "1B1,1F1"), "stage 1: 1B1 stands before its forward"),
        (GOOD.replace("1F1,1B1,1F2,1B2", "1F2,1B2,1F1,1B1"), "1F2 stands where 1F1 is expected"),
        (GOOD.replace("0F2", "2F2"), "rank 0 runs stages 0, 2"),
        (GOOD + "1F0\n", "rank 2: stage 1 is on another rank already"),
        (GOOD.splitlines()[0], "has the stages 0; the plan has 0..1"),
        (",,\n,,\n", "has the stages none"),
        (GOOD.replace("0F2", "0X2"), "rank 0, cell 3: '0X2' is no action"),
        (GOOD.replace("0F2", "0F"), "rank 0, cell 3: '0F' has no microbatch"),
        (GOOD.replace("0F2", "0F2x"), "'0F2x' is no action"),
        (GOOD.replace("0F2", "(0F2;0B1)OVERLAP_F_B"), "overlapped blocks"),
        (GOOD.replace("1B0,1F1", "1I0,1F1"), "1F1 stands between 1I0 and its W"),
        (GOOD.replace("1B0", "1W0"), "1W0 has no I before it"),
        (GOOD.replace("1B2", "1I2"), "1I2 has no W behind it"),
        (GOOD.replace("0F2", "9999999F2"), "is no action"),
        (GOOD.replace("0F2", "0F999999"), "stage 0: 0B2 stands before its forward"),
        (GOOD.replace("0F2", '"0F2'), "is not CSV"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0\n", "schedule: deadlocks"),
        (
            WITH_COMMUNICATION.replace("0SEND_F0,0F1,0SEND_F1", "0F1,0SEND_F1,0SEND_F0"),
            "1RECV_F0 is received where 0SEND_F1 arrives",
        ),
        (
            WITH_COMMUNICATION.replace("1F0,1B0,1SEND_B0", "1F0,1SEND_B0,1B0"),
            "1SEND_B0 stands before",
        ),
        (WITH_COMMUNICATION.replace("1RECV_F1,1F1", "1F1,1RECV_F1"), "1RECV_F1 stands behind"),
        (WITH_COMMUNICATION.replace(",1SEND_B1", ""), "0RECV_B1 has no counterpart"),
    ],
)
def test_wrong_schedules_name_the_place(text, part):
    with pytest.raises(ScheduleError) as raised:
        check_schedule(two_stage_plan(2 if "SEND" in text or "deadlock" in part else 3), text)
    assert part in str(raised.value)


def test_torch_itself_would_accept_an_order_that_is_wrong():
    """Why forwards of the last stage have to ascend: the validator of torch does not look."""
    text = GOOD.replace("1F1,1B1,1F2,1B2", "1F2,1B2,1F1,1B1")
    assert schedules._validate_schedule(torch_actions(text), 2, 2, 3) == {0: 0, 1: 1}
