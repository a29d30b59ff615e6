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

import json
import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pipeplan.errors import InputError, RuntimeMismatchError
from pipeplan.runtime.streams import set_cuda_device

__all__ = ["agree_on_start", "join_ranks"]

STORE_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PATIENCE_S = 300.0
"""How long to wait for all ranks of one start: as long as torch waits for a store."""
POLL_S = 0.05


def join_ranks() -> None:
    """Initialize torch.distributed from torchrun's environment: NCCL with GPUs, else gloo.

    Where nodes come and go, start torchrun with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`. Without
    it, its agents keep using the first store that they shared, even if that ended with its node.
    """
    missing = [name for name in STORE_VARIABLES if name not in os.environ]
    if missing:
        raise InputError(f"{missing[0]}: is not set; start the ranks with torchrun")
    device = set_cuda_device()  # before the first collective, which would use the first GPU
    backend = "nccl" if device is not None else "gloo"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, device_id=device)  # rank 0 makes a new store in each start
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        agent_store = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
        )
        starts = dist.PrefixStore("pipeplan-starts", agent_store)  # type: ignore[attr-defined]
        name = agree_on_start(starts, rank, world_size)
    except (dist.DistError, TimeoutError) as error:
        raise RuntimeMismatchError(
            f"ranks: not all {world_size} have come to the store within {PATIENCE_S:.0f} s; where"
            " nodes come and go, start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        ) from error
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(name, starts),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        device_id=device,
    )


def agree_on_start(store: Any, rank: int, world_size: int, patience_s: float = PATIENCE_S) -> str:
    """A name that all ranks of this start share, and that no other start has."""
    if rank == 0:
        return _offer(store, world_size, patience_s)
    return _answer(store, rank, patience_s)


def _offer(store: Any, world_size: int, patience_s: float) -> str:
    name = uuid.uuid4().hex
    answers = [f"{name}/answer/{rank}" for rank in range(1, world_size)]
    store.set("offer", name)
    store.wait(answers, timedelta(seconds=patience_s))
    words = [store.get(answer).decode() for answer in answers]
    store.set(f"{name}/words", json.dumps(words))
    return name


def _answer(store: Any, rank: int, patience_s: float) -> str:
    word, answered = uuid.uuid4().hex, ""
    deadline = time.monotonic() + patience_s
    store.wait(["offer"], timedelta(seconds=patience_s))
    while time.monotonic() < deadline:
        name: str = store.get("offer").decode()
        if name != answered:
            store.set(f"{name}/answer/{rank}", word)
            answered = name
        if store.check([f"{name}/words"]) and word in json.loads(store.get(f"{name}/words")):
            return name
        time.sleep(POLL_S)
    raise TimeoutError(f"rank 0 has not taken the answer of rank {rank}")
