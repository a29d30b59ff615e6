"""Waits until all ranks have come, and learns which processes they are.

Before that, nobody knows whom to watch. Each rank hands in a card::

    here/2    its process, a word that it has just made up, a proof that it knows the secret
    left/2    it has read the cards of all

The words of all ranks make the name of the gathering, which so is new. Its key signs whatever the
ranks tell each other later. While ranks are missing, those that have come say every `notice_s` whom
they wait for, watch the processes of this host, and end after the limit.
"""

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.supervision.courier import Courier, StoreError
from pipeplan.runtime.supervision.crew import make_crew
from pipeplan.runtime.supervision.ending import Ending, end_process, print_line
from pipeplan.runtime.supervision.launch_secret import (
    SecretError,
    derive_key,
    find_secret,
    proof_of,
)
from pipeplan.runtime.supervision.local_watch import LocalWatch
from pipeplan.runtime.supervision.options import WatchdogOptions
from pipeplan.runtime.supervision.processes import Process
from pipeplan.runtime.supervision.status_board import Failure
from pipeplan.runtime.supervision.store_holder import StoreHolder

__all__ = ["Gathering", "gather"]

POLL_S = 0.05
MAX_LISTED = 8
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """What ranks that have come together share."""

    name: str
    """No other gathering has it."""
    key: bytes
    """Signs what ranks tell through the store; empty if they share no secret."""
    processes: list[Process]
    """By rank."""
    proof: str
    """Tells the others that this rank knows the secret; empty if it knows none."""
    problem: str
    """Why this rank knows no secret; empty if it knows one."""
    store: Any
    courier: Courier
    """The thread that talks with this store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Card:
    """What a rank hands in."""

    process: Process
    word: str
    proof: str

    def to_json(self) -> str:
        fields = {"process": self.process.to_json(), "word": self.word, "proof": self.proof}
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: bytes) -> "_Card | None":
        """The card in a text; None if somebody else wrote the text."""
        try:
            fields = json.loads(text)
            process = Process.from_json(fields["process"])
            return cls(process=process, word=str(fields["word"]), proof=str(fields["proof"]))
        except (ValueError, KeyError, TypeError):
            return None

    def proof_by(self, secret: bytes, rank: int) -> str:
        """The proof that a rank with this secret hands in."""
        return proof_of(secret, f"{rank}/{self.word}/{self.process.to_json()}") if secret else ""


def gather(
    open_store: Callable[[], Any],
    rank: int,
    num_ranks: int,
    what: str,
    options: WatchdogOptions,
    end: Callable[[int], None] = end_process,
) -> Gathering:
    """Wait until all ranks have come; `what` says what for, such as "make their pipeline".

    `open_store` makes a connection of its own. If ranks stay away or die meanwhile, one line says
    so, and this process ends.
    """
    return _Gatherer(open_store, rank, num_ranks, what, options, end).run()


class _Gatherer:
    """One rank that waits for the others."""

    def __init__(
        self,
        open_store: Callable[[], Any],
        rank: int,
        num_ranks: int,
        what: str,
        options: WatchdogOptions,
        end: Callable[[int], None],
    ) -> None:
        self._rank, self._what, self._options = rank, what, options
        self._secret, self._problem = b"", ""
        try:
            self._secret = find_secret()
        except SecretError as error:
            self._problem = str(error)
        self._open_store, self._parent = open_store, os.getppid()
        self._store: Any = None
        processes = [Process.unknown()] * num_ranks
        key = derive_key(self._secret, "gathering") if self._secret else b""
        self._crew = make_crew(None, rank, processes, options, Courier(), key)
        self._key, self._ending = key, Ending(self._crew, end)
        self._local, self._cards = LocalWatch(rank, processes), dict[int, _Card]()
        self._last_look_s, self._notices = time.monotonic(), 0

    def run(self) -> Gathering:
        """Wait for all ranks."""
        self._await(self._hand_in)
        while len(self._cards) < self._crew.num_ranks:
            failure = self._await(self._read)
            if failure is not None:
                self._finish(failure)
            for rank, card in self._cards.items():
                self._crew.processes[rank] = card.process
                self._local.watch(rank, card.process)
            if len(self._cards) < self._crew.num_ranks:
                self._look()
                time.sleep(POLL_S)
        with contextlib.suppress(StoreError):  # whoever fails from now on is the watchdogs' affair
            self._crew.courier.send(self._leave).result(2 * self._options.beat_timeout_s)
        return self._gathering()

    def _gathering(self) -> Gathering:
        words = "".join(self._cards[rank].word for rank in range(self._crew.num_ranks))
        name = hashlib.sha256(words.encode()).hexdigest()[:32]
        is_shared = bool(self._secret) and all(
            card.proof == card.proof_by(self._secret, rank) for rank, card in self._cards.items()
        )
        return Gathering(
            name=name,
            key=derive_key(self._secret, name) if is_shared else b"",
            processes=self._crew.processes,
            proof=proof_of(self._secret, name) if self._secret else "",
            problem=self._problem,
            store=dist.PrefixStore(name, self._store),  # type: ignore[attr-defined]
            courier=self._crew.courier,
        )

    # ---------------------------------------------------------------- on the courier's thread

    def _hand_in(self) -> None:
        self._store = self._open_store()
        self._crew.board.use(self._store)
        card = _Card(process=Process.this_one(), word=uuid.uuid4().hex, proof="")
        proof = card.proof_by(self._secret, self._rank)
        card = _Card(process=card.process, word=card.word, proof=proof)
        self._store.set(f"here/{self._rank}", card.to_json())
        self._cards[self._rank] = card

    def _read(self) -> Failure | None:
        """Read the cards of others; the failure that one of them has declared."""
        for rank in range(self._crew.num_ranks):
            name = f"here/{rank}"
            if rank not in self._cards and self._store.check([name]):
                card = _Card.from_json(self._store.get(name))
                if card is not None:
                    self._cards[rank] = card
        if len(self._cards) == self._crew.num_ranks:
            return None  # the watchdogs see to it
        return self._crew.board.read_failure()

    def _leave(self) -> None:
        """Say that this rank knows all others. Rank 0 leaves last, since it may hold the store."""
        self._store.set(f"left/{self._rank}", "yes")
        others = [rank for rank in range(self._crew.num_ranks) if rank != self._rank]
        deadline_s = time.monotonic() + self._options.beat_timeout_s
        while self._rank == 0 and others and time.monotonic() < deadline_s:
            time.sleep(POLL_S / 5)
            others = [
                rank
                for rank in others
                if not self._cards[rank].process.is_gone and not self._store.check([f"left/{rank}"])
            ]

    # ---------------------------------------------------------------- on the main thread

    def _await(self, function: Callable[[], Result]) -> Result:
        """What the store answers; meanwhile, look around."""
        errand, since_s = self._crew.courier.send(function), self._crew.clock.now_s
        while not errand.wait(POLL_S):
            self._look(store_since_s=since_s)
        try:
            return errand.result(0.0)
        except StoreError:
            self._blame_holder(0.0, is_gone=True)

    def _look(self, store_since_s: float | None = None) -> None:
        """Once in each beat, see who has died, and who is still missing."""
        if time.monotonic() - self._last_look_s < self._options.beat_s:
            return
        self._last_look_s = time.monotonic()
        self._crew.clock.tick()
        now_s, options = self._crew.clock.now_s, self._options
        if os.getppid() != self._parent:
            self._finish(Failure(rank=self._rank, reason="the launcher is gone"), has_store=False)
        if store_since_s is not None and now_s - store_since_s > options.beat_timeout_s:
            self._blame_holder(now_s - store_since_s, is_gone=False)
        for failure in self._local.look(now_s, options.beat_timeout_s):
            reason = f"rank {failure.rank} {failure.reason}"
            self._finish(Failure(rank=failure.rank, reason=reason))
        if now_s > options.outside_timeout_s:
            reason = f"{self._missing_text()} within {now_s:.0f} s"
            self._finish(Failure(rank=self._missing()[0], reason=reason))
        elif int(now_s // options.notice_s) > self._notices:
            self._notices += 1
            if min(self._cards, default=self._rank) == self._rank:
                print_line(f"ranks wait to {self._what}: {self._missing_text()}")

    def _blame_holder(self, silence_s: float, *, is_gone: bool) -> NoReturn:
        """Say what became of the store's holder, and end."""
        holder = StoreHolder.of_this_launch(self._crew.processes, self._parent)
        name = "" if holder.rank is None else f"rank {holder.rank} "
        reason = name + holder.reason(silence_s, is_gone=is_gone)
        self._finish(Failure(rank=holder.rank or 0, reason=reason), has_store=False)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._crew.num_ranks) if rank not in self._cards] or [0]

    def _missing_text(self) -> str:
        missing = self._missing()
        listed = ", ".join(map(str, missing[:MAX_LISTED]))
        many = len(missing) > 1
        return f"{'ranks' if many else 'rank'} {listed} {'have' if many else 'has'} not come"

    def _finish(self, failure: Failure, *, has_store: bool = True) -> NoReturn:
        """Say the failure that was declared first, unless another rank does, and end."""
        ask, board = self._crew.courier.ask, self._crew.board
        has_store = has_store and not (
            failure.rank == 0 and self._crew.processes[0].is_on_this_host
        )
        try:
            if not has_store:
                raise StoreError
            failure = ask(lambda: board.declare(failure))
            line = self._line_of(failure)
            self._ending.with_store(failure, line)
        except StoreError:
            line = self._line_of(failure)
            absent = {rank for rank, process in enumerate(self._crew.processes) if process.is_gone}
            self._ending.without_store(line, failure.rank, absent)
        raise RuntimeMismatchError(line)  # only in tests, whose processes do not end

    def _line_of(self, failure: Failure) -> str:
        return f"ranks could not {self._what}: {failure.reason}; all ranks end"
