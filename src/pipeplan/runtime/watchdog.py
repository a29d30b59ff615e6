"""Ends all ranks, with one message that names the culprit, when one of them dies, hangs or raises.

A thread of each rank writes a sign of life to the store every second, with what the rank is
doing. It watches the next rank around the ring, so that the load grows with the number of ranks
and not with its square; rank 0 also compares all of them::

    rank 0 --watches--> rank 1 --watches--> rank 2 --watches--> rank 0

    died      its process is gone (same host), or no sign of life for `beat_timeout_s`
    stopped   no sign of life although the process exists; it is killed
    hangs     one block takes longer than `hang_timeout_s`, or a rank stays outside `step` that
              long while another one waits for it
    raises    it says so itself

A launcher that sees a rank end sends SIGTERM to the others; they then look at once for who is gone.
Whoever notices first writes the failure to the store; who reads it ends its own process, since a
thread that waits for a message cannot be woken otherwise. If the launcher is gone, ranks end too.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeplan.runtime.termination import Termination

__all__ = ["Watchdog", "WatchdogOptions"]

TERMINATED = 128 + signal.SIGTERM
"""The exit code of a rank that was asked to end, and knows no reason."""
SEARCH_S = 1.5
"""How long such a rank looks for the reason."""
GRACE_S = 3.0
"""How long a hanging rank may take to end by itself before it is killed."""
STDERR = 2
FAILED = "failed"
ANNOUNCED = "announced"
READ = "read"
INTERRUPTED = "was interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogOptions:
    """How patient the ranks are with each other."""

    beat_s: float = 1.0
    beat_timeout_s: float = 10.0
    hang_timeout_s: float = 20.0
    """Raise this where one block, or the time between two steps, may take longer."""


class Watchdog:
    """Watches over the ranks of one pipeline."""

    def __init__(
        self,
        store: Any,
        rank: int,
        names: list[str],
        options: WatchdogOptions,
        end: Callable[[int], None] | None = None,
    ) -> None:
        self._store, self._rank, self._names, self._options = store, rank, names, options
        self._end = end or _end_process
        self._state, self._doing, self._since = "outside", "", time.monotonic()
        self._stop = threading.Event()
        self._termination = Termination()
        self._parent = os.getppid()
        self._seen: dict[int, tuple[str, float]] = {}
        self.failure: str | None = None
        own = {"host": socket.gethostname(), "pid": os.getpid(), "born": _born(os.getpid())}
        store.set(f"process/{rank}", json.dumps(own))
        self._processes = [json.loads(store.get(f"process/{other}")) for other in range(len(names))]
        self._beat(0)
        self._thread = threading.Thread(target=self._watch, name="pipeplan-watchdog", daemon=True)
        self._thread.start()

    def enter(self, state: str, doing: Any = "") -> None:
        """Say what this rank begins to do: `computing`, `waiting` or `outside` of a step."""
        self._state, self._doing, self._since = state, doing, time.monotonic()

    def report(self, error: BaseException) -> None:
        """Tell the others that this rank raises."""
        text = str(error).strip().splitlines()
        reason = f"raised {type(error).__name__}: {text[0] if text else ''}".rstrip(": ")
        if isinstance(error, KeyboardInterrupt):
            reason = INTERRUPTED
        self.failure = self._text(self._rank, reason)
        with contextlib.suppress(Exception):
            self._declare(self._rank, reason)
            self._await_readers()

    def await_verdict(self) -> None:
        """Give the others' failure the time to be noticed; ends this process if there is one."""
        patience_s = self._options.beat_timeout_s + 2 * self._options.beat_s + GRACE_S
        self.enter("waiting", "for a failure to be noticed")
        self._stop.wait(patience_s)

    def close(self) -> None:
        """Stop watching."""
        if not self._stop.is_set():
            self.enter("done")
            with contextlib.suppress(Exception):
                self._beat(-1)
        was_open = not self._stop.is_set()
        self._stop.set()
        if was_open and threading.current_thread() is not self._thread:
            self._termination.wake()
            self._thread.join(timeout=5)
            self._termination.close()

    # ---------------------------------------------------------------- the thread

    def _watch(self) -> None:
        count = 0
        while True:
            is_asked = self._termination.wait(self._options.beat_s)
            if self._stop.is_set():
                return
            count += 1
            if os.getppid() != self._parent:
                self._end_without_launcher()
                return
            try:
                if is_asked:
                    self._seek_reason()
                self._beat(count)
                failure = self._find_failure()
            except Exception:  # the store is gone, and with it the rank that holds it
                if self._stop.is_set():
                    return
                self._end_without_store()
                return
            if failure is not None:
                self._finish(failure)
                return

    def _beat(self, count: int) -> None:
        age_s = time.monotonic() - self._since
        beat = {"n": count, "state": self._state, "doing": str(self._doing), "age_s": age_s}
        self._store.set(f"beat/{self._rank}", json.dumps(beat))

    def _find_failure(self) -> dict[str, Any] | None:
        if self._store.check([FAILED]):
            failure: dict[str, Any] = json.loads(self._store.get(FAILED))
            return failure
        limit_s = self._options.hang_timeout_s
        age_s = time.monotonic() - self._since
        if self._state == "computing" and age_s > limit_s:
            self._declare(self._rank, f"hangs: {self._doing} has run for {age_s:.0f} s")
        following = (self._rank + 1) % len(self._names)
        if following != self._rank:
            self._check_life(following)
        if self._rank == 0:
            self._check_absence(limit_s)
        return None

    def _seek_reason(self) -> None:
        """Asked to end: find out which rank is gone, and say so."""
        deadline = time.monotonic() + SEARCH_S
        while time.monotonic() < deadline:
            for rank, process in enumerate(self._processes):
                if _is_here(process) and not _is_alive(process):
                    self._declare(rank, f"died (process {process['pid']} is gone)")
            if self._store.check([FAILED]):
                self._finish(json.loads(self._store.get(FAILED)))
                break
            time.sleep(0.05)
        self._end(TERMINATED)

    def _check_life(self, rank: int) -> None:
        key = f"beat/{rank}"
        if not self._store.check([key]):
            return
        text = self._store.get(key)
        if json.loads(text)["state"] == "done":
            return
        now = time.monotonic()
        last, since = self._seen.get(rank, ("", now))
        if text != last:
            self._seen[rank] = (text, now)
            last, since = text, now
        process = self._processes[rank]
        if _is_here(process) and not _is_alive(process):
            self._declare(rank, f"died (process {process['pid']} is gone)")
        elif now - since > self._options.beat_timeout_s:
            alive = "stopped answering" if _is_here(process) else "died or is out of reach"
            self._declare(rank, f"{alive}: no sign of life for {now - since:.0f} s")
            if _is_here(process):  # it cannot end itself, and this rank may soon be gone
                _kill_now(process)

    def _check_absence(self, limit_s: float) -> None:
        keys = [f"beat/{rank}" for rank in range(len(self._names))]
        if not self._store.check(keys):
            return
        beats = [json.loads(text) for text in self._store.multi_get(keys)]
        waits = [beat["age_s"] for beat in beats if beat["state"] == "waiting"]
        for rank, beat in enumerate(beats):
            absent = beat["state"] in ("outside", "done") and beat["age_s"] > limit_s
            if absent and waits and max(waits) > limit_s:
                self._declare(
                    rank, f"hangs: outside of step for {beat['age_s']:.0f} s while others wait"
                )
        if waits and len(waits) == len(beats) and min(waits) > 2 * limit_s:
            self._declare(0, f"and all others have waited for each other for {min(waits):.0f} s")

    def _declare(self, rank: int, reason: str) -> None:
        failure = json.dumps({"rank": rank, "reason": reason})
        self._store.compare_set(FAILED, "", failure)

    def _text(self, rank: int, reason: str) -> str:
        return f"rank {rank} ({self._names[rank]}) {reason}; all ranks end"

    def _finish(self, failure: dict[str, Any]) -> None:
        rank, reason = failure["rank"], failure["reason"]
        self.failure = self._text(rank, reason)
        if rank == self._rank and reason.startswith(("raised", INTERRUPTED)):
            return  # the error itself is on its way up
        first = str(self._rank).encode()
        with contextlib.suppress(Exception):
            self._store.add(READ, 1)
            if self._store.compare_set(ANNOUNCED, "", first.decode()) == first:
                _say(self.failure)
                if rank != self._rank:
                    self._kill(rank)
            if self._rank == 0:
                self._await_readers()
        self._end(1)

    def _await_readers(self) -> None:
        """The store may end with this process: all others have to have read the failure before.

        The culprit may be unable to, and is not waited for beyond the grace.
        """
        deadline = time.monotonic() + max(GRACE_S, 2 * self._options.beat_s)
        while self._store.add(READ, 0) < len(self._names) - 1 and time.monotonic() < deadline:
            time.sleep(0.05)

    def _kill(self, rank: int) -> None:
        """End a rank that cannot end itself."""
        process = self._processes[rank]
        deadline = time.monotonic() + GRACE_S
        while _is_here(process) and _is_alive(process):
            if time.monotonic() > deadline:
                _kill_now(process)
                return
            time.sleep(0.1)

    def _end_without_launcher(self) -> None:
        """The launcher may have held the store, so nobody is asked who speaks."""
        self.failure = "the launcher is gone; all ranks end"
        self._say_alone()
        self._end(1)

    def _say_alone(self, without: int | None = None) -> None:
        """Speak if this is the first rank of its host, but for one: settled by number alone."""
        mine = [r for r, other in enumerate(self._processes) if r != without and _is_here(other)]
        if self.failure is not None and (not mine or mine[0] == self._rank):
            _say(self.failure)

    def _end_without_store(self) -> None:
        """Blame rank 0, which holds the store; the first other rank of each host speaks.

        Who speaks is settled by number alone: others may have ended for the same reason already.
        """
        self._stop.wait(self._options.beat_s)
        if self._stop.is_set():
            return  # this rank is done; the store went with one that was done before
        if os.getppid() != self._parent:
            self._end_without_launcher()
            return
        process = self._processes[0]
        gone = _is_here(process) and not _is_alive(process)
        reason = "died" if gone else "is out of reach: its store is gone"
        self.failure = self._text(0, reason)
        self._say_alone(without=0)
        self._end(1)


def _say(message: str) -> None:
    """One line, written at once, from whatever thread."""
    with contextlib.suppress(OSError):
        os.write(
            sys.__stderr__.fileno() if sys.__stderr__ else 2, f"pipeplan: {message}\n".encode()
        )


def _end_process(code: int) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _is_here(process: dict[str, Any]) -> bool:
    return bool(process["host"] == socket.gethostname())


def _is_alive(process: dict[str, Any]) -> bool:
    """Whether it is still the same process, and no zombie."""
    return bool(process["born"]) and _born(process["pid"]) == str(process["born"])


def _born(pid: int) -> str:
    """When a process started, so that a reused number is not taken for it; empty if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "" if Path("/proc/self").exists() else _born_elsewhere(pid)
    state, start_ticks = fields[0], fields[19]
    return "" if state in "ZX" else start_ticks


def _kill_now(process: dict[str, Any]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process["pid"], signal.SIGKILL)


def _born_elsewhere(pid: int) -> str:
    """Without /proc only whether it exists can be told."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "alive"
