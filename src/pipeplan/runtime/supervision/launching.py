"""Joins the ranks that torchrun starts, also when it starts them again.

torchrun starts all ranks again when one of them fails, and when nodes come or go. Its agents may
use one store for all these starts. That store still holds the addresses of ranks that have ended.
No variable tells the starts apart: each agent counts only the restarts after failures of its own
ranks. So the ranks of one start agree on a name for it::

    rank 0   offers a new name                              offer = NAME
    others   answer the newest offer, each with a new word  NAME/answer/RANK = WORD
    rank 0   repeats the words once it has them all         NAME/words = WORDS
    others   find their word there; else wait for another offer

A rank may also answer an offer of an earlier start. But that offer repeats only words of earlier
ranks, so the rank does not find its own word there.
"""

import contextlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from pipeplan.documents.text import printable
from pipeplan.errors import InputError, RuntimeMismatchError
from pipeplan.runtime.streams import set_cuda_device
from pipeplan.runtime.supervision.courier import ANSWER_S, Courier, StoreError
from pipeplan.runtime.supervision.ending import print_line
from pipeplan.runtime.supervision.error_policy import in_set_up
from pipeplan.runtime.supervision.gathering import gather
from pipeplan.runtime.supervision.meeting import Meeting, keep_for_pipeline, watch_over
from pipeplan.runtime.supervision.options import WatchdogOptions
from pipeplan.splitting.torch_private import without_torch_log

__all__ = ["agree_on_start", "join_ranks"]

STORE_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PATIENCE_S = 300.0
"""How long to wait for all ranks of one start: as long as torch waits for a store."""
POLL_S = 0.05
NOTICE_S = 30.0
"""While ranks are missing, rank 0 says so after this time, and then again."""
MAX_LISTED = 8
SHORTEST_ATTEMPT_S, LONGEST_ATTEMPT_S = 1.0, 10.0
"""How long one attempt to reach the store is meant to take."""
Result = TypeVar("Result")


def join_ranks(timeout_s: float = PATIENCE_S) -> None:
    """Initialize torch.distributed from torchrun's environment: NCCL with GPUs, else gloo.

    Where nodes come and go, start torchrun with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`. Without
    it, its agents keep using the first store that they shared, even if that ended with its node.

    Args:
        timeout_s: how long to wait for all ranks.

    Raises:
        InputError: a variable is missing or wrong, or the port is in use.
        RuntimeMismatchError: not all ranks have come in time.
    """
    if not timeout_s > 0:
        raise InputError(f"timeout_s: is {timeout_s!r}; give a number of seconds above 0")
    missing = [name for name in STORE_VARIABLES if name not in os.environ]
    if missing:
        raise InputError(f"{missing[0]}: is not set; start the ranks with torchrun")
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    device = set_cuda_device()  # before the first collective, which would use the first GPU
    backend = "nccl" if device is not None else "gloo"
    with _explained(rank, world_size, timeout_s):
        start = _in_time(lambda: _meet(rank, world_size, timeout_s), timeout_s)
    meeting = _watch_start(start, rank, world_size, timeout_s)
    with in_set_up(meeting.watchdog, "join_ranks"), without_torch_log():
        dist.init_process_group(
            backend, store=start, rank=rank, world_size=world_size, device_id=device
        )
    keep_for_pipeline(meeting)


def _watch_start(start: Any, rank: int, world_size: int, timeout_s: float) -> Meeting:
    """Let the ranks of a start watch over each other, from before they connect."""

    def open_store() -> Any:
        return dist.PrefixStore("gathering", start.clone())  # type: ignore[attr-defined]

    options = WatchdogOptions(outside_timeout_s=timeout_s)
    gathering = gather(open_store, rank, world_size, "connect", options)
    watchdog = watch_over(gathering, rank, WatchdogOptions())
    return Meeting(gathering=gathering, watchdog=watchdog)


def _meet(rank: int, world_size: int, timeout_s: float) -> Any:
    """The store of this start."""
    starts = dist.PrefixStore("pipeplan-starts", _open_store(rank, timeout_s))  # type: ignore[attr-defined]
    try:
        name = agree_on_start(starts, rank, world_size, timeout_s)
    except dist.DistError:
        raise TimeoutError("the process that held the store has ended") from None
    return dist.PrefixStore(name, starts)  # type: ignore[attr-defined]


def _in_time(function: Callable[[], Result], timeout_s: float) -> Result:
    """What the function returns; what is no store at all may never answer."""
    courier = Courier()
    errand = courier.send(function)
    try:
        return errand.result(timeout_s + ANSWER_S)
    except StoreError as error:
        if error.__cause__ is not None:
            raise error.__cause__ from None
        raise TimeoutError from None
    finally:
        courier.close(timeout_s=0.0)


def agree_on_start(store: Any, rank: int, world_size: int, patience_s: float = PATIENCE_S) -> str:
    """A name that all ranks of this start share, and that no other start has."""
    if rank == 0:
        return _offer(store, world_size, patience_s)
    return _answer(store, rank, world_size, patience_s)


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        text = printable(os.environ[name])
        raise InputError(f"{name}: is {text!r}; give a whole number") from None


def _open_store(rank: int, timeout_s: float) -> Any:
    """A client of torchrun's store; where there is none, rank 0 makes a new store."""
    host, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    is_holder = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    deadline = time.monotonic() + timeout_s
    while True:
        # Torch takes up to twice the time that it is given, and a thread inside of it cannot end.
        left_s = deadline - time.monotonic()
        attempt = timedelta(seconds=min(max(left_s / 3, SHORTEST_ATTEMPT_S), LONGEST_ATTEMPT_S))
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, is_master=is_holder, timeout=attempt, wait_for_workers=False
            )
            break
        except dist.DistNetworkError as error:
            text = str(error)
            if is_holder and ("EADDRINUSE" in text or "in use" in text):
                raise InputError(
                    f"MASTER_PORT: {port} is in use on this host; give the ranks another one"
                ) from None
            if is_holder or time.monotonic() >= deadline:
                raise
            time.sleep(POLL_S)
    store.set_timeout(timedelta(seconds=max(timeout_s, PATIENCE_S)))
    return store


@contextlib.contextmanager
def _explained(rank: int, world_size: int, timeout_s: float) -> Iterator[None]:
    """Say in one line what it means that ranks do not find each other."""
    try:
        yield
    except (dist.DistError, TimeoutError) as error:
        who = str(error) if isinstance(error, TimeoutError) else ""
        if not who:
            at = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            who = f"rank {rank} has found no store at {printable(at)}"
        raise RuntimeMismatchError(
            f"ranks: not all {world_size} have come to the store within {timeout_s:.0f} s"
            f" ({who}); start all of them, or raise timeout_s; where nodes come and go, start"
            " torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        ) from None


def _offer(store: Any, world_size: int, patience_s: float) -> str:
    name = uuid.uuid4().hex
    answers = [f"{name}/answer/{rank}" for rank in range(1, world_size)]
    store.set(f"{name}/size", str(world_size))
    store.set("offer", name)
    start, notices = time.monotonic(), 0
    while answers and not store.check(answers):
        wait_s = time.monotonic() - start
        missing = [rank for rank, answer in enumerate(answers, 1) if not store.check([answer])]
        listed = ", ".join(map(str, missing[:MAX_LISTED]))
        if wait_s > patience_s and missing:
            raise TimeoutError(f"missing: rank {listed}")
        if int(wait_s // NOTICE_S) > notices:
            notices += 1
            print_line(f"ranks wait to connect: no answer from rank {listed} for {wait_s:.0f} s")
        time.sleep(POLL_S)
    words = [store.get(answer).decode() for answer in answers]
    store.set(f"{name}/words", json.dumps(words))
    return name


def _answer(store: Any, rank: int, world_size: int, patience_s: float) -> str:
    word, answered, size = uuid.uuid4().hex, "", world_size
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if store.check(["offer"]):
            name: str = store.get("offer").decode()
            if name != answered:
                size = int(store.get(f"{name}/size"))
                store.set(f"{name}/answer/{rank}", word)
                answered = name
            if store.check([f"{name}/words"]) and word in json.loads(store.get(f"{name}/words")):
                return name
        time.sleep(POLL_S)
    if not answered:
        raise TimeoutError("missing: rank 0")
    if size != world_size:
        raise TimeoutError(f"WORLD_SIZE is {world_size} on rank {rank}, but {size} on rank 0")
    raise TimeoutError("rank 0 or another rank is missing")
