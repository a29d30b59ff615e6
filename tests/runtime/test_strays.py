"""A rank that goes another way than the others ends all of them, with one line that names it."""

import os
import re
import signal
import time

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from pipeplan.runtime import Pipeline, WatchdogOptions  # noqa: E402
from runtime.samples import cut_plan, make_mlp, mlp_loss  # noqa: E402
from runtime.workers import Ranks  # noqa: E402

NUM_RANKS = 3
PATIENT_S = 60.0
"""Far above the limits: a machine may be busy. A hang is longer."""
QUICK = WatchdogOptions(
    beat_s=0.1,
    beat_timeout_s=1.5,
    hang_timeout_s=5.0,
    outside_timeout_s=30.0,
    notice_s=0.5,
)


def sit_in_barrier(pipeline, step, folder):
    dist.barrier()


def close_early(pipeline, step, folder):
    pipeline.close()
    time.sleep(PATIENT_S)


def evaluate_instead(pipeline, step, folder):
    pipeline.evaluate(torch.ones(8, 12), torch.ones(8, 4))


def keep_gradients_instead(pipeline, step, folder):
    pipeline.step(torch.ones(8, 12), torch.ones(8, 4), update=False)


def save_alone(pipeline, step, folder):
    pipeline.save(os.path.join(folder, "saved"))


def skip_a_step(pipeline, step, folder):
    raise StopIteration


def dawdle(pipeline, step, folder):
    time.sleep(2.0)


def train(rank, folder, way, stray, options):
    """Six steps; before the fourth, one rank goes its own way."""
    plan = cut_plan(list("01234"), [0, 1, 3], [1, 1, 1], 2, 4)
    optimizer_fn = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    pipeline = Pipeline(plan, make_mlp(), mlp_loss, optimizer_fn, watchdog=options)
    with open(os.path.join(folder, f"ready-{rank}"), "w") as file:
        file.write(str(os.getpid()))
    for step in range(6):
        if step == 3 and rank == stray:
            try:
                way(pipeline, step, folder)
            except StopIteration:
                continue
        pipeline.step(torch.ones(8, 12), torch.ones(8, 4))
        time.sleep(0.05)
    if way is skip_a_step:
        dist.barrier()
    pipeline.close()


def run(tmp_path, way, stray, options=QUICK):
    """The lines that were said, and all exit codes."""
    said = tmp_path / "stderr.txt"
    arguments = (train, str(tmp_path), way, stray, options)
    with Ranks(NUM_RANKS, *arguments, stderr=str(said)) as ranks:
        codes = ranks.wait(PATIENT_S)
        lines = [line for line in said.read_text().splitlines() if line.startswith("pipeplan:")]
        errors = [ranks.error(rank) for rank in range(NUM_RANKS)]
    assert None not in codes, f"still running: {codes}; said {lines}"
    return [line.removeprefix("pipeplan: ") for line in lines], codes, errors


@pytest.mark.parametrize(
    ("way", "stray", "what"),
    [
        (sit_in_barrier, 1, "sits in barrier at test_strays.py:"),
        (close_early, 2, "closed its pipeline after call 4, but rank 0 is in step (call 5)"),
        (evaluate_instead, 1, "raised RuntimeMismatchError: step: rank 1 is in evaluation step"),
        (
            keep_gradients_instead,
            1,
            "raised RuntimeMismatchError: step: rank 1 is in accumulation step",
        ),
        (save_alone, 0, "calls save where rank"),
        (skip_a_step, 1, "sits in barrier at test_strays.py:"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_stray_rank_is_named(tmp_path, way, stray, what):
    lines, codes, _ = run(tmp_path, way, stray)
    last = [line for line in lines if line.endswith("; all ranks end")]
    assert len(last) == 1, lines
    assert last[0].startswith(f"rank {stray} (stage {stray} on d{stray}) {what}")
    assert 0 not in codes


def test_a_rank_that_evaluates_while_others_train_is_named(tmp_path):
    """The step's first exchange finds it, on whichever rank is the first to see it."""
    lines, codes, _ = run(tmp_path, evaluate_instead, 1)
    last = [line for line in lines if line.endswith("; all ranks end")]
    assert len(last) == 1, lines
    assert "rank 1 is in evaluation step 3" in last[0] or "rank 1 (stage 1 on d1) calls" in last[0]
    assert 0 not in codes


def test_a_busy_rank_is_waited_for_with_a_line(tmp_path):
    lines, codes, errors = run(tmp_path, dawdle, 1)
    assert codes == [0, 0, 0], errors
    named = [line for line in lines if "it is outside of step (test_strays.py:" in line]
    assert named, lines
    # On a busy machine others may be late for a moment, too; rank 1 is late for two seconds.
    rank_1 = "ranks have waited for rank 1 (stage 1 on d1) for "
    assert any(line.startswith(rank_1) for line in named), named
    others = [line for line in named if not line.startswith(rank_1)]
    assert all(re.search(r" for [01] s(: |$)", line) for line in others), others
    assert not [line for line in lines if line.endswith("; all ranks end")]


def train_long(rank, folder, options, num_steps):
    plan = cut_plan(list("01234"), [0, 1, 3], [1, 1, 1], 2, 4)
    optimizer_fn = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    pipeline = Pipeline(plan, make_mlp(), mlp_loss, optimizer_fn, watchdog=options)
    for step in range(num_steps):
        pipeline.step(torch.ones(8, 12), torch.ones(8, 4))
        if step == 2:
            open(os.path.join(folder, f"ready-{rank}"), "w").close()
        time.sleep(0.01)
    pipeline.close()


def await_ready(folder):
    deadline = time.monotonic() + PATIENT_S
    while len(list(folder.glob("ready-*"))) < NUM_RANKS:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_stopping_the_rank_that_holds_the_store_is_named(tmp_path):
    said = tmp_path / "stderr.txt"
    arguments = (train_long, str(tmp_path), QUICK, 100_000)
    with Ranks(NUM_RANKS, *arguments, stderr=str(said)) as ranks:
        await_ready(tmp_path)
        os.kill(ranks.pids[0], signal.SIGSTOP)
        codes = ranks.wait(PATIENT_S)
        lines = [line for line in said.read_text().splitlines() if line.startswith("pipeplan:")]
    assert codes == [-signal.SIGKILL, 1, 1]
    last = [line for line in lines if line.endswith("; all ranks end")]
    assert len(last) == 1, lines
    assert last[0].startswith("pipeplan: rank 0 (stage 0 on d0) stopped answering")


@pytest.mark.parametrize("stopped", [0, pytest.param(2, marks=pytest.mark.full)])
def test_a_rank_that_was_stopped_for_a_while_goes_on(tmp_path, stopped):
    patient = WatchdogOptions(beat_s=0.1, beat_timeout_s=20.0, hang_timeout_s=1.0)
    said = tmp_path / "stderr.txt"
    arguments = (train_long, str(tmp_path), patient, 200)
    with Ranks(NUM_RANKS, *arguments, stderr=str(said)) as ranks:
        await_ready(tmp_path)
        os.kill(ranks.pids[stopped], signal.SIGSTOP)
        time.sleep(3.0)
        os.kill(ranks.pids[stopped], signal.SIGCONT)
        codes = ranks.wait(PATIENT_S)
        lines = [line for line in said.read_text().splitlines() if line.startswith("pipeplan:")]
    assert codes == [0, 0, 0], lines
    assert lines == []
