"""Ranks are killed or stopped at random moments: all end in time, and the run goes on as before.

This file is also the program that torchrun starts.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from pipeplan.runtime import Pipeline, join_ranks  # noqa: E402
from runtime.samples import cut_plan, make_mlp, mlp_loss  # noqa: E402
from runtime.workers import few_at_once, free_port  # noqa: E402

NUM_RANKS, NUM_STEPS = 3, 14
LIMIT_S = 30.0


def train(folder):
    """Goes on from the last checkpoint, saves every second step, writes each loss down."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    join_ranks()  # a rank that is lost before is one that never comes
    (folder / f"pid-{rank}.part").write_text(str(os.getpid()))
    (folder / f"pid-{rank}.part").rename(folder / f"pid-{rank}")
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


class Launch:
    """A launch of all ranks, forked or by torchrun; all are ended in any case."""

    def __init__(self, folder, *, by_torchrun=False):
        self.folder, self.pids, self.codes = folder, [], {}
        self._turn = few_at_once()
        self._turn.__enter__()
        for path in folder.glob("pid-*"):
            path.unlink()
        (folder / "stderr").write_text("")
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(NUM_RANKS),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TRIAL": str(folder),
        }
        if by_torchrun:
            self.pids = [self._start_torchrun(environment)]
        else:
            self.pids = [self._fork({**environment, "RANK": str(rank)}) for rank in range(3)]

    def _start_torchrun(self, environment):
        command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3")
        with open(self.folder / "stderr", "a") as said:
            started = subprocess.Popen(
                [*command, "--master-port", environment["MASTER_PORT"], __file__],
                env={**os.environ, **environment},
                stdout=said,
                stderr=said,
            )
        started.returncode = 0  # `wait` collects it like a forked rank
        return started.pid

    def _fork(self, environment):
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.dup2(os.open(self.folder / "stderr", os.O_WRONLY | os.O_APPEND), 2)
            os.environ.update(environment)
            train(self.folder)
            code = 0
        finally:
            os._exit(code)

    def pid_of(self, rank):
        deadline = time.monotonic() + 120
        while not (self.folder / f"pid-{rank}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return int((self.folder / f"pid-{rank}").read_text())

    def losses(self):
        path = self.folder / "losses"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return {int(line.split()[0]): float(line.split()[1]) for line in lines if line[-1] == "\n"}

    def await_losses(self, count):
        deadline = time.monotonic() + 120
        while len(self.losses()) < count:
            assert time.monotonic() < deadline, (self.folder / "stderr").read_text()
            time.sleep(0.005)

    def wait(self, timeout_s):
        deadline = time.monotonic() + timeout_s
        while len(self.codes) < len(self.pids) and time.monotonic() < deadline:
            for pid in self.pids:
                if pid not in self.codes:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        self.codes[pid] = os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        return [self.codes.get(pid) for pid in self.pids]

    def left(self):
        """Processes of this launch that still run."""
        found = []
        for rank in range(NUM_RANKS):
            path = self.folder / f"pid-{rank}"
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{path.read_text()}/stat").read_text()
                if stat.rpartition(")")[2].split()[0] not in "ZX":
                    found.append(int(path.read_text()))
        return found

    def said(self):
        lines = (self.folder / "stderr").read_text().splitlines()
        return [line for line in lines if line.startswith("pipeplan:")]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in {*self.left(), *(pid for pid in self.pids if pid not in self.codes)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait(10.0)
        self._turn.__exit__(None, None, None)


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
    with Launch(folder) as launch:
        assert launch.wait(120) == [0] * NUM_RANKS, (folder / "stderr").read_text()
        return launch.losses()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The losses of a run that nobody disturbs."""
    losses = go_to_the_end(tmp_path_factory.mktemp("undisturbed"))
    assert len(losses) == NUM_STEPS
    return losses


def check_trial(folder, expected, number, seed, *, by_torchrun):
    """A disturbed run ends in time with the right line, leaves nothing, and goes on as before."""
    with Launch(folder, by_torchrun=by_torchrun) as launch:
        victim = disturb(launch, random.Random(seed), number)
        start = time.monotonic()
        codes = launch.wait(2 * LIMIT_S)
        took_s, left, said = time.monotonic() - start, launch.left(), launch.said()
    last = [line for line in said if line.endswith("; all ranks end")]
    case = f"rank {victim}, {took_s:.1f} s, codes {codes}, left {left}: {said}"
    print(case)  # pytest -rP shows it
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
