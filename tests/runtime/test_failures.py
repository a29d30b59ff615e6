"""A rank that dies, hangs or raises ends all ranks, with one line that names it."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from pipeplan.runtime import Pipeline  # noqa: E402
from pipeplan.runtime.supervision.termination import Termination  # noqa: E402
from pipeplan.runtime.supervision.watchdog import GRACE_S, WatchdogOptions  # noqa: E402
from runtime.samples import cut_plan, make_mlp, mlp_loss  # noqa: E402
from runtime.workers import Ranks  # noqa: E402

NUM_RANKS = 4
PATIENT_S = 30.0
QUICK = WatchdogOptions(
    beat_s=0.2,
    beat_timeout_s=3.0,
    hang_timeout_s=3.0,
    first_block_timeout_s=30.0,
    outside_timeout_s=3.0,
)
DEFAULT = WatchdogOptions()


class Trouble(nn.Module):
    """Passes on, until it is told not to."""

    how = folder = ""

    def forward(self, x):
        if Trouble.how == "raise":
            raise ValueError("the layer is out of order")
        if Trouble.how == "starve":
            os.kill(pid_of_ready(Trouble.folder, 1), signal.SIGSTOP)
            raise ValueError("the layer is out of order")
        if Trouble.how == "hang":
            time.sleep(600)
        return x


class Ready:
    """Says that this rank has begun to set up, and leaves time for what comes then."""

    def __init__(self, rank, folder):
        self.rank, self.folder = rank, folder

    def __call__(self, parameters):
        open(os.path.join(self.folder, f"ready-{self.rank}"), "w").close()
        time.sleep(600 if self.rank == 2 else 0)
        return torch.optim.SGD(parameters, lr=0.1)


def pid_of_ready(folder, rank):
    with open(os.path.join(folder, f"ready-{rank}")) as file:
        return int(file.read())


def set_up_slowly(rank, folder, how, options):
    plan = cut_plan(list("01234"), [0, 1, 3], [1, 2, 1], 2, 4)
    Pipeline(plan, make_mlp(), mlp_loss, Ready(rank, folder), watchdog=options)


def train_until(rank, folder, how, options):
    model = make_mlp()
    model[3] = Trouble()
    plan = cut_plan(list("01234"), [0, 1, 3], [1, 2, 1], 2, 4)
    pipeline = Pipeline(
        plan,
        model,
        mlp_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        watchdog=options,
    )
    for step in range(10_000):
        if step == 3:
            with open(os.path.join(folder, f"ready-{rank}"), "w") as file:
                file.write(str(os.getpid()))
            pipeline.evaluate(torch.ones(8, 12), torch.ones(8, 4))  # all have written it by now
            Trouble.how, Trouble.folder = how if rank == 3 else "", folder
        pipeline.step(torch.ones(8, 12), torch.ones(8, 4))
        if how == "absent" and step == 3 and rank == 2:
            time.sleep(600)


def end_of(tmp_path, how="", signal_to=None, number=None, options=QUICK, work=train_until):
    """How long all ranks took to end, their exit codes and what they said."""
    said = tmp_path / "stderr.txt"
    with Ranks(NUM_RANKS, work, str(tmp_path), how, options, stderr=str(said)) as ranks:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("ready-*"))) < NUM_RANKS and time.monotonic() < deadline:
            time.sleep(0.02)
        start = time.monotonic()
        if signal_to is not None:
            os.kill(ranks.pids[signal_to], number)
        codes = ranks.wait(PATIENT_S)
        took = time.monotonic() - start
        lines = [line for line in said.read_text().splitlines() if line.startswith("pipeplan:")]
    assert None not in codes, f"still running after {took:.0f} s: {codes}; said {lines}"
    assert 0 not in codes
    assert len(lines) == 1, lines
    return lines[0], codes


def test_killed_rank_is_named(tmp_path):
    line, codes = end_of(tmp_path, signal_to=2, number=signal.SIGKILL, options=DEFAULT)
    assert line.startswith("pipeplan: rank 2 (stage 1 on d2) died")
    assert codes[2] == -signal.SIGKILL


def test_rank_killed_while_setting_up_is_named(tmp_path):
    line, _ = end_of(tmp_path, signal_to=2, number=signal.SIGKILL, work=set_up_slowly)
    assert line.startswith("pipeplan: rank 2 (stage 1 on d2) died")


def test_raising_rank_is_named(tmp_path):
    line, _ = end_of(tmp_path, "raise")
    assert line == (
        "pipeplan: rank 3 (stage 2 on d3) raised ValueError: the layer is out of order;"
        " all ranks end"
    )


@contextlib.contextmanager
def busy_machine(num_processes=2):
    """Processes beside the ranks that compute all the time."""
    processes = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_processes)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_raising_rank_is_named_also_to_a_rank_that_is_late(tmp_path):
    """Rank 1 gets no time on the machine until the others have long known the failure."""
    said = tmp_path / "stderr.txt"
    arguments = (str(tmp_path), "starve", WatchdogOptions(beat_s=0.2))
    with (
        busy_machine(),
        Ranks(NUM_RANKS, train_until, *arguments, stderr=str(said)) as ranks,
    ):
        deadline = time.monotonic() + 60
        while "pipeplan:" not in (said.read_text() if said.exists() else ""):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(GRACE_S + 1)
        os.kill(ranks.pids[1], signal.SIGCONT)
        codes = ranks.wait(PATIENT_S)
        lines = [line for line in said.read_text().splitlines() if line.startswith("pipeplan:")]
    assert None not in codes
    assert lines == [
        "pipeplan: rank 3 (stage 2 on d3) raised ValueError: the layer is out of order;"
        " all ranks end"
    ]


def test_hanging_rank_is_named(tmp_path):
    line, _ = end_of(tmp_path, "hang")
    assert line.startswith("pipeplan: rank 3 (stage 2 on d3) hangs: 2F0 has run for")


def test_killed_rank_is_named_where_the_launcher_ends_the_others(tmp_path):
    """As torchrun does: SIGTERM to all others, before any of them can have noticed."""
    said = tmp_path / "stderr.txt"
    with Ranks(NUM_RANKS, train_until, str(tmp_path), "", DEFAULT, stderr=str(said)) as ranks:
        while len(list(tmp_path.glob("ready-*"))) < NUM_RANKS:
            time.sleep(0.02)
        for rank in (2, 0, 1, 3):
            os.kill(ranks.pids[rank], signal.SIGKILL if rank == 2 else signal.SIGTERM)
        start = time.monotonic()
        codes = ranks.wait(PATIENT_S)
        lines = [line for line in said.read_text().splitlines() if line.startswith("pipeplan:")]
    assert None not in codes
    assert time.monotonic() - start < 10
    assert len(lines) == 1
    assert lines[0].startswith("pipeplan: rank 2 (stage 1 on d2) died")


@pytest.mark.full
def test_rank_that_holds_the_store_is_named(tmp_path):
    line, _ = end_of(tmp_path, signal_to=0, number=signal.SIGKILL)
    assert line.startswith("pipeplan: rank 0 (stage 0 on d0) died")


@pytest.mark.full
def test_stopped_rank_is_named_and_killed(tmp_path):
    line, codes = end_of(tmp_path, signal_to=1, number=signal.SIGSTOP)
    assert line.startswith("pipeplan: rank 1 (stage 1 on d1) stopped answering")
    assert codes[1] == -signal.SIGKILL


@pytest.mark.full
def test_rank_that_never_comes_back_to_step_is_named(tmp_path):
    line, _ = end_of(tmp_path, "absent")
    assert line.startswith("pipeplan: rank 2 (stage 1 on d2) hangs: outside of step")


def test_sigterm_reaches_the_thread_and_not_forked_children():
    termination = Termination()
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert not termination.wait(0.1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert termination.wait(5.0)
    termination.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


NUM_STEPS = 12


def train_with_checkpoints(rank, folder, options):
    """Goes on from the last checkpoint, saves every second step, writes each loss down."""
    torch.manual_seed(0)
    plan = cut_plan(list("01234"), [0, 1, 3], [1, 2, 1], 2, 4)
    pipeline = Pipeline(
        plan,
        make_mlp(),
        mlp_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        watchdog=options,
    )
    pipeline.load(os.path.join(folder, "checkpoints"))
    while pipeline.num_steps < NUM_STEPS:
        generator = torch.Generator().manual_seed(pipeline.num_steps)
        batch = torch.randn(8, 12, generator=generator), torch.randn(8, 4, generator=generator)
        loss = pipeline.step(*batch)
        if rank == 0:
            with open(os.path.join(folder, "losses"), "a") as file:
                file.write(f"{pipeline.num_steps} {loss!r}\n")
        if pipeline.num_steps % 2 == 0:
            pipeline.save(os.path.join(folder, "checkpoints"))
        time.sleep(0.02)
    pipeline.close()  # ranks end here at once, and others may not take that for a death


def losses_of(folder):
    """The last loss written down for each step; a step after a checkpoint may run twice."""
    lines = (folder / "losses").read_text().splitlines() if (folder / "losses").exists() else []
    return {int(line.split()[0]): float(line.split()[1]) for line in lines if " " in line}


def run_to_the_end(folder):
    with Ranks(NUM_RANKS, train_with_checkpoints, str(folder), QUICK) as ranks:
        assert ranks.wait(60.0) == [0] * NUM_RANKS, [ranks.error(r) for r in range(NUM_RANKS)]
    return losses_of(folder)


@pytest.mark.parametrize("trials", [1, pytest.param(20, marks=pytest.mark.full)])
def test_a_killed_run_goes_on_with_the_same_losses(tmp_path, trials):
    rng = random.Random(trials)
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    expected = run_to_the_end(undisturbed)
    assert len(expected) == NUM_STEPS
    for trial in range(trials):
        folder = tmp_path / f"trial-{trial}"
        folder.mkdir()
        victim, said = rng.randrange(NUM_RANKS), folder / "stderr.txt"
        arguments = (str(folder), QUICK)
        with Ranks(NUM_RANKS, train_with_checkpoints, *arguments, stderr=str(said)) as ranks:
            while len(losses_of(folder)) < rng.randint(1, NUM_STEPS - 4):
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.05))
            os.kill(ranks.pids[victim], signal.SIGKILL)
            codes = ranks.wait(PATIENT_S)
        lines = [line for line in said.read_text().splitlines() if line.startswith("pipeplan:")]
        assert None not in codes, f"trial {trial}: still running: {codes}"
        assert codes[victim] == -signal.SIGKILL
        assert len(lines) == 1, f"trial {trial}, rank {victim}, {codes}: {said.read_text()}"
        assert lines[0].startswith(f"pipeplan: rank {victim} "), lines
        found = run_to_the_end(folder)
        assert found == pytest.approx(expected, rel=1e-6), f"trial {trial}"
