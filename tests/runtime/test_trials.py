"""Ranks are killed or stopped at random moments: all end in time, and the run goes on as before.

This file is also the program that torchrun starts.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from pipeplan.runtime import Pipeline, join_ranks  # noqa: E402
from runtime.launches import NUM_RANKS, START_S, Launch, note_pid  # noqa: E402
from runtime.samples import cut_plan, make_mlp, mlp_loss  # noqa: E402

NUM_STEPS = 14
LIMIT_S = 30.0


def train(folder):
    """Goes on from the last checkpoint, saves every second step, writes each loss down."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    join_ranks()  # a rank that is lost before is one that never comes
    note_pid(folder, rank)
    torch.manual_seed(0)
    plan = cut_plan(list("01234"), [0, 1, 3], [1, 1, 1], 2, 4)
    optimizer_fn = lambda found: torch.optim.SGD(found, lr=0.1, momentum=0.9)  # noqa: E731
    with Pipeline(plan, make_mlp(), mlp_loss, optimizer_fn) as pipeline:
        pipeline.load(folder / "checkpoints")
        while pipeline.num_steps < NUM_STEPS:
            generator = torch.Generator().manual_seed(pipeline.num_steps)
            batch = torch.randn(8, 12, generator=generator), torch.randn(8, 4, generator=generator)
            loss = pipeline.step(*batch)
            if rank == 0:
                with open(folder / "losses", "a") as file:
                    file.write(f"{pipeline.num_steps} {loss!r}\n")
            if pipeline.num_steps % 2 == 0:
                pipeline.save(folder / "checkpoints")
            time.sleep(0.02)
    dist.barrier()
    dist.destroy_process_group()


def disturb(launch, rng, number):
    """Send a signal to a random rank at a random moment; which rank it was."""
    victim, moment = rng.randrange(NUM_RANKS), rng.random()
    for rank in range(NUM_RANKS):
        launch.pid_of(rank)
    if moment < 0.2:  # while ranks set up
        time.sleep(rng.uniform(0.0, 0.5))
    elif moment < 0.6:  # while they save
        launch.await_losses(2 * rng.randint(1, 4))
        time.sleep(rng.uniform(0.0, 0.03))
    else:
        launch.await_losses(rng.randint(1, NUM_STEPS - 4))
        time.sleep(rng.uniform(0.0, 0.05))
    os.kill(launch.pid_of(victim), number)
    return victim


def go_to_the_end(folder):
    with Launch(folder, train) as launch:
        assert launch.wait(START_S) == [0] * NUM_RANKS, (folder / "stderr").read_text()
        return launch.losses()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The losses of a run that nobody disturbs."""
    losses = go_to_the_end(tmp_path_factory.mktemp("undisturbed"))
    assert len(losses) == NUM_STEPS
    return losses


def check_trial(folder, expected, number, seed, *, by_torchrun):
    """A disturbed run ends in time with the right line, leaves nothing, and goes on as before."""
    with Launch(folder, train, program=__file__ if by_torchrun else None) as launch:
        victim = disturb(launch, random.Random(seed), number)
        start = time.monotonic()
        while launch.left() and time.monotonic() - start < 2 * LIMIT_S:
            launch.wait(0.0)
            time.sleep(0.02)
        took_s = time.monotonic() - start  # torchrun itself may take longer on a busy machine
        codes, left, said = launch.wait(START_S), launch.left(), launch.said()
    last = [line for line in said if line.endswith("; all ranks end")]
    case = f"rank {victim}, {took_s:.1f} s, codes {codes}, left {left}: {said}"
    sys.stdout.write(f"{case}\n")  # pytest -rP shows it
    assert None not in codes, case
    assert took_s < LIMIT_S, case
    assert not left, case
    assert len(last) == 1, case
    assert f"rank {victim} " in last[0], case
    assert "frame #" not in (folder / "stderr").read_text(), case
    assert go_to_the_end(folder) == expected, case


@pytest.mark.full
@pytest.mark.parametrize("trial", range(30))
def test_a_killed_run_ends_in_time_and_goes_on(tmp_path, expected, trial):
    check_trial(tmp_path, expected, signal.SIGKILL, trial, by_torchrun=False)


@pytest.mark.full
@pytest.mark.parametrize("trial", range(20))
def test_a_killed_run_under_torchrun_ends_in_time_and_goes_on(tmp_path, expected, trial):
    check_trial(tmp_path, expected, signal.SIGKILL, 100 + trial, by_torchrun=True)


@pytest.mark.full
@pytest.mark.parametrize("trial", range(14))
def test_a_stopped_run_ends_in_time_and_goes_on(tmp_path, expected, trial):
    check_trial(tmp_path, expected, signal.SIGSTOP, 200 + trial, by_torchrun=False)


@pytest.mark.full
@pytest.mark.parametrize("trial", range(6))
def test_a_stopped_run_under_torchrun_ends_in_time_and_goes_on(tmp_path, expected, trial):
    check_trial(tmp_path, expected, signal.SIGSTOP, 300 + trial, by_torchrun=True)


if __name__ == "__main__":
    train(Path(os.environ["TRIAL"]))
