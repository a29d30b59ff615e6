"""Launches of ranks as users see them: by torchrun, or forked, each like a program of its own."""

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from runtime.workers import few_at_once, free_port

NUM_RANKS = 3
START_S = 300.0
"""On a busy machine four processes take minutes to import torch."""


def note_pid(folder, rank):
    """Write down which process this rank is."""
    (folder / f"pid-{rank}.part").write_text(str(os.getpid()))
    (folder / f"pid-{rank}.part").rename(folder / f"pid-{rank}")


def run_as_program(work, folder):
    """Run, and do at the end what the interpreter does; the exit code."""
    atexit._clear()  # handlers of the process that was forked are not this program's
    code = 0
    try:
        work(folder)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        traceback.print_exc()
        sys.last_value = error
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    atexit._run_exitfuncs()
    return code


class Launch:
    """A launch of all ranks, forked or by torchrun; all are ended in any case."""

    def __init__(self, folder, work, *, program=None):
        """Rank 0, 1 and 2 run `work(folder)`; with `program`, torchrun starts that file instead."""
        self.folder, self._work, self.pids, self.codes = folder, work, [], {}
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
        if program is not None:
            self.pids = [self._start_torchrun(environment, program)]
        else:
            ranks = range(NUM_RANKS)
            self.pids = [self._fork({**environment, "RANK": str(rank)}) for rank in ranks]

    def _start_torchrun(self, environment, program):
        command = (sys.executable, "-m", "torch.distributed.run")
        options = ("--nproc-per-node", str(NUM_RANKS), "--master-port", environment["MASTER_PORT"])
        with open(self.folder / "stderr", "a") as said:
            started = subprocess.Popen(
                [*command, *options, program],
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
            code = run_as_program(self._work, self.folder)
        finally:
            os._exit(code)

    def pid_of(self, rank):
        deadline = time.monotonic() + START_S
        while not (self.folder / f"pid-{rank}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return int((self.folder / f"pid-{rank}").read_text())

    def losses(self):
        path = self.folder / "losses"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return {int(line.split()[0]): float(line.split()[1]) for line in lines if line[-1] == "\n"}

    def await_losses(self, count):
        deadline = time.monotonic() + START_S
        while len(self.losses()) < count:
            assert time.monotonic() < deadline, (self.folder / "stderr").read_text()
            time.sleep(0.005)

    def wait(self, timeout_s):
        """The exit codes of the ranks, or that of torchrun; None while they run."""
        deadline = time.monotonic() + timeout_s
        while len(self.codes) < len(self.pids):
            for pid in self.pids:
                if pid not in self.codes:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        self.codes[pid] = os.waitstatus_to_exitcode(status)
            if time.monotonic() >= deadline:
                break
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
