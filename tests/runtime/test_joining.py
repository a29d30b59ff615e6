"""Ranks that do not find each other say so in one line, after a stated time."""

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from pipeplan.errors import InputError, PipeplanError  # noqa: E402
from pipeplan.runtime import WatchdogOptions, join_ranks  # noqa: E402
from pipeplan.runtime.supervision import launching  # noqa: E402
from pipeplan.runtime.supervision.courier import ANSWER_S  # noqa: E402
from pipeplan.runtime.supervision.gathering import gather  # noqa: E402
from runtime.workers import free_port  # noqa: E402


def join_in_child(folder, rank, world_size, port, timeout_s):
    """Fork a rank that joins, and writes down what became of it."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        said = "joined"
        try:
            join_ranks(timeout_s)
            dist.barrier()
            dist.destroy_process_group()
        except PipeplanError as error:
            said = f"{type(error).__name__}: {error}"
        (Path(folder) / str(rank)).write_text(said)
    finally:
        os._exit(0)


def join(folder, ranks, world_size, port, timeout_s, limit_s=60.0):
    """What became of each of these ranks."""
    pids = [join_in_child(folder, rank, world_size, port, timeout_s) for rank in ranks]
    deadline = time.monotonic() + limit_s
    for pid in pids:
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(pid, 9)
            time.sleep(0.01)
    return {int(path.name): path.read_text() for path in Path(folder).iterdir()}


def test_all_join(tmp_path):
    assert join(tmp_path, [2, 0, 1], 3, free_port(), 60.0) == dict.fromkeys(range(3), "joined")


def test_a_rank_that_never_comes_is_named(tmp_path):
    said = join(tmp_path, [0, 1], 3, free_port(), 2.0)
    assert sorted(said) == [0, 1]
    for text in said.values():
        assert text.startswith(
            "RuntimeMismatchError: ranks: not all 3 have come to the store within 2 s ("
        )
        assert "\n" not in text
    assert "(missing: rank 2)" in said[0]


def test_rank_0_that_never_comes_is_noticed(tmp_path):
    port = free_port()
    said = join(tmp_path, [1], 2, port, 2.0)
    assert f"(rank 1 has found no store at 127.0.0.1:{port})" in said[1]


def test_no_thread_is_left_inside_of_torch_when_there_is_no_store(monkeypatch):
    """The interpreter would end with SIGABRT."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    start_s = time.monotonic()
    with pytest.raises(dist.DistNetworkError):
        launching._open_store(1, 2.0)
    assert 2.0 <= time.monotonic() - start_s < 2.0 + ANSWER_S


def test_a_port_in_use_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))  # noqa: S104
        taken.listen()
        port = taken.getsockname()[1]
        said = join(tmp_path, [0, 1], 2, port, 3.0)
    assert said[0] == (
        f"InputError: MASTER_PORT: {port} is in use on this host; give the ranks another one"
    )
    assert said[1].startswith("RuntimeMismatchError: ranks: not all 2 have come")


def test_wrong_settings_are_named(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "x", "MASTER_ADDR": "a"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(InputError, match="WORLD_SIZE: is 'x'; give a whole number"):
        join_ranks()
    with pytest.raises(InputError, match="timeout_s: is 0; give a number of seconds"):
        join_ranks(0)
    with pytest.raises(InputError, match="hang_timeout_s: is -1; give a number of seconds"):
        WatchdogOptions(hang_timeout_s=-1)


def gather_two_of_three(options):
    """Ranks 0 and 1 gather, and rank 2 does not; with which codes they end."""
    store, ended = dist.HashStore(), []

    def come(rank):
        with contextlib.suppress(PipeplanError):
            gather(lambda: store, rank, 3, "make their pipeline", options, end=ended.append)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


def test_ranks_that_wait_for_another_say_so_and_end(capfd):
    options = WatchdogOptions(beat_s=0.05, notice_s=0.3, outside_timeout_s=1.0)
    assert gather_two_of_three(options) == [1, 1]
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "pipeplan: ranks wait to make their pipeline: rank 2 has not come"
    last = [line for line in lines if line.endswith("; all ranks end")]
    assert len(last) == 1, lines
    assert last[0].startswith("pipeplan: ranks could not make their pipeline: rank 2 has not come")
