"""Ranks fail at the worst moments: all end in time, with one line that names the right rank."""

import functools
import os
import signal
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from pipeplan.runtime import Pipeline, join_ranks, training  # noqa: E402
from pipeplan.runtime.checkpoints import saving  # noqa: E402
from pipeplan.runtime.verification.first_step import FirstStep  # noqa: E402
from runtime.launches import NUM_RANKS, Launch, note_pid  # noqa: E402
from runtime.samples import cut_plan, make_mlp, mlp_loss  # noqa: E402

LIMIT_S = 30.0
NUM_STEPS = 6

MOMENTS = {
    "connecting": (dist, "init_process_group"),
    "confirming": (training, "confirm"),
    "placing": (training.Pipeline, "_take_place"),
    "cutting": (training.Pipeline, "_set_up_stage"),
    "comparing": (FirstStep, "verify"),
    "writing": (saving, "write_synced"),
    "describing": (saving, "write_description"),
    "renaming": (saving, "put_in_place"),
}
"""Functions of ranks. The trouble comes just before one of them."""


def send(number):
    os.kill(os.getpid(), number)


def pause(seconds):
    """Stop this process; another one continues it."""
    command = f"sleep {seconds}; kill -CONT {os.getpid()}"
    subprocess.Popen(["/bin/sh", "-c", command])
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_interpreter(seconds):
    """Let no other thread of this process run, as some extensions do."""
    import ctypes

    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def out_of_order():
    raise ValueError("out of order")


TROUBLES = {
    "kill": lambda: send(signal.SIGKILL),
    "stop": lambda: send(signal.SIGSTOP),
    "interrupt": lambda: send(signal.SIGINT),
    "raise": out_of_order,
    "exit-0": lambda: sys.exit(0),
    "exit-3-at-once": lambda: os._exit(3),
    "barrier": dist.barrier,
    "pause": lambda: pause(10),
    "hold": lambda: hold_interpreter(10),
    "hold-long": lambda: hold_interpreter(50),
    "nothing": lambda: None,
}


def train(folder, troubles):
    """Joins, trains, evaluates, saves; `troubles` are ranks, their moments and what happens."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    note_pid(folder, rank)
    mine = {moment: what for victim, moment, what in troubles if victim == rank}

    def trouble(moment):
        if moment in mine:
            (folder / "begin").write_text(repr(time.time()))
            TROUBLES[mine.pop(moment)]()

    def with_trouble(function, moment):
        def wrapped(*args, **kwargs):
            trouble(moment)
            return function(*args, **kwargs)

        return wrapped

    for moment, (owner, name) in MOMENTS.items():
        if moment in mine:
            setattr(owner, name, with_trouble(getattr(owner, name), moment))
    join_ranks()
    trouble("joined")
    torch.manual_seed(0)
    plan = cut_plan(list("01234"), [0, 1, 3], [1, 1, 1], 2, 4)
    optimizer_fn = lambda found: torch.optim.SGD(found, lr=0.1)  # noqa: E731
    model = make_mlp()
    for index in (0, 1, 3):  # the first layer of each stage
        model[index].append(Layer(trouble))
    with Pipeline(plan, model, mlp_loss, optimizer_fn) as pipeline:
        while pipeline.num_steps < NUM_STEPS:
            pipeline.step(torch.ones(8, 12), torch.ones(8, 4))
            if pipeline.num_steps == 3:
                trouble("training")
                Layer.is_ready = True
        pipeline.save(folder / "checkpoints")
        trouble("saved")


class Layer(torch.nn.Module):
    """Passes on, with trouble on the way when it is ready."""

    is_ready = False

    def __init__(self, trouble):
        super().__init__()
        self._trouble = trouble

    def forward(self, x):
        if Layer.is_ready:
            self._trouble("computing")
        return x


def run(folder, *troubles):
    """The last line that was said, all exit codes, and all that was printed."""
    with Launch(folder, functools.partial(train, troubles=troubles)) as launch:
        codes = launch.wait(4 * LIMIT_S)
        took_s = time.time() - float((folder / "begin").read_text())
        left, said = launch.left(), launch.said()
    printed = (folder / "stderr").read_text()
    assert None not in codes, said
    assert not left
    assert "frame #" not in printed  # a stack trace of torch
    return [line for line in said if line.endswith("; all ranks end")], codes, printed, took_s


def check(folder, victim, moment, what):
    last, codes, printed, took_s = run(folder, (victim, moment, what))
    assert len(last) == 1, last
    assert f"rank {victim} " in last[0]
    assert took_s < LIMIT_S
    assert all(code != 0 for rank, code in enumerate(codes) if rank != victim)
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("victim", "moment", "what"),
    [
        (2, "confirming", "kill"),
        (0, "joined", "kill"),
        (0, "training", "exit-0"),
        (1, "computing", "exit-0"),
    ],
)
def test_a_rank_that_fails_at_a_bad_moment_is_named(tmp_path, victim, moment, what):
    check(tmp_path, victim, moment, what)


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("moment", ["joined", *MOMENTS, "training", "computing"])
def test_a_rank_that_is_killed_at_a_bad_moment_is_named(tmp_path, victim, moment):
    if victim != 0 and moment in ("describing", "renaming"):
        pytest.skip("only rank 0 does that")
    check(tmp_path, victim, moment, "kill")


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("what", ["stop", "interrupt", "raise", "exit-0", "exit-3-at-once"])
@pytest.mark.parametrize("moment", ["joined", "comparing", "training", "computing", "writing"])
def test_a_rank_that_goes_wrong_at_a_bad_moment_is_named(tmp_path, victim, moment, what):
    check(tmp_path, victim, moment, what)


@pytest.mark.full
@pytest.mark.parametrize("moment", ["joined", "training"])
def test_a_rank_in_a_barrier_of_its_own_is_named(tmp_path, moment):
    check(tmp_path, 1, moment, "barrier")


@pytest.mark.full
@pytest.mark.parametrize("what", ["pause", "hold"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_comes_back_in_time_is_innocent(tmp_path, victim, what):
    last, codes, printed, _ = run(tmp_path, (victim, "training", what))
    assert codes == [0] * NUM_RANKS, printed
    assert last == []
    assert printed == ""


@pytest.mark.full
@pytest.mark.parametrize("held", [0, 1])
def test_who_is_held_by_native_code_ends_too_when_another_dies(tmp_path, held):
    last, codes, _, took_s = run(tmp_path, (held, "training", "hold-long"), (2, "training", "kill"))
    assert len(last) == 1
    assert "rank 2 " in last[0]
    assert took_s < LIMIT_S
    assert 0 not in codes


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 2])
def test_who_needs_no_rank_that_dies_at_the_end_ends_well(tmp_path, victim):
    _, codes, printed, _ = run(tmp_path, (victim, "saved", "kill"))
    assert codes.pop(victim) == -signal.SIGKILL
    assert codes == [0, 0]
    assert printed == ""


@pytest.mark.full
def test_of_two_ranks_that_fail_at_once_one_is_named(tmp_path):
    last, codes, _, took_s = run(tmp_path, (1, "training", "kill"), (2, "training", "kill"))
    assert len(last) == 1, last
    assert "rank 1 " in last[0] or "rank 2 " in last[0]
    assert took_s < LIMIT_S
    assert codes == [1, -signal.SIGKILL, -signal.SIGKILL]


def test_the_end_of_training_prints_nothing(tmp_path):
    """Although rank 0 holds the store, and ranks end in any order."""
    _, codes, printed, _ = run(tmp_path, (0, "training", "nothing"))
    assert codes == [0] * NUM_RANKS
    assert printed == ""
