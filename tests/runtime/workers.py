"""Ranks for tests: forked processes over gloo on 127.0.0.1, and what each of them returns."""

import contextlib
import fcntl
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def few_at_once():
    """Groups of ranks take turns on a machine, however many processes run the tests."""
    with open(Path(tempfile.gettempdir()) / "pipeplan-ranks.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)


class Ranks:
    """Forked ranks, ended in any case."""

    def __init__(self, num_ranks, function, *args, stderr=None):
        self._turn = few_at_once()
        self._turn.__enter__()
        self.folder = tempfile.TemporaryDirectory(prefix="pipeplan-ranks-")
        port = free_port()
        self.pids = []
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                _child(rank, num_ranks, port, function, args, Path(self.folder.name), stderr)
            self.pids.append(pid)
        self.codes = {}

    def wait(self, timeout_s=120.0):
        """The exit code of each rank; negative for a signal."""
        deadline = time.monotonic() + timeout_s
        while len(self.codes) < len(self.pids) and time.monotonic() < deadline:
            for rank, pid in enumerate(self.pids):
                if rank not in self.codes:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        self.codes[rank] = os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        return [self.codes.get(rank) for rank in range(len(self.pids))]

    def result(self, rank):
        return pickle.loads((Path(self.folder.name) / f"{rank}.result").read_bytes())  # noqa: S301

    def error(self, rank):
        path = Path(self.folder.name) / f"{rank}.error"
        return path.read_text() if path.exists() else ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self.folder.cleanup()
        self._turn.__exit__(None, None, None)


def run_ranks(num_ranks, function, *args, timeout_s=120.0):
    """What `function(rank, *args)` returns in each of the ranks."""
    with Ranks(num_ranks, function, *args) as ranks:
        codes = ranks.wait(timeout_s)
        errors = "\n".join(ranks.error(rank) for rank in range(num_ranks) if ranks.error(rank))
        assert codes == [0] * num_ranks, f"exit codes {codes}\n{errors}"
        return [ranks.result(rank) for rank in range(num_ranks)]


def share_from_first(make):
    """What `make()` returns on rank 0, on every rank."""
    made = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return made[0]


def _child(rank, num_ranks, port, function, args, folder, stderr):
    code = 1
    try:
        if stderr is not None:
            os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=60),
        )
        result = function(rank, *args)
        dist.barrier()
        (folder / f"{rank}.result").write_bytes(pickle.dumps(result))
        code = 0
        dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}\n{traceback.format_exc()}")
    finally:
        os._exit(code)
