"""Whoever reaches the store's port cannot end the run, nor have processes killed."""

import contextlib
import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from pipeplan.errors import RuntimeMismatchError  # noqa: E402
from pipeplan.runtime import Pipeline, WatchdogOptions  # noqa: E402
from pipeplan.runtime.supervision import gathering  # noqa: E402
from pipeplan.runtime.supervision.launch_secret import (  # noqa: E402
    SecretError,
    derive_key,
    find_secret,
    proof_of,
)
from pipeplan.runtime.supervision.meeting import (  # noqa: E402
    confirm,
    meet_at_default_store,
)
from pipeplan.runtime.supervision.processes import Process  # noqa: E402
from pipeplan.runtime.supervision.signed_store import SignedStore  # noqa: E402
from pipeplan.runtime.supervision.status_board import (  # noqa: E402
    Beat,
    Failure,
    State,
    StatusBoard,
)
from runtime.samples import cut_plan, make_mlp, mlp_loss  # noqa: E402
from runtime.workers import run_ranks  # noqa: E402

GARBAGE = [b"", b"\xff\x00", b"[]", b"{}", b"null", b"1e999", b'{"rank": 1}', b"x" * 5000]
BEAT = Beat(count=1, state=State.COMPUTING, doing="", age_s=0.0)


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_is_not_seen_and_does_not_keep_the_failure_out(store, garbage):
    board = StatusBoard(store, 0, 2, b"key")
    for name in ("failure", "speaker", "beat/0", "beat/1", "read/1"):
        store.set(name, garbage)
    assert board.read_failure() is None
    assert board.read_beats() == []
    assert not board.has_read(1)
    failure = Failure(rank=1, reason="died")
    assert board.declare(failure) == failure
    assert board.read_failure() == failure
    assert board.become_speaker()


def test_a_failure_that_a_stranger_writes_is_not_seen(store):
    ours = StatusBoard(store, 0, 2, b"key")
    for key in (b"", b"another key"):
        StatusBoard(store, 1, 2, key).declare(Failure(rank=0, reason="must end"))
        assert ours.read_failure() is None
    assert ours.has_strangers


def test_a_signed_value_holds_only_under_its_name(store):
    signed = SignedStore(store, b"key")
    signed.write("beat/1", "text")
    store.set("failure", store.get("beat/1"))
    assert signed.read("failure") is None
    assert signed.read("beat/1") == "text"


def test_an_older_beat_that_is_repeated_is_not_seen(store):
    ours, theirs = StatusBoard(store, 0, 2, b"key"), StatusBoard(store, 1, 2, b"key")
    theirs.write_beat(BEAT)
    old = store.get("beat/1")
    theirs.write_beat(dataclasses.replace(BEAT, count=2))
    assert ours.read_beat(1).count == 2
    store.set("beat/1", old)
    assert ours.read_beat(1).count == 2


def test_each_run_has_its_own_key():
    assert derive_key(b"secret", "one") != derive_key(b"secret", "two")
    assert derive_key(b"secret", "one").hex() != proof_of(b"secret", "one")


# ------------------------------------------------------------------------------- the secret


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.delenv("PIPEPLAN_SECRET", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "pipeplan"


def test_the_secret_is_made_once_and_for_this_user_only(home):
    first = find_secret()
    assert len(first) == 64
    assert find_secret() == first
    assert (home / "secret").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in home.iterdir()] == ["secret"]


def test_a_secret_that_others_know_is_refused(home, monkeypatch):
    find_secret()
    (home / "secret").chmod(0o644)
    with pytest.raises(SecretError, match="others can read"):
        find_secret()
    (home / "secret").chmod(0o600)
    home.chmod(0o777)
    with pytest.raises(SecretError, match="others can write"):
        find_secret()
    home.chmod(0o700)
    (home / "secret").write_text("short")
    with pytest.raises(SecretError, match="too short"):
        find_secret()
    monkeypatch.setenv("PIPEPLAN_SECRET", "short")
    with pytest.raises(SecretError, match="shorter than 16"):
        find_secret()


def test_a_link_or_a_pipe_is_no_secret(home):
    home.mkdir(mode=0o700)
    (home / "other").write_text("x" * 64)
    (home / "secret").symlink_to(home / "other")
    with pytest.raises(SecretError):
        find_secret()
    (home / "secret").unlink()
    os.mkfifo(home / "secret", 0o600)
    with pytest.raises(SecretError, match="is not a file"):
        find_secret()


def agree(rank, secrets):
    os.environ["PIPEPLAN_SECRET"] = secrets[rank]
    found = meet_at_default_store(WatchdogOptions())
    confirm(found)
    return found.name, found.key, [process.pid for process in found.processes]


def test_ranks_agree_on_a_key_or_say_that_they_have_none(capfd):
    same = run_ranks(2, agree, ["a" * 20] * 2)
    assert same[0] == same[1]
    assert len(same[0][1]) == 32
    assert "unprotected" not in capfd.readouterr().err
    other = run_ranks(2, agree, ["a" * 20, "b" * 20])
    assert other[0] == other[1]
    assert other[0][1] == b""
    lines = [line for line in capfd.readouterr().err.splitlines() if "pipeplan:" in line]
    assert lines == [
        "pipeplan: this run is unprotected: rank 1 has another secret than rank 0; whoever reaches"
        " the store's port can end it; set PIPEPLAN_SECRET to the same value on all hosts"
    ]


def meet_among_strangers(rank):
    """What ranks say to a gathering that somebody else has changed, on one rank or on all."""
    found, said = meet_at_default_store(WatchdogOptions()), []
    for changes in ({"name": f"made up {rank}"}, {"key": b""}):
        try:
            confirm(dataclasses.replace(found, **changes))
        except RuntimeMismatchError as error:
            said.append(str(error))
    confirm(found)
    return said


def test_ranks_refuse_a_gathering_that_a_stranger_has_changed():
    for said in run_ranks(2, meet_among_strangers):
        assert len(said) == 2
        assert all("somebody else writes to it" in text for text in said)


def test_a_card_of_a_stranger_is_no_rank(store):
    for garbage in GARBAGE:
        store.set("here/1", garbage)
        gatherer = gathering._Gatherer(lambda: store, 0, 2, "meet", WatchdogOptions(), print)
        gatherer._hand_in()
        assert gatherer._read() is None
        assert sorted(gatherer._cards) == [0]


# ------------------------------------------------------------------------------- processes


def test_only_processes_of_this_launch_are_killed():
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    variables = {"MASTER_ADDR": "127.0.0.9", "MASTER_PORT": "1"}
    with subprocess.Popen(command, env={**os.environ, **variables}) as stranger:
        time.sleep(0.2)
        process = Process.of(stranger.pid)
        assert process.is_alive
        assert not process.is_ours
        process.kill()
        time.sleep(0.2)
        assert stranger.poll() is None
        stranger.kill()


def test_a_number_that_now_is_another_process_is_not_killed():
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    process = Process.of(child)
    later = dataclasses.replace(process, birth="1")
    assert not later.is_ours
    elsewhere = dataclasses.replace(process, machine="another")
    assert not elsewhere.is_ours
    assert not elsewhere.is_gone
    later.kill()
    time.sleep(0.1)
    assert process.is_alive
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert process.is_gone


def test_a_process_without_a_file_to_open_takes_nobody_for_dead():
    parent, child = Process.this_one(), os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        with contextlib.suppress(OSError):
            while True:
                os.dup(2)
        os._exit(int(parent.is_gone))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_process_one_and_own_groups_are_never_killed():
    for pid in (-1, 0, 1):
        assert not dataclasses.replace(Process.this_one(), pid=pid).is_ours


# ------------------------------------------------------------------------------- a real run

QUICK = WatchdogOptions(beat_s=0.1, beat_timeout_s=20.0)


def train(rank, folder):
    """Trains while a stranger writes to every key of the store."""
    plan = cut_plan(list("01234"), [0, 2], [1, 1], 2, 4)
    optimizer_fn = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    pipeline = Pipeline(plan, make_mlp(), mlp_loss, optimizer_fn, watchdog=QUICK)
    default = dist.distributed_c10d._get_default_store()
    stranger = default.clone()
    while hasattr(stranger, "underlying_store"):
        stranger = stranger.underlying_store
    losses = []
    for step in range(40):
        losses.append(pipeline.step(torch.ones(8, 12), torch.ones(8, 4)))
        if rank == 1:
            keys = [key for key in stranger.list_keys() if "pipeplan/" in key]
            boards = {key.rpartition("/beat/")[0] for key in keys if "/beat/" in key}
            assert boards
            failure = json.dumps({"rank": 0, "reason": "must end", "kind": "noticed"})
            for board in boards:
                stranger.set(f"{board}/failure", GARBAGE[step % 8] if step % 3 else failure)
                stranger.set(f"{board}/beat/0", GARBAGE[step % 8])
                stranger.delete_key(f"{board}/beat/1")
        time.sleep(0.03)
    pipeline.close()
    return losses


def test_a_stranger_who_writes_to_the_store_does_not_end_the_run():
    assert len(run_ranks(2, train, "")[0]) == 40
