"""Watchdogs of several ranks in one process: who is named, who speaks, who waits for whom."""

import contextlib
import dataclasses
import threading
import time
import types

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from pipeplan.errors import RuntimeMismatchError  # noqa: E402
from pipeplan.pipeline import Block, Kind  # noqa: E402
from pipeplan.runtime.supervision import ending, watching  # noqa: E402
from pipeplan.runtime.supervision.courier import Courier  # noqa: E402
from pipeplan.runtime.supervision.crew import make_crew  # noqa: E402
from pipeplan.runtime.supervision.error_policy import (  # noqa: E402
    blame_for_error,
    in_set_up,
)
from pipeplan.runtime.supervision.patient_clock import PatientClock  # noqa: E402
from pipeplan.runtime.supervision.processes import Process  # noqa: E402
from pipeplan.runtime.supervision.signs import Signs  # noqa: E402
from pipeplan.runtime.supervision.status_board import (  # noqa: E402
    Beat,
    Failure,
    FailureKind,
    State,
    StatusBoard,
)
from pipeplan.runtime.supervision.watchdog import Watchdog, WatchdogOptions  # noqa: E402

QUICK = WatchdogOptions(beat_s=0.02, beat_timeout_s=5.0, hang_timeout_s=5.0)


class SlowReader:
    """A store whose user learns of a failure late, like a rank on a busy machine."""

    def __init__(self, store, delay_s):
        self._store, self._delay_s = store, delay_s

    def __getattr__(self, name):
        return getattr(self._store, name)

    def check(self, keys):
        if keys == ["failure"] and self._store.check(keys):
            time.sleep(self._delay_s)
        return self._store.check(keys)


class Group:
    """The watchdogs of some ranks. A rank that would end its process is noted instead."""

    def __init__(self, num_ranks, delays_s=None, names=None, options=QUICK):
        self.store, self._options = dist.HashStore(), options
        self.ends = {}
        """By rank, its exit code, and which ranks had read the failure by then."""
        self.board = StatusBoard(self.store, 0, num_ranks)
        self.names = names or [f"stage {rank}" for rank in range(num_ranks)]
        self.watchdogs = [None] * num_ranks
        threads = [
            threading.Thread(target=self._make, args=(rank, (delays_s or {}).get(rank, 0.0)))
            for rank in range(num_ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _make(self, rank, delay_s):
        store = SlowReader(self.store, delay_s) if delay_s else self.store
        self.watchdogs[rank] = Watchdog(
            store, rank, self.names, self._options, lambda code: self._note(rank, code)
        )

    def _note(self, rank, code):
        readers = {other for other in range(len(self.names)) if self.board.has_read(other)}
        self.ends.setdefault(rank, (code, readers))

    def await_ends(self, ranks):
        deadline = time.monotonic() + 10
        while set(self.ends) != set(ranks) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert set(self.ends) == set(ranks)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for watchdog in self.watchdogs:
            watchdog.close()


@pytest.fixture(autouse=True)
def _quick_and_harmless(monkeypatch):
    """All ranks are this process, which nobody may kill; the grace is short."""
    monkeypatch.setattr(Process, "kill", lambda self: None)
    monkeypatch.setattr(watching, "GRACE_S", 0.2)
    monkeypatch.setattr(ending, "GRACE_S", 0.2)
    monkeypatch.setattr(ending, "FINISH_S", 0.4)


def lines_in(capfd):
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("pipeplan:")]


@pytest.mark.parametrize("kind", [FailureKind.NOTICED, FailureKind.RAISED])
def test_the_store_stays_until_the_slowest_rank_has_read_the_failure(capfd, kind):
    """The culprit reads its own failure too, but does not count instead of the slow one."""
    with Group(4, delays_s={1: 0.8}) as group:
        group.board.declare(Failure(rank=3, reason="hangs", kind=kind))
        group.await_ends({0, 1, 2, 3} if kind is FailureKind.NOTICED else {0, 1, 2})
    assert {0, 1, 2} <= group.ends[0][1]  # rank 0 may hold the store
    assert lines_in(capfd) == ["pipeplan: rank 3 (stage 3) hangs; all ranks end"]


def test_a_raising_rank_waits_for_the_slowest_reader(capfd):
    with Group(3, delays_s={2: 0.8}) as group:
        group.watchdogs[0].report(ValueError("out\nof order"))
        assert group.board.has_read(1)
        assert group.board.has_read(2)
        group.await_ends({1, 2})
    assert lines_in(capfd) == ["pipeplan: rank 0 (stage 0) raised ValueError: out; all ranks end"]
    assert {code for code, _ in group.ends.values()} == {1}


def test_ranks_that_are_done_are_not_waited_for():
    with Group(3) as group:
        group.watchdogs[2].close()
        start = time.monotonic()
        group.watchdogs[0].report(ValueError("out of order"))
        assert time.monotonic() - start < 1
        group.await_ends({1})


def test_the_first_failure_stays():
    with Group(2) as group:
        group.board.declare(Failure(rank=1, reason="first"))
        group.board.declare(Failure(rank=0, reason="second"))
        assert group.board.read_failure() == Failure(rank=1, reason="first")


def test_a_rank_that_raises_has_time_to_finish(monkeypatch):
    kills_s = []
    monkeypatch.setattr(Process, "kill", lambda self: kills_s.append(time.monotonic()))
    with Group(2) as group:
        start_s = time.monotonic()
        group.board.declare(Failure(rank=1, reason="raised", kind=FailureKind.RAISED))
        group.await_ends({0})
    assert kills_s[0] - start_s > ending.FINISH_S
    assert group.ends[0][0] == 1


def test_a_rank_that_does_not_learn_of_a_failure_is_ended_by_others(monkeypatch):
    killed = []
    monkeypatch.setattr(Process, "kill", lambda self: killed.append(self.pid))
    monkeypatch.setattr(Process, "is_alive", True)
    quick = dataclasses.replace(QUICK, beat_timeout_s=0.3)
    with Group(3, options=quick) as group:
        fall_silent(group.watchdogs[1])
        group.watchdogs[0]._crew.processes[1] = dataclasses.replace(Process.this_one(), pid=1001)
        group.board.declare(Failure(rank=2, reason="hangs"))
        group.await_ends({0, 2})
    assert 1001 in killed


def fall_silent(watchdog):
    """Do what native code does that holds Python's lock: the thread gives no sign of life."""
    watchdog._watcher._signs.exchange = lambda make_beat: None


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_rank_that_gives_no_sign_of_life_is_named(capfd, silent):
    """It may have been the one that judges, and its last sign may say that it waits."""
    quick = dataclasses.replace(QUICK, beat_timeout_s=0.3, notice_s=0.5, outside_timeout_s=1.2)
    with Group(3, options=quick) as group, contextlib.ExitStack() as calls:
        for watchdog in group.watchdogs:
            calls.enter_context(watchdog.call("step"))
            watchdog.enter(State.WAITING, "0F0")
        time.sleep(0.2)
        fall_silent(group.watchdogs[silent])
        group.await_ends({0, 1, 2} - {silent})
    *notices, last = lines_in(capfd)
    assert notices
    for notice in notices:
        assert f"for rank {silent} (stage {silent}) for" in notice
        assert "it runs, but gives no sign of life" in notice
    assert last.startswith(f"pipeplan: rank {silent} (stage {silent}) hangs: runs, but gives no")
    assert last.endswith("raise outside_timeout_s (1.2 s); all ranks end")


class OtherHost:
    """What rank 0 sees of ranks 1 and 2, which run on another host; time is made here."""

    def __init__(self):
        self.store = dist.HashStore()
        there = [Process(host="there", pid=pid, birth="1", machine="m") for pid in (11, 12)]
        courier = Courier()
        processes = [Process.this_one(), *there]
        self._crew = make_crew(self.store, 0, processes, WatchdogOptions(), courier, b"")
        self._crew.clock = types.SimpleNamespace(now_s=0.0)
        self._signs, self._count = Signs(self._crew), 0

    def pass_s(self, seconds, alive):
        """What rank 0 finds while these ranks give signs of life."""
        for _ in range(seconds):
            self._count += 1
            self._crew.clock.now_s += 1.0
            beat = Beat(count=self._count, state=State.OUTSIDE, doing="", age_s=1.0)
            for rank in alive:
                StatusBoard(self.store, rank, 3).write_beat(beat)
            found = self._signs.exchange(lambda beat=beat: beat)
            self._crew.courier.ask(lambda: None)  # the round is over
            if found is not None:
                return found
        return None


def test_the_ranks_of_another_host_vouch_for_each_other():
    """Native code may keep one of them from giving signs of life; it is merely busy."""
    other = OtherHost()
    assert other.pass_s(3, alive=[1, 2]) is None
    assert other.pass_s(60, alive=[2]) is None
    assert other.pass_s(3, alive=[1, 2]) is None
    found = other.pass_s(25, alive=[])
    assert found.rank == 1
    assert found.reason.startswith("died or is out of reach: no sign of life for 16 s")


def test_a_rank_that_is_done_does_not_end_by_what_it_was_about_to_find(capfd):
    """Its thread gets no processor for long, and looks again when others have already ended."""
    with Group(2) as group:
        watcher = group.watchdogs[1]._watcher

        def find_late():
            watcher.stop.wait()
            return Failure(rank=0, reason="died")

        watcher._find_failure = find_late
        time.sleep(0.1)
        group.watchdogs[1].close()
        assert not watcher.thread.is_alive()
        assert group.ends == {}
    assert lines_in(capfd) == []


def test_a_mismatch_that_only_one_rank_finds_is_named(capfd):
    with Group(3) as group:
        with (
            pytest.raises(RuntimeMismatchError),
            in_set_up(group.watchdogs[1]),
        ):
            raise RuntimeMismatchError("model: is on the meta device")
        group.await_ends({0, 2})
    assert lines_in(capfd) == [
        "pipeplan: rank 1 (stage 1) raised RuntimeMismatchError: model: is on the meta device;"
        " all ranks end"
    ]


def test_a_mismatch_that_all_ranks_find_is_left_to_them(capfd, monkeypatch):
    monkeypatch.setattr(watching, "GRACE_S", 2.0)
    error = RuntimeMismatchError("model: is on the meta device")

    def set_up(watchdog):
        with pytest.raises(RuntimeMismatchError), in_set_up(watchdog):
            raise error

    with Group(3) as group:
        threads = [threading.Thread(target=set_up, args=(one,)) for one in group.watchdogs]
        for thread in threads:
            thread.start()
            time.sleep(0.1)
        for thread in threads:
            thread.join()
    assert group.ends == {}
    assert lines_in(capfd) == []


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_an_interrupt_takes_one_line_and_ends_in_130(capfd, num_ranks):
    interrupt = KeyboardInterrupt()
    with Group(num_ranks) as group:
        blame_for_error(group.watchdogs[0], interrupt)
        group.await_ends(range(1, num_ranks))
    assert lines_in(capfd) == ["pipeplan: rank 0 (stage 0) was interrupted; all ranks end"]
    assert interrupt.__notes__ == ["rank 0 (stage 0) was interrupted; all ranks end"]
    assert {code for code, _ in group.ends.values()} <= {130}


@pytest.mark.parametrize(
    "error",
    [
        dist.DistNetworkError("failed to recv, got 0 bytes"),
        RuntimeError("[/gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
        BrokenPipeError("Broken pipe"),
    ],
)
def test_a_rank_whose_connection_broke_names_the_one_that_failed(capfd, error):
    with Group(3) as group:
        stumbling = threading.Thread(target=blame_for_error, args=(group.watchdogs[2], error))
        stumbling.start()
        deadline = time.monotonic() + 10
        while group.board.read_beat(2).state is not State.SEEKING and time.monotonic() < deadline:
            time.sleep(0.01)
        assert group.board.read_failure() is None
        assert group.board.read_beat(2).state is State.SEEKING
        group.board.declare(Failure(rank=1, reason="died"))
        group.await_ends({0, 1, 2})
        for watchdog in group.watchdogs:
            watchdog.close()
        stumbling.join()
    assert lines_in(capfd) == ["pipeplan: rank 1 (stage 1) died; all ranks end"]


def test_a_watcher_that_was_held_up_itself_blames_nobody(monkeypatch):
    """After a pause of the whole machine, old signs of life are no reason to end."""
    options = WatchdogOptions(beat_s=0.02, beat_timeout_s=1.0, hang_timeout_s=5.0)
    store = dist.HashStore()
    other = StatusBoard(store, 1, 2)
    elsewhere = dataclasses.replace(Process.this_one(), host="elsewhere")
    processes = [Process.this_one(), elsewhere]
    watchdog = Watchdog(store, 0, ["a", "b"], options, lambda code: None, processes=processes)
    other.write_beat(Beat(count=1, state=State.COMPUTING, doing="", age_s=0))
    time.sleep(0.1)
    ends_of_pause = []
    wait = watchdog._watcher.termination.wait

    def pause_once(timeout_s):
        if not ends_of_pause:
            time.sleep(1.5)  # longer than the timeout
            ends_of_pause.append(time.monotonic())
        return wait(timeout_s)

    monkeypatch.setattr(watchdog._watcher.termination, "wait", pause_once)
    deadline = time.monotonic() + 10
    while other.read_failure() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert time.monotonic() - ends_of_pause[0] > 0.9  # a rank that stays silent is noticed then
    assert other.read_failure().reason.startswith("died or is out of reach")
    watchdog.close()


def test_hostile_names_and_errors_stay_one_harmless_line(capfd):
    names = ["stage 0 on \x1b[2J\u202egpu\nrank 9 died", "other"]
    with Group(2, names=names) as group:
        group.watchdogs[0].report(ValueError("\x1b]0;owned\x07 \u2066text"))
        group.await_ends({1})
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("pipeplan: rank 0 (stage 0 on ?[2J?gpu rank 9 died) raised ValueError: ")
    assert err.rstrip("\n").isprintable()


def test_the_first_block_of_its_kind_may_compile():
    """Then the limit is short, and the line says which option to raise."""
    options = WatchdogOptions(beat_s=0.02, hang_timeout_s=0.5, first_block_timeout_s=60.0)
    store = dist.HashStore()
    watchdog = Watchdog(store, 0, ["a"], options, lambda code: None)
    board = StatusBoard(store, 0, 1)
    first, second = Block(Kind.FORWARD, 0, 0), Block(Kind.FORWARD, 0, 1)
    with watchdog.call("step"):
        watchdog.enter(State.COMPUTING, first)
        time.sleep(1.5)
        assert board.read_failure() is None
        watchdog.enter(State.COMPUTING, second)
        deadline = time.monotonic() + 20
        while board.read_failure() is None and time.monotonic() < deadline:
            time.sleep(0.01)
    reason = board.read_failure().reason
    assert reason.startswith("hangs: 0F1 has run for ")
    assert reason.endswith("if a block may take longer, raise hang_timeout_s (0.5 s)")
    watchdog.close()


def test_a_clock_does_not_count_a_pause_of_its_process():
    clock = PatientClock(beat_s=0.1)
    time.sleep(1.0)
    assert clock.tick() <= 0.2
    assert clock.now_s <= 0.2


def test_a_closed_pipeline_takes_no_more_calls():
    watchdog = Watchdog(dist.HashStore(), 0, ["a"], QUICK, lambda code: None)
    watchdog.close()
    refusal = pytest.raises(RuntimeMismatchError, match="step: the pipeline is closed; make a new")
    with refusal, watchdog.call("step"):
        raise AssertionError("this is not reached")
