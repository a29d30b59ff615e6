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
from pipeplan.runtime.supervision.arrival import Arrival
from pipeplan.runtime.supervision.courier import Courier, StoreError
from pipeplan.runtime.supervision.ending import ANSWER_S
from pipeplan.runtime.supervision.launch_secret import SecretError, derive_key, find_secret
from pipeplan.runtime.supervision.options import WatchdogOptions
from pipeplan.runtime.supervision.processes import Process
from pipeplan.runtime.supervision.status_board import StatusBoard

__all__ = ["agree_on_start", "join_ranks", "joined_processes"]

STORE_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PATIENCE_S = 300.0
"""How long to wait for all ranks of one start: as long as torch waits for a store."""
POLL_S = 0.05
Result = TypeVar("Result")

_JOINED: list[Process] = []
"""The processes of all ranks, by rank; empty if they are not known."""


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
        start, _JOINED[:] = _in_time(lambda: _meet(rank, world_size, timeout_s), timeout_s)
    # The store's own time limit stays that of torch: it also holds for what comes later.
    options = WatchdogOptions(outside_timeout_s=timeout_s)
    meeting = dist.PrefixStore("meeting", start.clone())  # type: ignore[attr-defined]
    with Arrival(meeting, rank, world_size, "connect", options, _JOINED):
        dist.init_process_group(
            backend, store=start, rank=rank, world_size=world_size, device_id=device
        )


def _meet(rank: int, world_size: int, timeout_s: float) -> tuple[Any, list[Process]]:
    """The store of this start, and the processes of all ranks as far as they are known."""
    starts = dist.PrefixStore("pipeplan-starts", _open_store(rank, timeout_s))  # type: ignore[attr-defined]
    boards: dict[str, StatusBoard] = {}

    def introduce(name: str) -> None:
        """Tell the others which process this is, before they know that it has come."""
        start = dist.PrefixStore(name, starts)  # type: ignore[attr-defined]
        boards[name] = _board(start, rank, world_size, name)
        boards[name].write_process()

    name = agree_on_start(starts, rank, world_size, timeout_s, introduce)
    return dist.PrefixStore(name, starts), _known_processes(boards[name])  # type: ignore[attr-defined]


def _in_time(function: Callable[[], Result], timeout_s: float) -> Result:
    """What the function returns; what is no store at all may never answer."""
    courier = Courier()
    errand = courier.send(function)
    try:
        return errand.result(timeout_s + ANSWER_S)
    except StoreError as error:
        if error.__cause__ is not None:
            raise error.__cause__ from None
        at = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise TimeoutError(f"what listens at {printable(at)} does not answer") from None
    finally:
        courier.close(timeout_s=0.0)


def joined_processes() -> list[Process]:
    """The processes of all ranks that `join_ranks` has joined; empty if they are not known."""
    return _JOINED


def agree_on_start(
    store: Any,
    rank: int,
    world_size: int,
    patience_s: float = PATIENCE_S,
    introduce: Callable[[str], None] = lambda name: None,
) -> str:
    """A name that all ranks of this start share, and that no other start has.

    `introduce` is called with each name that this rank takes part in, before others know that.
    """
    if rank == 0:
        return _offer(store, world_size, patience_s, introduce)
    return _answer(store, rank, patience_s, introduce)


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
    limit = timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=is_holder, timeout=limit, wait_for_workers=False
        )
    except dist.DistNetworkError as error:
        text = str(error)
        if is_holder and ("EADDRINUSE" in text or "in use" in text):
            raise InputError(
                f"MASTER_PORT: {port} is in use on this host; give the ranks another one"
            ) from error
        raise
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
        ) from error


def _offer(store: Any, world_size: int, patience_s: float, introduce: Callable[[str], None]) -> str:
    name = uuid.uuid4().hex
    introduce(name)
    answers = [f"{name}/answer/{rank}" for rank in range(1, world_size)]
    store.set("offer", name)
    try:
        store.wait(answers, timedelta(seconds=patience_s))
    except dist.DistStoreError as error:
        late = [rank for rank in range(1, world_size) if not store.check([answers[rank - 1]])]
        listed = ", ".join(map(str, late[:8]))
        raise TimeoutError(f"missing: rank {listed}") from error
    words = [store.get(answer).decode() for answer in answers]
    store.set(f"{name}/words", json.dumps(words))
    return name


def _answer(store: Any, rank: int, patience_s: float, introduce: Callable[[str], None]) -> str:
    word, answered = uuid.uuid4().hex, ""
    deadline = time.monotonic() + patience_s
    try:
        store.wait(["offer"], timedelta(seconds=patience_s))
    except dist.DistStoreError as error:
        raise TimeoutError("missing: rank 0") from error
    while time.monotonic() < deadline:
        name: str = store.get("offer").decode()
        if name != answered:
            introduce(name)
            store.set(f"{name}/answer/{rank}", word)
            answered = name
        if store.check([f"{name}/words"]) and word in json.loads(store.get(f"{name}/words")):
            return name
        time.sleep(POLL_S)
    raise TimeoutError("rank 0 or another rank is missing")


def _board(store: Any, rank: int, world_size: int, name: str) -> StatusBoard:
    """Where ranks say which processes they are; unsigned if there is no secret."""
    try:
        key = derive_key(find_secret(), name)
    except SecretError:
        key = b""
    return StatusBoard(store, rank, world_size, key)


def _known_processes(board: StatusBoard) -> list[Process]:
    """The processes of all ranks; none if they cannot be known for sure."""
    try:
        return board.exchange_processes() if board.is_signed else []
    except (KeyError, ValueError, TypeError):  # ranks have different secrets, or somebody meddles
        return []
